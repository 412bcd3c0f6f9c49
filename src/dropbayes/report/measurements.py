r"""What a model's predictions are worth on rows whose truth is known: every number the report shows.

Nothing here is computed by a formula of its own: scores come from `dropbayes.scores`, calibration from
`dropbayes.calibration`, uncertainties of classes from `dropbayes.information`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dropbayes import calibration, information, scores
from dropbayes.calibration import ReliabilityCurve
from dropbayes.predictive.mixtures import Mixture
from dropbayes.scores import RiskCoverage

Numbers = npt.NDArray[np.float64]

LEVEL = 0.95
"""The coverage claimed by the intervals shown."""

CRPS_ROWS = 2000
"""The rows whose CRPS is computed (its cost grows with the square of the draws): beyond them, an even selection."""

ENOUGH_ROWS = 30
"""Below this many rows the report does not judge calibration."""


MEANINGS = {
    "RMSE": "root mean squared error of the predicted mean; smaller is better",
    "MAE": "mean absolute error; smaller is better",
    "CRPS": "continuous ranked probability score, in the target's units; smaller is better",
    "50 % interval holds": "share of truths inside; 50 % is calibrated",
    "80 % interval holds": "share of truths inside; 80 % is calibrated",
    "95 % interval holds": "share of truths inside; 95 % is calibrated",
    "95 % interval width": "mean width; narrower is better if the coverage is right",
    "95 % interval score": "width plus a penalty for misses; smaller is better",
    "Sharpness": "root mean predictive variance: the RMSE the model expects of itself",
    "Calibration gap": "mean gap between claimed and observed coverage over all levels; 0 is best",
    "Mean PIT": "mean rank of the truth in its prediction; 0.5 is unbiased, more means predictions run low",
    "Best factor on std": "1 is right; above 1 the model was over-confident",
    "Accuracy": "share of rows whose most probable class is the truth",
    "Balanced accuracy": "mean over the classes of the share of their rows that are recognised",
    "Mean confidence": "mean probability of the predicted class; a calibrated model's accuracy",
    "Brier score": "squared error of the probabilities, 0 to 2; smaller is better",
    "ECE": "expected calibration error, 15 bins of equal width; smaller is better",
    "Adaptive ECE": "the same over 15 bins of equally many rows",
    "Best temperature": "1 is right; above 1 the model was over-confident",
    "Entropy": "mean total uncertainty, in nats",
    "Mutual information": "its epistemic part, in nats",
    "AUROC of errors": "chance that a wrong row is more uncertain than a right one; 0.5 is no better than chance",
    "AURC": "area under the risk-coverage curve; smaller is better",
    "Excess AURC": "the part of it above the best possible ranking; 0 is perfect",
    "Log-likelihood": "mean log-density (or log-probability) of the truth; larger is better",
}
"""What each score says, and which direction is better."""


@dataclass(frozen=True)
class Score:
    """One line of the table of scores.

    Args:
        name: What it is called.
        value: The number.
        error: Its standard error over the rows, taken as independent; None where none is known.
        percent: Whether it is a share, shown in percent.
        remark: What to add to its meaning.
    """

    name: str
    value: float
    error: float | None = None
    percent: bool = False
    remark: str = ""

    @property
    def meaning(self) -> str:
        """What it says."""
        return MEANINGS[self.name] + self.remark


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression's predictions, row by row, and their scores, in the units of y."""

    y: Numbers
    mean: Numbers
    std: Numbers
    epistemic_std: Numbers
    aleatoric_std: Numbers
    lower: Numbers
    upper: Numbers
    pit: Numbers
    reliability: ReliabilityCurve
    risk: RiskCoverage
    scores: dict[str, Score]
    n_draws: int

    @property
    def uncertainty(self) -> Numbers:
        """What rows are ranked by."""
        return self.std


