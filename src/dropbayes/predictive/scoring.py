"""The table of scores: the name, meaning, direction and computation of each.

`evaluate`, `dropbayes evaluate` and the report read the same table; the first two show the scores marked as `core`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dropbayes import calibration, scores
from dropbayes.predictive.outcomes import INTERVAL_LEVEL, ClassOutcomes, RegressionOutcomes
from dropbayes.runtime.validation import Array, finite_tensor, matching_tensors, row_weights
from dropbayes.scores.averages import standard_error, weighted_mean

COVERAGE_LEVELS = (0.5, 0.8, 0.95)
"""The nominal coverages whose observed counterparts are reported."""


@dataclass(frozen=True)
class Score:
    """One score of a set of rows.

    Args:
        name: Its name in code and in JSON.
        label: Its display name.
        meaning: Its meaning, with its unit or range.
        better: Which direction is better; "nominal" if a stated value is ideal, None if neither is.
        value: The score of the outcomes, a scalar.
        error: Its standard error over independent rows of equal weight; None if unknown.
        nominal: The ideal value, if there is one.
        percent: Whether it is a fraction, shown in percent.
        core: Whether `evaluate` reports it.
    """

    name: str
    label: str
    meaning: str
    better: Literal["higher", "lower", "nominal"] | None
    value: Callable[[Any], Tensor]
    error: Callable[[Any], Tensor] | None = None
    nominal: float | None = None
    percent: bool = False
    core: bool = False

    @property
    def description(self) -> str:
        """The meaning, and which direction is better."""
        if self.nominal is not None:
            nominal = f"{100 * self.nominal:.0f} %" if self.percent else f"{self.nominal:g}"
            return f"{self.meaning}; {nominal} is right"
        direction = {"higher": "; larger is better", "lower": "; smaller is better", None: ""}
        return self.meaning + direction[self.better]


def core_scores(rows: RegressionOutcomes | ClassOutcomes) -> dict[str, float]:
    """The scores of the rows that `evaluate` reports, by name.

    Examples:
        >>> import torch
        >>> core_scores(ClassOutcomes(torch.tensor([1]), torch.tensor([[0.25, 0.75]])))["brier"]
        0.125
    """
    table = CLASS_SCORES if isinstance(rows, ClassOutcomes) else REGRESSION_SCORES
    return {name: float(score.value(rows)) for name, score in table.items() if score.core}


def reliability_curve(rows: RegressionOutcomes | ClassOutcomes) -> calibration.ReliabilityCurve:
    """What was claimed and what was observed: of central intervals, or of the predicted classes."""
    if isinstance(rows, ClassOutcomes):
        return calibration.class_reliability(rows.probabilities, rows.labels, sample_weight=rows.sample_weight)
    return calibration.interval_reliability(rows.pit, sample_weight=rows.sample_weight)


def _mean(name: str, label: str, meaning: str, better: Any, per_row: Callable[[Any], Any], **options: Any) -> Score:
    """A score that is the mean of a per-row value."""

    def value(rows: Any) -> Tensor:
        return weighted_mean(per_row(rows), rows.sample_weight)

    return Score(name, label, meaning, better, value, lambda rows: standard_error(per_row(rows)), **options)


def _by_name(*entries: Score) -> dict[str, Score]:
    return {score.name: score for score in entries}


def risk_curve(rows: RegressionOutcomes | ClassOutcomes) -> scores.RiskCoverage:
    """The risk-coverage curve of the rows, ranked by their uncertainty."""
    return scores.risk_coverage(rows.uncertainty(), rows.loss(), sample_weight=rows.sample_weight)


_RANKING = (
    Score("aurc", "AURC", "area under the risk-coverage curve", "lower", lambda rows: risk_curve(rows).area),
    Score(
        "excess_aurc",
        "Excess AURC",
        "the part of it above the best possible ranking",
        "lower",
        lambda rows: risk_curve(rows).excess_area,
    ),
)


# --- regression ----------------------------------------------------------------------------------------------------


def _rmse_error(rows: RegressionOutcomes) -> Tensor:
    """The standard error of a root of a mean, to first order."""
    squares = rows.absolute_errors().square()
    return standard_error(squares) / (2 * squares.mean().sqrt()).clamp_min(torch.finfo(squares.dtype).tiny)


def _coverage(level: float) -> Score:
    percent = f"{100 * level:.0f}"

    def value(rows: RegressionOutcomes) -> Tensor:
        # The target is inside the central interval exactly when its transform is inside the central levels.
        pit = finite_tensor("pit", rows.pit)
        return weighted_mean(((2 * pit - 1).abs() <= level).to(pit.dtype), rows.sample_weight)

    def error(rows: RegressionOutcomes) -> Tensor:
        return torch.tensor(math.sqrt(level * (1 - level) / len(rows.pit)))

    meaning = f"share of outcomes inside the central {percent} % interval"
    label = f"{percent} % interval holds"
    return Score(f"coverage_{percent}", label, meaning, "nominal", value, error, level, percent=True, core=True)


def _widths(rows: Any) -> Tensor:
    lower, upper, _ = matching_tensors({"lower": rows.lower, "upper": rows.upper, "y": rows.y})
    return upper - lower


REGRESSION_SCORES = _by_name(
    _mean(
        "log_likelihood",
        "Log-likelihood",
        "mean log-density of the outcomes, nats per row",
        "higher",
        lambda rows: finite_tensor("log_likelihood", rows.log_likelihood, infinite=True),
        core=True,
    ),
    Score(
        "rmse",
        "RMSE",
        "root mean squared error of the mean, in units of the target",
        "lower",
        lambda rows: scores.rmse(rows.mean, rows.y, sample_weight=rows.sample_weight),
        _rmse_error,
        core=True,
    ),
    _mean(
        "mae",
        "MAE",
        "mean absolute error of the mean, in units of the target",
        "lower",
        RegressionOutcomes.absolute_errors,
        core=True,
    ),
    Score(
        "sharpness",
        "Sharpness",
        "root mean predictive variance: the RMSE the model expects of itself",
        "lower",
        lambda rows: scores.sharpness(rows.std, sample_weight=rows.sample_weight),
        core=True,
    ),
    *map(_coverage, COVERAGE_LEVELS),
    _mean(
        "interval_width",
        "95 % interval width",
        "mean width, in units of the target; narrower is better if the coverage is right",
        None,
        _widths,
    ),
    _mean(
        "interval_score",
        "95 % interval score",
        "width plus a penalty for misses",
        "lower",
        lambda rows: scores.interval_score(rows.lower, rows.upper, rows.y, level=INTERVAL_LEVEL),
    ),
    _mean(
        "crps",
        "CRPS",
        "continuous ranked probability score, in units of the target",
        "lower",
        lambda rows: finite_tensor("crps", rows.crps),
    ),
    Score(
        "calibration_gap",
        "Calibration gap",
        "mean gap between claimed and observed coverage over all levels",
        "lower",
        lambda rows: calibration.interval_reliability(rows.pit, sample_weight=rows.sample_weight).mean_gap,
        percent=True,
    ),
    Score(
        "mean_pit",
        "Mean PIT",
        "mean rank of the outcome in its prediction; above 0.5 predictions run low",
        "nominal",
        lambda rows: weighted_mean(finite_tensor("pit", rows.pit), rows.sample_weight),
        lambda rows: torch.tensor(1 / math.sqrt(12 * len(rows.pit))),  # of uniform transforms
        0.5,
    ),
    Score(
        "std_factor",
        "Best factor on std",
        "factor on the standard deviation with the largest likelihood; above 1 the model was over-confident",
        "nominal",
        lambda rows: calibration.std_scale(rows.mean, rows.std, rows.y, sample_weight=rows.sample_weight),
        nominal=1.0,
    ),
    *_RANKING,
)
"""The scores of a regression by name, in the order in which they are shown."""


# --- classification ------------------------------------------------------------------------------------------------


def balanced_accuracy(predicted: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    """The mean recall over the classes that occur."""
    truth = torch.as_tensor(labels)
    weight = row_weights(sample_weight, len(truth), like=truth)
    _, group = truth[weight > 0].unique(return_inverse=True)
    weight, hit = weight[weight > 0], (torch.as_tensor(predicted) == truth)[weight > 0]
    return (torch.bincount(group, weight * hit) / torch.bincount(group, weight)).mean()


def _temperature(rows: ClassOutcomes) -> Tensor:
    logits = torch.as_tensor(rows.probabilities).clamp_min(1e-30).log()
    return calibration.temperature(logits[None], rows.labels, sample_weight=rows.sample_weight)


def _detection(rows: ClassOutcomes) -> Tensor:
    wrong = rows.loss()
    counted = wrong[row_weights(rows.sample_weight, len(wrong), like=wrong) > 0]
    if not 0 < counted.sum() < len(counted):
        return torch.tensor(math.nan)  # nothing to detect, or nothing but errors
    return scores.auroc(rows.uncertainty(), wrong, sample_weight=rows.sample_weight)


def class_auroc(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    """The mean over the classes of the area under the ROC curve of each against the others; NaN with only one class.

    Classes that do not occur are left out.

    Examples:
        >>> class_auroc([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]], [0, 0, 1, 1])
        tensor(0.7500)
    """
    p, truth = torch.as_tensor(probabilities), torch.as_tensor(labels)
    present = truth[row_weights(sample_weight, len(truth), like=truth) > 0].unique().tolist()
    if len(present) < 2:
        return torch.tensor(math.nan)
    return torch.stack([scores.auroc(p[:, k], truth == k, sample_weight=sample_weight) for k in present]).mean()


def _of_probabilities(score: Callable[..., Tensor]) -> Callable[[ClassOutcomes], Tensor]:
    return lambda rows: score(rows.probabilities, rows.labels, sample_weight=rows.sample_weight)


CLASS_SCORES = _by_name(
    _mean(
        "log_likelihood",
        "Log-likelihood",
        "mean log-probability of the labels, nats per row",
        "higher",
        lambda rows: scores.class_log_likelihood(rows.probabilities, rows.labels),
        core=True,
    ),
    _mean(
        "accuracy",
        "Accuracy",
        "share of rows whose most probable class is right",
        "higher",
        ClassOutcomes.correct,
        percent=True,
        core=True,
    ),
    Score(
        "balanced_accuracy",
        "Balanced accuracy",
        "mean over the classes of the share of their rows that are recognised",
        "higher",
        lambda rows: balanced_accuracy(
            torch.as_tensor(rows.probabilities).argmax(1), rows.labels, sample_weight=rows.sample_weight
        ),
        percent=True,
    ),
    Score(
        "class_auroc",
        "AUROC of classes",
        "chance that a row of a class is given more of it than other rows are, mean over the classes; 0.5 is a guess",
        "higher",
        _of_probabilities(class_auroc),
    ),
    _mean(
        "mean_confidence",
        "Mean confidence",
        "mean probability of the predicted class; a calibrated model's accuracy",
        None,
        lambda rows: scores.confidence_and_correctness(rows.probabilities, rows.labels)[0],
        percent=True,
    ),
    _mean(
        "brier",
        "Brier score",
        "squared error of the probabilities, 0 to 2",
        "lower",
        lambda rows: scores.brier_score(rows.probabilities, rows.labels),
        core=True,
    ),
    Score(
        "calibration_error",
        "ECE",
        "expected calibration error: mean gap of confidence and accuracy over 15 bins of equal width",
        "lower",
        _of_probabilities(scores.expected_calibration_error),
        percent=True,
        core=True,
    ),
    Score(
        "adaptive_calibration_error",
        "Adaptive ECE",
        "the same over 15 bins of equally many rows",
        "lower",
        _of_probabilities(scores.adaptive_calibration_error),
        percent=True,
    ),
    Score(
        "temperature",
        "Best temperature",
        "temperature of the logits with the largest likelihood; above 1 the model was over-confident",
        "nominal",
        _temperature,
        nominal=1.0,
    ),
    _mean("entropy", "Entropy", "mean total uncertainty, in nats", None, ClassOutcomes.uncertainty),
    _mean(
        "mutual_information",
        "Mutual information",
        "its epistemic part, in nats",
        None,
        lambda rows: finite_tensor("mutual_information", rows.mutual_information),
    ),
    Score(
        "error_auroc",
        "AUROC of errors",
        "chance that a wrong row is more uncertain than a right one; 0.5 is no better than chance",
        "higher",
        _detection,
    ),
    *_RANKING,
)
"""The scores of a classification by name, in the order in which they are shown."""
