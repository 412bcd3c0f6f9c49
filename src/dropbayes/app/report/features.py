r"""The features: the importance of each, the parts in which the model errs, the difference from the training rows."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import scipy.special
import scipy.stats

from dropbayes.app.models.fields import even_selection
from dropbayes.app.report.measurements import Measured
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.columns.dates import day_of_year
from dropbayes.runtime.formatting import percent, printable_name, score_text
from dropbayes.runtime.validation import Numbers, NumpyArray
from dropbayes.scores import class_log_likelihood

SHUFFLED_ROWS = 400  # whose features are shuffled: of more, an even selection
MAX_FEATURES = 12  # of a table
_N_PARTS = 4  # of a number's range


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature as it was before encoding."""

    name: str
    columns: tuple[int, ...]  # of the inputs
    values: NumpyArray  # numbers, or texts
    is_date: bool = False  # the numbers are dates, as decimal years
    trained: NumpyArray | None = None  # its values in the training rows, where those are known
    labels: Mapping[float, str] = field(default_factory=dict)  # texts of some of the numbers, such as yes and no

    @property
    def title(self) -> str:
        """Its name as the page shows it, a long one cut in its middle."""
        return printable_name(self.name)

    @property
    def is_number(self) -> bool:
        return self.values.dtype.kind == "f"

    def text(self, value: float | str) -> str:
        """A value of the feature as a reader of the table knows it."""
        if not self.is_number:
            return printable_name(value)
        if math.isnan(value := float(value)):
            return "(missing)"
        if value in self.labels:
            return self.labels[value]
        if self.is_date:
            return str(day_of_year(value))
        whole = len(str(int(abs(value)))) if abs(value) < 1e9 else 0
        return f"{value:.{max(4, whole)}g}".replace("-", "−")  # no thousands marks: it may be a year

    def with_labels(self, texts: Mapping[str, Sequence[object]]) -> Self:
        """The feature with its numbers written as in the table of texts, if they are few and each has one text."""
        if self.name not in texts or not self.is_number or self.is_date:
            return self
        distinct, labels = np.unique(self.values), {}
        for value in distinct[np.isfinite(distinct)] if len(distinct) <= _N_PARTS + 1 else ():
            written = {str(texts[self.name][row]) for row in np.flatnonzero(self.values == value).tolist()}
            if len(written) == 1:
                labels[float(value)] = printable_name(written.pop(), max_length=40)
        return replace(self, labels=labels)

    def typical(self, values: NumpyArray) -> str:
        """The median of some of its values, or the commonest."""
        if self.is_number:
            present = values[np.isfinite(values)]
            return self.text(np.median(present)) if len(present) else "–"
        names, counts = np.unique(values.astype(str), return_counts=True)
        return self.text(names[counts.argmax()])

    def parts(self) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        """The rows with some of its values and those values in words: quarters of a number, else the commonest."""
        values = self.values
        if not self.is_number or len(np.unique(values)) <= _N_PARTS + 1:
            distinct, counts = np.unique(values, return_counts=True)
            for value in distinct[np.argsort(-counts)][: _N_PARTS + 2]:
                yield self.text(value), np.isnan(values) if value != value else values == value
            return
        missing = ~np.isfinite(values)
        edges = np.unique(np.quantile(values[~missing], np.linspace(0, 1, _N_PARTS + 1)))
        for low, high in pairwise(edges):
            below = values <= high if high == edges[-1] else values < high
            yield f"{self.text(low)} to {self.text(high)}", (values >= low) & below
        if missing.any():
            yield self.text(math.nan), missing