@dataclass(frozen=True, eq=False)
class Classification:
    """A classifier's predictions, row by row, and their scores; uncertainties are in nats."""

    labels: npt.NDArray[np.int64]
    probabilities: Numbers
    entropy: Numbers
    epistemic: Numbers
    aleatoric: Numbers
    reliability: ReliabilityCurve
    risk: RiskCoverage
    scores: dict[str, Score]
    n_draws: int

    @property
    def uncertainty(self) -> Numbers:
        """What rows are ranked by."""
        return self.entropy

    @property
    def predicted(self) -> npt.NDArray[np.int64]:
        """The most probable class of each row."""
        return self.probabilities.argmax(1)

    @property
    def confidence(self) -> Numbers:
        """Its probability."""
        return self.probabilities.max(1)


def with_draws(model: Any, *, n_draws: int | None, seed: int | None) -> Any:
    """A view of the model that predicts from another number of draws or from those of another seed."""
    view = model.with_draws(n_draws=n_draws, seed=seed)
    vars(view).pop("feature_names_in_", None)  # rows come as plain arrays: no warning that they bear no names
    return view


def mean_and_error(values: Any) -> tuple[float, float]:
    """The mean over rows and its standard error.

    Examples:
        >>> mean_and_error(np.array([1.0, 3.0]))
        (2.0, 1.0)
    """
    rows = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # the log-likelihood of an outcome held impossible
        return float(rows.mean()), float(rows.std(ddof=1) / math.sqrt(len(rows)))


