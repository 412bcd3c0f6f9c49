"""What the measurements mean: whether certainty and truth agree, what is wrong if not, whether a gain is real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.special
import scipy.stats
import torch

from dropbayes.app.report.features import Feature
from dropbayes.app.report.formatting import percent
from dropbayes.app.report.measurements import ENOUGH_ROWS, Classification, Regression, chance_error

_JOINT_SIGMAS = 2.394
"""Standard errors that the worst of three coverages exceeds with a probability of at most 5 % (Bonferroni)."""

_LEVELS = (50, 80, 95)
"""The claimed coverages that are judged, in percent."""


@dataclass(frozen=True)
class Verdict:
    """Whether stated certainty and observed truth agree.

    Args:
        kind: "calibrated", "over", "under", "uneven" or "few" (rows).
        text: The verdict in words.
        level: The claimed coverage, in percent, that shows it best.
    """

    kind: str
    text: str
    level: int = 95

    @property
    def tone(self) -> str:
        """The colour of the verdict."""
        return {"calibrated": "good", "few": "plain"}.get(self.kind, "warn")


def regression_verdict(measured: Regression) -> Verdict:
    """The verdict on the 50 %, 80 % and 95 % intervals: their coverage against that of chance, jointly at 5 %."""
    n = len(measured.y)
    if n < ENOUGH_ROWS:
        return Verdict("few", f"{n} rows are too few to judge calibration")
    claims = [level - 1 for level in _LEVELS]
    gap = (measured.reliability.observed - measured.reliability.claimed)[claims].numpy()
    sigmas = gap / measured.reliability.standard_error[claims].numpy()
    if np.abs(sigmas).max() <= _JOINT_SIGMAS:
        return Verdict("calibrated", f"as far as {n:,} rows can tell, it is calibrated")
    worst = int(np.abs(sigmas).argmax())
    level = _LEVELS[worst]
    factors = interval_factors(measured)
    if not factors.agree:
        shape = "wrong in shape, which no factor on the standard deviation mends"
        return Verdict("uneven", f"{shape}: {_widths(factors)}", level)
    kind, word = ("over", "over-confident: its intervals are too narrow") if gap[worst] < 0 else (
        "under", "too cautious: its intervals are wider than needed")  # fmt: skip
    slight = "slightly " if abs(gap[worst]) < 0.03 else ""
    chance = f"{abs(sigmas[worst]):.0f} standard errors off at {level} %"
    return Verdict(kind, f"{slight}{word} ({chance})", level)


@dataclass(frozen=True, eq=False)
class IntervalFactors:
    """The factor on the width that would make the 50 %, 80 % and 95 % intervals hold what they claim.

    Args:
        values: The three factors, in units of a Gaussian's width; below 1 an interval is too wide.
        errors: Their standard errors.
    """

    values: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Their mean, weighted by their precision."""
        return float(np.average(self.values, weights=self.errors**-2.0))

    @property
    def agree(self) -> bool:
        """Whether one factor serves all levels: the scale is wrong, not the shape."""
        return bool(np.all(np.abs(self.values - self.mean) <= _JOINT_SIGMAS * self.errors))


