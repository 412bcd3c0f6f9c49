r"""The predictor: a model with its settings, as a pure function of columns.

A row's prediction has the same bits alone, in any batch, in any thread or process: draws are keyed, rows are evaluated
in tiles of fixed size, and every statistic adds up a row's draws in an order that depends on that row alone.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dropbayes.estimators.ensembles import METHODS, ClassEnsemble, Ensemble, RegressionEnsemble
from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dropbayes.linear import N_POINTS, outputs_by
from dropbayes.predictive.mixtures import Mixture, draw_mean
from dropbayes.runtime import storage
from dropbayes.runtime.arrays import NumpyArray, round_digits
from dropbayes.runtime.validation import check_count, check_positive, check_probability
from dropbayes.scores import information

if TYPE_CHECKING:  # slow to import, and a network does not need them
    import pyarrow as pa

    from dropbayes.estimators.columns import Encoded, Schema

__all__ = ["MATRIX", "Predictor", "appended", "check_finite", "uncertainty"]

Columns = Mapping[str, Any]
"""Columns by name: arrays of any library, or lists."""

MATRIX = "x"
"""The name of the input that holds all columns as one matrix, `[row, column]`."""

Draws = int | Literal["auto"]

_MAX_VALUES = 2**20  # of the draws of a block, in memory
_MIN_DRAWS = 64  # of "auto", in sets from which an error is estimated
_N_SETS = 8


class Predictor:
    r"""A model with its settings, as a function of columns.

    A call has no side effects, is thread-safe, and gives every row the same bits however the rows are split into calls.
    A pickled predictor holds only the weights and the names of the columns.

    Args:
        model: A fitted `DropoutRegressor` or `DropoutClassifier`, a model of `dropbayes.app.models`, or a network.
        likelihood: The observation model of a network's output; required for a network.
        columns: The names of a network's input columns, in order; without them it has one input, the array `x`.
        n_draws: The number of draws $T$ (per network of an estimator), by default that of the model, 100 for a network;
            "auto" draws for each row until the tolerance is met, and says in `draws_used` how often.
        seed: The seed of the draws; by default that of the model, 0 for a network.
        coverage: The nominal coverage of the interval from `lower` to `upper`.
        allow_new: Whether to encode unseen categories as all zeros instead of failing.
        method: "sampling", or "linear" or "moments" for a prediction without draws (`dropbayes.predict`), in which a
            network's rows are equal up to rounding however they are split.
        tolerance: For "auto": the standard error of a row's mean, relative to its predictive standard deviation.
        max_draws: For "auto": the most draws (per network), at which a row stops short of the tolerance.

    Attributes:
        schema: The columns of a table's model; None for others.
        classes: The labels of the classes, in the order of `probabilities`; None if they have no names.

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
        n_draws: Draws | None = None,
        seed: int | None = None,
        coverage: float = 0.95,
        allow_new: bool = False,
        method: str = "sampling",
        tolerance: float = 0.05,
        max_draws: int = 10_000,
    ) -> None:
        self._likelihood, self.allow_new = likelihood, bool(allow_new)
        check_positive("tolerance", tolerance)
        check_count("max_draws", max_draws, at_least=_MIN_DRAWS)
        self.tolerance, self.max_draws = float(tolerance), int(max_draws)
        self.n_draws: Draws
        self.schema: Schema | None = None
        self.classes: NumpyArray | None = None
        self._is_network = isinstance(model, nn.Module)
        if self._is_network:
            if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian | Categorical):
                raise ValueError(
                    "`likelihood` must say how the network's output is read: Gaussian(precision=...), "
                    f"HeteroscedasticGaussian() or Categorical(); got {likelihood!r}."
                )
            self._model: Any = model
            self._names = None if columns is None else tuple(columns)
            self._n_inputs = None if columns is None else len(columns)
            self._n_networks = self._row_size = 1
            self.n_draws, self.seed = 100, 0
        else:
            if likelihood is not None or columns is not None:
                raise ValueError(
                    "`likelihood` and `columns` are those of the estimator; pass them with a network only."
                )
            ensemble = getattr(model, "ensemble", model)
            if not isinstance(ensemble, Ensemble):
                kind = type(model).__name__
                raise TypeError(f"`model` must be a dropout estimator, the model of a folder or a network; got {kind}.")
            names = getattr(ensemble, "feature_names_in_", None)
            self.schema, self._names = (
                getattr(model, "schema", None),
                None if names is None else tuple(map(str, names)),
            )
            self._model = ensemble.with_draws()
            vars(self._model).pop("feature_names_in_", None)  # the names are checked when the columns are ordered
            self._n_inputs, self._n_networks = ensemble.n_features_in_, len(ensemble.population_)
            self._row_size = int(ensemble.population_.weights[-1].shape[-1])
            self.n_draws, self.seed = int(ensemble.n_draws), int(ensemble.seed_)
            self.classes = getattr(ensemble, "classes_", None)
        self._set(n_draws, seed, coverage, method)

    def _set(self, n_draws: Draws | None, seed: int | None, coverage: float, method: str) -> None:
        """Sets what can be set; None keeps the current value."""
        n_draws = self.n_draws if n_draws is None else n_draws
        seed = self.seed if seed is None else seed
        if n_draws != "auto":
            check_count("n_draws", n_draws)
        check_count("seed", seed, at_least=0, at_most=2**63 - 1)
        check_probability("coverage", coverage)
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(map(repr, METHODS))}; got {method!r}.")
        self.n_draws, self.seed, self.coverage, self.method = n_draws, int(seed), float(coverage), method

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("n_draws", "seed", "coverage", "method"))
        return f"Predictor({', '.join(self.inputs)} -> {', '.join(self.outputs)}; {settings})"

    @classmethod
    def load(cls, path: str | os.PathLike[str], **settings: Any) -> Predictor:
        """The predictor of a model folder (`dropbayes fit`) or of an estimator's file (`DropoutRegressor.save`).

        Args:
            path: The folder or the file.
            settings: `n_draws`, `seed`, `coverage`, `allow_new` ..., as for the class.

        Raises:
            ValueError: The path holds no model, a damaged one, or one of a later format.
        """
        if os.path.isfile(path):
            kinds: dict[str, type[Ensemble]] = {kind.saved_as: kind for kind in (RegressionEnsemble, ClassEnsemble)}
            return cls(kinds[storage.load(path, kinds=list(kinds)).kind].load(path), **settings)
        from dropbayes.app.models.storage import read

        ensemble, schema, _, _ = read(path)
        predictor = cls(ensemble, **settings)
        predictor.schema = schema
        return predictor

    def with_settings(
        self,
        *,
        n_draws: Draws | None = None,
        seed: int | None = None,
        coverage: float | None = None,
        method: str | None = None,
    ) -> Predictor:
        """The same model with other settings; None keeps the current value."""
        other = copy.copy(self)
        other._set(n_draws, seed, self.coverage if coverage is None else coverage, method or self.method)
        return other

    @property
    def inputs(self) -> dict[str, str]:
        """The columns the model reads, with the type of each: "number", "boolean", "category", or "array"."""
        if self.schema is not None:
            return {column.name: column.kind for column in self.schema.columns}
        return {MATRIX: "array"} if self._names is None else dict.fromkeys(self._names, "number")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the fields of a prediction."""
        if self.classes is None and not isinstance(self._likelihood, Categorical):
            return ("mean", "std", "epistemic", "aleatoric", "lower", "upper")
        return ("predicted", "probabilities", "entropy", "mutual_information")

    @property
    def column_names(self) -> list[str]:
        """The names of the columns that `add_columns` appends, without their prefix."""
        flat = list(self.flat_columns(self.predict_inputs(self._rows(0))))
        return flat + ["labels"] * self.has_label_sets + ["outside"] * (self.schema is not None)

    @property
    def prefix(self) -> str:
        """The prefix of those names: the target and `_`, if it is known."""
        return "" if self.schema is None else f"{self.schema.target}_"

    @property
    def has_label_sets(self) -> bool:
        """Whether a conformal calibration gives each row a set of labels."""
        recalibration = getattr(self._model, "recalibration", None)
        return self.classes is not None and recalibration is not None and recalibration.method == "conformal"

    @property
    def key(self) -> tuple[int, Draws, int, float, str, float, int]:
        """The settings that determine a prediction's bits: in one process, equal keys may share a batch."""
        settings = self.n_draws, self.seed, self.coverage, self.method, self.tolerance, self.max_draws
        return id(self._model), *settings

    @property
    def fingerprint(self) -> str:
        """A digest of the model: of its columns, and of its exact predictions for some fixed rows."""
        limits = (self.tolerance, self.max_draws) if self.n_draws == "auto" else ()
        settings = self.schema or self.inputs, self.n_draws, self.seed, self.coverage, *limits
        digest = hashlib.sha256(repr(settings).encode())
        for values in self.predict_inputs(self._rows(8)).values():
            digest.update(repr(values.tolist()).encode())
        return digest.hexdigest()

    @property
    def n_inputs(self) -> int:
        """The number of inputs of the networks."""
        if self._n_inputs is None:
            raise ValueError("`columns` must name the inputs of a network whose prediction is a table.")
        return self._n_inputs

    def _rows(self, n_rows: int) -> NumpyArray:
        """Some rows of inputs."""
        return np.random.default_rng(0).normal(size=(n_rows, self.n_inputs))

    @property
    def most_draws(self) -> int:
        """The number of draws of each network; with "auto", the most of them."""
        return self.max_draws if self.n_draws == "auto" else self.n_draws

    @property
    def total_draws(self) -> int:
        """The number of draws of a prediction, `most_draws` per network, or of the points in their place."""
        return (self.most_draws if self.method == "sampling" else N_POINTS) * self._n_networks

    def __call__(self, columns: Columns) -> dict[str, NumpyArray]:
        """The prediction for each row.

        Args:
            columns: The model's columns by name, each with one value per row; or all of them as the matrix `x`. Other
                columns are ignored.

        Returns:
            For numbers `mean`, `std`, `epistemic`, `aleatoric` (variances), `lower`, `upper`; for classes `predicted`,
            `probabilities` `[row, class]`, `entropy` and `mutual_information` in nats. The first axis is the row.

        Raises:
            ValueError: A column is missing or has invalid values; or a row is so far from those of training that its
                prediction is not finite.
        """
        prediction = self.predict_inputs(self.encode(columns))
        check_finite(prediction)
        return prediction

    def encode(self, columns: Columns) -> NumpyArray:
        """The rows as inputs of the network, `[row, ...]`; see `__call__` for the columns."""
        if self.schema is not None:
            return self.encode_rows(columns).x
        if self._names is not None:
            arrays = _by_name(columns, self._names)
            return np.column_stack([_number_column(values, name) for name, values in arrays.items()])
        x = _matrix(columns)
        if self._n_inputs is not None:
            x = _number_column(x, MATRIX)
            if x.ndim != 2 or x.shape[1] != self._n_inputs:
                raise ValueError(f"`{MATRIX}` must be shaped [row, {self._n_inputs}]; got {list(x.shape)}.")
        return x

    def encode_rows(self, columns: Columns, *, allow_new: bool | None = None) -> Encoded:
        """The rows of a table's model as inputs, with their missing, new and outlying cells; see `__call__`.

        Args:
            columns: The model's columns by name.
            allow_new: Whether to encode unseen categories as all zeros; by default, the setting of the predictor.
        """
        import pyarrow as pa

        from dropbayes.estimators.columns import encode

        if self.schema is None:
            raise ValueError("`model` must have the columns of a table; fit it with Model.fit or the command line.")
        arrays = _by_name(columns, list(self.inputs))
        table = pa.table({name: _arrow_column(values, name) for name, values in arrays.items()})
        return encode(self.schema, table, at=_location, allow_new=self.allow_new if allow_new is None else allow_new)

    def predict_inputs(self, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction for rows returned by `encode`, possibly concatenated; not checked to be finite."""
        if self.n_draws == "auto" and self.method == "sampling":
            return self._predict_until_tolerance(x)
        if not len(x):  # an empty prediction has the shapes of one row
            one = self._statistics(np.zeros((1, *x.shape[1:]), x.dtype))
            return {name: values[:0] for name, values in one.items()}
        step = max(1, min(4096, _MAX_VALUES // (self.total_draws * self._row_size)))
        blocks = [self._statistics(x[start : start + step]) for start in range(0, len(x), step)]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _predict_until_tolerance(self, x: NumpyArray) -> dict[str, NumpyArray]:
        """Each row by the fewest draws of 64, 128 ... that meet the tolerance, whatever the other rows."""
        waiting, n_draws = np.arange(len(x)), _MIN_DRAWS
        parts: list[dict[str, NumpyArray]] = []
        while len(waiting) or not parts:
            predictor = self.with_settings(n_draws=min(n_draws, self.max_draws))
            met = np.full(len(waiting), n_draws >= self.max_draws)
            if not met.any():
                met = predictor._relative_error(x[waiting]) <= self.tolerance
            prediction = predictor.predict_inputs(x[waiting[met]])
            used = np.full(met.sum(), predictor.total_draws)
            parts.append({"row": waiting[met], **prediction, "draws_used": used})
            waiting, n_draws = waiting[~met], 2 * n_draws
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(joined.pop("row"))
        return {name: values[order] for name, values in joined.items()}

    def _relative_error(self, x: NumpyArray) -> NumpyArray:
        """A bound on the standard error of each row's mean, relative to its predictive standard deviation.

        It is that of as many draws in eight independent sets; draws that are stratified together have less.
        """
        seeds = [(self.seed + (index + 1) * 2**40) % 2**63 for index in range(_N_SETS)]
        n_draws = self.most_draws // _N_SETS
        sets = [self.with_settings(n_draws=n_draws, seed=seed).predict_inputs(x) for seed in seeds]
        means = np.stack([one["mean" if "mean" in one else "probabilities"] for one in sets])
        mean, error = means.mean(0), means.std(0, ddof=1) / _N_SETS**0.5
        deviation = np.mean([one["std"] for one in sets], axis=0) if "std" in sets[0] else np.sqrt(mean * (1 - mean))
        ratio = np.divide(error, deviation, out=np.zeros_like(error), where=error > 0)
        return ratio.max(axis=tuple(range(1, ratio.ndim)))

    def _statistics(self, x: NumpyArray) -> dict[str, NumpyArray]:
        if self._is_network:
            return self._network_statistics(x)
        ensemble = self._model.with_draws(n_draws=self.most_draws, seed=self.seed, method=self.method)
        if self.classes is not None:
            statistics = _information(ensemble.draws(x), self.classes)
        else:
            statistics = _moments(ensemble.predictive(x), self.coverage)
        return {name: round_digits(values) for name, values in statistics.items()}

    def _network_statistics(self, x: NumpyArray) -> dict[str, NumpyArray]:
        net, likelihood = self._model, self._likelihood
        like = next(net.parameters(), torch.empty(0))
        inputs = torch.tensor(x, device=like.device)
        inputs = inputs.to(like.dtype) if inputs.is_floating_point() else inputs
        output = outputs_by(self.method, net, inputs, n_draws=self.most_draws, seed=self.seed)
        if not isinstance(output, Tensor):
            raise TypeError(f"`model` must return one tensor; got {type(output).__name__}. Wrap it to return that one.")
        assert likelihood is not None
        likelihood = likelihood.for_output(output.dim() - 1)
        mean = likelihood.mean(output.cpu()).double()
        if isinstance(likelihood, Categorical):
            return _information(mean.movedim(likelihood.axis, -1), None)
        scale = likelihood.variance(output.cpu()).double().sqrt()
        moments = _moments(Mixture(mean.flatten(1), scale.flatten(1)), self.coverage)
        return {name: values.reshape(mean.shape[1:]) for name, values in moments.items()}

    # --- tables ---------------------------------------------------------------------------------------------------

    def flat_columns(self, prediction: Mapping[str, NumpyArray]) -> dict[str, NumpyArray]:
        """The prediction as columns of a table: one column per class probability or output.

        The parts of the uncertainty are standard deviations there, `epistemic_std` and `aleatoric_std`: the squares of
        both add up to that of `std` [GG16, prop:var].
        """
        columns: dict[str, NumpyArray] = {}
        for name, values in prediction.items():
            if name in ("epistemic", "aleatoric"):  # a table holds deviations, like `std`
                name, values = f"{name}_std", round_digits(np.sqrt(values))
            if values.ndim == 1:
                columns[name] = values
                continue
            labels = range(values.shape[1]) if self.classes is None else self.classes.tolist()
            stem = "probability" if name == "probabilities" else name
            columns |= {f"{stem}_{label}": values[:, index] for index, label in enumerate(labels)}
        return columns

    def table_columns(self, rows: Encoded) -> dict[str, NumpyArray]:
        """The columns of a prediction for encoded rows of a table, `remarks` included."""
        prediction = self.predict_inputs(rows.x)
        return self.flat_columns(prediction) | self.remarks(prediction, rows)

    def remarks(self, prediction: Mapping[str, NumpyArray], rows: Encoded) -> dict[str, NumpyArray]:
        """The columns of texts that a table gets beside its prediction.

        After a conformal calibration of classes, `labels` is the set of labels that holds the true one with probability
        `coverage`; `outside` names the columns whose value lies beyond those of the training rows.
        """
        columns = {"outside": np.array(rows.outside_names(), dtype=np.str_)}
        if not self.has_label_sets or self.classes is None:
            return columns
        inside = self._model.recalibration.label_sets(prediction["probabilities"], self.coverage).numpy()
        labels = self.classes.astype(np.str_)
        return {"labels": np.array(["; ".join(labels[row]) for row in inside], dtype=np.str_), **columns}

    def add_columns(self, table: pa.Table, *, prefix: str | None = None) -> pa.Table:
        """An Arrow table with the columns of the prediction appended, as `dropbayes predict` adds them.

        Args:
            table: The rows; columns that the model does not read are unchanged.
            prefix: The prefix of the new columns' names; by default the target and `_`, if it is known.
        """
        if self.schema is None:
            arrays = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
            columns = self.flat_columns(self.predict_inputs(self.encode(arrays)))
        else:
            from dropbayes.estimators.columns import check_columns, encode

            check_columns(self.schema, table.column_names, "the table")
            columns = self.table_columns(encode(self.schema, table, at=_location, allow_new=self.allow_new))
        check_finite(columns)
        prefix = self.prefix if prefix is None else prefix
        taken = [prefix + name for name in columns if prefix + name in table.column_names]
        if taken:
            raise ValueError(f"the table has a column {taken[0]!r}, which the prediction would add; set `prefix`.")
        return appended(table, {prefix + name: values for name, values in columns.items()})


def appended(table: pa.Table, columns: Mapping[str, NumpyArray]) -> pa.Table:
    """The table with further columns."""
    import pyarrow as pa

    for name, values in columns.items():
        kind = pa.string() if values.dtype.kind in "OU" else None
        table = table.append_column(name, pa.array(values.tolist() if kind else values, kind))
    return table


def _moments(mixture: Mixture, coverage: float) -> dict[str, NumpyArray]:
    """The moments of each row's predictive distribution, and the ends of its central interval."""
    lower, upper = mixture.interval(coverage)
    values = {"mean": mixture.mean, "std": mixture.std, "epistemic": mixture.epistemic, "aleatoric": mixture.aleatoric}
    return {name: value.numpy() for name, value in (values | {"lower": lower, "upper": upper}).items()}


def _information(probabilities: Tensor, classes: NumpyArray | None) -> dict[str, NumpyArray]:
    """The most probable class of each row, all class probabilities, entropy and mutual information."""
    mean = draw_mean(probabilities)
    best = mean.argmax(-1).numpy()
    return {
        "predicted": best if classes is None else classes[best],
        "probabilities": mean.numpy(),
        "entropy": information.entropy(mean).numpy(),
        "mutual_information": information.mutual_information(probabilities).numpy(),
    }


def _location(row: int) -> str:
    return "`columns`" if row < 0 else f"row {row}"


def check_finite(prediction: Mapping[str, NumpyArray], at: Callable[[int], str] = _location) -> None:
    """Raises ValueError if a row is so far from the training rows that single precision overflows."""
    for values in prediction.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int((~np.isfinite(values)).reshape(len(values), -1).any(1).argmax())
            raise ValueError(
                f"{at(row)}: the prediction is not finite; a value of this row is too far from those of training."
            )


def uncertainty(prediction: Mapping[str, NumpyArray]) -> NumpyArray:
    """The uncertainty by which rows are deferred: the standard deviation, or for classes the entropy."""
    return prediction["std" if "std" in prediction else "entropy"]


# --- columns of any array type -------------------------------------------------------------------------------------


def _array(values: Any) -> Any:
    """The values as an array with a shape; Arrow arrays unchanged."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values if hasattr(values, "shape") or type(values).__module__.startswith("pyarrow") else np.asarray(values)


def _matrix(columns: Columns) -> NumpyArray:
    if MATRIX not in columns:
        raise ValueError(f"`columns` must hold the array `{MATRIX}`; got {sorted(map(str, columns))[:8]}.")
    x = np.asarray(_array(columns[MATRIX]))
    if not x.ndim:
        raise ValueError(f"`{MATRIX}` must have an axis of rows; got a single value.")
    return x


def _by_name(columns: Columns, names: Sequence[str]) -> dict[str, Any]:
    """Each of the named columns as a one-dimensional array of the same length."""
    from dropbayes.estimators.columns.schema import list_names

    lacking = [name for name in names if name not in columns]
    if lacking and MATRIX in columns:
        x = _matrix(columns)
        if x.ndim != 2 or x.shape[1] != len(names):
            raise ValueError(
                f"`{MATRIX}` must be shaped [row, {len(names)}], a column for each of {list_names(names)}; "
                f"got {list(x.shape)}."
            )
        return {name: x[:, index] for index, name in enumerate(names)}
    if lacking:
        raise ValueError(f"`columns` lacks {list_names(lacking)}, which the model reads; it has {list_names(columns)}.")
    arrays = {name: _array(columns[name]) for name in names}
    for name, values in arrays.items():
        shape = getattr(values, "shape", (len(values),))
        if len(shape) == 2 and shape[1] == 1:
            arrays[name] = np.asarray(values)[:, 0]
        elif len(shape) != 1:
            raise ValueError(f"column {name!r} must have one value per row; got the shape {list(shape)}.")
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"`columns` must be equally long; got {lengths}.")
    return arrays


def _arrow_column(values: Any, name: str) -> pa.Array | pa.ChunkedArray:
    import pyarrow as pa

    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        is_bytes = isinstance(values, np.ndarray) and values.dtype.kind == "S"
        return pa.array(values.astype(np.str_) if is_bytes else values, from_pandas=True)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
        raise ValueError(f"column {name!r} cannot be read: {str(error).splitlines()[0]}") from None


def _number_column(values: npt.ArrayLike, name: str) -> NumpyArray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"column {name!r} must hold numbers; got {array.dtype}.")
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array)).reshape(len(array), -1).any(1).argmax())
        raise ValueError(f"row {row}, column {name!r}: must be a finite number.")
    return array.astype(np.float64)
