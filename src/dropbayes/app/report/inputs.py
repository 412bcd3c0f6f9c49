"""The inputs of a report: the arguments of `report`, each validated with one clear error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dropbayes.app.report import measurements
from dropbayes.app.report.features import Feature, features_of
from dropbayes.app.report.formatting import name
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.runtime.arrays import Numbers

_COMMAND = re.compile(r"(dropbayes|python) [a-z-]")


@dataclass(frozen=True, eq=False)
class ReportInputs:
    """The validated arguments of a report, with names made safe to display.

    Args:
        model: The model, predicting from the draws asked for.
        x: The inputs.
        y: The truths; class numbers for a classifier.
        target: The name of what is predicted.
        columns: Columns to show beside the most uncertain rows.
        title: The title of the document.
        provenance: Labels and texts of what was done, and whether the text is a command.
        names: The names of the features.
        band_feature: The feature over which to draw the band.
        training: Inputs and truths the model was fitted to.
        unknown: Inputs without a truth.
        features: The features of the inputs, as they were before encoding.
        ranges: The least and greatest value of a feature in the training rows.
    """

    model: Any
    x: Numbers
    y: Any
    target: str
    columns: list[tuple[str, Sequence[object]]]
    title: str
    provenance: list[tuple[str, str, bool]]
    names: list[str]
    band_feature: int | None
    training: tuple[Numbers, Any] | None
    unknown: Numbers | None
    features: list[Feature]
    ranges: dict[str, tuple[float, float]]

    @property
    def training_features(self) -> list[Feature] | None:
        """The features of the training rows, where those are known."""
        if self.training is None:
            return None
        groups = {feature.name: feature.columns for feature in self.features}
        known = features_of(self.training[0], self.names, groups)
        return [replace(one, labels=feature.labels) for one, feature in zip(known, self.features, strict=True)]

    @classmethod
    def of(
        cls, model: Any, x: Any, y: Any, *, target: Any, columns: Any, title: Any, provenance: Any, n_draws: Any,
        seed: Any, names: Any, band_feature: Any, training: Any, unknown: Any, features: Any, ranges: Any,
    ) -> ReportInputs:  # fmt: skip
        """The validated arguments."""
        if not isinstance(model, DropoutRegressor | DropoutClassifier):
            raise TypeError(f"`model` must be a DropoutRegressor or DropoutClassifier; got {type(model).__name__}.")
        check_is_fitted(model)
        if isinstance(model, DropoutRegressor) and not model.one_column_:
            raise ValueError(
                f"`model` must predict one output; it predicts {model.population_.y_mean.shape[-1]}. "
                "Fit one model per output and report on each."
            )
        for label, text in (("target", target), ("title", title)):
            if not isinstance(text, str):
                raise TypeError(f"`{label}` must be text; got {type(text).__name__}.")
        if n_draws is not None and not (_is_integer(n_draws) and n_draws >= 1):
            raise ValueError(f"`n_draws` must be a positive integer or None; got {n_draws!r}.")
        if seed is not None and not (_is_integer(seed) and seed >= 0):
            raise ValueError(f"`seed` must be a non-negative integer or None; got {seed!r}.")
        rows = _inputs(model, x, "x", at_least=2)
        truth = _outcomes(model, y, len(rows), "y")
        labels = _columns(model, names, rows.shape[1])
        if band_feature is not None and not (_is_integer(band_feature) and 0 <= band_feature < rows.shape[1]):
            raise ValueError(
                f"`band_feature` must number a column of `x`, 0 to {rows.shape[1] - 1}; got {band_feature!r}."
            )
        texts = _columns_of_rows(columns, rows, labels)
        return cls(
            measurements.with_draws(model, n_draws=n_draws, seed=seed), rows, truth, name(target),
            texts,
            name(title, most=160), _facts(provenance), labels, None if band_feature is None else int(band_feature),
            _pair(model, training), None if unknown is None else _inputs(model, unknown, "unknown", at_least=1),
            _features(rows, labels, _groups(features, rows.shape[1]), {} if columns is None else dict(texts)),
            {name(label): (float(low), float(high)) for label, (low, high) in (ranges or {}).items()},
        )  # fmt: skip


def _features(
    x: Numbers, names: list[str], groups: dict[str, tuple[int, ...]] | None, texts: Mapping[str, Sequence[object]]
) -> list[Feature]:
    return [
        feature.with_labels(texts[feature.name]) if feature.name in texts else feature
        for feature in features_of(x, names, groups)
    ]


def _groups(features: Any, n_inputs: int) -> dict[str, tuple[int, ...]] | None:
    if features is None:
        return None
    groups = {name(label): tuple(int(column) for column in columns) for label, columns in features.items()}
    if sorted(column for columns in groups.values() for column in columns) != list(range(n_inputs)):
        raise ValueError(f"`features` must share out the {n_inputs} columns of `x`, each to one feature.")
    return groups


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _inputs(model: Any, x: Any, label: str, *, at_least: int) -> Numbers:
    try:
        rows = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"`{label}` must be a matrix of numbers [row, feature].") from None
    if rows.ndim != 2 or rows.shape[1] != model.n_features_in_ or len(rows) < at_least:
        raise ValueError(
            f"`{label}` must be [row, feature] with at least {at_least} rows and the {model.n_features_in_} features "
            f"the model was fitted to; got shape {rows.shape}."
        )
    if not np.isfinite(rows).all():
        raise ValueError(
            f"`{label}` must hold finite numbers; row {int((~np.isfinite(rows)).any(1).argmax())} does not."
        )
    return rows


def _outcomes(model: Any, y: Any, n_rows: int, label: str) -> Any:
    truth = np.asarray(y)
    if truth.shape != (n_rows,):
        raise ValueError(f"`{label}` must hold one truth for each of the {n_rows} rows; got shape {truth.shape}.")
    if isinstance(model, DropoutClassifier):
        codes = {value: code for code, value in enumerate(model.classes_.tolist())}
        unseen = [value for value in truth.tolist() if value not in codes]
        if unseen:
            raise ValueError(
                f"`{label}` must hold only the classes the model was fitted to; got {str(unseen[0])[:80]!r}. Leave "
                "those rows out."
            )
        return np.array([codes[value] for value in truth.tolist()], dtype=np.int64)
    try:
        values = truth.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"`{label}` must hold numbers for a DropoutRegressor; got {truth.dtype}.") from None
    if not np.isfinite(values).all():
        raise ValueError(f"`{label}` must hold finite numbers; row {int((~np.isfinite(values)).argmax())} does not.")
    return values


def _pair(model: Any, training: Any) -> tuple[Numbers, Any] | None:
    if training is None:
        return None
    if not isinstance(training, tuple) or len(training) != 2:
        raise TypeError(f"`training` must be a pair (x, y); got {type(training).__name__}.")
    rows = _inputs(model, training[0], "training", at_least=1)
    return rows, _outcomes(model, training[1], len(rows), "training")


def _columns(model: Any, names: Any, n_features: int) -> list[str]:
    known = getattr(model, "feature_names_in_", None) if names is None else names
    if known is None:
        return [f"feature {k + 1}" for k in range(n_features)]
    if isinstance(known, str) or len(known) != n_features:
        raise ValueError(f"`names` must name each of the {n_features} columns of `x`; got {len(known)}.")
    return [name(label) for label in known]


def _columns_of_rows(columns: Any, x: Numbers, names: list[str]) -> list[tuple[str, Sequence[object]]]:
    if columns is None:
        return list(zip(names, x.T, strict=True))
    if not isinstance(columns, Mapping):
        raise TypeError(f"`columns` must map column names to values; got {type(columns).__name__}.")
    for label, values in columns.items():
        if isinstance(values, str) or len(values) != len(x):
            raise ValueError(
                f"`columns` must have one value for each of the {len(x)} rows; {str(label)[:80]!r} has {len(values)}."
            )
    # A pandas series would take a row number for a label of its index.
    return [
        (name(label, most=40), values if isinstance(values, list | tuple | np.ndarray) else list(values))
        for label, values in columns.items()
    ]


def _facts(provenance: Any) -> list[tuple[str, str, bool]]:
    if provenance is None:
        return []
    if not isinstance(provenance, Mapping):
        raise TypeError(f"`provenance` must map labels to texts; got {type(provenance).__name__}.")
    facts = [(name(label), name(text, most=1000)) for label, text in provenance.items()]
    return [(label[:1].upper() + label[1:], text, bool(_COMMAND.match(text))) for label, text in facts]
