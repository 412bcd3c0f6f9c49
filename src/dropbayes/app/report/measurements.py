r"""The measurements of a model's predictions on rows with known outcomes: every number the report shows.

Nothing here has a formula of its own: scores come from `dropbayes.predictive.scoring`, verdicts from
`dropbayes.predictive.agreement`, curves from `dropbayes.calibration` and `dropbayes.scores`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dropbayes import calibration, information, scores
from dropbayes.calibration import ReliabilityCurve
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.predictive import CLASS_SCORES, REGRESSION_SCORES, ClassOutcomes, RegressionOutcomes, Score, draw_mean
from dropbayes.predictive.agreement import Agreement, class_agreement, interval_agreement
from dropbayes.predictive.outcomes import INTERVAL_LEVEL
from dropbayes.runtime.arrays import Numbers
from dropbayes.runtime.formatting import number, percent
from dropbayes.scores import RiskCoverage

CRPS_ROWS = 2000
"""The rows whose CRPS is computed (its cost grows with the square of the draws): beyond them, an even selection."""

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ScoreValue:
    """One line of the table of scores.

    Args:
        score: The score, of `dropbayes.predictive.scoring`.
        value: Its value.
        error: Its standard error over the rows, taken as independent; None where none is known.
        remark: An addition to its meaning.
    """

    score: Score
    value: float
    error: float | None = None
    remark: str = ""

    @property
    def meaning(self) -> str:
        """The meaning of the score, and which direction is better."""
        return self.score.description + self.remark


def score_values(
    table: Mapping[str, Score], rows: RegressionOutcomes | ClassOutcomes, **remarks: str
) -> dict[str, ScoreValue]:
    """The scores of a table that the rows have, by name, each with the remark made on it."""
    values = {}
    for name, score in table.items():
        value = float(score.value(rows))
        error = None if score.error is None else float(score.error(rows))
        if not math.isnan(value):
            values[name] = ScoreValue(score, value, error, remarks.get(name, ""))
    return values


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression's predictions, row by row, in the units of y, and all that follows from them.

    Args:
        y: The outcomes.
        mean: The predictive mean.
        epistemic_std: The standard deviation over the draws.
        aleatoric_std: That of the noise.
        lower: The lower end of the 95 % interval.
        upper: Its upper end.
        pit: The predictive distribution function at the outcome.
        log_density: The predictive log-density of the outcome.
        crps: The continuous ranked probability score of an even selection of rows.
        n_draws: The number of draws.
    """

    loss_name = shuffled_loss = "mean absolute error"
    surprise_name = "95 % interval holds"
    claims = "Intervals"
    show = staticmethod(number)

    y: Numbers
    mean: Numbers
    epistemic_std: Numbers
    aleatoric_std: Numbers
    lower: Numbers
    upper: Numbers
    pit: Numbers
    log_density: Numbers
    crps: Numbers
    n_draws: int

    @cached_property
    def uncertainty(self) -> Numbers:
        """The standard deviation, by which rows are ranked."""
        return np.hypot(self.epistemic_std, self.aleatoric_std)

    @cached_property
    def epistemic_share(self) -> Numbers:
        """The epistemic part of each row's variance."""
        return self.epistemic_std**2 / self.uncertainty**2

    @property
    def mean_epistemic_share(self) -> float:
        """The epistemic part of the mean variance."""
        return float((self.epistemic_std**2).mean() / (self.uncertainty**2).mean())

    @cached_property
    def loss(self) -> Numbers:
        """The absolute error of each row."""
        return np.abs(self.y - self.mean)

    @cached_property
    def inside(self) -> npt.NDArray[np.bool_]:
        """Whether each outcome lies inside its 95 % interval."""
        return (self.lower <= self.y) & (self.y <= self.upper)

    @property
    def surprise(self) -> tuple[Numbers, Numbers]:
        """How far each row's success is from the probability claimed for it, and the variance that claim implies."""
        claimed = np.full(len(self.y), INTERVAL_LEVEL)
        return self.inside - claimed, claimed * (1 - claimed)

    def surprise_text(self, surprise: float) -> str:
        return percent(INTERVAL_LEVEL + surprise)

    def too_sure(self, surprise: float) -> str:
        return f"Intervals hold only {percent(INTERVAL_LEVEL + surprise)}"

    @cached_property
    def reliability(self) -> ReliabilityCurve:
        return calibration.interval_reliability(self.pit)

    @cached_property
    def risk(self) -> RiskCoverage:
        return scores.risk_coverage(self.uncertainty, self.loss)

    @cached_property
    def agreement(self) -> Agreement:
        return interval_agreement(self.pit)

    @cached_property
    def scores(self) -> dict[str, ScoreValue]:
        moments = self.y, self.mean, self.uncertainty, self.pit, self.log_density
        rows = RegressionOutcomes(*moments, crps=self.crps, lower=self.lower, upper=self.upper)
        some = f" (of {len(self.crps):,} evenly chosen rows)" if len(self.crps) < len(self.y) else ""
        return score_values(REGRESSION_SCORES, rows, crps=some)