def features_of(
    x: Numbers, names: Sequence[str], groups: Mapping[str, Sequence[int]] | None = None, training: Numbers | None = None
) -> list[Feature]:
    """The features of the inputs `[row, input]`, from the inputs that each became; by default every input is one.

    The inputs of a category are called by its name, " = " and a text, its flag by its name and " is missing", and the
    first of a date by its name and ": year"; all of it may occur in a name or a text, too.
    """
    if groups is not None and sorted(k for columns in groups.values() for k in columns) != list(range(x.shape[1])):
        raise ValueError(f"`features` must share out the {x.shape[1]} columns of `x`, each to one feature.")

    def values(x: Numbers, name: str, columns: Sequence[int]) -> NumpyArray:
        flags = [k for k in columns[1:] if names[k] == f"{name} is missing"]
        levels = [k for k in columns if names[k].startswith(f"{name} = ")]
        if len(levels) < 2:
            return np.where(x[:, flags].any(1), np.nan, x[:, columns[0]].astype(float))
        texts = np.array([names[k].removeprefix(f"{name} = ") for k in levels], dtype=object)
        absent = np.where(x[:, flags].any(1), "(missing)", "(not in training)")  # new, or missing only here
        return np.where(x[:, levels].any(1), texts[x[:, levels].argmax(1)], absent).astype(object)

    features = []
    for name, columns in (groups or {name: (k,) for k, name in enumerate(names)}).items():
        here, known = values(x, name, columns), None if training is None else values(training, name, columns)
        features.append(Feature(name, tuple(columns), here, names[columns[0]] == f"{name}: year", known))
    return features


class Importance(NamedTuple):
    feature: Feature
    rise: float  # of the mean absolute error, or of the negative log-likelihood, if it is shuffled among the rows
    error: float  # the standard error of that


