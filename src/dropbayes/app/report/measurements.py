r"""The measurements of a model's predictions on rows with known outcomes: every number the report shows.

Nothing here has a formula of its own: scores come from `dropbayes.predictive.scoring`, verdicts from
`dropbayes.predictive.agreement`, curves from `dropbayes.calibration` and `dropbayes.scores`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from sklearn.metrics import confusion_matrix

from dropbayes import calibration, scores
from dropbayes.app.models.fields import outcome_columns
from dropbayes.predictive import ClassOutcomes, RegressionOutcomes
from dropbayes.predictive.agreement import bias, class_agreement, interval_agreement
from dropbayes.predictive.scoring import ScoreValue, reliability_curve, risk_curve, score_values
from dropbayes.runtime.formatting import number, percent, printable_name
from dropbayes.runtime.validation import Numbers, NumpyArray
from dropbayes.scores import RiskCoverage

Labels = npt.NDArray[np.int64]


def shown_scores(rows: RegressionOutcomes | ClassOutcomes, remarks: Mapping[str, str]) -> dict[str, ScoreValue]:
    """The scores that the rows have, by name, with remarks on the meaning of some."""
    values = {name: one for name, one in score_values(rows, also=None).items() if not math.isnan(one.value)}
    return {name: one._replace(meaning=one.meaning + remarks.get(name, "")) for name, one in values.items()}


@dataclass(eq=False)
class Regression:
    """A regression's predictions, row by row, in the units of y, and all that follows from them."""

    n_draws: int
    y: Numbers
    mean: Numbers
    std: Numbers
    epistemic: Numbers  # variance over the draws
    aleatoric: Numbers  # variance of the noise
    lower: Numbers  # of the 95 % interval
    upper: Numbers
    pit: Numbers  # the predictive distribution function at y
    log_likelihood: Numbers
    crps: Numbers  # of an even selection of rows
    in_series: bool = field(default=False, kw_only=True)  # whether the rows follow one another

    has_classes: ClassVar[Literal[False]] = False
    loss_name = shuffled_loss = "mean absolute error"
    claims, surprise_name, total_name = "Intervals", "95 % interval holds", "variance"
    show = staticmethod(number)

    def __post_init__(self) -> None:
        self.total = self.epistemic + self.aleatoric
        self.uncertainty = self.std  # by which rows are ranked
        self.epistemic_share = float(self.epistemic.mean() / max(self.total.mean(), 1e-300))
        self.loss = np.abs(self.y - self.mean)
        self.inside = (self.lower <= self.y) & (self.y <= self.upper)
        # How far each row's success is from the probability claimed for it, and the variance that claim implies.
        self.surprise = self.inside - 0.95, np.full(len(self.y), 0.95 * 0.05)
        judged = self.y, self.mean, self.uncertainty, self.pit, self.log_likelihood, None
        self.outcomes = rows = RegressionOutcomes(*judged, self.crps, self.lower, self.upper)
        self.reliability, self.risk = reliability_curve(rows), risk_curve(rows)
        self.agreement = interval_agreement(self.pit, in_series=self.in_series)
        self.side = bias(self.pit, in_series=self.in_series)
        some = f" (of {len(self.crps):,} evenly chosen rows)" if len(self.crps) < len(self.y) else ""
        self.scores = shown_scores(rows, {"crps": some})
        self.typical = float(np.median(self.uncertainty))
        self.spread, rmse = float(self.y.std()) if np.ptp(self.y) else 0.0, self.scores["rmse"]  # not of rounding
        self.useless = 0 < self.spread <= rmse.value + 2 * (rmse.error or 0.0)  # beyond chance no better than the mean

    def surprise_text(self, surprise: float) -> str:
        return percent(0.95 + surprise)


@dataclass(eq=False)
class Classification:
    """A classifier's predictions, row by row, and all that follows from them; uncertainties are in nats."""

    n_draws: int
    labels: Labels
    probabilities: Numbers
    total: Numbers  # entropy of the probabilities
    epistemic: Numbers  # mutual information
    aleatoric: Numbers  # expected entropy
    sets: Labels | None = None  # those of a conformal calibration, `[row, class]`
    classes: Sequence[str] = field(default=(), kw_only=True)  # their names

    has_classes: ClassVar[Literal[True]] = True
    loss_name, shuffled_loss = "error rate", "negative log-likelihood (nats)"
    claims, surprise_name, total_name = "Probabilities", "accuracy − confidence", "entropy"
    show = staticmethod(percent)

    def __post_init__(self) -> None:
        self.uncertainty = self.total  # by which rows are ranked
        self.epistemic_share = float(self.epistemic.mean() / max(self.total.mean(), 1e-300))
        self.predicted, self.confidence = self.probabilities.argmax(1), self.probabilities.max(1)
        self.loss = (self.predicted != self.labels).astype(float)
        self.log_likelihood = scores.class_log_likelihood(self.probabilities, self.labels).numpy()
        self.surprise = 1 - self.loss - self.confidence, self.confidence * (1 - self.confidence)
        every = np.arange(self.probabilities.shape[1])
        self.confusion = confusion_matrix(self.labels, self.predicted, labels=every)  # [true, predicted]
        occurs, predicted = self.confusion.sum(1), self.confusion.sum(0)
        self.commonest = float(occurs.max() / len(self.labels))  # the share of the commonest class
        self.n_never = int(((occurs > 0) & (predicted == 0)).sum())  # classes that occur and are never predicted
        mistakes = self.confusion - np.diag(self.confusion.diagonal())
        i, j = map(int, np.unravel_index(mistakes.argmax(), mistakes.shape))
        self.commonest_mistake = i, j, int(mistakes[i, j])
        known = {"mutual_information": self.epistemic, "sets": self.sets}
        self.outcomes = rows = ClassOutcomes(self.labels, self.probabilities, **known)
        self.reliability, self.risk = reliability_curve(rows), risk_curve(rows)
        self.agreement = class_agreement(self.probabilities, self.labels)
        expected = calibration.calibration_test(self.probabilities, self.labels, n_resamples=200).expected
        self.scores = shown_scores(rows, {"calibration_error": f", and chance alone makes it {100 * expected:.1f} %"})
        self.useless = len(self.labels) - self.loss.sum() <= occurs.max() < len(self.labels)

    def surprise_text(self, surprise: float) -> str:
        return f"{100 * surprise:+.1f} %".replace("-", "−")


Measured = Regression | Classification


def measure(model: Any, x: Numbers, y: NumpyArray, *, in_series: bool = False) -> Measured:
    """The measurements of a model, from the distributions, or the class probabilities, that it predicts by itself."""
    n_draws, columns = outcome_columns(model, [(x, y, "`x`, row {}".format)], n_rows=len(x))
    if "labels" not in columns:
        return Regression(n_draws, in_series=in_series, **columns)
    classes = [printable_name(label, max_length=40) for label in model.classes_.tolist()]
    return Classification(n_draws, **columns, classes=classes)


def risk_after_deferring(risk: RiskCoverage, share: float) -> tuple[int, float]:
    """The number of rows deferred, the most uncertain first, and the mean loss of those that stay."""
    n = len(risk.risk)
    deferred = min(n - 1, math.floor(share * n + 1e-9))
    return deferred, float(risk.risk[n - 1 - deferred])
