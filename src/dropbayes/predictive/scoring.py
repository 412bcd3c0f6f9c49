"""Predictions beside what happened, and the table of scores: the meaning, direction and computation of each.

`evaluate`, `dropbayes evaluate` and the report read the same table; the first two show the scores marked as `core`.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dropbayes import calibration, scores
from dropbayes.predictive.mixtures import Mixture
from dropbayes.runtime.validation import Array, finite_tensor, matching_tensors, row_values, row_weights
from dropbayes.scores import information
from dropbayes.scores.averages import standard_error, weighted_mean

COVERAGE_LEVELS = (0.5, 0.8, 0.95)
"""The nominal coverages whose observed counterparts are reported; the last is that of the interval whose width is."""


@dataclass(frozen=True)
class RegressionOutcomes:
    """The per-row data of the regression scores."""

    y: Array  #: The observed targets, `[row, ...]`.
    mean: Array  #: The predictive mean.
    std: Array  #: The predictive standard deviation.
    pit: Array  #: The predictive distribution function at the target (`Mixture.pit`).
    log_likelihood: Array  #: The predictive log-likelihood of each row, `[row]`.
    sample_weight: Array | None = None  #: The weight of each row.
    crps: Array | None = None  #: The continuous ranked probability score of each row, or of a selection of rows.
    lower: Array | None = None  #: The lower end of the central interval with the last of `COVERAGE_LEVELS`.
    upper: Array | None = None  #: Its upper end.

    @staticmethod
    def columns(mixture: Mixture, y: Tensor, *, ranked: Tensor | slice) -> dict[str, Tensor]:
        """The columns of a mixture's rows beside their outcomes; the CRPS, which takes longest, of those `ranked`."""
        lower, upper = mixture.interval(COVERAGE_LEVELS[-1])
        moments = {"y": y, "mean": mixture.mean, "std": mixture.std, "lower": lower, "upper": upper}
        judged = {"log_likelihood": mixture.log_density(y), "pit": mixture.pit(y)}
        return moments | judged | {"crps": mixture.rows(ranked).crps(y[ranked])}

    def __post_init__(self) -> None:
        n_rows = len(matching_tensors({"mean": self.mean, "std": self.std, "pit": self.pit, "y": self.y})[0])
        row_values("log_likelihood", self.log_likelihood, n_rows=n_rows, infinite=True)

    def absolute_errors(self) -> Tensor:
        outcome, mean = matching_tensors({"y": self.y, "mean": self.mean})
        return (outcome - mean).abs()

    def loss(self) -> Tensor:
        """The absolute error of each row, averaged over its outputs."""
        return self.absolute_errors().reshape(len(self.y), -1).mean(1)

    def uncertainty(self) -> Tensor:
        """The predictive variance of each row, summed over its outputs."""
        return finite_tensor("std", self.std).square().reshape(len(self.std), -1).sum(1)


@dataclass(frozen=True)
class ClassOutcomes:
    """The per-row data of the classification scores."""

    labels: Array  #: Class indices, `[row]`.
    probabilities: Array  #: Predictive probabilities, `[row, class]`.
    sample_weight: Array | None = None  #: The weight of each row.
    mutual_information: Array | None = None  #: The mutual information of label and weights, in nats.
    sets: Array | None = None  #: Whether a class is in the set of the last of `COVERAGE_LEVELS`, `[row, class]`.

    def uncertainty(self) -> Tensor:
        """The entropy of each row, in nats."""
        return information.entropy(self.probabilities)

    def correct(self) -> Tensor:
        return scores.confidence_and_correctness(self.probabilities, self.labels)[1]

    def loss(self) -> Tensor:
        """1 for each row whose most probable class is wrong."""
        return 1 - self.correct()

    def members(self) -> Tensor:
        """1 for each class in the set of its row, `[row, class]`; NaN without sets."""
        sets = torch.as_tensor(self.probabilities) * math.nan if self.sets is None else torch.as_tensor(self.sets)
        return sets.double()