def mean_and_deviations(model: Any, x: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The predictive mean of rows, and its epistemic and aleatoric standard deviations, for one output."""
    parts = [(m.mean, m.epistemic.sqrt(), m.aleatoric.sqrt()) for _, m in _mixtures(model, x)]
    mean, epistemic, aleatoric = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
    return mean, epistemic, aleatoric


def entropies(model: Any, x: Numbers) -> Numbers:
    """The predictive entropy of rows, for a classifier."""
    return torch.cat([information.predictive_entropy(p) for p in _class_draws(model, x)]).numpy()


def _mixtures(model: Any, x: Numbers) -> Iterator[tuple[slice, Mixture]]:
    """The predictive distributions that `predict` itself reads, block by block."""
    for rows, mixture in model.predictive_blocks(x):
        _refuse_infinite(mixture.location, rows)
        yield rows, mixture


def _class_draws(model: Any, x: Numbers) -> Iterator[Tensor]:
    """The class probabilities that `predict_proba` itself averages, block by block."""
    for rows, probabilities in model.draw_blocks(x):
        _refuse_infinite(probabilities.sum(-1), rows)
        yield probabilities


def _refuse_infinite(draws: Tensor, rows: slice) -> None:
    infinite = (~draws.isfinite()).any(0)
    if infinite.any():
        row = rows.start + int(infinite.int().argmax())
        raise ValueError(f"`x` must lie where the model predicts finite numbers; row {row} does not.")


# ------------------------------------------------------------------------------------------------ regression


def regression(model: Any, x: Numbers, y: Numbers) -> Regression:
    """The measurements of a regression; `x` and `y` are checked by the caller."""
    truth = torch.from_numpy(y)
    chosen = np.zeros(len(x), dtype=bool)
    chosen[np.linspace(0, len(x) - 1, min(len(x), CRPS_ROWS)).round().astype(int)] = True
    pit, density, ranked = list[Tensor](), list[Tensor](), list[Tensor]()
    n_draws = 0
    for rows, mixture in _mixtures(model, x):
        outcome, some = truth[rows], torch.from_numpy(chosen[rows])
        n_draws = mixture.n_draws
        pit.append(mixture.pit(outcome))
        density.append(mixture.log_density(outcome))
        few = Mixture(mixture.location[:, some], mixture.scale[:, some], mixture.freedom)
        ranked.append(few.crps(outcome[some]))
    mean_, epistemic, aleatoric = mean_and_deviations(model, x)
    std = np.sqrt(epistemic**2 + aleatoric**2)
    lower, upper = (np.asarray(end, dtype=np.float64) for end in model.predict_interval(x, coverage=LEVEL))
    transform = torch.cat(pit)
    reliability = calibration.interval_reliability(transform)
    risk = scores.risk_coverage(std, np.abs(y - mean_))
    chosen_few = f" (of {CRPS_ROWS:,} evenly chosen rows)" if len(x) > CRPS_ROWS else ""
    lines = [
        *_errors(mean_, y),
        Score("Log-likelihood", *mean_and_error(torch.cat(density))),
        Score("CRPS", *mean_and_error(torch.cat(ranked)), remark=chosen_few),
        *_coverages(reliability),
        Score("95 % interval width", *mean_and_error(upper - lower)),
        Score("95 % interval score", *mean_and_error(scores.interval_score(lower, upper, y, level=LEVEL))),
        Score("Sharpness", float(scores.sharpness(std))),
        Score("Calibration gap", float(reliability.mean_gap), percent=True),
        Score("Mean PIT", float(transform.mean()), 1 / math.sqrt(12 * len(y))),  # of uniform transforms
        Score("Best factor on std", float(calibration.std_scale(mean_, std, y))),
        Score("AURC", float(risk.area)),
        Score("Excess AURC", float(risk.excess_area)),
    ]
    return Regression(
        y, mean_, std, epistemic, aleatoric, lower, upper, transform.numpy(), reliability, risk, _named(lines), n_draws
    )


def _errors(mean: Numbers, y: Numbers) -> list[Score]:
    rmse = float(scores.rmse(mean, y))
    square_error = mean_and_error((mean - y) ** 2)[1]
    error = square_error / (2 * rmse) if rmse else 0.0  # of a root, to first order
    return [Score("RMSE", rmse, error), Score("MAE", float(scores.mae(mean, y)), mean_and_error(np.abs(mean - y))[1])]


def _coverages(curve: ReliabilityCurve) -> list[Score]:
    held = [(p, float(curve.observed[p - 1]), float(curve.standard_error[p - 1])) for p in (50, 80, 95)]
    return [Score(f"{p} % interval holds", share, error, percent=True) for p, share, error in held]


# -------------------------------------------------------------------------------------------- classification


def classification(model: Any, x: Numbers, labels: npt.NDArray[np.int64]) -> Classification:
    """The measurements of a classifier; `labels` are class numbers."""
    parts, n_draws = list[tuple[Tensor, ...]](), 0
    for p in _class_draws(model, x):
        n_draws = len(p)
        mutual, expected = information.mutual_information(p), information.expected_entropy(p)
        parts.append((p.mean(0), information.predictive_entropy(p), mutual, expected))
    probabilities, entropy, epistemic, aleatoric = (torch.cat(part) for part in zip(*parts, strict=True))
    truth = torch.from_numpy(labels)
    confidence, correct = scores.confidence_and_correctness(probabilities, truth)
    reliability = calibration.class_reliability(probabilities, truth)
    risk = scores.risk_coverage(entropy, 1 - correct)
    ece, adaptive = (
        float(measure(probabilities, truth))
        for measure in (scores.expected_calibration_error, scores.adaptive_calibration_error)
    )
    lines = [
        Score("Accuracy", float(scores.accuracy(probabilities, truth)), mean_and_error(correct)[1], percent=True),
        Score("Balanced accuracy", balanced_accuracy(probabilities.argmax(1).numpy(), labels), percent=True),
        Score("Mean confidence", *mean_and_error(confidence), percent=True),
        Score("Log-likelihood", *mean_and_error(scores.class_log_likelihood(probabilities, truth))),
        Score("Brier score", *mean_and_error(scores.brier_score(probabilities, truth))),
        Score("ECE", ece, percent=True, remark=f", and chance alone makes it {100 * chance_error(confidence):.1f} %"),
        Score("Adaptive ECE", adaptive, percent=True),
        Score("Best temperature", _temperature(probabilities, truth)),
        Score("Entropy", *mean_and_error(entropy)),
        Score("Mutual information", *mean_and_error(epistemic)),
        *_detection(entropy, 1 - correct),
        Score("AURC", float(risk.area)),
        Score("Excess AURC", float(risk.excess_area)),
    ]
    return Classification(
        labels, probabilities.numpy(), entropy.numpy(), epistemic.numpy(), aleatoric.numpy(), reliability, risk,
        _named(lines), n_draws,
    )  # fmt: skip


@dataclass(frozen=True)
class ClassScores:
    """How one class fares: its rows, and the share of them recognised and of those named so that are right."""

    support: int
    predicted: int
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def per_class(predicted: Any, labels: Any, n_classes: int) -> list[ClassScores]:
    """The scores of each class; NaN where a share is one of no rows.

    Examples:
        >>> first, second = per_class(np.array([0, 0, 1]), np.array([0, 1, 1]), 2)
        >>> first.precision, first.recall, second.precision, second.recall
        (0.5, 1.0, 1.0, 0.5)
    """
    found = []
    for label in range(n_classes):
        own, named = labels == label, predicted == label
        right = float((own & named).sum())
        precision = right / named.sum() if named.any() else math.nan
        recall = right / own.sum() if own.any() else math.nan
        found.append(ClassScores(int(own.sum()), int(named.sum()), float(precision), float(recall)))
    return found


def balanced_accuracy(predicted: Any, labels: Any) -> float:
    """The mean over the classes that occur of the share of their rows that are recognised."""
    classes = np.unique(labels)
    return float(np.mean([(predicted[labels == label] == label).mean() for label in classes]))


def never_predicted(found: Classification) -> list[int]:
    """The classes that occur in some rows and are predicted in none."""
    return sorted(set(found.labels.tolist()) - set(found.predicted.tolist()))


def chance_error(confidence: Tensor, *, n_bins: int = 15) -> float:
    r"""The expected calibration error that a calibrated model would show by chance.

    A bin of $N_b$ rows adds $\tfrac{N_b}{N} \mathbb E|\text{acc}_b - \text{conf}_b| \approx \tfrac1N \sqrt{\tfrac2\pi
    \sum_{n \in b} c_n (1 - c_n)}$.

    Examples:
        >>> round(chance_error(torch.full((400,), 0.5), n_bins=1), 4)  # sqrt(2 / pi) * 0.5 / 20
        0.0199
    """
    bins = (confidence * n_bins).long().clamp_max(n_bins - 1)
    variance = torch.zeros(n_bins, dtype=confidence.dtype).index_add(0, bins, confidence * (1 - confidence))
    return float((variance * 2 / math.pi).sqrt().sum() / len(confidence))


def _temperature(probabilities: Tensor, truth: Tensor) -> float:
    logits = probabilities.clamp_min(1e-30).log()
    return float(calibration.temperature(logits[None], truth))


def _detection(entropy: Tensor, wrong: Tensor) -> list[Score]:
    if not 0 < wrong.sum() < len(wrong):
        return []  # nothing to detect, or nothing but errors
    return [Score("AUROC of errors", float(scores.auroc(entropy, wrong)))]


# ------------------------------------------------------------------------------------------------------ both


def _named(lines: list[Score]) -> dict[str, Score]:
    return {score.name: score for score in lines}


def risk_after_deferring(risk: RiskCoverage, share: float) -> tuple[int, float]:
    """The number of rows deferred, the most uncertain first, and the mean loss of those that stay.

    Examples:
        >>> curve = scores.risk_coverage(torch.arange(10.0), torch.eye(10)[9])  # the most uncertain row is wrong
        >>> risk_after_deferring(curve, 0.0), risk_after_deferring(curve, 0.1)
        ((0, 0.1...), (1, 0.0))
    """
    n = len(risk.risk)
    deferred = min(n - 1, math.floor(share * n + 1e-9))
    return deferred, float(risk.risk[n - 1 - deferred])
