r"""Reliability: claimed probabilities against observed frequencies, and whether a gap is more than chance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime import validation
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import Array
from dropbayes.scores.averages import cumulative_weights
from dropbayes.scores.classification import calibration_gap, confidence_and_correctness, equal_bins


@dataclass(frozen=True)
class ReliabilityCurve:
    """Claimed probabilities, the frequencies observed at each, and the (effective) number of rows behind, `[point]`."""

    claimed: Tensor
    observed: Tensor
    count: Tensor

    @property
    def standard_error(self) -> Tensor:
        """The standard error of `observed` if the claims were true: the scatter due to chance."""
        return (self.claimed * (1 - self.claimed) / self.count).sqrt()

    @property
    def mean_gap(self) -> Tensor:
        """The mean absolute gap of the curve from the diagonal, every point weighted the same."""
        return (self.observed - self.claimed).abs().mean()


def class_reliability(
    probabilities: Array, labels: Array, *, n_bins: int = 10, sample_weight: Array | None = None
) -> ReliabilityCurve:
    """The reliability curve of a classifier: mean confidence and accuracy in bins of equal width; empty bins left out.

    Examples:
        >>> curve = class_reliability(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=2)
        >>> curve.claimed, curve.observed, curve.count
        (tensor([0.7500]), tensor([0.5000]), tensor([2.]))
    """
    confidence, correct = confidence_and_correctness(probabilities, labels)
    weight = validation.row_weights(sample_weight, len(confidence), like=confidence).to(confidence.dtype)
    bins = equal_bins(confidence, n_bins)
    columns = weight, weight * confidence, weight * correct, weight.square()
    sums = [weight.new_zeros(n_bins).index_add(0, bins, values) for values in columns]
    mass, claimed, observed, squares = (values[sums[0] > 0] for values in sums)
    return ReliabilityCurve(claimed / mass, observed / mass, mass.square() / squares)


def gaussian_pit(mean: Array, std: Array, y: Array) -> Tensor:
    r"""The probability integral transform $\Phi\big((y - \mu)/\sigma\big)$, uniform for calibrated Gaussians.

    Examples:
        >>> gaussian_pit(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.8413])
    """
    centre, deviation, outcome = validation.matching_tensors({"mean": mean, "std": std, "y": y})
    validation.check_values("std", deviation, positive=True)
    return torch.special.ndtr((outcome - centre) / deviation)


def quantile_reliability(pit: Array, *, n_levels: int = 99, sample_weight: Array | None = None) -> ReliabilityCurve:
    """The reliability curve of predictive quantiles: how often the target fell below the quantile of each level.

    From probability integral transforms `[row]` (`gaussian_pit`, `predictive.Mixture.pit`), at levels evenly spaced
    strictly inside the unit interval.

    Examples:
        >>> quantile_reliability(torch.tensor([0.1, 0.2, 0.3, 0.9]), n_levels=1).observed  # below the median
        tensor([0.7500])
    """
    return _level_curve(checked_levels("pit", pit), n_levels, sample_weight)


def interval_reliability(pit: Array, *, n_levels: int = 99, sample_weight: Array | None = None) -> ReliabilityCurve:
    """The reliability curve of central intervals: how often the target fell inside the interval of each level.

    The arguments are those of `quantile_reliability`.

    Examples:
        >>> interval_reliability(torch.tensor([0.1, 0.3, 0.6, 0.9]), n_levels=1).observed  # in the central half
        tensor([0.5000])
    """
    return _level_curve((2 * checked_levels("pit", pit) - 1).abs(), n_levels, sample_weight)


def checked_levels(name: str, levels: Array, *, axes: str | None = "[row, ...]") -> Tensor:
    """Levels, such as probability integral transforms: numbers from 0 to 1."""
    values = validation.finite_tensor(name, levels, axes=axes)
    validation.check_values(name, values, at_most=1)
    return values


def _level_curve(values: Tensor, n_levels: int, sample_weight: Array | None) -> ReliabilityCurve:
    validation.check_count("n_levels", n_levels)
    weight = validation.row_weights(sample_weight, len(values), like=values)
    weight = weight.reshape(-1, *(1,) * (values.dim() - 1)).expand(values.shape).flatten()
    levels = torch.arange(1, n_levels + 1, dtype=values.dtype, device=values.device) / (n_levels + 1)
    _, up_to, total = cumulative_weights(values.flatten(), weight, levels)
    effective = total.square() / weight.square().sum()
    return ReliabilityCurve(levels, (up_to / total).to(levels), torch.full_like(levels, float(effective)))


@dataclass(frozen=True)
class CalibrationTest:
    """A calibration error, and what a calibrated model of the same claims shows on as many rows.

    `expected` is its mean error, the bias of the estimate, `upper` what it exceeds with probability 5 %, `p_value` the
    probability that it shows at least this error.
    """

    error: float
    expected: float
    upper: float
    p_value: float

    @property
    def excess(self) -> float:
        """The error less its bias, at least 0: an estimate that does not grow with the number of bins."""
        return max(0.0, self.error - self.expected)


@on_cpu
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

    Consistency resampling [Bröcker & Smith 2007]: the predictions `[row, class]` are fixed, and each is correct with a
    probability of its confidence, in `n_resamples` sets of labels. The p-value is exact for the hypothesis that the
    confidences are true. `sample_weight` is the number of independent rows that each row stands for, an integer.

    Examples:
        >>> p = torch.tensor([[0.3, 0.7]]).repeat(100, 1)
        >>> test = calibration_test(p, torch.tensor([1] * 71 + [0] * 29))  # 71 % where 70 % is claimed
        >>> round(test.error, 3), test.p_value > 0.5
        (0.01, True)
    """
    validation.check_count("n_resamples", n_resamples)
    confidence, correct = (part.detach().double().cpu() for part in confidence_and_correctness(probabilities, labels))
    confidence, correct = validation.repeated_rows(sample_weight, confidence, correct)
    bins = equal_bins(confidence, n_bins)
    generator = validation.random_generator(seed)
    # In double precision: in single precision, ties with the observed error break.
    uniform = (torch.rand(len(confidence), generator=generator, dtype=torch.float64) for _ in range(n_resamples))
    chance = torch.stack([calibration_gap(confidence, (one < confidence).double(), bins) for one in uniform])
    observed = float(calibration_gap(confidence, correct, bins))
    p_value = (1 + int((chance >= observed - 1e-12).sum())) / (1 + n_resamples)
    return CalibrationTest(observed, float(chance.mean()), float(chance.quantile(0.95)), p_value)


