r"""The measurements of a model's predictions on rows with known outcomes: every number the report shows.

Nothing here is computed by a formula of its own: scores come from `dropbayes.scores`, calibration from
`dropbayes.calibration`, uncertainties of classes from `dropbayes.information`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dropbayes import calibration, information, scores
from dropbayes.calibration import ReliabilityCurve
from dropbayes.predictive.mixtures import Mixture
from dropbayes.predictive.outcomes import INTERVAL_LEVEL, ClassOutcomes, RegressionOutcomes
from dropbayes.predictive.scoring import CLASS_SCORES, REGRESSION_SCORES, Score
from dropbayes.runtime.arrays import Numbers
from dropbayes.scores import RiskCoverage

LEVEL = INTERVAL_LEVEL
"""The coverage claimed by the intervals shown."""

CRPS_ROWS = 2000
"""The rows whose CRPS is computed (its cost grows with the square of the draws): beyond them, an even selection."""

ENOUGH_ROWS = 30
"""Below this many rows the report does not judge calibration."""


@dataclass(frozen=True)
class ScoreValue:
    """One line of the table of scores.

    Args:
        score: What it is, of `dropbayes.predictive.scoring`.
        value: The number.
        error: Its standard error over the rows, taken as independent; None where none is known.
        remark: What to add to its meaning.
    """

    score: Score
    value: float
    error: float | None = None
    remark: str = ""

    @property
    def meaning(self) -> str:
        """What it says, and which direction is better."""
        return self.score.description + self.remark


def score_values(table: Mapping[str, Score], rows: Any, **remarks: str) -> dict[str, ScoreValue]:
    """Every score of a table that the rows have, by name, with the remark made on it."""
    values = {}
    for name, score in table.items():
        value = float(score.value(rows))
        error = None if score.error is None else float(score.error(rows))
        if not math.isnan(value):
            values[name] = ScoreValue(score, value, error, remarks.get(name, ""))
    return values


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
    scores: dict[str, ScoreValue]
    n_draws: int
    noise: str = "constant"

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
    scores: dict[str, ScoreValue]
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
    vars(view).pop("feature_names_in_", None)  # rows come as plain arrays, without feature names to warn about
    return view


def mean_and_error(values: Any) -> tuple[float, float]:
    """The mean over rows and its standard error.

    Examples:
        >>> mean_and_error(np.array([1.0, 3.0]))
        (2.0, 1.0)
    """
    rows = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # the log-likelihood of an outcome of density zero
        return float(rows.mean()), float(rows.std(ddof=1) / math.sqrt(len(rows)))


def mean_and_deviations(model: Any, x: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The predictive mean of rows, and its epistemic and aleatoric standard deviations, for one output."""
    blocks = [(m.mean, m.epistemic.sqrt(), m.aleatoric.sqrt()) for _, m in _mixtures(model, x)]
    mean, epistemic, aleatoric = (torch.cat(tensors).numpy() for tensors in zip(*blocks, strict=True))
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
        ranked.append(mixture.rows(some).crps(outcome[some]))
    mean_, epistemic, aleatoric = mean_and_deviations(model, x)
    std = np.sqrt(epistemic**2 + aleatoric**2)
    lower, upper = (np.asarray(end, dtype=np.float64) for end in model.predict_interval(x, coverage=LEVEL))
    transform = torch.cat(pit)
    reliability = calibration.interval_reliability(transform)
    risk = scores.risk_coverage(std, np.abs(y - mean_))
    rows_scored = RegressionOutcomes(
        y, mean_, std, transform, torch.cat(density), crps=torch.cat(ranked), lower=lower, upper=upper
    )
    crps_rows = f" (of {CRPS_ROWS:,} evenly chosen rows)" if len(x) > CRPS_ROWS else ""
    values = score_values(REGRESSION_SCORES, rows_scored, crps=crps_rows)
    return Regression(
        y, mean_, std, epistemic, aleatoric, lower, upper, transform.numpy(), reliability, risk, values, n_draws,
        model.noise,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- classification


def classification(model: Any, x: Numbers, labels: npt.NDArray[np.int64]) -> Classification:
    """The measurements of a classifier; `labels` are class numbers."""
    blocks, n_draws = list[tuple[Tensor, ...]](), 0
    for p in _class_draws(model, x):
        n_draws = len(p)
        mutual, expected = information.mutual_information(p), information.expected_entropy(p)
        blocks.append((p.mean(0), information.predictive_entropy(p), mutual, expected))
    probabilities, entropy, epistemic, aleatoric = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
    truth = torch.from_numpy(labels)
    confidence, correct = scores.confidence_and_correctness(probabilities, truth)
    reliability = calibration.class_reliability(probabilities, truth)
    risk = scores.risk_coverage(entropy, 1 - correct)
    chance = f", and chance alone makes it {100 * chance_error(confidence):.1f} %"
    rows_scored = ClassOutcomes(truth, probabilities, mutual_information=epistemic)
    values = score_values(CLASS_SCORES, rows_scored, calibration_error=chance)
    return Classification(
        labels, probabilities.numpy(), entropy.numpy(), epistemic.numpy(), aleatoric.numpy(), reliability, risk,
        values, n_draws,
    )  # fmt: skip


@dataclass(frozen=True)
class ClassScores:
    """The scores of one class: its rows, its precision and its recall."""

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
    """The scores of each class; NaN where there are no rows to divide by.

    Examples:
        >>> first, second = per_class(np.array([0, 0, 1]), np.array([0, 1, 1]), 2)
        >>> first.precision, first.recall, second.precision, second.recall
        (0.5, 1.0, 1.0, 0.5)
    """
    measured = []
    for label in range(n_classes):
        own, named = labels == label, predicted == label
        right = float((own & named).sum())
        precision = right / named.sum() if named.any() else math.nan
        recall = right / own.sum() if own.any() else math.nan
        measured.append(ClassScores(int(own.sum()), int(named.sum()), float(precision), float(recall)))
    return measured


def never_predicted(measured: Classification) -> list[int]:
    """The classes that occur in some rows and are predicted in none."""
    return sorted(set(measured.labels.tolist()) - set(measured.predicted.tolist()))


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
