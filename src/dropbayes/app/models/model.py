"""A complete model of a table: its networks, its columns, its calibration and its origin."""

import copy
import pathlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dropbayes import estimators
from dropbayes.app.models import storage
from dropbayes.app.models.predictor import Predictor, uncertainty
from dropbayes.app.models.storage import Origin
from dropbayes.app.tables.training import Reading, TrainingRows, training_rows
from dropbayes.estimators.columns import Cells, Encoded, Schema, check_columns, encode
from dropbayes.estimators.columns.cells import Place, in_one_case
from dropbayes.estimators.columns.schema import Task, list_names
from dropbayes.estimators.ensembles import Ensemble
from dropbayes.estimators.frames import as_frame, as_table, frame_inputs, frame_schema
from dropbayes.estimators.recalibration import Method, fit_recalibration, with_recalibration
from dropbayes.runtime.files import AnyPath
from dropbayes.runtime.validation import NumpyArray, quote

__all__ = ["Model", "load", "uncertainty_percentiles"]

Frame = TypeVar("Frame")  # a data frame of pandas, polars or arrow, or a dict of columns


def _row(row: int) -> str:
    return "the data frame" if row < 0 else f"the data frame, row {row}"


def uncertainty_percentiles(ensemble: Ensemble, x: NumpyArray) -> dict[str, float]:
    """The 50th, 90th, 95th and 99th percentile of the uncertainty of known rows, to compare later rows with."""
    values = uncertainty(Predictor(ensemble).predict_inputs(x[:: -(-len(x) // 2000)]))  # evenly spaced ones of many
    return {str(level): float(np.percentile(values, level)) for level in (50, 90, 95, 99)}


@dataclass(eq=False)
class Model:
    """A fitted ensemble with its columns and its origin.

    Example:
        >>> frame = {"size": list(range(60)), "price": [3.0 * size for size in range(60)]}
        >>> model = Model.fit(frame, target="price", n_steps=20, n_networks=1, drop_prob=0.05, weight_decay=1e-4)
        >>> sorted(model.predict({"size": [10, 90]}))
        ['aleatoric_std', 'epistemic_std', 'lower', 'mean', 'outside', 'std', 'upper']
        >>> model.predict({"size": [10, 90]})["outside"]
        ['', 'size']
    """

    ensemble: Any  #: The fitted networks, recalibrated if the model is.
    schema: Schema  #: Its columns.
    origin: Origin  #: The origin of the fit: file, rows, settings, versions, calibration.
    path: pathlib.Path | None = None  #: Its folder, if it has one.
    digest: str = ""  #: The digest of the networks in that folder.

    @classmethod
    def fit(
        cls, frame: object, *, target: str, task: Task | None = None, reading: Reading | None = None, **settings: Any
    ) -> Self:
        """A model fitted to a data frame: columns interpreted as on the command line, then an estimator.

        Args:
            frame: A data frame (pandas, polars, arrow) or a dict of columns, the target among them.
            target: The column to predict.
            task: "regression" or "classification"; by default, regression for numbers other than 0 and 1.
            reading: The options for reading its columns.
            settings: Parameters of `DropoutRegressor` or `DropoutClassifier`.
        """
        rows = training_rows(as_table(frame), target=str(target), at=_row, task=task, reading=reading)
        return cls.of_rows(rows, origin={"file": "a data frame"}, **settings)

    @classmethod
    def of_rows(cls, rows: TrainingRows, *, origin: Origin, **settings: Any) -> Self:
        """A model fitted to training rows."""
        regression = rows.schema.task == "regression"
        estimator = (estimators.DropoutRegressor if regression else estimators.DropoutClassifier)(**settings)
        try:
            estimator.fit(rows.x, rows.y, sample_weight=rows.weight, groups=rows.group, times=rows.time)
        finally:
            estimator.verbose = False
        percentiles = uncertainty_percentiles(estimator, rows.x)
        return cls(estimator, rows.schema, {"n_rows": len(rows.x), **origin, "uncertainty_percentiles": percentiles})

    @classmethod
    def of(cls, estimator: Any, frame: object, y: npt.ArrayLike, *, target: str) -> Self:
        """The model of an estimator fitted in Python, with its columns, ready to be saved as a folder.

        The data frame and `y` are the inputs and the targets it was fitted to, `target` is the name of the latter.
        """
        if not hasattr(estimator, "population_"):
            raise ValueError("`estimator` must be fitted; call its fit first.")
        task: Task = "classification" if hasattr(estimator, "classes_") else "regression"
        columns = estimator.frame_columns_ or frame_schema(frame)  # it keeps none for a frame of numbers
        schema, names = replace(columns, target=target, task=task), tuple(as_table(frame).column_names)
        if estimator.frame_columns_ is None and schema.inputs != names:
            rule, got = "numbers alone, as the estimator was fitted to them", ", ".join(schema.inputs[:8])
            remedy = "Fit with Model.fit(frame, target=...), which encodes columns."
            raise ValueError(f"`frame` must hold {rule}; its columns would become the inputs {got}. {remedy}")
        if estimator.frame_columns_ is None and (n_inputs := estimator.n_features_in_) != len(names):
            raise ValueError(f"`frame` must hold the {n_inputs} inputs of the estimator; got {len(names)}.")
        x = frame_inputs(schema, frame, learn_missing=True)
        if len(np.asarray(y)) != len(x):
            raise ValueError(f"`y` must hold a target for each of the {len(x)} rows; got {len(np.asarray(y))}.")
        view = copy.copy(estimator)
        vars(view).pop("feature_names_in_", None)  # the schema has the names; rows come as plain arrays
        view.frame_columns_, view.n_features_in_ = None, len(schema.inputs)
        origin = {"file": "a data frame", "n_rows": len(x), "uncertainty_percentiles": uncertainty_percentiles(view, x)}
        return cls(view, schema, origin)

    @property
    def uncertainty_percentiles(self) -> dict[str, float]:
        """Percentiles of the uncertainty on known rows: those of training, or of the calibration that changed it."""
        known = self.origin.get("calibration", {}).get("uncertainty_percentiles")
        return dict(known or self.origin.get("uncertainty_percentiles", {}))

    def with_draws(self, *, n_draws: int | None, seed: int | None) -> Self:
        """The model with another number of draws or another seed; None keeps the current one."""
        return replace(self, ensemble=self.ensemble.with_draws(n_draws=n_draws, seed=seed))

    def encode(self, frame: object, *, allow_new: bool = False) -> Encoded:
        """The rows of a data frame or a dict of columns as inputs of the networks; `allow_new` as in `predict`."""
        return encode(self.schema, as_table(frame), at=_row, allow_new=allow_new)

    def predict(self, frame: Frame, *, coverage: float = 0.95, allow_new: bool = False) -> Frame:
        """The prediction of each row, with uncertainty: the columns that `dropbayes predict` adds.

        Args:
            frame: A data frame or a dict of columns.
            coverage: The nominal coverage of the intervals.
            allow_new: Whether to encode unseen categories as all zeros instead of failing.

        Returns:
            A data frame of the same kind (a dict for a dict). "outside" names the columns whose value lies beyond
            those of the training rows.
        """
        encoded = self.encode(frame, allow_new=allow_new)
        if not len(encoded.x):
            raise ValueError("`frame` must have at least one row.")
        columns = Predictor(self, coverage=coverage).table_columns(encoded)
        predicted: Frame = as_frame({name: values.tolist() for name, values in columns.items()}, frame)
        return predicted

    def outcomes(self, table: pa.Table, *, at: Place = _row) -> tuple[NumpyArray, NumpyArray]:
        """The targets of a table's rows, and which rows have one; `at` locates a row."""
        schema = self.schema
        cells = Cells(table[schema.target], schema.target, at, schema.missing)
        if schema.task == "regression":
            y = cells.numbers(schema.target_notation)
            return y, ~np.isnan(y)
        classes = pa.array([str(label) for label in self.ensemble.classes_.tolist()])  # True, 1.0 ... of an estimator
        labels = in_one_case([*Cells(classes, schema.target, at).labels(), *cells.labels()])
        codes = {str(label): code for code, label in enumerate(labels[: len(classes)])}
        for row, text in enumerate(texts := labels[len(classes) :]):
            if text is not None and text not in codes:
                raise cells.error(row, f"the class {quote(text)} was not seen in training ({list_names(codes, 5)}).")
        code = np.array([-1 if text is None else codes[text] for text in texts], dtype=np.int64)
        return self.ensemble.classes_[code], code >= 0

    def calibrate(self, frame: object, *, method: Method = "scale", allow_new: bool = False) -> Self:
        """The model recalibrated on rows it was not fitted to, with their targets; call `save` to persist it.

        The methods are those of `dropbayes.estimators.recalibration`, and `allow_new` is as in `predict`.
        """
        table = as_table(frame)
        check_columns(self.schema, table.column_names, "the data frame", with_target=True)
        y, known = self.outcomes(table)
        return self.recalibrated(self.encode(table, allow_new=allow_new).x[known], y[known], method, "a data frame")

    def recalibrated(self, x: NumpyArray, y: NumpyArray, method: Method, source: str) -> Self:
        """The model recalibrated on the inputs and targets of held-out rows from some source."""
        recalibration = fit_recalibration(self.ensemble, x, y, method=method, at=source)
        ensemble = with_recalibration(self.ensemble, recalibration)
        known = {**asdict(recalibration), "values": list(recalibration.values), "file": source}
        known["uncertainty_percentiles"] = uncertainty_percentiles(ensemble, x)
        return replace(self, ensemble=ensemble, origin=self.origin | {"calibration": known})

    def uncalibrated(self) -> Self:
        """The model as it was fitted."""
        origin = {name: value for name, value in self.origin.items() if name != "calibration"}
        return replace(self, ensemble=with_recalibration(self.ensemble, None), origin=origin)

    def save(self, path: AnyPath) -> Self:
        """Writes the model's folder atomically, replacing an existing one; returns the model with its folder."""
        digest = storage.write(path, self.ensemble, self.schema, self.origin)
        return replace(self, path=pathlib.Path(path), digest=digest)

    def save_calibration(self) -> None:
        """Writes the calibration into the model's folder; the networks are unchanged."""
        if self.path is None:
            raise ValueError("the model has no folder yet; write it with model.save(path).")
        storage.write_origin(self.path, self.schema, self.origin, self.digest)


def load(path: AnyPath) -> Model:
    """The model in a folder written by `dropbayes fit` or `Model.save`, with its columns and calibration.

    Raises ValueError for a folder without a model, with a damaged one, or with one of another format.
    """
    ensemble, schema, origin, digest = storage.read(path)
    return Model(ensemble, schema, origin, pathlib.Path(path), digest)
