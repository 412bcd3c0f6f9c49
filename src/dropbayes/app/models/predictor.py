r"""The predictor: a model with its settings, as a pure function of columns.

A row's prediction has the same bits alone, in any batch, in any thread or process: draws are keyed, rows are evaluated
in tiles of fixed size, and every statistic adds up a row's draws in an order that depends on that row alone.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from dropbayes.app.models.fields import EnsembleFields, NetworkFields, round_digits
from dropbayes.estimators.ensembles import METHODS, ClassEnsemble, Ensemble, RegressionEnsemble, check_finite
from dropbayes.estimators.frames import arrow_cells, as_array, check_names
from dropbayes.likelihoods import Likelihood
from dropbayes.linear import N_POINTS
from dropbayes.runtime import storage
from dropbayes.runtime.validation import NumpyArray, check_choice, check_count, check_positive, check_probability

if TYPE_CHECKING:  # slow to import, and a network does not need them
    import pyarrow as pa

    from dropbayes.estimators.columns import Encoded, Schema

__all__ = ["MATRIX", "Predictor", "location", "uncertainty"]

Columns = Mapping[str, Any]  #: Columns by name: arrays of any library, or lists.

MATRIX = "x"  #: The name of the input that holds all columns as one matrix, `[row, column]`.

Draws = int | Literal["auto"]

_MAX_VALUES = 2**20  # of the draws of a block, in memory
_MIN_DRAWS = 64  # of "auto", in sets from which an error is estimated
_N_SETS = 8


def location(row: int) -> str:
    """The location of a row of some columns, as text."""
    return "`columns`" if row < 0 else f"row {row}"


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
        >>> from dropbayes.likelihoods import Gaussian
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
        self._fields: EnsembleFields | NetworkFields
        if isinstance(model, nn.Module):
            self._fields = NetworkFields(model, likelihood, columns)
        elif likelihood is None and columns is None:
            self._fields = EnsembleFields(model)
        else:
            raise ValueError("`likelihood` and `columns` are those of the estimator; pass them with a network only.")
        self.schema: Schema | None = self._fields.schema
        self.classes: NumpyArray | None = self._fields.classes
        self.n_draws: Draws = self._fields.n_draws if n_draws is None else n_draws
        self.seed = self._fields.seed if seed is None else seed
        self.coverage, self.allow_new, self.method = coverage, bool(allow_new), method
        self.tolerance, self.max_draws = tolerance, max_draws
        self._check(of_draws=(n_draws, seed) != (None, None))

    def _check(self, *, of_draws: bool) -> None:
        """Raises unless every setting is one that a prediction can have; gives each its plain type."""
        if of_draws and self.method in METHODS[1:]:
            raise ValueError(f"`n_draws` and `seed` must be left out with `method` {self.method!r}: it makes no draws.")
        if self.n_draws != "auto":
            check_count("n_draws", self.n_draws)
        check_count("seed", self.seed, at_least=0, at_most=2**63 - 1)
        check_count("max_draws", self.max_draws, at_least=_MIN_DRAWS)
        check_positive("tolerance", self.tolerance)
        check_probability("coverage", self.coverage)
        check_choice("method", self.method, METHODS)
        self.seed, self.max_draws = int(self.seed), int(self.max_draws)
        self.coverage, self.tolerance = float(self.coverage), float(self.tolerance)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("n_draws", "seed", "coverage", "method"))
        return f"Predictor({', '.join(self.inputs)} -> {', '.join(self.outputs)}; {settings})"

    @classmethod
    def load(cls, path: str | os.PathLike[str], **settings: Any) -> Predictor:
        """The predictor of a model folder (`dropbayes fit`) or of an estimator's file (`DropoutRegressor.save`).

        The settings are those of the class. Raises ValueError for no model, a damaged one, or one of another format.
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
        other, given = copy.copy(self), {"n_draws": n_draws, "seed": seed, "coverage": coverage, "method": method}
        vars(other).update({name: value for name, value in given.items() if value is not None})
        other._check(of_draws=(n_draws, seed) != (None, None))
        return other

    @property
    def inputs(self) -> dict[str, str]:
        """The columns the model reads, with the type of each: "number", "boolean", "category", "date", or "array"."""
        if self.schema is not None:
            return {column.name: column.kind for column in self.schema.columns}
        return {MATRIX: "array"} if self._fields.names is None else dict.fromkeys(self._fields.names, "number")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the fields of a prediction."""
        if self._fields.has_classes:
            return ("predicted", "probabilities", "entropy", "mutual_information")
        return ("mean", "std", "epistemic", "aleatoric", "lower", "upper")

    @property
    def column_names(self) -> list[str]:
        """The names of the columns that `add_columns` appends, without their prefix."""
        from dropbayes.estimators.columns import Encoded

        return list(self.table_columns(Encoded(np.zeros((0, self.n_inputs)))))

    @property
    def prefix(self) -> str:
        """The prefix of those names: the target and `_`, if it is known."""
        return "" if self.schema is None else f"{self.schema.target}_"

    @property
    def key(self) -> tuple[int, Draws, int, float, str, float, int]:
        """The settings that determine a prediction's bits: in one process, equal keys may share a batch."""
        return id(self._fields), self.n_draws, self.seed, self.coverage, self.method, self.tolerance, self.max_draws

    @property
    def fingerprint(self) -> str:
        """A digest of the model: of its columns, its calibration, and its exact predictions for some fixed rows."""
        limits = (self.tolerance, self.max_draws) if self.n_draws == "auto" else ()
        settings = self.schema or self.inputs, self.n_draws, self.seed, self.coverage, *limits
        digest = hashlib.sha256(repr((settings, self._fields.recalibration)).encode())  # sets of labels are not below
        rows = np.random.default_rng(0).normal(size=(8, self.n_inputs))
        with warnings.catch_warnings(action="ignore"):  # these rows may be far from those of training
            for values in self.predict_inputs(rows).values():
                digest.update(repr(values.tolist()).encode())
        return digest.hexdigest()

    @property
    def n_inputs(self) -> int:
        """The number of inputs of the networks."""
        if self._fields.n_inputs is None:
            raise ValueError("`columns` must name the inputs of a network whose prediction is a table.")
        return self._fields.n_inputs

    @property
    def most_draws(self) -> int:
        """The number of draws of each network; with "auto", the most of them."""
        return self.max_draws if self.n_draws == "auto" else self.n_draws

    @property
    def total_draws(self) -> int:
        """The number of draws of a prediction, `most_draws` per network, or of the points in their place."""
        return (self.most_draws if self.method == "sampling" else N_POINTS) * self._fields.n_networks

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
        check_finite(prediction, location)
        return prediction

    def encode(self, columns: Columns) -> NumpyArray:
        """The rows as inputs of the network, `[row, ...]`; see `__call__` for the columns."""
        if not any(hasattr(type(columns), names) for names in ("keys", "columns", "column_names")):
            rule = f"must be a dict or a frame, with the matrix of all columns as {MATRIX!r} if they have no names"
            raise TypeError(f"`columns` {rule}; got {type(columns).__name__}.")
        if self.schema is not None:
            return self.encode_rows(columns).x
        if self._fields.names is not None:
            arrays = _by_name(columns, self._fields.names)
            return np.column_stack([_number_column(values, name) for name, values in arrays.items()])
        x = _matrix(columns, self._fields.n_inputs)
        return x if self._fields.n_inputs is None else _number_column(x, MATRIX)

    def encode_rows(self, columns: Columns, *, allow_new: bool | None = None) -> Encoded:
        """The rows as inputs, with what a table's model finds missing, new and outlying in them; see `__call__`.

        Whether unseen categories are allowed is by default the setting of the predictor.
        """
        import pyarrow as pa

        from dropbayes.estimators.columns import Encoded, encode

        if self.schema is None:
            return Encoded(self.encode(columns))
        arrays = {name: arrow_cells(values, name) for name, values in _by_name(columns, list(self.inputs)).items()}
        allow_new = self.allow_new if allow_new is None else allow_new
        return encode(self.schema, pa.table(arrays), at=location, allow_new=allow_new)

    def predict_inputs(self, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction for rows returned by `encode`, possibly concatenated; not checked to be finite."""
        if not len(x):  # an empty prediction has the shapes of one row, which may lie far from those of training
            with warnings.catch_warnings(action="ignore"):
                one = self.predict_inputs(np.zeros((1, *x.shape[1:]), x.dtype))
            return {name: values[:0] for name, values in one.items()}
        if self.n_draws == "auto" and self.method == "sampling":
            return self._predict_until_tolerance(x)
        step = max(1, min(4096, _MAX_VALUES // (self.total_draws * self._fields.row_size)))
        settings = self.most_draws, self.seed, self.coverage, self.method
        blocks = [self._fields(x[start : start + step], *settings) for start in range(0, len(x), step)]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _predict_until_tolerance(self, x: NumpyArray) -> dict[str, NumpyArray]:
        """Each row by the fewest draws of 64, 128 ... that meet the tolerance, whatever the other rows."""
        waiting, n_draws = np.arange(len(x)), _MIN_DRAWS
        parts: list[dict[str, NumpyArray]] = []
        while len(waiting):
            predictor = self.with_settings(n_draws=min(n_draws, self.max_draws))
            met = np.full(len(waiting), n_draws >= self.max_draws)
            if not met.any():
                met = predictor._relative_error(x[waiting]) <= self.tolerance
            prediction = predictor.predict_inputs(x[waiting[met]])
            parts.append({"row": waiting[met], **prediction, "draws_used": np.full(met.sum(), predictor.total_draws)})
            waiting, n_draws = waiting[~met], 2 * n_draws
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(joined.pop("row"))
        return {name: values[order] for name, values in joined.items()}

    def _relative_error(self, x: NumpyArray) -> NumpyArray:
        """A bound on the standard error of each row's mean, relative to its predictive standard deviation.

        It is that of as many draws in eight independent sets; draws that are stratified together have less.
        """
        seeds = [(self.seed + (index + 1) * 2**40) % 2**63 for index in range(_N_SETS)]
        sets = [self.with_settings(n_draws=self.most_draws // _N_SETS, seed=seed).predict_inputs(x) for seed in seeds]
        means = np.stack([one["mean" if "mean" in one else "probabilities"] for one in sets])
        mean, error = means.mean(0), means.std(0, ddof=1) / _N_SETS**0.5
        deviation = np.mean([one["std"] for one in sets], axis=0) if "std" in sets[0] else np.sqrt(mean * (1 - mean))
        ratio = np.divide(error, deviation, out=np.zeros_like(error), where=error > 0)
        return ratio.max(axis=tuple(range(1, ratio.ndim)))

    def flat_columns(self, prediction: Mapping[str, NumpyArray]) -> dict[str, NumpyArray]:
        """The prediction as columns of a table: one column per class probability or output.

        The squares of `epistemic_std` and `aleatoric_std` add up to that of `std` [GG16, prop:var].
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
        """The columns of a prediction for encoded rows; a table's model adds its `remarks`."""
        prediction = self.predict_inputs(rows.x)
        return self.flat_columns(prediction) | ({} if self.schema is None else self.remarks(prediction, rows))

    def remarks(self, prediction: Mapping[str, NumpyArray], rows: Encoded) -> dict[str, NumpyArray]:
        """The columns of texts that a table gets beside its prediction.

        After a conformal calibration of classes, `labels` is the set of labels that holds the true one with probability
        `coverage`; `outside` names the columns whose value lies beyond those of the training rows.
        """
        columns = {"outside": np.array(rows.outside_names(), dtype=np.str_)}
        if self.classes is not None and getattr(self._fields.recalibration, "method", "") == "conformal":
            sets, probabilities = self._fields.recalibration.label_sets, prediction["probabilities"]
            inside = sets(probabilities, self.coverage).numpy() if len(probabilities) else []
            labels = np.asarray(self.classes, np.str_)
            columns = {"labels": np.array(["; ".join(labels[row]) for row in inside], dtype=np.str_), **columns}
        return columns

    def add_columns(self, table: pa.Table, *, prefix: str | None = None) -> pa.Table:
        """An Arrow table with the columns of the prediction appended, as `dropbayes predict` adds them.

        Args:
            table: The rows; columns that the model does not read are unchanged.
            prefix: The prefix of the new columns' names; by default the target and `_`, if it is known.
        """
        return self.append_columns(table, self.encode_rows(table), prefix)

    def append_columns(
        self, table: pa.Table, rows: Encoded, prefix: str | None = None, at: Callable[[int], str] = location
    ) -> pa.Table:
        """The same for rows that are encoded already; `at` is the location of a row in an error."""
        import pyarrow as pa

        prefix, columns = self.prefix if prefix is None else prefix, self.table_columns(rows)
        check_finite(columns, at)
        for name, values in columns.items():
            if prefix + name in table.column_names:
                fault = f"the table has a column {prefix + name!r}, which the prediction would add"
                raise ValueError(f"{fault}; choose another `prefix`, or leave the column out.")
            kind = pa.string() if values.dtype.kind in "OU" else None
            table = table.append_column(prefix + name, pa.array(values.tolist() if kind else values, kind))
        return table


def uncertainty(prediction: Mapping[str, NumpyArray]) -> NumpyArray:
    """The uncertainty by which rows are deferred: the standard deviation, or for classes the entropy."""
    return prediction["std" if "std" in prediction else "entropy"]


def _matrix(columns: Columns, n_columns: int | None) -> NumpyArray:
    """All columns as one array, `[row, column]`; of any shape `[row, ...]` where their number is unknown."""
    if MATRIX not in columns:
        raise ValueError(f"`columns` must hold the array `{MATRIX}`; got {sorted(map(str, columns))[:8]}.")
    x = np.asarray(as_array(columns[MATRIX]))
    if not x.ndim:
        raise ValueError(f"`{MATRIX}` must have an axis of rows; got a single value.")
    if n_columns is not None and x.shape[1:] != (n_columns,):
        raise ValueError(f"`{MATRIX}` must be shaped [row, {n_columns}], with all columns; got {list(x.shape)}.")
    return x


def _by_name(columns: Columns, names: Sequence[str]) -> dict[str, Any]:
    """Each of the named columns as a one-dimensional array of the same length, of NumPy, pandas or Arrow."""
    from dropbayes.estimators.columns.schema import list_names

    known = check_names(columns, "columns")
    columns = {name: columns[name] for name in known} if hasattr(columns, "column_names") else columns
    lacking = [name for name in names if name not in columns]
    if lacking and MATRIX in columns and (MATRIX not in names or np.ndim(columns[MATRIX]) == 2):
        return dict(zip(names, _matrix(columns, len(names)).T, strict=True))
    if lacking:
        raise ValueError(f"`columns` lacks {list_names(lacking)}, which the model reads; it has {list_names(known)}.")
    arrays: dict[str, Any] = {}
    for name in names:
        values = as_array(columns[name])
        values = values if hasattr(values, "__array__") else np.asarray(values)  # a list
        shape = np.shape(values)
        if len(shape) != 1 and shape[1:] != (1,):
            raise ValueError(f"column {name!r} must have one value per row; got the shape {list(shape)}.")
        arrays[name] = values if len(shape) == 1 else np.asarray(values)[:, 0]
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"`columns` must be equally long; got {lengths}.")
    return arrays


def _number_column(values: npt.ArrayLike, name: str) -> NumpyArray:
    if (array := np.asarray(values)).dtype.kind not in "biuf":
        raise ValueError(f"column {name!r} must hold numbers; got {array.dtype}.")
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array)).reshape(len(array), -1).any(1).argmax())
        raise ValueError(f"row {row}, column {name!r}: must be a finite number.")
    return array.astype(np.float64)
