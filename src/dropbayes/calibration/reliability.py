r"""Reliability: claimed probabilities against observed frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_count, finite_tensor, matching_tensors, row_weights
from dropbayes.scores import confidence_and_correctness
from dropbayes.scores.distributions import noise_variance_of

__all__ = [
    "ReliabilityCurve",
    "class_reliability",
    "gaussian_pit",
    "interval_reliability",
    "mixture_pit",
    "quantile_reliability",
]


@dataclass(frozen=True)
class ReliabilityCurve:
    """Claimed probabilities and the frequencies observed at each.

    Args:
        claimed: The claimed probability, `[point]`.
        observed: The observed frequency, `[point]`.
        count: The number of rows behind each frequency, `[point]`; with weights, their effective number.
    """

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

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        labels: Class indices, `[row]`.
        n_bins: The number of bins of the unit interval.
        sample_weight: The weight of each row.

    Examples:
        >>> curve = class_reliability(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=2)
        >>> curve.claimed, curve.observed, curve.count
        (tensor([0.7500]), tensor([0.5000]), tensor([2.]))
    """
    check_count("n_bins", n_bins)
    confidence, correct = confidence_and_correctness(probabilities, labels)
    weight = row_weights(sample_weight, len(confidence), like=confidence).to(confidence.dtype)
    bins = (confidence * n_bins).long().clamp_max(n_bins - 1)
    sums = [
        torch.zeros(n_bins, dtype=confidence.dtype, device=confidence.device).index_add(0, bins, values)
        for values in (weight, weight * confidence, weight * correct, weight.square())
    ]
    mass, claimed, observed, squares = (values[sums[0] > 0] for values in sums)
    return ReliabilityCurve(claimed / mass, observed / mass, mass.square() / squares)


def gaussian_pit(mean: Array, std: Array, y: Array) -> Tensor:
    r"""The probability integral transform $\Phi\big((y - \mu)/\sigma\big)$, uniform for calibrated Gaussians.

    Examples:
        >>> gaussian_pit(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.8413])
    """
    centre, deviation, outcome = matching_tensors({"mean": mean, "std": std, "y": y})
    if not bool((deviation > 0).all()):
        raise ValueError(f"`std` must be positive; got {deviation.min().item():.3g}.")
    return torch.special.ndtr((outcome - centre) / deviation)


def mixture_pit(draws: Array, y: Array, *, noise_variance: Array | float) -> Tensor:
    r"""The probability integral transform of the mixture, $\tfrac1T \sum_t \Phi\big((y - \widehat y_t)/\sqrt v\big)$.

    Args:
        draws: Outputs of the network, `[draw, row]`.
        y: The observed targets, `[row]`.
        noise_variance: The observation variance $v > 0$ ($\tau^{-1}$): a number, `[row]`, `[draw, 1]` or `[draw, row]`.

    Examples:
        >>> mixture_pit(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), noise_variance=1.0)
        tensor([0.5000])
    """
    outputs, outcome = matching_tensors({"draws": draws, "y": y}, draws="draws")
    variance = noise_variance_of(noise_variance, outputs)
    if not bool((variance > 0).all()):
        raise ValueError(f"`noise_variance` must be positive; got {variance.min().item():.3g}.")
    return torch.special.ndtr((outcome - outputs) / variance.sqrt()).mean(0)


def quantile_reliability(pit: Array, *, n_levels: int = 99, sample_weight: Array | None = None) -> ReliabilityCurve:
    """The reliability curve of predictive quantiles: how often the target fell below the quantile of each level.

    Args:
        pit: Probability integral transforms, `[row]` (`gaussian_pit`, `mixture_pit`).
        n_levels: The number of levels, evenly spaced strictly inside the unit interval.
        sample_weight: The weight of each row.

    Examples:
        >>> quantile_reliability(torch.tensor([0.1, 0.2, 0.3, 0.9]), n_levels=1).observed  # below the median
        tensor([0.7500])
    """
    return _level_curve(transforms(pit), n_levels, sample_weight)


def interval_reliability(pit: Array, *, n_levels: int = 99, sample_weight: Array | None = None) -> ReliabilityCurve:
    """The reliability curve of central intervals: how often the target fell inside the interval of each level.

    Args:
        pit: Probability integral transforms, `[row]` (`gaussian_pit`, `mixture_pit`).
        n_levels: The number of levels, evenly spaced strictly inside the unit interval.
        sample_weight: The weight of each row.

    Examples:
        >>> interval_reliability(torch.tensor([0.1, 0.3, 0.6, 0.9]), n_levels=1).observed  # in the central half
        tensor([0.5000])
    """
    return _level_curve((2 * transforms(pit) - 1).abs(), n_levels, sample_weight)


def transforms(pit: Array) -> Tensor:
    """Probability integral transforms, `[row, ...]`: numbers from 0 to 1."""
    values = finite_tensor("pit", pit, axes="[row, ...]")
    if not bool(((values >= 0) & (values <= 1)).all()):
        low, high = values.min().item(), values.max().item()
        raise ValueError(f"`pit` must lie between 0 and 1; got {low:.3g} to {high:.3g}. See `gaussian_pit`.")
    return values


def _level_curve(values: Tensor, n_levels: int, sample_weight: Array | None) -> ReliabilityCurve:
    check_count("n_levels", n_levels)
    weight = row_weights(sample_weight, len(values), like=values)
    weight = weight.reshape(-1, *(1,) * (values.dim() - 1)).expand(values.shape).flatten()
    ordered, order = values.flatten().sort()
    mass = torch.cat([weight.new_zeros(1), weight[order].cumsum(0)])
    levels = torch.arange(1, n_levels + 1, dtype=values.dtype, device=values.device) / (n_levels + 1)
    below = mass[torch.searchsorted(ordered, levels, right=True)] / mass[-1]
    effective = mass[-1].square() / weight.square().sum()
    return ReliabilityCurve(levels, below.to(levels), torch.full_like(levels, float(effective)))
