"""The table of scores: what each is called, what it means, which direction is better and how it is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from dropbayes.runtime.validation import Array, finite_tensor, matching_tensors, row_values
from dropbayes.scores import classification, regression
from dropbayes.scores.averages import weighted_mean

__all__ = [
    "CLASS_SCORES",
    "COVERAGE_LEVELS",
    "REGRESSION_SCORES",
    "ClassOutcomes",
    "RegressionOutcomes",
    "Score",
    "class_scores",
    "regression_scores",
]

COVERAGE_LEVELS = (0.5, 0.8, 0.95)
"""The nominal coverages whose observed counterparts are reported."""


@dataclass(frozen=True)
class RegressionOutcomes:
    """What the scores of a regression need of each row.

    Args:
        y: The observed targets, `[row, ...]`.
        mean: The predictive mean.
        std: The predictive standard deviation.
        pit: The predictive distribution function at the target (`calibration.mixture_pit`).
        log_likelihood: The predictive log-likelihood of each row, `[row]`.
        sample_weight: The weight of each row.
    """

    y: Array
    mean: Array
    std: Array
    pit: Array
    log_likelihood: Array
    sample_weight: Array | None = None

    def __post_init__(self) -> None:
        n_rows = len(matching_tensors({"mean": self.mean, "std": self.std, "pit": self.pit, "y": self.y})[0])
        row_values("log_likelihood", self.log_likelihood, n_rows=n_rows, infinite=True)


@dataclass(frozen=True)
class ClassOutcomes:
    """What the scores of a classification need of each row.

    Args:
        labels: Class indices, `[row]`.
        probabilities: Predictive probabilities, `[row, class]`.
        sample_weight: The weight of each row.
    """

    labels: Array
    probabilities: Array
    sample_weight: Array | None = None


@dataclass(frozen=True)
class Score:
    """One score of a set of rows.

    Args:
        name: Its name in code and in JSON.
        label: Its name for people.
        meaning: What it says, with its unit or range.
        better: Which direction is better; "nominal" when a stated value is right.
        value: The score of the outcomes, a scalar.
        nominal: The value that is right, if one is.
    """

    name: str
    label: str
    meaning: str
    better: Literal["higher", "lower", "nominal"]
    value: Callable[[Any], Tensor]
    nominal: float | None = None


def _coverage(level: float) -> Score:
    percent = f"{100 * level:.0f}"

    def value(rows: RegressionOutcomes) -> Tensor:
        # The target is inside the central interval exactly when its transform is inside the central levels.
        pit = finite_tensor("pit", rows.pit)
        return weighted_mean(((2 * pit - 1).abs() <= level).to(pit.dtype), rows.sample_weight)

    meaning = f"share of outcomes inside the central {percent} % interval of the predictive distribution"
    return Score(f"coverage_{percent}", f"coverage of {percent} %", meaning, "nominal", value, level)


REGRESSION_SCORES = {
    score.name: score
    for score in (
        Score(
            "log_likelihood",
            "log-likelihood",
            "mean log-density of the outcomes, nats per row",
            "higher",
            lambda rows: weighted_mean(
                finite_tensor("log_likelihood", rows.log_likelihood, infinite=True), rows.sample_weight
            ),
        ),
        Score(
            "rmse",
            "RMSE",
            "root mean squared error of the mean, in units of the target",
            "lower",
            lambda rows: regression.rmse(rows.mean, rows.y, sample_weight=rows.sample_weight),
        ),
        Score(
            "mae",
            "MAE",
            "mean absolute error of the mean, in units of the target",
            "lower",
            lambda rows: regression.mae(rows.mean, rows.y, sample_weight=rows.sample_weight),
        ),
        Score(
            "sharpness",
            "sharpness",
            "root mean predictive variance, in units of the target: the RMSE the model expects",
            "lower",
            lambda rows: regression.sharpness(rows.std, sample_weight=rows.sample_weight),
        ),
        *map(_coverage, COVERAGE_LEVELS),
    )
}
"""The scores of a regression by name, in the order in which they are shown."""

CLASS_SCORES = {
    score.name: score
    for score in (
        Score(
            "log_likelihood",
            "log-likelihood",
            "mean log-probability of the labels, nats per row",
            "higher",
            lambda rows: weighted_mean(
                classification.class_log_likelihood(rows.probabilities, rows.labels), rows.sample_weight
            ),
        ),
        Score(
            "accuracy",
            "accuracy",
            "share of rows whose most probable class is right",
            "higher",
            lambda rows: classification.accuracy(rows.probabilities, rows.labels, sample_weight=rows.sample_weight),
        ),
        Score(
            "brier",
            "Brier score",
            "squared error of the probabilities, 0 to 2",
            "lower",
            lambda rows: weighted_mean(classification.brier_score(rows.probabilities, rows.labels), rows.sample_weight),
        ),
        Score(
            "calibration_error",
            "calibration error",
            "mean gap of confidence and accuracy over 15 bins of equal width",
            "lower",
            lambda rows: classification.expected_calibration_error(
                rows.probabilities, rows.labels, sample_weight=rows.sample_weight
            ),
        ),
    )
}
"""The scores of a classification by name, in the order in which they are shown."""


def regression_scores(rows: RegressionOutcomes) -> dict[str, float]:
    """Every score of a regression, by name."""
    return {name: float(score.value(rows)) for name, score in REGRESSION_SCORES.items()}


def class_scores(rows: ClassOutcomes) -> dict[str, float]:
    """Every score of a classification, by name.

    Examples:
        >>> import torch
        >>> class_scores(ClassOutcomes(torch.tensor([1]), torch.tensor([[0.25, 0.75]])))["brier"]
        0.125
    """
    return {name: float(score.value(rows)) for name, score in CLASS_SCORES.items()}