@dataclass(frozen=True, eq=False)
class Classification:
    """A classifier's predictions, row by row, and all that follows from them; uncertainties are in nats.

    Args:
        labels: The class numbers.
        probabilities: The predictive probabilities, `[row, class]`.
        entropy: Their entropy.
        epistemic: Its epistemic part, the mutual information.
        aleatoric: The rest, the expected entropy.
        n_draws: The number of draws.
    """

    loss_name = "error rate"
    shuffled_loss = "negative log-likelihood (nats)"
    surprise_name = "accuracy − confidence"
    claims = "Probabilities"
    show = staticmethod(percent)

    labels: Labels
    probabilities: Numbers
    entropy: Numbers
    epistemic: Numbers
    aleatoric: Numbers
    n_draws: int

    @property
    def uncertainty(self) -> Numbers:
        """The entropy, by which rows are ranked."""
        return self.entropy

    @cached_property
    def epistemic_share(self) -> Numbers:
        """The epistemic part of each row's entropy."""
        return np.clip(self.epistemic / np.maximum(self.entropy, 1e-300), 0, 1)

    @property
    def mean_epistemic_share(self) -> float:
        """The epistemic part of the mean entropy."""
        return float(self.epistemic.mean() / max(self.entropy.mean(), 1e-300))

    @cached_property
    def predicted(self) -> Labels:
        """The most probable class of each row."""
        return self.probabilities.argmax(1)

    @cached_property
    def confidence(self) -> Numbers:
        """Its probability."""
        return self.probabilities.max(1)

    @cached_property
    def loss(self) -> Numbers:
        """One for each row that is wrong."""
        return (self.predicted != self.labels).astype(float)

    @property
    def log_density(self) -> Numbers:
        """The log-probability of each row's class."""
        return scores.class_log_likelihood(self.probabilities, self.labels).numpy()

    @property
    def surprise(self) -> tuple[Numbers, Numbers]:
        """How far each row's success is from the probability claimed for it, and the variance that claim implies."""
        return 1 - self.loss - self.confidence, self.confidence * (1 - self.confidence)

    def surprise_text(self, surprise: float) -> str:
        return f"{100 * surprise:+.1f} %".replace("-", "−")

    def too_sure(self, surprise: float) -> str:
        return f"Accuracy stays {percent(-surprise)} below confidence"

    @cached_property
    def confusion(self) -> Labels:
        """The number of rows of each true class predicted as each class, `[true, predicted]`."""
        count = np.zeros((self.probabilities.shape[1],) * 2, dtype=np.int64)
        np.add.at(count, (self.labels, self.predicted), 1)
        return count

    @cached_property
    def reliability(self) -> ReliabilityCurve:
        return calibration.class_reliability(self.probabilities, self.labels)

    @cached_property
    def risk(self) -> RiskCoverage:
        return scores.risk_coverage(self.entropy, self.loss)

    @cached_property
    def agreement(self) -> Agreement:
        return class_agreement(self.probabilities, self.labels)

    @cached_property
    def scores(self) -> dict[str, ScoreValue]:
        rows = ClassOutcomes(self.labels, self.probabilities, mutual_information=self.epistemic)
        expected = calibration.calibration_test(self.probabilities, self.labels, n_resamples=200).expected
        chance = f", and chance alone makes it {100 * expected:.1f} %"
        return score_values(CLASS_SCORES, rows, calibration_error=chance)


def regression(model: DropoutRegressor, x: Numbers, y: Numbers) -> Regression:
    """The measurements of a regression, from the distributions that `predict` itself reads."""
    truth, chosen = torch.from_numpy(y), torch.zeros(len(x), dtype=torch.bool)
    chosen[even_selection(len(x), CRPS_ROWS)] = True
    blocks, n_draws = [], 0
    for rows, mixture in model.predictive_blocks(x):
        _refuse_infinite(mixture.location, rows)
        outcome, some, n_draws = truth[rows], chosen[rows], mixture.n_draws
        moments = mixture.mean, mixture.epistemic.sqrt(), mixture.aleatoric.sqrt()
        judged = mixture.pit(outcome), mixture.log_density(outcome), mixture.rows(some).crps(outcome[some])
        blocks.append((*moments, *mixture.interval(INTERVAL_LEVEL), *judged))
    return Regression(y, *(torch.cat(column).numpy() for column in zip(*blocks, strict=True)), n_draws)


def classification(model: DropoutClassifier, x: Numbers, labels: Labels) -> Classification:
    """The measurements of a classifier, from the probabilities that `predict_proba` itself averages."""
    blocks, n_draws = [], 0
    for rows, draws in model.draw_blocks(x):
        _refuse_infinite(draws.sum(-1), rows)
        probabilities, n_draws = draw_mean(draws), len(draws)
        parts = information.mutual_information(draws), information.expected_entropy(draws)
        blocks.append((probabilities, information.entropy(probabilities), *parts))
    return Classification(labels, *(torch.cat(column).numpy() for column in zip(*blocks, strict=True)), n_draws)


def _refuse_infinite(draws: Tensor, rows: slice) -> None:
    infinite = (~draws.isfinite()).any(0)
    if infinite.any():
        row = rows.start + int(infinite.int().argmax())
        raise ValueError(f"`x` must lie where the model predicts finite numbers; row {row} does not.")


def even_selection(n_rows: int, max_rows: int) -> npt.NDArray[np.int64]:
    """The indices of at most so many rows, evenly spread.

    Examples:
        >>> even_selection(5, 3).tolist(), even_selection(2, 3).tolist()
        ([0, 2, 4], [0, 1])
    """
    return np.linspace(0, n_rows - 1, min(n_rows, max_rows)).round().astype(np.int64)


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
