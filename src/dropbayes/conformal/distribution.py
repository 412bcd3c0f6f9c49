r"""Conformal predictive distributions: a whole distribution calibrated in probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_probability, matching_tensors, row_values, row_weights
from dropbayes.scores.averages import weighted_quantile

__all__ = ["ConformalDistribution", "conformal_distribution"]


@dataclass(frozen=True, eq=False)
class ConformalDistribution:
    r"""The distribution of each new row's target: $\mu + \sigma r$ with $r$ the residuals of held-out rows.

    For exchangeable rows its distribution function at the target is uniform, so targets fall below each quantile as
    often as its level says, up to $1/(n+1)$ [Vovk et al. 2019].

    Args:
        mean: The predictive mean of the new rows, `[row]`.
        std: Their predictive standard deviation, `[row]`.
        residuals: The signed residuals in standard deviations of $n$ held-out rows, in increasing order.
        weight: The weight of each residual; a new row has weight 1.
    """

    mean: Tensor
    std: Tensor
    residuals: Tensor
    weight: Tensor

    def distribution(self, y: Array) -> Tensor:
        """The distribution function at `y`, `[row]`: the middle of its jump there."""
        centre, _, outcome = matching_tensors({"mean": self.mean, "std": self.std, "y": y})
        standard = ((outcome - centre) / self.std.to(centre)).contiguous()
        mass = torch.cat([self.weight.new_zeros(1), self.weight.cumsum(0)])
        below, up_to = (mass[torch.searchsorted(self.residuals.to(standard), standard, right=r)] for r in (False, True))
        return (0.5 * (below + up_to + 1) / (mass[-1] + 1)).to(standard.dtype)

    def quantile(self, level: float) -> Tensor:
        """The quantile of each row, `[row]`: a new target is at most this with probability at least `level`."""
        check_probability("level", level)
        return self.mean + self._residual(level, 1) * self.std

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The central interval of each row, asymmetric about the mean when the residuals are skewed."""
        check_probability("level", level)
        outer = (1 + level) / 2
        return self.mean - self._residual(outer, -1) * self.std, self.mean + self._residual(outer, 1) * self.std

    def _residual(self, level: float, sign: int) -> Tensor:
        """The bound on the residual of a new row, times the sign, that holds with probability at least `level`."""
        mass = level * (self.weight.sum() + 1)
        return weighted_quantile(sign * self.residuals, self.weight, mass).to(self.mean)


def conformal_distribution(
    mean: Array, std: Array, *, calibration_residuals: Array, sample_weight: Array | None = None
) -> ConformalDistribution:
    r"""The conformal predictive distribution of new rows.

    Args:
        mean: Predictive mean of the new rows, `[row]`.
        std: Their predictive standard deviation, `[row]`.
        calibration_residuals: Signed residuals $(y - \mu)/\sigma$ of held-out rows, `[row]`.
        sample_weight: The weight of each held-out row; a new row has weight 1.

    Examples:
        >>> known = torch.tensor([-2.0, -1.0, 0.0, 1.0, 5.0])  # skewed: now and then a target is far above
        >>> new = conformal_distribution(torch.tensor([10.0]), torch.tensor([1.0]), calibration_residuals=known)
        >>> new.quantile(0.5), new.interval(0.6), new.distribution(torch.tensor([10.5]))
        (tensor([10.]), (tensor([8.]), tensor([15.])), tensor([0.5833]))
    """
    centre, deviation = matching_tensors({"mean": mean, "std": std})
    if centre.dim() != 1 or not bool((deviation > 0).all()):
        raise ValueError(f"`mean` and `std` must be [row], and `std` positive; got {tuple(centre.shape)}.")
    residuals = row_values("calibration_residuals", calibration_residuals)
    weight = row_weights(sample_weight, len(residuals), like=residuals)
    residuals, order = residuals.sort()
    return ConformalDistribution(centre, deviation, residuals, weight[order])