RowOutcomes = RegressionOutcomes | ClassOutcomes
Better = Literal["higher", "lower"] | None
Value = Callable[[Any], Tensor]  # of outcomes


@dataclass(frozen=True)
class Score:
    """One score of a set of rows."""

    label: str  #: Its display name.
    meaning: str  #: Its meaning, with its unit or range.
    better: Better  #: Which direction is better; None if neither is.
    value: Value  #: The score of the outcomes, a scalar.
    error: Value | None = None  #: Its standard error over independent rows of equal weight; None if unknown.
    nominal: float | None = None  #: The ideal value, if there is one; the error is then that of a calibrated model.
    percent: bool = False  #: Whether it is a fraction, shown in percent.
    core: bool = False  #: Whether `evaluate` reports it.

    @property
    def description(self) -> str:
        """The meaning, and which direction is better."""
        if self.nominal is not None:
            nominal = f"{100 * self.nominal:.0f} %" if self.percent else f"{self.nominal:g}"
            return f"{self.meaning}; {nominal} is right"
        direction = {"higher": "; larger is better", "lower": "; smaller is better", None: ""}
        return self.meaning + direction[self.better]


class ScoreValue(NamedTuple):
    """A score of some rows, which are taken as independent for the standard error."""

    score: Score
    value: float
    error: float | None  # None where it is unknown
    meaning: str


def score_values(rows: RowOutcomes, also: Collection[str] | None = ()) -> dict[str, ScoreValue]:
    """The scores of the rows that `evaluate` reports, by name, and those named in `also`; all if that is None."""
    values, several = {}, len(rows.uncertainty()) > 1
    for name, score in (CLASS_SCORES if isinstance(rows, ClassOutcomes) else REGRESSION_SCORES).items():
        if score.core or also is None or name in also:
            error = float(score.error(rows)) if score.error is not None and several else None
            values[name] = ScoreValue(score, float(score.value(rows)), error, score.description)
    return values


def core_scores(rows: RowOutcomes) -> dict[str, float]:
    """The scores of the rows that `evaluate` reports, by name."""
    return {name: one.value for name, one in score_values(rows).items()}


def reliability_curve(rows: RowOutcomes) -> calibration.ReliabilityCurve:
    """What was claimed and what was observed: of central intervals, or of the predicted classes."""
    if isinstance(rows, ClassOutcomes):
        return calibration.class_reliability(rows.probabilities, rows.labels, sample_weight=rows.sample_weight)
    return calibration.interval_reliability(rows.pit, sample_weight=rows.sample_weight)


class _Named:
    """The words and the options of a score, to which its computation is added."""

    def __init__(self, label: str, meaning: str, better: Better, **options: Any) -> None:
        self.words, self.options = (label, meaning, better), options

    def by(self, value: Value, error: Value | None = None) -> Score:
        """The score with this value of the outcomes."""
        return Score(*self.words, value, error, **self.options)

    def mean(self, per_row: Value, error: Value | None = None) -> Score:
        """The score that is the mean of a value of each row, with its own standard error or another."""
        own = error or (lambda rows: standard_error(per_row(rows)))
        return self.by(lambda rows: weighted_mean(per_row(rows), rows.sample_weight), own)


def risk_curve(rows: RowOutcomes) -> scores.RiskCoverage:
    """The risk-coverage curve of the rows, ranked by their uncertainty."""
    return scores.risk_coverage(rows.uncertainty(), rows.loss(), sample_weight=rows.sample_weight)


_RANKING = {
    "aurc": _Named("AURC", "area under the risk-coverage curve", "lower").by(lambda rows: risk_curve(rows).area),
    "excess_aurc": _Named("Excess AURC", "the part of it above the best possible ranking", "lower").by(
        lambda rows: risk_curve(rows).excess_area
    ),
}


def _rmse_error(rows: RegressionOutcomes) -> Tensor:
    """The standard error of a root of a mean, to first order."""
    squares = rows.absolute_errors().square()
    return standard_error(squares) / (2 * squares.mean().sqrt()).clamp_min(torch.finfo(squares.dtype).tiny)