def interval_factors(measured: Regression) -> IntervalFactors:
    r"""The factors of the intervals.

    A row is inside every central interval that claims more than $u = |2 F(y) - 1|$, so the interval that holds the
    share p claims the p-quantile $u_p$. In a Gaussian's units its half-width is $z(u_p)$ where $z(p)$ was meant: the
    factor is $z(u_p) / z(p)$. Its error is that of the order statistics $np \pm \sqrt{n p (1 - p)}$.
    """
    ordered = np.sort(np.abs(2 * measured.pit - 1))
    n = len(ordered)

    def half_width(level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return math.sqrt(2) * scipy.special.erfinv(np.clip(level, 1e-6, 1 - 1e-9))

    values, errors = [], []
    for p in (level / 100 for level in _LEVELS):
        ranks = n * p + np.array([-1.0, 0.0, 1.0]) * math.sqrt(n * p * (1 - p))
        low, middle, high = half_width(ordered[np.clip(ranks.round().astype(int), 0, n - 1)]) / half_width(p)
        values.append(middle)
        errors.append(max((high - low) / 2, 1e-6))
    return IntervalFactors(np.array(values), np.array(errors))


def _widths(factors: IntervalFactors) -> str:
    levels: dict[str, list[str]] = {}
    for level, value in zip(_LEVELS, factors.values, strict=True):
        levels.setdefault(_width(value), []).append(f"{level} %")
    if len(levels) == 1:
        return f"its intervals are {next(iter(levels))} at every level, by different factors"
    return "its intervals are " + ", ".join(f"{width} at {' and '.join(at)}" for width, at in levels.items())


def _width(factor: float) -> str:
    return "too wide" if factor < 0.98 else "too narrow" if factor > 1.02 else "right"


def dependent_feature(measured: Regression, features: Sequence[Feature]) -> str:
    """The feature (or "the prediction") with which the width of the intervals should vary and does not; "" if none.

    Spearman's rank correlation of $|2 F(y) - 1|$ with each number, at a joint level of 1 % and above 0.1.
    """
    if len(measured.y) < ENOUGH_ROWS:
        return ""
    u = np.abs(2 * measured.pit - 1)
    numbers = {"the prediction": measured.mean, **{f.name: f.values for f in features if f.is_number}}
    strongest, greatest = "", 0.1
    for name, values in numbers.items():
        known = np.isfinite(values)
        if known.sum() < ENOUGH_ROWS or np.ptp(values[known]) == 0:
            continue
        test = scipy.stats.spearmanr(u[known], values[known])
        if abs(test.statistic) > greatest and test.pvalue < 0.01 / len(numbers):
            strongest, greatest = name, abs(float(test.statistic))
    return strongest


def class_verdict(measured: Classification) -> Verdict:
    """The verdict on the probabilities: mean confidence against accuracy, then the gap in bins against chance."""
    n = len(measured.labels)
    if n < ENOUGH_ROWS:
        return Verdict("few", f"{n} rows are too few to judge calibration")
    confidence = measured.confidence
    error = math.sqrt(float((confidence * (1 - confidence)).sum())) / n
    gap = measured.scores["accuracy"].value - float(confidence.mean())
    if abs(gap) > 2 * error:
        kind, word = ("over", "over-confident") if gap < 0 else ("under", "too cautious")
        slight = "slightly " if abs(gap) < 0.03 else ""
        return Verdict(
            kind,
            f"{slight}{word}: it claims {percent(float(confidence.mean()))} and is right in "
            f"{percent(measured.scores['accuracy'].value)} of the rows",
        )
    chance, seen = chance_error(torch.from_numpy(confidence)), measured.scores["calibration_error"].value
    if seen > 2 * chance:
        return Verdict(
            "uneven", f"right on the whole but not at every level: ECE {percent(seen)}, chance {percent(chance)}"
        )
    return Verdict(
        "calibrated",
        f"as far as {n:,} rows can tell, it is calibrated (ECE {percent(seen)}, chance {percent(chance)})",
    )


def bias_direction(measured: Regression) -> str:
    """Whether predictions run "low" or "high", beyond two standard errors of the mean rank of the truth; else ""."""
    score = measured.scores["mean_pit"]
    if len(measured.y) < ENOUGH_ROWS or abs(score.value - 0.5) <= 2 * (score.error or math.inf):
        return ""
    slightly = "slightly " if abs(score.value - 0.5) < 0.05 else ""
    return slightly + ("low" if score.value > 0.5 else "high")


def epistemic_share(measured: Regression | Classification) -> float:
    """The epistemic part of the mean uncertainty: of the variance, or of the entropy."""
    if isinstance(measured, Regression):
        return float((measured.epistemic_std**2).mean() / (measured.std**2).mean())
    return float(measured.epistemic.mean() / max(measured.entropy.mean(), 1e-300))


def gain_is_real(measured: Regression | Classification, deferred: int, gain: float) -> bool:
    r"""Whether deferring the $d$ most uncertain of $N$ rows lowers the mean loss more than $d$ rows at random would.

    For errors, the number among $d$ random rows is hypergeometric; it must reach the number deferred with a probability
    of at most 2.5 %. For losses of standard deviation $s$ the gain must exceed $2 s \sqrt{d / (N (N - d))}$, twice the
    standard error of a mean of $N - d$ rows drawn without replacement.
    """
    if isinstance(measured, Regression):
        loss = np.abs(measured.y - measured.mean)
        n = len(loss)
        return gain > 2 * float(np.std(loss, ddof=1)) * math.sqrt(deferred / n / (n - deferred))
    n, wrong = len(measured.labels), int((measured.predicted != measured.labels).sum())
    caught = round(wrong - (n - deferred) * float(measured.risk.risk[n - 1 - deferred]))
    return bool(scipy.stats.hypergeom.sf(caught - 1, n, wrong, deferred) <= 0.025)
