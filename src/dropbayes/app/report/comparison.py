"""The model beside others: simple models fitted to the same training rows; and the evaluated rows beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dropbayes.app.report.features import Feature
from dropbayes.app.report.measurements import Classification, Regression, mean_and_error
from dropbayes.runtime.arrays import Numbers

__all__ = ["Baseline", "Shift", "baselines", "shifts"]

BEYOND_CHANCE = 2.0
"""The standard errors from which a difference of two models is more than chance."""

TRAINING_ROWS = 20_000
"""The most training rows (an even selection) that the simple models are fitted to."""


@dataclass(frozen=True)
class Baseline:
    """A model beside ours.

    Args:
        name: What it is.
        error: Its RMSE, or its error rate.
        error_se: The standard error of that.
        gap: How much greater its loss (squared error, or error rate) is than ours, in standard errors of the
            difference row by row; None for our own model.
        log_likelihood: The mean log-probability of the true classes; None for numbers.
    """

    name: str
    error: float
    error_se: float
    gap: float | None
    log_likelihood: float | None = None

    @property
    def is_better(self) -> bool:
        """Whether it errs less than our model, beyond chance."""
        return self.gap is not None and self.gap < -BEYOND_CHANCE


def baselines(
    measured: Regression | Classification, x: Numbers, y: Any, training: tuple[Numbers, Any], *, n_classes: int
) -> list[Baseline]:
    """Our model, the mean (or the class shares), a linear model and gradient boosting, all scored on the same rows."""
    rows = np.linspace(0, len(training[0]) - 1, min(len(training[0]), TRAINING_ROWS)).round().astype(int)
    known = training[0][rows], training[1][rows]
    if isinstance(measured, Regression):
        return _regression_baselines(measured, x, y, known)
    return _class_baselines(measured, x, y, known, n_classes)


def _regression_baselines(
    measured: Regression, x: Numbers, y: Numbers, known: tuple[Numbers, Numbers]
) -> list[Baseline]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    predictions = {
        "this model": measured.mean,
        "mean of the training rows": np.full(len(y), known[1].mean()),
        "linear regression": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 7))).fit(*known).predict(x),
        "gradient boosting": HistGradientBoostingRegressor(random_state=0).fit(*known).predict(x),
    }
    model_losses = (measured.mean - y) ** 2
    lines = []
    for name, predicted in predictions.items():
        squares = (predicted - y) ** 2
        rmse = math.sqrt(squares.mean())
        error = mean_and_error(squares)[1] / (2 * rmse) if rmse else 0.0
        lines.append(Baseline(name, rmse, error, None if name == "this model" else _sigmas(squares - model_losses)))
    return lines


def _class_baselines(
    measured: Classification, x: Numbers, y: npt.NDArray[np.int64], known: tuple[Numbers, Any], n_classes: int
) -> list[Baseline]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    share = np.bincount(known[1], minlength=n_classes) / len(known[1])
    predictions = {
        "this model": measured.probabilities,
        "class shares of the training rows": np.tile(share, (len(y), 1)),
    }
    for name, model in (
        ("logistic regression", make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))),
        ("gradient boosting", HistGradientBoostingClassifier(random_state=0, early_stopping=False, max_iter=50)),
    ):
        fitted = model.fit(*known)
        probabilities = np.zeros((len(y), n_classes))
        probabilities[:, fitted.classes_] = fitted.predict_proba(x)
        predictions[name] = probabilities
    model_losses = (measured.predicted != y).astype(float)
    lines = []
    for name, probabilities in predictions.items():
        wrong = (probabilities.argmax(1) != y).astype(float)
        log_likelihood = float(np.log(np.maximum(probabilities[np.arange(len(y)), y], 1e-12)).mean())
        gap = None if name == "this model" else _sigmas(wrong - model_losses)
        lines.append(Baseline(name, *mean_and_error(wrong), gap, log_likelihood))
    return lines


def _sigmas(difference: Numbers) -> float:
    mean, error = mean_and_error(difference)
    return mean / error if error else 0.0


# --- rows judged and rows trained on -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift:
    """How far a feature of the evaluated rows is from that of the training rows.

    Args:
        name: The feature.
        before: Its median, or its commonest value, in the training rows; empty if they are not known.
        after: The same in the evaluated rows.
        distance: The greatest difference of the two distribution functions (Kolmogorov-Smirnov), or half the sum of
            absolute differences of shares; None if the training rows are not known.
        p_value: The probability of such a distance by chance.
        outside: The share of the rows judged beyond the least and greatest value of the training rows.
    """

    name: str
    before: str
    after: str
    distance: float | None
    p_value: float | None
    outside: float


def shifts(
    features: Sequence[Feature],
    training: Sequence[Feature] | None,
    ranges: Mapping[str, tuple[float, float]],
) -> list[Shift]:
    """The features, the most shifted first.

    Args:
        features: The features of the evaluated rows.
        training: The same features of the training rows, where those are known.
        ranges: The least and greatest training value of features, for those that are not.
    """
    known = {} if training is None else {feature.name: feature for feature in training}
    measured = [_shift(feature, known.get(feature.name), ranges.get(feature.name)) for feature in features]
    return sorted(measured, key=lambda one: (-(one.distance or 0.0), -one.outside))


def _shift(feature: Feature, before: Feature | None, limits: tuple[float, float] | None) -> Shift:
    if before is None or before.is_number != feature.is_number:
        outside = _share_outside(feature.values, *limits) if limits is not None and feature.is_number else 0.0
        return Shift(feature.name, "", _typical_value(feature), None, None, outside)
    if feature.is_number:
        from scipy.stats import ks_2samp

        one, other = (values[np.isfinite(values)] for values in (before.values, feature.values))
        if not len(one) or not len(other):
            return Shift(feature.name, _typical_value(before), _typical_value(feature), None, None, 0.0)
        test = ks_2samp(one, other, method="asymp")
        outside = _share_outside(feature.values, float(one.min()), float(one.max()))
        return Shift(
            feature.name,
            _typical_value(before),
            _typical_value(feature),
            float(test.statistic),
            float(test.pvalue),
            outside,
        )
    return _category_shift(feature, before)


def _category_shift(feature: Feature, before: Feature) -> Shift:
    from scipy.stats import chi2_contingency

    levels = np.unique(np.concatenate([before.values.astype(str), feature.values.astype(str)]))
    counts = np.array([[(side.values.astype(str) == level).sum() for level in levels] for side in (before, feature)])
    shares = counts / counts.sum(1, keepdims=True)
    p_value = float(chi2_contingency(counts).pvalue) if len(levels) > 1 else 1.0
    new = float(shares[1][counts[0] == 0].sum())
    distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
    return Shift(feature.name, _typical_value(before), _typical_value(feature), distance, p_value, new)


def _share_outside(values: Numbers, low: float, high: float) -> float:
    return float(((values < low) | (values > high)).mean())


def _typical_value(feature: Feature) -> str:
    if feature.is_number:
        present = feature.values[np.isfinite(feature.values)]
        return feature.text(np.median(present)) if len(present) else "–"
    names, counts = np.unique(feature.values.astype(str), return_counts=True)
    return str(names[counts.argmax()])
