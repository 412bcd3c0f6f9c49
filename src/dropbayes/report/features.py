r"""What the features do: how much each matters, and where along each the model errs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dropbayes.predictive.mixtures import draw_mean
from dropbayes.report.measurements import Classification, Regression
from dropbayes.runtime.arrays import Numbers

__all__ = ["Feature", "Importance", "Segment", "features_of", "importances", "segments"]

IMPORTANCE_ROWS, IMPORTANCE_DRAWS = 400, 40
"""The rows whose feature is shuffled (an even selection), and the draws of all networks that predict them."""

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
    """

    name: str
    columns: tuple[int, ...]
    values: npt.NDArray[Any]

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
        return self.values.dtype.kind == "f"


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
        names: The names of the inputs; those of a category end in " = " and its text, a flag in " is missing".
        groups: The inputs that each feature became; by default every input is a feature.

    Example:
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> features_of(x, ["city = Oslo", "city = Rome"], {"city": (0, 1)})[0].values.tolist()
        ['Oslo', 'Rome']
    """
    groups = {name: (k,) for k, name in enumerate(names)} if groups is None else groups
    return [Feature(name, tuple(columns), _values(x, names, columns)) for name, columns in groups.items()]


def _values(x: Numbers, names: Sequence[str], columns: Sequence[int]) -> npt.NDArray[Any]:
    """The numbers, or the texts of a one-hot category, that some inputs stand for."""
    flags = [k for k in columns if names[k].endswith(" is missing") and len(columns) > 1]
    levels = [k for k in columns if " = " in names[k] and k not in flags]
    missing = x[:, flags].any(1) if flags else np.zeros(len(x), dtype=bool)
    if len(levels) > 1:
        texts = np.array([names[k].rpartition(" = ")[2] for k in levels], dtype=object)
        known = x[:, levels].any(1)
        return np.where(known, texts[x[:, levels].argmax(1)], "(missing)").astype(object)
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
        names, counts = np.unique(values.astype(str), return_counts=True)
        chosen = names[np.argsort(-counts)][: _SEGMENTS + 2]
        return [(_text(name), values.astype(str) == name) for name in chosen]
    present = values[np.isfinite(values)]
    edges = np.unique(np.quantile(present, np.linspace(0, 1, _SEGMENTS + 1)))
    parts = []
    for low, high in pairwise(edges):
        last = high == edges[-1]
        inside = (values >= low) & ((values <= high) if last else (values < high))
        parts.append((f"{low:.4g} to {high:.4g}".replace("-", "−"), inside))
    if len(present) < len(values):
        parts.append(("(missing)", ~np.isfinite(values)))
    return parts


def _text(name: str) -> str:
    try:
        return f"{float(name):g}"
    except ValueError:
        return name
