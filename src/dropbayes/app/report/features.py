r"""What the features do: how much each matters, and where along each the model errs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dropbayes.app.report.formatting import name
from dropbayes.app.report.measurements import Classification, Regression
from dropbayes.columns.dates import day_of_year
from dropbayes.predictive.mixtures import draw_mean
from dropbayes.runtime.arrays import Numbers

__all__ = ["Feature", "Importance", "Segment", "features_of", "importances", "segments"]

IMPORTANCE_ROWS, IMPORTANCE_DRAWS = 400, 40
"""The rows whose feature is shuffled (an even selection), and the draws of all networks that predict them."""

MISSING = "(missing)"
"""What is displayed for a missing value."""

_REPEATS, _PREDICTIONS = 5, 400  # Shuffles of a feature, and the most predictions spent on all features.
_SEGMENTS = 4
_FEWEST = 20  # Segments with fewer rows are left out.


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature as it was before encoding.

    Args:
        name: Its name.
        columns: The columns of the inputs it became.
        values: Its value in each row: numbers, or texts.
        is_date: Whether the numbers are dates, as decimal years.
        labels: How the table writes some of the numbers, such as yes and no.
    """

    name: str
    columns: tuple[int, ...]
    values: npt.NDArray[Any]
    is_date: bool = False
    labels: Mapping[float, str] = field(default_factory=dict)

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return self.values.dtype.kind == "f"

    def text(self, value: Any) -> str:
        """A value of the feature as a reader of the table knows it.

        Examples:
            >>> Feature("city", (0,), np.array(["Oslo"])).text("Oslo")
            'Oslo'
            >>> Feature("rate", (0,), np.zeros(1)).text(-1234567.8), Feature("day", (0,), np.zeros(1), True).text(1970)
            ('−1234568', '1970-01-01')
        """
        if not self.is_number:
            return str(value)
        if np.isnan(value):
            return MISSING
        if value in self.labels:
            return self.labels[value]
        if self.is_date:
            return str(day_of_year(float(value)))
        whole = len(str(int(abs(value)))) if abs(value) < 1e9 else 0
        return f"{value:.{max(4, whole)}g}".replace("-", "−")  # no thousands marks: it may be a year

    def with_labels(self, texts: Sequence[Any]) -> Feature:
        """The feature with its numbers written as the table does, if they are few and each has one text.

        Example:
            >>> Feature("paid", (0,), np.array([1.0, 0.0, 1.0])).with_labels(["yes", "no", "yes"]).text(1.0)
            'yes'
        """
        if not self.is_number or self.is_date or len(distinct := np.unique(self.values)) > _SEGMENTS + 1:
            return self
        labels = {}
        for number in distinct[np.isfinite(distinct)]:
            written = {str(texts[row]) for row in np.flatnonzero(self.values == number).tolist()}
            if len(written) == 1:
                labels[float(number)] = name(written.pop(), most=40)
        return replace(self, labels=labels)


@dataclass(frozen=True)
class Importance:
    """How much worse the predictions are if a feature is shuffled among the rows.

    Args:
        name: The feature.
        rise: The rise of the mean loss: absolute error, or negative log-probability in nats.
        error: Its standard error over shuffles and rows.
    """

    name: str
    rise: float
    error: float


@dataclass(frozen=True)
class Segment:
    """The rows with some values of a feature, and the model's errors on them.

    Args:
        feature: The feature.
        values: The values, in words.
        n_rows: How many rows.
        loss: Their mean absolute error, or their error rate.
        sigmas: How far that is above the mean of all rows, in standard errors.
        coverage: The share inside their 95 % interval, or the accuracy minus the mean confidence.
        coverage_sigmas: How far that is from what it should be, in standard errors.
    """

    feature: str
    values: str
    n_rows: int
    loss: float
    sigmas: float
    coverage: float
    coverage_sigmas: float


def features_of(x: Numbers, names: Sequence[str], groups: Mapping[str, Sequence[int]] | None = None) -> list[Feature]:
    """The features of the inputs.

    Args:
        x: The inputs, `[row, input]`.
        names: The names of the inputs; those of a category end in " = " and its text, a flag in " is missing", and the
            first of a date in ": year".
        groups: The inputs that each feature became; by default every input is a feature.

    Example:
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> features_of(x, ["city = Oslo", "city = Rome"], {"city": (0, 1)})[0].values.tolist()
        ['Oslo', 'Rome']
    """
    groups = {name: (k,) for k, name in enumerate(names)} if groups is None else groups
    return [
        Feature(name, tuple(columns), _values(x, names, columns), is_date=names[columns[0]] == f"{name}: year")
        for name, columns in groups.items()
    ]


