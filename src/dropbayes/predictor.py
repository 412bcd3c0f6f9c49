r"""A model as a pure function from columns to predictions: what engines and servers call.

A row's prediction has the same bits alone, in any batch, in any thread or process: draws are keyed, rows are evaluated
in tiles of fixed size, and every statistic adds up a row's draws in an order that depends on that row alone.
"""

from __future__ import annotations

import copy
import hashlib
import numbers
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dropbayes import information, sampling
from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dropbayes.mixtures import Mixture, draw_mean

if TYPE_CHECKING:
    from dropbayes.tables import Schema

__all__ = ["Predictor", "check_finite", "uncertainty", "uncertainty_percentiles"]

Array = npt.NDArray[Any]

MATRIX = "x"
"""The name of the input that holds all columns as one matrix, `[row, column]`."""

_REGRESSION = ("mean", "std", "epistemic", "aleatoric", "lower", "upper")
_CLASSIFICATION = ("predicted", "probabilities", "entropy", "mutual_information")
# Numbers of draws held at once: what they take is a few times eight bytes each.
_HELD = 2**20
_PERCENTILE_ROWS = 2000
_MOST_ROWS = 4096  # as many as the estimators take at once


class Predictor:
    r"""A model with its settings, as a function of columns.

    Calling it has no side effect, may be done from several threads at once, and gives every row the same bits however
    the rows are cut into calls. A copy of it (`pickle`) holds the weights and the names of the columns, nothing else.

    Args:
        model: A fitted `DropoutRegressor` or `DropoutClassifier`, a model of `dropbayes.folders`, or a network.
        likelihood: How a network's output is read; required for a network.
        columns: The names of a network's input columns, in order; without them it has one input, the array `x`.
        n_draws: The draws $T$ (of each network of an estimator); by default those of the model, 100 for a network.
        seed: The seed of the draws; by default that of the model, 0 for a network.
        interval: The probability that `lower` and `upper` enclose the outcome.
        allow_new: Whether a category unknown in training counts as none of those known, rather than as wrong.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> predict = Predictor(net, likelihood=Gaussian(precision=4.0), columns=("height", "weight"))
        >>> predict({"height": [1.7, 1.8], "weight": [70.0, 80.0]})["std"].shape
        (2, 1)
    """

    def __init__(
        self,
        model: Any,
        *,
        likelihood: Likelihood | None = None,
        columns: Sequence[str] | None = None,
        n_draws: int | None = None,
        seed: int | None = None,
        interval: float = 0.95,
        allow_new: bool = False,
    ) -> None:
        self._model = (
            _network_model(model, likelihood, columns) if isinstance(model, nn.Module) else _table_model(model)
        )
        if not isinstance(model, nn.Module) and (likelihood is not None or columns is not None):
            raise ValueError("`likelihood` and `columns` are those of the estimator; pass them with a network only.")
        self.allow_new = bool(allow_new)
        self.n_draws, self.seed, self.interval = _settings(self._model.defaults, n_draws, seed, interval)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_draws: int | None = None,
        seed: int | None = None,
        interval: float = 0.95,
        allow_new: bool = False,
    ) -> Predictor:
        """The predictor of a model folder (`dropbayes fit`) or of an estimator's file (`DropoutRegressor.save`).

        Args:
            path: The folder or the file.
            n_draws: As for the class.
            seed: As for the class.
            interval: As for the class.
            allow_new: As for the class.

        Raises:
            ValueError: It is no model, a damaged one, or of a later format.
        """
        from dropbayes import folders

        model = _saved_estimator(path) if os.path.isfile(path) else folders.load(path)
        return cls(model, n_draws=n_draws, seed=seed, interval=interval, allow_new=allow_new)

    def with_settings(
        self, *, n_draws: int | None = None, seed: int | None = None, interval: float | None = None
    ) -> Predictor:
        """The same model with other settings; those that are None stay as they are."""
        now = self.n_draws, self.seed
        other = copy.copy(self)
        other.n_draws, other.seed, other.interval = _settings(
            now, n_draws, seed, self.interval if interval is None else interval
        )
        return other

    @property
    def inputs(self) -> dict[str, str]:
        """The columns the model reads, with what each holds: "number", "boolean", "category", or "array"."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what a prediction holds."""
        return _CLASSIFICATION if self._model.has_classes else _REGRESSION

    @property
    def column_names(self) -> list[str]:
        """The names of the columns that `flat_columns` gives."""
        return list(self.flat_columns(self.predict_inputs(self._model.no_rows)))

    @property
    def classes(self) -> Array | None:
        """The labels of the classes, in the order of `probabilities`; None if they have no names."""
        return self._model.classes

    @property
    def key(self) -> tuple[Any, ...]:
        """What the bits of a prediction follow from: predictors of one process with equal keys may share a batch."""
        return id(self._model), self.n_draws, self.seed, self.interval

    @property
    def fingerprint(self) -> str:
        """A digest of what the model predicts: of its columns, and of the bits it gives some fixed rows."""
        x = np.random.default_rng(0).normal(size=(8, self._model.no_rows.shape[1]))
        digest = hashlib.sha256(repr((self._model.columns_read, self.n_draws, self.seed, self.interval)).encode())
        for values in self.predict_inputs(x).values():
            digest.update(repr(values.tolist()).encode())
        return digest.hexdigest()

    @property
    def total_draws(self) -> int:
        """The draws of a prediction: `n_draws` of each network."""
        return self.n_draws * self._model.n_networks

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Array]:
        """The prediction for each row.

        Args:
            columns: The model's columns by name, each with one value per row; or all of them as the matrix `x`. Other
                columns are not looked at.

        Returns:
            For numbers `mean`, `std`, `epistemic`, `aleatoric` (variances), `lower`, `upper`; for classes `predicted`,
            `probabilities` `[row, class]`, `entropy` and `mutual_information` in nats. The first axis is the rows.

        Raises:
            ValueError: A column is missing or holds what the model cannot read; or a row is so far from those of
                training that its prediction is not finite.
        """
        found = self.predict_inputs(self.encode(columns))
        check_finite(found)
        return found

    def flat_columns(self, prediction: Mapping[str, Array]) -> dict[str, Array]:
        """The prediction as columns of a table: each class probability, or output, in a column of its own.

        The parts of the uncertainty are standard deviations there, `epistemic_std` and `aleatoric_std`.
        """
        columns: dict[str, Array] = {}
        for name, values in prediction.items():
            if name in ("epistemic", "aleatoric"):  # beside `std` a table has deviations
                name, values = f"{name}_std", _rounded(np.sqrt(values))
            if values.ndim == 1:
                columns[name] = values
                continue
            labels: Any = range(values.shape[1]) if self.classes is None else self.classes.tolist()
            stem = "probability" if name == "probabilities" else name
            columns |= {f"{stem}_{label}": values[:, place] for place, label in enumerate(labels)}
        return columns

    def extend(self, table: Any, *, prefix: str | None = None) -> Any:
        """An arrow table with the columns beside its own that `dropbayes predict` adds.

        Args:
            table: The rows; columns that the model does not read stay as they are.
            prefix: What the names of the new columns begin with; by default the target and `_`, if it is known.
        """
        import pyarrow as pa

        prediction, more = self._model.table_prediction(self, table)
        check_finite(prediction)
        columns = self.flat_columns(prediction) | more
        prefix = self._model.prefix if prefix is None else prefix
        taken = [prefix + name for name in columns if prefix + name in table.column_names]
        if taken:
            raise ValueError(f"the table has a column {taken[0]!r}, which the prediction would add; set `prefix`.")
        for name, values in columns.items():
            kind = pa.string() if values.dtype.kind in "OU" else None
            table = table.append_column(prefix + name, pa.array(values.tolist() if kind else values, kind))
        return table

    def encode(self, columns: Mapping[str, Any]) -> Array:
        """The rows as inputs of the network, `[row, ...]`; see `__call__` for the columns."""
        return self._model.encode(columns, self.allow_new)

    def predict_inputs(self, x: Array) -> dict[str, Array]:
        """The prediction for rows that `encode` gave, or any number of such joined; not checked to be finite."""
        step = max(1, min(_MOST_ROWS, _HELD // max(1, self.total_draws * self._model.row_size)))
        blocks = [self._block(x[start : start + step]) for start in range(0, max(len(x), 1), step)]
        if len(blocks) == 1:
            return blocks[0]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _block(self, x: Array) -> dict[str, Array]:
        rows = x if len(x) else np.zeros((1, *x.shape[1:]), x.dtype)  # no rows have the shapes of one
        found = self._model.statistics(rows, self.n_draws, self.seed, self.interval)
        return found if len(x) else {name: values[:0] for name, values in found.items()}


def check_finite(prediction: Mapping[str, Array]) -> None:
    """Raises ValueError where a row is so far from the training rows that single precision overflows."""
    for values in prediction.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int((~np.isfinite(values)).reshape(len(values), -1).any(1).argmax())
            raise ValueError(
                f"row {row}: the prediction is not finite; a value of this row is too far from those of training."
            )


def uncertainty(prediction: Mapping[str, Array]) -> Array:
    """The number by which rows are deferred: the standard deviation, or for classes the entropy."""
    return prediction["std" if "std" in prediction else "entropy"]


def uncertainty_percentiles(predictor: Predictor, x: Array) -> dict[str, float]:
    """The 50th, 90th, 95th and 99th percentile of the uncertainty of training rows, to compare later rows with.

    Args:
        predictor: The model.
        x: The training rows as inputs of the network; of many, some evenly spaced ones are taken.
    """
    some = x[:: -(-len(x) // _PERCENTILE_ROWS)]
    values = uncertainty(predictor.predict_inputs(some))
    return {str(level): float(np.percentile(values, level)) for level in (50, 90, 95, 99)}


def _settings(
    defaults: tuple[int, int], n_draws: int | None, seed: int | None, interval: float
) -> tuple[int, int, float]:
    """The settings, checked."""
    n_draws = defaults[0] if n_draws is None else n_draws
    seed = defaults[1] if seed is None else seed
    for name, value, least in (("n_draws", n_draws, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value < 2**63:
            raise ValueError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")
    if isinstance(interval, bool) or not isinstance(interval, numbers.Real) or not 0 < interval < 1:
        raise ValueError(f"`interval` must lie between 0 and 1; got {interval!r}.")
    return operator.index(n_draws), operator.index(seed), float(interval)


# --- statistics ----------------------------------------------------------------------------------------------------


def _moments(mixture: Mixture, interval: float) -> dict[str, Array]:
    """The moments of each row's predictive distribution, and the ends of its central interval."""
    found = (mixture.mean, mixture.std, mixture.epistemic, mixture.aleatoric, *mixture.interval(interval))
    return {name: values.numpy() for name, values in zip(_REGRESSION, found, strict=True)}


def _information(probabilities: Tensor, classes: Array | None) -> dict[str, Array]:
    """The most probable class of each row, all class probabilities, entropy and mutual information."""
    mean = draw_mean(probabilities)
    best = mean.argmax(-1).numpy()
    predicted = best if classes is None else classes[best]
    found = predicted, mean, information.entropy(mean), information.mutual_information(probabilities)
    return {name: np.asarray(values) for name, values in zip(_CLASSIFICATION, found, strict=True)}


def _rounded(values: Array) -> Array:
    """The numbers to 12 digits: more than a network of single precision has, and easier to read."""
    if values.dtype.kind != "f":
        return values
    return np.array([float(f"{value:.12g}") for value in values.ravel().tolist()]).reshape(values.shape)


# --- models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _TableModel:
    """An estimator, and the columns it reads where they are known."""

    estimator: Any
    schema: Schema | None

    @property
    def defaults(self) -> tuple[int, int]:
        return int(self.estimator.n_draws), int(self.estimator.seed_)

    @property
    def n_networks(self) -> int:
        return len(self.estimator.population_)

    @property
    def columns_read(self) -> Any:
        return self.inputs if self.schema is None else self.schema

    @property
    def no_rows(self) -> Array:
        return np.zeros((0, int(self.estimator.n_features_in_)))

    @property
    def row_size(self) -> int:
        return int(self.estimator.population_.weights[-1].shape[-1])

    @property
    def has_classes(self) -> bool:
        return hasattr(self.estimator, "classes_")

    @property
    def classes(self) -> Array | None:
        return np.asarray(self.estimator.classes_) if self.has_classes else None

    @property
    def inputs(self) -> dict[str, str]:
        if self.schema is not None:
            return {column.name: column.kind for column in self.schema.columns}
        names = getattr(self.estimator, "feature_names_in_", None)
        return {MATRIX: "array"} if names is None else dict.fromkeys(map(str, names), "number")

    def encode(self, columns: Mapping[str, Any], allow_new: bool) -> Array:
        names = list(self.inputs)
        if self.schema is not None:
            import pyarrow as pa

            from dropbayes.tables import encode

            table = pa.table({name: _arrow(values, name) for name, values in _by_name(columns, names).items()})
            return encode(self.schema, table, at=_row_label, allow_new=allow_new).x
        if self.inputs != {MATRIX: "array"}:
            return np.column_stack([_numbers(values, name) for name, values in _by_name(columns, names).items()])
        x = _numbers(_matrix(columns), MATRIX)
        if x.ndim != 2 or x.shape[1] != self.estimator.n_features_in_:
            raise ValueError(f"`{MATRIX}` must be shaped [row, {self.estimator.n_features_in_}]; got {list(x.shape)}.")
        return x

    @property
    def prefix(self) -> str:
        return "" if self.schema is None else f"{self.schema.target}_"

    def table_prediction(self, predictor: Predictor, table: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        """The prediction of a table's rows, and the columns that a table has besides."""
        if self.schema is None:
            return predictor.predict_inputs(self.encode(_columns_of(table), False)), {}
        from dropbayes import folders
        from dropbayes.tables import check_columns, encode

        check_columns(self.schema, table.column_names, "the table")
        rows = encode(self.schema, table, at=_row_label, allow_new=predictor.allow_new)
        prediction = predictor.predict_inputs(rows.x)
        sets = folders.label_sets(self.estimator, prediction, coverage=predictor.interval)
        return prediction, dict(zip(("labels",), sets, strict=False)) | {
            "outside": np.array(rows.outside_names(), dtype=np.str_)
        }

    def statistics(self, x: Array, n_draws: int, seed: int, interval: float) -> dict[str, Array]:
        estimator = self.estimator.with_draws(n_draws=n_draws, seed=seed)
        vars(estimator).pop("feature_names_in_", None)  # the names were looked at when the columns were put in order
        if self.has_classes:
            found = _information(estimator.draws(x), self.classes)
        else:
            found = _moments(estimator.predictive(x), interval)
        return {name: _rounded(values) for name, values in found.items()}


@dataclass(frozen=True, eq=False)
class _NetworkModel:
    """A network, the reading of its output, and the names of its inputs where it reads columns."""

    net: nn.Module
    likelihood: Likelihood
    columns: tuple[str, ...] | None
    defaults: tuple[int, int] = (100, 0)
    n_networks: int = 1
    row_size: int = 1
    classes: None = None  # nobody told their names
    prefix: str = ""

    @property
    def columns_read(self) -> Any:
        return self.inputs

    @property
    def no_rows(self) -> Array:
        if self.columns is None:
            raise ValueError("`columns` must name the inputs of a network whose prediction is a table.")
        return np.zeros((0, len(self.columns)))

    @property
    def has_classes(self) -> bool:
        return isinstance(self.likelihood, Categorical)

    @property
    def inputs(self) -> dict[str, str]:
        return {MATRIX: "array"} if self.columns is None else dict.fromkeys(self.columns, "number")

    def encode(self, columns: Mapping[str, Any], allow_new: bool) -> Array:
        if self.columns is None:
            return np.asarray(_matrix(columns))
        return np.column_stack([_numbers(values, name) for name, values in _by_name(columns, self.columns).items()])

    def statistics(self, x: Array, n_draws: int, seed: int, interval: float) -> dict[str, Array]:
        output = self._draws(x, n_draws, seed)
        mean = self.likelihood.mean(output).double()
        if isinstance(self.likelihood, Categorical):
            return _information(mean.movedim(self.likelihood.class_axis, -1), None)
        scale = self.likelihood.variance(output).double().sqrt()
        shape = mean.shape[1:]
        moments = _moments(Mixture(mean.reshape(n_draws, -1), scale.reshape(n_draws, -1)), interval)
        return {name: values.reshape(shape) for name, values in moments.items()}

    def table_prediction(self, predictor: Predictor, table: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        return predictor.predict_inputs(self.encode(_columns_of(table), False)), {}

    def _draws(self, x: Array, n_draws: int, seed: int) -> Tensor:
        like = next(self.net.parameters(), torch.empty(0))
        inputs = torch.tensor(x, device=like.device)
        inputs = inputs.to(like.dtype) if inputs.is_floating_point() else inputs
        output = sampling.draws(self.net, inputs, n_draws=n_draws, seed=seed)
        if not isinstance(output, Tensor):
            raise TypeError(f"`model` must return one tensor; got {type(output).__name__}. Wrap it to return that one.")
        return output.cpu()


def _table_model(model: Any) -> _TableModel:
    estimator = getattr(model, "estimator", model)
    if not hasattr(estimator, "with_draws"):
        kind = type(model).__name__
        raise TypeError(f"`model` must be a dropout estimator, the model of a folder or a network; got {kind}.")
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    return _TableModel(estimator, getattr(model, "schema", None))


def _network_model(net: nn.Module, likelihood: Likelihood | None, columns: Sequence[str] | None) -> _NetworkModel:
    if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian | Categorical):
        raise ValueError(
            "`likelihood` must say how the network's output is read: Gaussian(precision=...), "
            f"HeteroscedasticGaussian() or Categorical(); got {likelihood!r}."
        )
    return _NetworkModel(net, likelihood, None if columns is None else tuple(columns))


def _saved_estimator(path: str | os.PathLike[str]) -> Any:
    from dropbayes import estimators
    from dropbayes.runtime import storage

    kind = storage.load(path, kinds=["DropoutRegressor", "DropoutClassifier"]).kind
    return getattr(estimators, kind).load(path)


# --- columns -------------------------------------------------------------------------------------------------------


def _row_label(row: int) -> str:
    return "`columns`" if row < 0 else f"row {row}"


def _columns_of(table: Any) -> dict[str, Any]:
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def _array(values: Any) -> Any:
    """The values as an array that knows its shape; arrow arrays as they are."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values if hasattr(values, "shape") or type(values).__module__.startswith("pyarrow") else np.asarray(values)


def _matrix(columns: Mapping[str, Any]) -> Array:
    if MATRIX not in columns:
        raise ValueError(f"`columns` must hold the array `{MATRIX}`; got {sorted(map(str, columns))[:8]}.")
    x = np.asarray(_array(columns[MATRIX]))
    if not x.ndim:
        raise ValueError(f"`{MATRIX}` must have an axis of rows; got a single value.")
    return x


def _by_name(columns: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Each of the named columns as a one-dimensional array of the same length."""
    lacking = [name for name in names if name not in columns]
    if lacking and MATRIX in columns:
        x = _matrix(columns)
        if x.ndim != 2 or x.shape[1] != len(names):
            raise ValueError(f"`{MATRIX}` must be shaped [row, {len(names)}], a column for each of {_listed(names)}; "
                             f"got {list(x.shape)}.")  # fmt: skip
        return {name: x[:, place] for place, name in enumerate(names)}
    if lacking:
        raise ValueError(f"`columns` lacks {_listed(lacking)}, which the model reads; it has {_listed(columns)}.")
    arrays = {name: _array(columns[name]) for name in names}
    for name, values in arrays.items():
        shape = getattr(values, "shape", (len(values),))
        if len(shape) == 2 and shape[1] == 1:
            arrays[name] = np.asarray(values)[:, 0]
        elif len(shape) != 1:
            raise ValueError(f"column {name!r} must have one value per row; got the shape {list(shape)}.")
    lengths = {len(values) for values in arrays.values()}
    if len(lengths) > 1:
        raise ValueError(f"`columns` must be equally long; got { ({name: len(v) for name, v in arrays.items()}) }.")
    return arrays


def _listed(names: Iterable[Any]) -> str:
    names = [repr(str(name)) for name in names]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _arrow(values: Any, name: str) -> Any:
    import pyarrow as pa

    if isinstance(values, np.ndarray) and values.dtype.kind == "S":
        values = values.astype(np.str_)
    try:
        return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
        raise ValueError(f"column {name!r} cannot be read: {str(error).splitlines()[0]}") from None


def _numbers(values: Any, name: str) -> Array:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"column {name!r} must hold numbers; got {array.dtype}.")
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array)).reshape(len(array), -1).any(1).argmax())
        raise ValueError(f"row {row}, column {name!r}: must be a finite number.")
    return array.astype(np.float64)