def _coverage_error(level: float) -> Value:
    return lambda rows: torch.tensor(math.sqrt(level * (1 - level) / len(rows.uncertainty())), device="cpu")


def _coverage(level: float) -> Score:
    interval = f"{100 * level:.0f} % interval"
    meaning = f"share of outcomes inside the central {interval}"
    # The target is inside the central interval exactly when its transform is inside the central levels.
    return _Named(f"{interval} holds", meaning, None, nominal=level, percent=True, core=True).mean(
        lambda rows: ((2 * finite_tensor("pit", rows.pit) - 1).abs() <= level).double(), _coverage_error(level)
    )


def _widths(rows: Any) -> Tensor:
    lower, upper, _ = matching_tensors({"lower": rows.lower, "upper": rows.upper, "y": rows.y})
    return upper - lower


REGRESSION_SCORES = {
    "log_likelihood": _Named(
        "Log-likelihood", "mean log-density of the outcomes, nats per row", "higher", core=True
    ).mean(lambda rows: finite_tensor("log_likelihood", rows.log_likelihood, infinite=True)),
    "rmse": _Named("RMSE", "root mean squared error of the mean, in units of the target", "lower", core=True).by(
        lambda rows: scores.rmse(rows.mean, rows.y, sample_weight=rows.sample_weight), _rmse_error
    ),
    "mae": _Named("MAE", "mean absolute error of the mean, in units of the target", "lower", core=True).mean(
        RegressionOutcomes.absolute_errors
    ),
    "sharpness": _Named(
        "Sharpness", "root mean predictive variance: the RMSE the model expects of itself", "lower", core=True
    ).by(lambda rows: scores.sharpness(rows.std, sample_weight=rows.sample_weight)),
    **{f"coverage_{100 * level:.0f}": _coverage(level) for level in COVERAGE_LEVELS},
    "interval_width": _Named(
        "95 % interval width", "mean width, in units of the target; narrower is better if the coverage is right", None
    ).mean(_widths),
    "interval_score": _Named("95 % interval score", "width plus a penalty for misses", "lower").mean(
        lambda rows: scores.interval_score(rows.lower, rows.upper, rows.y, level=COVERAGE_LEVELS[-1])
    ),
    "crps": _Named("CRPS", "continuous ranked probability score, in units of the target", "lower").mean(
        lambda rows: finite_tensor("crps", rows.crps)
    ),
    "calibration_gap": _Named(
        "Calibration gap", "mean gap between claimed and observed coverage over all levels", "lower", percent=True
    ).by(lambda rows: calibration.interval_reliability(rows.pit, sample_weight=rows.sample_weight).mean_gap),
    "mean_pit": _Named(
        "Mean PIT", "mean rank of the outcome in its prediction; above 0.5 predictions run low", None, nominal=0.5
    ).mean(
        lambda rows: finite_tensor("pit", rows.pit),
        lambda rows: torch.tensor(1 / math.sqrt(12 * len(rows.pit)), device="cpu"),  # of uniform transforms
    ),
    "std_factor": _Named(
        "Best factor on std",
        "factor on the standard deviation with the largest likelihood; above 1 the model was over-confident",
        None,
        nominal=1.0,
    ).by(lambda rows: calibration.std_scale(rows.mean, rows.std, rows.y, sample_weight=rows.sample_weight)),
    **_RANKING,
}
"""The scores of a regression by name, in the order in which they are shown."""