def importances(
    model: DropoutRegressor | DropoutClassifier, x: Numbers, y: Numbers, features: Sequence[Feature]
) -> list[Importance]:
    """The permutation importance of each feature, the greatest first, from 40 draws of all networks and 5 shuffles.

    The same draws predict the rows before and after the shuffle, so that their noise cancels.
    """
    rows = even_selection(len(x), SHUFFLED_ROWS)
    x, y = x[rows], y[rows]
    fewer = model.with_draws(n_draws=max(1, 40 // len(model.population_)), seed=None)

    def losses(x: Numbers) -> Numbers:
        truth = np.tile(y, len(x) // len(y))
        with warnings.catch_warnings(action="ignore"):  # shuffled rows are nobody's, and may be far from all others
            if hasattr(model, "classes_"):
                return -class_log_likelihood(np.maximum(fewer.predict_proba(x), 1e-12), truth).numpy()
            return np.abs(fewer.predict(x) - truth)

    before, generator = losses(x), np.random.default_rng(0)
    n_shuffles = max(1, min(5, 400 // max(1, len(features))))
    measured, n_features = list[Importance](), max(1, 4000 // (n_shuffles * len(x)))  # whose rows one call predicts
    for start in range(0, len(features), n_features):
        tables = np.tile(x, (len(some := features[start : start + n_features]), n_shuffles, 1, 1))
        for feature, shuffled in zip(some, tables, strict=True):
            for table in shuffled:
                table[:, feature.columns] = x[generator.permutation(len(x))][:, feature.columns]
        rises = losses(tables.reshape(-1, x.shape[1])).reshape(len(some), n_shuffles, -1).mean(1) - before
        for feature, rise in zip(some, rises, strict=True):
            measured.append(Importance(feature, float(rise.mean()), float(scipy.stats.sem(rise))))
    return sorted(measured, key=lambda one: -one.rise)


class Segment(NamedTuple):
    """The rows with some values of a feature, and the model's errors on them."""

    feature: str
    values: str  # in words
    n_rows: int
    loss: float  # the mean absolute error, or the error rate
    sigmas: float  # its difference from the other rows' in standard errors
    surprise: float  # the share inside their 95 % interval less 95 %, or the accuracy less the mean confidence
    surprise_sigmas: float  # the same in standard errors


def segments(measured: Measured, features: Sequence[Feature]) -> list[Segment]:
    """The model's errors in each part of each feature that has at least 20 rows."""
    loss, (surprise, variance) = measured.loss, measured.surprise
    result = []
    for feature in features:
        for values, inside in feature.parts():
            if not 20 <= (n := int(inside.sum())) < len(loss):
                continue
            inner, outer = loss[inside], loss[~inside]
            error = math.sqrt(inner.var(ddof=1) / n + outer.var(ddof=1) / max(len(outer), 2))
            excess = float(inner.mean() - outer.mean()) / max(error, 1e-300)
            gap, chance = float(surprise[inside].mean()), math.sqrt(max(float(variance[inside].sum()), 1e-12)) / n
            result.append(Segment(feature.title, values, n, float(inner.mean()), excess, gap, gap / chance))
    return result


def ranking_table(ranked: Sequence[Importance]) -> dict[str, object]:
    """The features, the greatest importance first."""
    greatest = max(ranked[0].rise, 1e-300)
    rows = [
        [one.feature.title, score_text(one.rise, one.error), f"{100 * max(one.rise, 0.0) / greatest:.0f} %"]
        for one in ranked[:MAX_FEATURES]
    ]
    first = next((one.feature.title for one in ranked if one.rise > 2 * one.error), "")  # beyond chance
    return {"rows": rows, "n_left": len(ranked) - len(rows), "first": first}


def segment_table(measured: Measured, features: Sequence[Feature]) -> dict[str, object] | None:
    """The errors in parts of features, and which of them are beyond chance among so many parts; None without any."""
    if not (parts := segments(measured, features)):
        return None
    # The standard errors that the greatest of so many exceeds with a probability of at most 5 % (Bonferroni).
    limit = float(scipy.special.ndtri(1 - 0.025 / (2 * len(parts))))
    worst, off = max(parts, key=lambda part: part.sigmas), min(parts, key=lambda part: part.surprise_sigmas)
    show, surprise = measured.show, measured.surprise_text
    rows = [[p.feature, p.values, f"{p.n_rows:,}", show(p.loss), surprise(p.surprise)] for p in parts]
    notable = {k for k, p in enumerate(parts) if p.sigmas > limit or abs(p.surprise_sigmas) > limit}
    return {"limit": limit, "worst": worst, "off": off, "rows": rows, "notable": notable}


class Shift(NamedTuple):
    """The difference of a feature of the evaluated rows from that of the training rows.

    The distance is Kolmogorov and Smirnov's, the greatest difference of the two distribution functions; for categories,
    half the sum of absolute differences of their shares.
    """

    name: str
    before: str  # the median, or the commonest value, in the training rows; empty if they are not known
    after: str  # the same in the evaluated rows
    outside: float = 0.0  # the share of the evaluated rows beyond the range of the training rows
    distance: float | None = None  # None if the training rows are not known
    p_value: float | None = None  # of such a distance by chance


def shifts(features: Sequence[Feature], ranges: Mapping[str, tuple[float, float]]) -> list[Shift]:
    """The features, the most shifted first; `ranges` are the ends of training values where those are not known."""
    measured = [_shift(feature, *ranges.get(feature.name, (-math.inf, math.inf))) for feature in features]
    return sorted(measured, key=lambda one: (-(one.distance or 0.0), -one.outside))


def _shift(feature: Feature, low: float, high: float) -> Shift:
    values, trained = feature.values, feature.trained
    after = feature.typical(values)
    if trained is None:
        outside = (values < low) | (values > high) if feature.is_number else values == "(not in training)"
        return Shift(feature.title, "", after, float(np.mean(outside)))
    before = feature.typical(trained)
    if feature.is_number:
        one, other = (side[np.isfinite(side)] for side in (trained, values))
        if not len(one) or not len(other):
            return Shift(feature.title, before, after)
        test = scipy.stats.ks_2samp(one, other, method="asymp")
        distance, p_value = float(test.statistic), float(test.pvalue)
        outside = float(((values < one.min()) | (values > one.max())).mean())
    else:
        levels, codes = np.unique(np.concatenate([trained, values]).astype(str), return_inverse=True)
        counts = np.array([np.bincount(side, minlength=len(levels)) for side in np.split(codes, [len(trained)])])
        shares = counts / counts.sum(1, keepdims=True)
        distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
        p_value = float(scipy.stats.chi2_contingency(counts).pvalue) if len(levels) > 1 else 1.0
        outside = float(shares[1][counts[0] == 0].sum())
    return Shift(feature.title, before, after, outside, distance, p_value)


def shift_table(measured: Sequence[Shift]) -> dict[str, object]:
    """The features of the evaluated rows beside those of the training rows."""
    moved = [one.name for one in measured if one.p_value is not None and one.p_value < 0.01 / len(measured)]
    distances = ("–" if one.distance is None else f"{one.distance:.2f}" for one in measured)
    rows = [
        [one.name, one.before or "–", one.after, distance, percent(one.outside)]
        for one, distance in zip(measured[:MAX_FEATURES], distances, strict=False)
    ]
    notable = {k for k, one in enumerate(measured) if one.name in moved or one.outside > 0}
    return {"moved": moved, "farthest": max(measured, key=lambda one: one.outside), "rows": rows, "notable": notable}
