"""The arguments of a report, each validated with one clear error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dropbayes.app.report.features import Feature
from dropbayes.estimators.ensembles import ClassEnsemble, RegressionEnsemble
from dropbayes.runtime.validation import Array, Numbers, NumpyArray, check_type, finite_tensor, quote, row_values

Model = RegressionEnsemble | ClassEnsemble


@dataclass(frozen=True, eq=False)
class ReportInputs:
    """The arguments of `report`, with the classes of outcomes as numbers; names are made safe where they are shown."""

    model: Any
    x: Numbers
    y: NumpyArray
    target: str
    columns: list[tuple[str, Sequence[object]]]
    provenance: Mapping[str, str]
    names: list[str]
    band_feature: int | None
    training: tuple[Numbers, NumpyArray] | None
    unknown: Numbers | None
    features: list[Feature]
    ranges: Mapping[str, tuple[float, float]]
    numbers: Numbers | None


def fitted_model(model: Model) -> Model:
    """A view of the model that takes rows without the names of features."""
    check_type("model", model, (RegressionEnsemble, ClassEnsemble), "be a DropoutRegressor or DropoutClassifier")
    view = model.with_draws()
    if not getattr(model, "one_column_", True):
        fault = f"must predict one output; it predicts {model.population_.y_mean.shape[-1]}"
        raise ValueError(f"`model` {fault}. Fit one model per output and report on each.")
    vars(view).pop("feature_names_in_", None)  # rows come as plain arrays, without feature names to warn about
    return view


def input_rows(model: Model, x: Array, label: str, *, at_least: int = 1) -> Numbers:
    rows = finite_tensor(label, x, axes="[row, feature]").double().numpy()
    if rows.shape[1] != model.n_features_in_ or len(rows) < at_least:
        known = f"the {model.n_features_in_} features the model was fitted to"
        rule = f"[row, feature] with at least {at_least} rows and {known}"
        raise ValueError(f"`{label}` must be {rule}; got shape {rows.shape}.")
    return rows


def outcomes(model: Model, y: Array, n_rows: int, label: str) -> NumpyArray:
    """The outcomes: finite numbers, or the numbers of classes."""
    if not hasattr(model, "classes_"):
        return row_values(label, y, n_rows=n_rows).double().numpy()
    codes, truths = {value: code for code, value in enumerate(model.classes_.tolist())}, np.asarray(y).tolist()
    unseen = [value for value in truths if value not in codes]
    if unseen or len(truths) != n_rows:
        what = f"{len(truths)} labels" if not unseen else repr(str(unseen[0])[:80])
        rule = f"one of the classes the model was fitted to for each of the {n_rows} rows"
        raise ValueError(f"`{label}` must hold {rule}; got {what}.")
    return np.array([codes[value] for value in truths], dtype=np.int64)


def input_names(model: Model, names: Sequence[str] | None, n_inputs: int) -> list[str]:
    """The names of the inputs, by default those the model was fitted with."""
    known = getattr(model, "feature_names_in_", None) if names is None else names
    if known is None:
        return [f"feature {k + 1}" for k in range(n_inputs)]
    if len(known) != n_inputs:
        raise ValueError(f"`names` must name each of the {n_inputs} columns of `x`; got {len(known)}.")
    return list(map(str, known))


def shown_columns(columns: Mapping[str, Sequence[object]], n_rows: int) -> list[tuple[str, Sequence[object]]]:
    shown = []
    for label, values in columns.items():
        # As a list: a pandas series would take a row number for a label of its index.
        cells = values.tolist() if hasattr(values, "tolist") else list(values)
        if len(cells) != n_rows:
            raise ValueError(f"`columns` must have one value per row ({n_rows}); {quote(label)} has {len(cells)}.")
        shown.append((str(label), cells))
    return shown
