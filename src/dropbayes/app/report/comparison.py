"""The training rows as a yardstick: simple models fitted to them, and how the evaluated rows differ from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropbayes.app.models.fields import even_selection
from dropbayes.app.report.features import MAX_FEATURES, Feature
from dropbayes.app.report.measurements import Measured
from dropbayes.runtime.arrays import Numbers, NumpyArray
from dropbayes.runtime.formatting import number, percent, score_text


class Baseline(NamedTuple):
    name: str
    error: float  # RMSE, or error rate
    error_se: float  # the standard error of that
    gap: float  # the excess of its losses over ours, row by row, in standard errors
    log_likelihood: float | None = None  # of classes only

    @property
    def is_better(self) -> bool:
        """Whether it errs less than our model, beyond chance: by more than two standard errors."""
        return self.gap < -2


def baselines(measured: Measured, x: Numbers, training: tuple[Numbers, NumpyArray] | None) -> list[Baseline]:
    """Our model and simple ones fitted to the training rows (an even selection of many), scored on the same rows."""
    if training is None:
        return []
    rows = even_selection(len(training[0]), 20_000)
    known = training[0][rows], training[1][rows]
    lines = []
    if not measured.has_classes:
        regressors = {
            "mean of the training rows": DummyRegressor(),
            "linear regression": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 7))),
            "gradient boosting": HistGradientBoostingRegressor(random_state=0),
        }
        predicted = {name: model.fit(*known).predict(x) for name, model in regressors.items()}
        for name, values in {"this model": measured.mean, **predicted}.items():
            squares = (values - measured.y) ** 2
            rmse = math.sqrt(squares.mean())
            error = float(scipy.stats.sem(squares)) / (2 * rmse) if rmse else 0.0
            lines.append(Baseline(name, rmse, error, _gap(squares - measured.loss**2)))
        return lines
    classifiers = {
        "class shares of the training rows": DummyClassifier(),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
        "gradient boosting": HistGradientBoostingClassifier(random_state=0, early_stopping=False, max_iter=50),
    }
    given = {"this model": measured.probabilities}
    for name, model in classifiers.items():
        given[name], fitted = np.zeros_like(measured.probabilities), model.fit(*known)
        given[name][:, fitted.classes_] = fitted.predict_proba(x)
    for name, values in given.items():
        wrong = (values.argmax(1) != measured.labels).astype(float)
        likelihood = np.log(np.maximum(values[np.arange(len(wrong)), measured.labels], 1e-12))
        compared = float(scipy.stats.sem(wrong)), _gap(wrong - measured.loss)
        lines.append(Baseline(name, float(wrong.mean()), *compared, float(likelihood.mean())))
    return lines


def _gap(excess: Numbers) -> float:
    """The mean of losses in excess of ours, in standard errors."""
    error = float(scipy.stats.sem(excess))
    return float(excess.mean()) / error if error else 0.0


def baseline_rows(lines: Sequence[Baseline]) -> tuple[list[list[str]], set[int]]:
    """The cells of the table of models, and the rows of those that err less than ours."""
    rows = []
    for place, line in enumerate(lines):
        more = [] if line.log_likelihood is None else [number(line.log_likelihood)]
        compared = "no difference beyond chance" if place else ""
        if abs(line.gap) > 2:
            compared = f"{'worse' if line.gap > 0 else 'better'} by {abs(line.gap):.0f} standard errors"
        rows.append([line.name, score_text(line.error, line.error_se, percent=bool(more)), *more, compared])
    return rows, {k for k, line in enumerate(lines) if line.is_better}


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
        outside = ((values < low) | (values > high)).mean() if feature.is_number else 0.0
        return Shift(feature.name, "", after, float(outside))
    before = feature.typical(trained)
    if feature.is_number:
        one, other = (side[np.isfinite(side)] for side in (trained, values))
        if not len(one) or not len(other):
            return Shift(feature.name, before, after)
        test = scipy.stats.ks_2samp(one, other, method="asymp")
        distance, p_value = float(test.statistic), float(test.pvalue)
        outside = float(((values < one.min()) | (values > one.max())).mean())
    else:
        sides = [side.astype(str) for side in (trained, values)]
        levels = np.unique(np.concatenate(sides))
        counts = np.array([[(side == level).sum() for level in levels] for side in sides])
        shares = counts / counts.sum(1, keepdims=True)
        distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
        p_value = float(scipy.stats.chi2_contingency(counts).pvalue) if len(levels) > 1 else 1.0
        outside = float(shares[1][counts[0] == 0].sum())
    return Shift(feature.name, before, after, outside, distance, p_value)


class ShiftTable:
    """The features of the evaluated rows beside those of the training rows."""

    def __init__(self, measured: Sequence[Shift]) -> None:
        self.moved = [one.name for one in measured if one.p_value is not None and one.p_value < 0.01 / len(measured)]
        self.farthest = max(measured, key=lambda one: one.outside)
        distances = ("–" if one.distance is None else f"{one.distance:.2f}" for one in measured)
        self.rows = [
            [one.name, one.before or "–", one.after, distance, percent(one.outside)]
            for one, distance in zip(measured[:MAX_FEATURES], distances, strict=False)
        ]
        self.notable = {k for k, one in enumerate(measured) if one.name in self.moved or one.outside > 0}
