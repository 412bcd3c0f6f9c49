r"""Tests and bands: is a calibration error more than chance would show?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.calibration.reliability import ReliabilityCurve, transforms
from dropbayes.runtime.validation import (
    Array,
    check_count,
    check_probability,
    matching_tensors,
    random_generator,
    row_counts,
)
from dropbayes.scores import confidence_and_correctness

__all__ = ["CalibrationTest", "calibration_test", "reliability_band", "uniformity_test"]


@dataclass(frozen=True)
class CalibrationTest:
    """A calibration error, compared with that of a calibrated model on the same number of rows.

    Args:
        error: The error observed.
        expected: Its mean for a calibrated model of the same claims: the bias of the estimate.
        upper: The value that a calibrated model exceeds with probability 5 %.
        p_value: The probability that a calibrated model shows at least this error.
    """

    error: float
    expected: float
    upper: float
    p_value: float

    @property
    def excess(self) -> float:
        """The error less its bias, at least 0: an estimate that does not grow with the number of bins."""
        return max(0.0, self.error - self.expected)


def calibration_test(
    probabilities: Array,
    labels: Array,
    *,
    n_bins: int = 15,
    n_resamples: int = 1000,
    seed: int = 0,
    sample_weight: Array | None = None,
) -> CalibrationTest:
    r"""The test of the expected calibration error against its distribution under labels drawn from the claims.

    Consistency resampling [Bröcker & Smith 2007]: the predictions are fixed, and each is correct with a probability of
    its confidence. The p-value is exact for the hypothesis that the confidences are true.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        labels: Class indices, `[row]`.
        n_bins: The number of bins of equal width.
        n_resamples: The number of sets of labels drawn.
        seed: The seed of the draws.
        sample_weight: The number of independent rows that each row stands for, an integer.

    Examples:
        >>> p = torch.tensor([[0.3, 0.7]]).repeat(100, 1)
        >>> test = calibration_test(p, torch.tensor([1] * 71 + [0] * 29))  # 71 % where 70 % is claimed
        >>> round(test.error, 3), test.p_value > 0.5
        (0.01, True)
    """
    check_count("n_bins", n_bins)
    check_count("n_resamples", n_resamples)
    pair = confidence_and_correctness(probabilities, labels)
    confidence, correct = (values.detach().double().cpu() for values in pair)
    counts = row_counts(sample_weight, len(confidence), like=confidence)
    confidence, correct = confidence.repeat_interleave(counts), correct.repeat_interleave(counts)
    bins = (confidence * n_bins).long().clamp_max(n_bins - 1)
    generator = random_generator(seed)

    def error(right: Tensor) -> float:
        gap = torch.zeros(n_bins, dtype=torch.float64).index_add(0, bins, right - confidence)
        return float(gap.abs().sum() / len(confidence))

    chance = torch.tensor(
        [
            error((torch.rand(len(confidence), generator=generator, dtype=torch.float64) < confidence).double())
            for _ in range(n_resamples)
        ]
    )
    observed = error(correct)
    p_value = (1 + int((chance >= observed - 1e-12).sum())) / (1 + n_resamples)
    return CalibrationTest(observed, float(chance.mean()), float(chance.quantile(0.95)), p_value)


def reliability_band(curve: ReliabilityCurve, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The frequencies that a calibrated model would show at each point of the curve, with the given probability.

    Exact binomial quantiles, point by point; one point in 20 lies outside a band of 95 % by chance.

    Args:
        curve: A reliability curve.
        level: The probability of the band at each point.

    Returns:
        The lower and the upper frequencies, `[point]`.

    Examples:
        >>> curve = ReliabilityCurve(torch.tensor([0.5]), torch.tensor([0.9]), torch.tensor([10.0]))
        >>> reliability_band(curve)  # 9 of 10 is more than a fair coin shows
        (tensor([0.2000]), tensor([0.8000]))
    """
    import scipy.stats

    check_probability("level", level)
    claimed, count = matching_tensors({"claimed": curve.claimed, "count": curve.count})
    rounding = 8 * torch.finfo(claimed.dtype).eps
    if claimed.dim() != 1 or not bool(((claimed >= 0) & (claimed <= 1 + rounding) & (count >= 0.5)).all()):
        raise ValueError("`curve` must claim probabilities, `[point]`, each with at least one row behind it.")
    rows, probability = count.double().round().cpu().numpy(), claimed.double().clamp_max(1).cpu().numpy()
    ends = [scipy.stats.binom.ppf(0.5 + sign * level / 2, rows, probability) / rows for sign in (-1, 1)]
    lower, upper = (torch.as_tensor(end).to(claimed) for end in ends)
    return lower, upper


def uniformity_test(pit: Array, *, sample_weight: Array | None = None) -> float:
    """The p-value of the hypothesis that the transforms are uniform: that the predictive distributions are calibrated.

    The Kolmogorov-Smirnov test. A small p-value shows a miscalibration of bias, width or shape; a large one does not
    exclude it.

    Args:
        pit: Probability integral transforms of independent rows, `[row]`.
        sample_weight: The number of independent rows that each row stands for, an integer.

    Examples:
        >>> uniformity_test(torch.linspace(0.01, 0.99, 50)) > 0.9, uniformity_test(torch.linspace(0.4, 0.6, 50)) < 1e-6
        (True, True)
    """
    import scipy.stats

    values = transforms(pit).detach().double().cpu()
    values = values.repeat_interleave(row_counts(sample_weight, len(values), like=values), 0)
    return float(scipy.stats.kstest(values.flatten().numpy(), "uniform").pvalue)