def _values(x: Numbers, names: Sequence[str], columns: Sequence[int]) -> npt.NDArray[Any]:
    """The numbers, or the texts of a one-hot category, that some inputs stand for."""
    flags = [k for k in columns if names[k].endswith(" is missing") and len(columns) > 1]
    levels = [k for k in columns if " = " in names[k] and k not in flags]
    missing = x[:, flags].any(1) if flags else np.zeros(len(x), dtype=bool)
    if len(levels) > 1:
        texts = np.array([names[k].rpartition(" = ")[2] for k in levels], dtype=object)
        known = x[:, levels].any(1)
        return np.where(known, texts[x[:, levels].argmax(1)], MISSING).astype(object)
    return np.where(missing, np.nan, x[:, columns[0]].astype(float))


# --- importance ----------------------------------------------------------------------------------------------------


def importances(model: Any, x: Numbers, y: Any, features: Sequence[Feature]) -> list[Importance]:
    """The permutation importance of each feature, the greatest first.

    The same draws predict the rows before and after the shuffle, so that their noise cancels.
    """
    rows = np.linspace(0, len(x) - 1, min(len(x), IMPORTANCE_ROWS)).round().astype(int)
    x, y = x[rows], y[rows]
    fewer = model.with_draws(n_draws=max(1, IMPORTANCE_DRAWS // len(model.population_)), seed=None)
    before = _losses(fewer, x, y)
    generator = np.random.default_rng(0)
    repeats = max(1, min(_REPEATS, _PREDICTIONS // max(1, len(features))))
    measured = []
    for feature in features:
        rises = []
        for _ in range(repeats):
            shuffled = x.copy()
            shuffled[:, feature.columns] = x[generator.permutation(len(x))][:, feature.columns]
            rises.append(_losses(fewer, shuffled, y) - before)
        rise = np.mean(rises, axis=0)
        measured.append(Importance(feature.name, float(rise.mean()), float(rise.std(ddof=1) / math.sqrt(len(rise)))))
    return sorted(measured, key=lambda one: -one.rise)


def _losses(model: Any, x: Numbers, y: Any) -> Numbers:
    """The loss of each row: absolute error, or negative log-probability of the truth."""
    if hasattr(model, "classes_"):
        probabilities = draw_mean(model.draws(x)).numpy()
        return -np.log(np.maximum(probabilities[np.arange(len(y)), y], 1e-12))
    return np.abs(np.asarray(model.predict(x), dtype=float) - y)


# --- segments ------------------------------------------------------------------------------------------------------


def segments(measured: Regression | Classification, features: Sequence[Feature]) -> list[Segment]:
    """The model's errors in each segment of each feature: quarters of a number, the commonest of other values."""
    if isinstance(measured, Regression):
        loss = np.abs(measured.y - measured.mean)
        right = ((measured.lower <= measured.y) & (measured.y <= measured.upper)).astype(float) - 0.95
        variance = np.full(len(loss), 0.95 * 0.05)
    else:
        loss = (measured.predicted != measured.labels).astype(float)
        right = 1 - loss - measured.confidence
        variance = measured.confidence * (1 - measured.confidence)
    result = []
    for feature in features:
        for values, inside in _parts(feature):
            n = int(inside.sum())
            if n < _FEWEST or n == len(loss):
                continue
            rest = ~inside
            error = math.sqrt(loss[inside].var(ddof=1) / n + loss[rest].var(ddof=1) / max(int(rest.sum()), 2))
            gap = float(right[inside].mean())
            chance = math.sqrt(max(float(variance[inside].sum()), 1e-12)) / n
            shown = gap + 0.95 if isinstance(measured, Regression) else gap
            excess = float(loss[inside].mean() - loss[rest].mean()) / max(error, 1e-300)
            result.append(Segment(feature.name, values, n, float(loss[inside].mean()), excess, shown, gap / chance))
    return result


def _parts(feature: Feature) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    values = feature.values
    if not feature.is_number or len(np.unique(values)) <= _SEGMENTS + 1:
        distinct, counts = np.unique(values, return_counts=True)
        chosen = distinct[np.argsort(-counts)][: _SEGMENTS + 2]
        return [(feature.text(value), ~np.isfinite(values) if value != value else values == value) for value in chosen]
    present = values[np.isfinite(values)]
    edges = np.unique(np.quantile(present, np.linspace(0, 1, _SEGMENTS + 1)))
    parts = []
    for low, high in pairwise(edges):
        last = high == edges[-1]
        inside = (values >= low) & ((values <= high) if last else (values < high))
        parts.append((f"{feature.text(low)} to {feature.text(high)}", inside))
    if len(present) < len(values):
        parts.append((MISSING, ~np.isfinite(values)))
    return parts