def balanced_accuracy(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    """The mean recall over the classes that occur."""
    truth = torch.as_tensor(labels)
    weight = row_weights(sample_weight, len(truth), like=truth)
    recognised = torch.bincount(truth, weight * (torch.as_tensor(probabilities).argmax(1) == truth))
    total = torch.bincount(truth, weight)
    return (recognised / total)[total > 0].mean()


def _temperature(rows: ClassOutcomes) -> Tensor:
    logits = torch.as_tensor(rows.probabilities).clamp_min(1e-30).log()
    return calibration.temperature(logits[None], rows.labels, sample_weight=rows.sample_weight)


def _auroc(uncertainty: Tensor, event: Tensor, sample_weight: Array | None) -> Tensor:
    counted = event[row_weights(sample_weight, len(event), like=event) > 0]
    if not 0 < counted.sum() < len(counted):
        return uncertainty.new_tensor(math.nan)  # nothing to detect, or nothing else
    return scores.auroc(uncertainty, event, sample_weight=sample_weight)


def class_auroc(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    """The mean over the classes that occur of the area under the ROC curve of each against the others; NaN of one."""
    p, truth = torch.as_tensor(probabilities), torch.as_tensor(labels)
    return torch.stack([_auroc(p[:, k], truth == k, sample_weight) for k in range(p.shape[1])]).nanmean()


def _of_probabilities(score: Callable[..., Tensor]) -> Value:
    return lambda rows: score(rows.probabilities, rows.labels, sample_weight=rows.sample_weight)


CLASS_SCORES = {
    "log_likelihood": _Named(
        "Log-likelihood", "mean log-probability of the labels, nats per row", "higher", core=True
    ).mean(lambda rows: scores.class_log_likelihood(rows.probabilities, rows.labels)),
    "accuracy": _Named(
        "Accuracy", "share of rows whose most probable class is right", "higher", percent=True, core=True
    ).mean(ClassOutcomes.correct),
    "balanced_accuracy": _Named(
        "Balanced accuracy",
        "mean over the classes of the share of their rows that are recognised",
        "higher",
        percent=True,
    ).by(_of_probabilities(balanced_accuracy)),
    "class_auroc": _Named(
        "AUROC of classes",
        "chance that a row of a class is given more of it than other rows are, mean over the classes; 0.5 is a guess",
        "higher",
    ).by(_of_probabilities(class_auroc)),
    "mean_confidence": _Named(
        "Mean confidence", "mean probability of the predicted class; a calibrated model's accuracy", None, percent=True
    ).mean(lambda rows: scores.confidence_and_correctness(rows.probabilities, rows.labels)[0]),
    "brier": _Named("Brier score", "squared error of the probabilities, 0 to 2", "lower", core=True).mean(
        lambda rows: scores.brier_score(rows.probabilities, rows.labels)
    ),
    "calibration_error": _Named(
        "ECE",
        "expected calibration error: mean gap of confidence and accuracy over 15 bins of equal width",
        "lower",
        percent=True,
        core=True,
    ).by(_of_probabilities(scores.expected_calibration_error)),
    "adaptive_calibration_error": _Named(
        "Adaptive ECE", "the same over 15 bins of equally many rows", "lower", percent=True
    ).by(_of_probabilities(scores.adaptive_calibration_error)),
    "set_coverage": _Named(
        "95 % sets hold", "share of labels in their conformal set", None, nominal=COVERAGE_LEVELS[-1], percent=True
    ).mean(
        lambda rows: rows.members().gather(1, torch.as_tensor(rows.labels)[:, None])[:, 0],
        _coverage_error(COVERAGE_LEVELS[-1]),
    ),
    "set_size": _Named(
        "95 % set size", "mean number of labels in a set; smaller is better if the coverage is right", None
    ).mean(lambda rows: rows.members().sum(1)),
    "temperature": _Named(
        "Best temperature",
        "temperature of the logits with the largest likelihood; above 1 the model was over-confident",
        None,
        nominal=1.0,
    ).by(_temperature),
    "entropy": _Named("Entropy", "mean total uncertainty, in nats", None).mean(ClassOutcomes.uncertainty),
    "mutual_information": _Named("Mutual information", "its epistemic part, in nats", None).mean(
        lambda rows: row_values("mutual_information", rows.mutual_information, n_rows=len(rows.labels))
    ),
    "error_auroc": _Named(
        "AUROC of errors",
        "chance that a wrong row is more uncertain than a right one; 0.5 is no better than chance",
        "higher",
    ).by(lambda rows: _auroc(rows.uncertainty(), rows.loss(), rows.sample_weight)),
    **_RANKING,
}
"""The scores of a classification by name, in the order in which they are shown."""