def reliability_band(curve: ReliabilityCurve, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The lower and upper frequencies, `[point]`, between which a calibrated model's lie with probability `level` each.

    Examples:
        >>> curve = ReliabilityCurve(torch.tensor([0.5]), torch.tensor([0.9]), torch.tensor([10.0]))
        >>> reliability_band(curve)  # 9 of 10 is more than a fair coin shows
        (tensor([0.2000]), tensor([0.8000]))
    """
    import scipy.stats

    validation.check_probability("level", level)
    claimed, count = validation.matching_tensors({"claimed": curve.claimed, "count": curve.count})
    rounding = 8 * torch.finfo(claimed.dtype).eps
    if claimed.dim() != 1 or not bool(((claimed >= 0) & (claimed <= 1 + rounding) & (count >= 0.5)).all()):
        raise ValueError("`curve` must claim probabilities, `[point]`, each with at least one row behind it.")
    rows, probability = count.double().round().cpu().numpy(), claimed.double().clamp_max(1).cpu().numpy()
    lower, upper = (scipy.stats.binom.ppf(0.5 + sign * level / 2, rows, probability) / rows for sign in (-1, 1))
    return torch.as_tensor(lower).to(claimed), torch.as_tensor(upper).to(claimed)


def uniformity_test(pit: Array, *, sample_weight: Array | None = None) -> float:
    """The p-value of the hypothesis that the transforms are uniform: that the predictive distributions are calibrated.

    The Kolmogorov-Smirnov test. A small p-value shows a miscalibration of bias, width or shape; a large one does not
    exclude it. `sample_weight` is the number of independent rows that each row stands for, an integer.

    Examples:
        >>> uniformity_test(torch.linspace(0.01, 0.99, 50)) > 0.9, uniformity_test(torch.linspace(0.4, 0.6, 50)) < 1e-6
        (True, True)
    """
    import scipy.stats

    (values,) = validation.repeated_rows(sample_weight, checked_levels("pit", pit).detach().double().cpu())
    return float(scipy.stats.kstest(values.flatten().numpy(), "uniform").pvalue)
