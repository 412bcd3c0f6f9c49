r"""The agreement of stated certainty with what happened, judged against the scatter of chance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dropbayes.calibration import calibration_test, interval_reliability
from dropbayes.predictive.scoring import COVERAGE_LEVELS
from dropbayes.runtime.formatting import percent
from dropbayes.runtime.validation import Array, finite_tensor
from dropbayes.scores import confidence_and_correctness

MIN_ROWS = 30  #: Below this many rows calibration is not judged.

_JOINT_SIGMAS = 2.394  # the worst of three standard normal numbers exceeds it with a probability of 5 % (Bonferroni)


@dataclass(frozen=True)
class Agreement:
    """A verdict on calibration."""

    kind: Literal["calibrated", "over", "under", "uneven", "few"]  #: Over-confident, ..., wrong in shape, too few rows.
    text: str  #: The verdict in words.
    level: float = 0.95  #: The nominal coverage at which it shows most.
    factor: float = 1.0  #: On the standard deviation, with which intervals would hold what they claim, if one serves.

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        if self.kind in ("calibrated", "few"):
            return self.text[:1].upper() + self.text[1:] + "."
        return f"The model is {self.text}."


def independent_rows(pit: Array) -> float:
    r"""How many independent rows tell as much: $n (1 - \rho) / (1 + \rho)$, with ρ the correlation of neighbours."""
    centred = finite_tensor("pit", pit).double()
    centred = centred - centred.mean()
    correlation = max(0.0, float((centred[1:] * centred[:-1]).sum() / centred.square().sum().clamp_min(1e-300)))
    return len(centred) * (1 - correlation) / (1 + correlation)


def interval_agreement(pit: Array, *, in_series: bool = False) -> Agreement:
    """The verdict on the central intervals of a regression, from the probability integral transforms `[row]`.

    The coverages of the 50 %, 80 % and 95 % intervals are tested jointly at 5 %. Rows `in_series`, such as the months
    of a forecast, err together, and count as the fewer rows that would be independent.
    """
    n = len(finite_tensor("pit", pit))
    if n < MIN_ROWS:
        return Agreement("few", f"{n} rows are too few to judge calibration")
    counted = independent_rows(pit) if in_series else n
    if counted < MIN_ROWS:
        worth = f"err together and tell as much as {counted:.0f} independent ones"
        return Agreement("few", f"{n:,} rows that follow one another {worth}, too few to judge calibration")
    curve = interval_reliability(pit)
    at = [round(100 * level) - 1 for level in COVERAGE_LEVELS]
    gap = (curve.observed - curve.claimed)[at]
    widened = math.sqrt(n / counted)
    sigmas = (gap / (curve.standard_error[at] * widened)).abs()
    if sigmas.max() <= _JOINT_SIGMAS:
        return Agreement("calibrated", f"as far as {n:,} rows can tell, it is calibrated")
    worst = int(sigmas.argmax())
    level, (factors, errors) = COVERAGE_LEVELS[worst], interval_factors(pit)
    errors = errors * widened
    weight = errors**-2
    factor = float((factors * weight).sum() / weight.sum())
    if ((factors - factor).abs() > _JOINT_SIGMAS * errors).any():
        widths: dict[str, list[str]] = {}
        for claimed, value in zip(COVERAGE_LEVELS, factors.tolist(), strict=True):
            width = "too wide" if value < 0.98 else "too narrow" if value > 1.02 else "right"
            widths.setdefault(width, []).append(f"{100 * claimed:.0f} %")
        text = ", ".join(f"{width} at {' and '.join(at)}" for width, at in widths.items())
        if len(widths) == 1:
            text = f"{next(iter(widths))} at every level, by different factors"
        shape = "wrong in shape, which no factor on the standard deviation mends"
        return Agreement("uneven", f"{shape}: its intervals are {text}", level)
    slight = "slightly " if abs(gap[worst]) < 0.03 else ""
    chance = f"({sigmas[worst]:.0f} standard errors off at {100 * level:.0f} %)"
    if gap[worst] < 0:
        return Agreement("over", f"{slight}over-confident: its intervals are too narrow {chance}", level, factor)
    return Agreement("under", f"{slight}too cautious: its intervals are wider than needed {chance}", level, factor)


def interval_factors(pit: Array) -> tuple[Tensor, Tensor]:
    r"""The factors on the width with which the 50 %, 80 % and 95 % intervals would hold what they claim, with errors.

    A row is inside every central interval that claims more than $u = |2 F(y) - 1|$, so the interval that holds the
    share p claims the p-quantile $u_p$. In a Gaussian's units its half-width is $z(u_p)$ where $z(p)$ was meant:
    the factor is $z(u_p) / z(p)$. Its error is that of the order statistics $np \pm \sqrt{n p (1 - p)}$.
    """
    ordered = (2 * finite_tensor("pit", pit).double() - 1).abs().sort().values
    n, p = len(ordered), torch.tensor(COVERAGE_LEVELS, dtype=torch.float64, device="cpu")
    ranks = n * p + torch.tensor([[-1.0], [0.0], [1.0]], device="cpu") * (n * p * (1 - p)).sqrt()
    levels = ordered[ranks.round().long().clamp(0, n - 1)].clamp(1e-6, 1 - 1e-9)
    low, middle, high = torch.erfinv(levels) / torch.erfinv(p)
    return middle, ((high - low) / 2).clamp_min(1e-6)


def bias(pit: Array, *, in_series: bool = False) -> str:
    """The side on which predictions lie, "low", "slightly low", "high" or "slightly high"; empty if chance explains it.

    The mean rank of the outcome in its prediction is compared with ½ at two standard errors of uniform ranks; rows
    `in_series` as in `interval_agreement`.
    """
    ranks = finite_tensor("pit", pit)
    off = float(ranks.double().mean()) - 0.5
    counted = independent_rows(ranks) if in_series else len(ranks)
    if counted < MIN_ROWS or abs(off) <= 2 / math.sqrt(12 * counted):
        return ""
    return ("slightly " if abs(off) < 0.05 else "") + ("low" if off > 0 else "high")


def uneven_width(pit: Array, columns: Mapping[str, Array]) -> str:
    """The name of the column with which the width of the intervals should vary and does not; empty if there is none.

    Spearman's rank correlation of $|2 F(y) - 1|$ with each column, at a joint level of 1 % and above 0.1; rows without
    a finite number are left out of their column.
    """
    import numpy as np
    import scipy.stats

    u = (2 * finite_tensor("pit", pit) - 1).abs().numpy()
    strongest, greatest = "", 0.1
    for name, column in columns.items():
        values = np.asarray(column, dtype=float)
        known = np.isfinite(values)
        if known.sum() < MIN_ROWS or 0 in (np.ptp(values[known]), np.ptp(u[known])):
            continue
        test = scipy.stats.spearmanr(u[known], values[known])
        if abs(test.statistic) > greatest and test.pvalue < 0.01 / len(columns):
            strongest, greatest = name, abs(float(test.statistic))
    return strongest


def class_agreement(probabilities: Array, labels: Array) -> Agreement:
    """The verdict on class probabilities: mean confidence against accuracy, then calibration error against chance."""
    confidence, correct = confidence_and_correctness(probabilities, labels)
    n = len(confidence)
    if n < MIN_ROWS:
        return Agreement("few", f"{n} rows are too few to judge calibration")
    claimed, observed = float(confidence.mean()), float(correct.mean())
    gap = observed - claimed
    if abs(gap) > 2 * math.sqrt(float((confidence * (1 - confidence)).sum())) / n:
        slight = "slightly " if abs(gap) < 0.03 else ""
        seen = f"it claims {percent(claimed)} and is right in {percent(observed)} of the rows"
        if gap < 0:
            return Agreement("over", f"{slight}over-confident: {seen}")
        return Agreement("under", f"{slight}too cautious: {seen}")
    test = calibration_test(probabilities, labels, n_resamples=200)
    figures = f"ECE {percent(test.error)}, chance {percent(test.expected)}"
    if test.error > 2 * test.expected:
        return Agreement("uneven", f"right on the whole but not at every level: {figures}")
    return Agreement("calibrated", f"as far as {n:,} rows can tell, it is calibrated ({figures})")
