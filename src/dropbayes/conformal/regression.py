r"""Conformal intervals of a regression (around a mean, between quantiles, without rows to spare) and distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import (
    Array,
    check_probability,
    check_values,
    finite_tensor,
    matching_tensors,
    row_values,
    row_weights,
)
from dropbayes.scores.averages import weighted_quantile


def standardised_residuals(mean: Array, std: Array | float, y: Array) -> Tensor:
    r"""The residual in standard deviations, $|y - \mu| / \sigma$: the conformal score of a regression.

    Examples:
        >>> standardised_residuals(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]))
        tensor([1.5000])
    """
    centre, deviation, outcome = _moments({"mean": mean, "y": y}, std)
    return (outcome - centre).abs() / deviation


def _moments(arrays: Mapping[str, Array], std: Array | float) -> list[Tensor]:
    """The mean, the positive standard deviation and the other arrays, of one shape; a scalar deviation is expanded."""
    deviation = finite_tensor("std", std)
    if deviation.dim() == 0:
        deviation = deviation.expand(finite_tensor("mean", arrays["mean"]).shape)
    tensors = matching_tensors({"mean": arrays["mean"], "std": deviation, **arrays})
    check_values("std", tensors[1], positive=True)
    return tensors


def conformal_interval(mean: Array, std: Array | float, *, threshold: Array | float) -> tuple[Tensor, Tensor]:
    r"""The split-conformal interval $\mu \pm q\,\sigma$, which holds the target with the probability of its threshold.

    The guarantee is over new rows *and* held-out sets, for exchangeable rows; it holds for any model, on average over
    rows and not for each row. A better uncertainty makes the interval narrower, not more valid.

    Args:
        mean: Predictive mean of the new rows.
        std: Their predictive standard deviation (1 for intervals of one width).
        threshold: The threshold $q$ of the `standardised_residuals` of held-out rows: a number (`conformal_threshold`),
            or `[row]` (`group_thresholds`, or with weights).

    Examples:
        >>> conformal_interval(torch.tensor([5.0]), torch.tensor([2.0]), threshold=1.8)
        (tensor([1.4000]), tensor([8.6000]))
    """
    centre, deviation = _moments({"mean": mean}, std)
    half = _per_row(threshold, centre) * deviation
    return centre - half, centre + half


def quantile_residuals(lower: Array, upper: Array, y: Array) -> Tensor:
    r"""The distance of the target outside its predicted quantiles, $\max(l - y,\; y - u)$; negative inside.

    Examples:
        >>> quantile_residuals(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.5]))
        tensor([ 2.0000, -0.5000])
    """
    low, high, outcome = matching_tensors({"lower": lower, "upper": upper, "y": y})
    return torch.maximum(low - outcome, outcome - high)


def conformal_quantile_interval(lower: Array, upper: Array, *, threshold: Array | float) -> tuple[Tensor, Tensor]:
    r"""The conformalised quantile interval $[l - q,\; u + q]$ [Romano et al. 2019].

    Predicted quantiles (of the mixture of draws, or of a quantile network) are widened by one number, or narrowed when
    they were too wide. Unlike $\mu \pm q\sigma$, they follow skewed noise.

    Args:
        lower: The predicted lower quantile of the new rows, `[row]`.
        upper: Their predicted upper quantile.
        threshold: The threshold $q$ of the `quantile_residuals` of held-out rows, as in `conformal_interval`.

    Returns:
        The lower and the upper ends; where a narrowed interval would be empty, both are its middle.

    Examples:
        >>> conformal_quantile_interval(torch.tensor([0.0]), torch.tensor([4.0]), threshold=0.5)
        (tensor([-0.5000]), tensor([4.5000]))
    """
    low, high = matching_tensors({"lower": lower, "upper": upper})
    if bool((low > high).any()):
        raise ValueError(f"`lower` must not exceed `upper`; it does in {int((low > high).sum())} rows.")
    margin = _per_row(threshold, low)
    margin = torch.maximum(margin, (low - high) / 2)  # no interval has a negative width
    return low - margin, high + margin


def _per_row(threshold: Array | float, like: Tensor) -> Tensor:
    bound = finite_tensor("threshold", threshold, infinite=True)
    if bound.dim() and bound.shape != like.shape[:1]:
        raise ValueError(f"`threshold` must be a number or [row]; got shape {tuple(bound.shape)} for {len(like)} rows.")
    spread = bound.to(like.device, torch.promote_types(bound.dtype, like.dtype))
    return spread.reshape(*bound.shape, *(1,) * (like.dim() - 1)) if bound.dim() else spread


def cross_conformal_interval(
    predictions: Array, *, residuals: Array, folds: Array | None = None, level: float
) -> tuple[Tensor, Tensor]:
    r"""The jackknife+ or CV+ interval, from models that each left some rows out.

    With $\mu_{-i}$ the model that did not see row $i$ and $R_i = |y_i - \mu_{-i}(x_i)|$, the ends are the
    $\lfloor (n+1)(1 - \text{level}) \rfloor$-th smallest of $\mu_{-i}(x) - R_i$ and the $\lceil (n+1)\,\text{level}
    \rceil$-th smallest of $\mu_{-i}(x) + R_i$ [Barber et al. 2021]. Every row both trains and calibrates. For
    exchangeable rows the coverage is at least $1 - 2\,(1 - \text{level})$, for K folds of n rows less about
    $\sqrt{2/n}$; in practice it is close to the level.

    Args:
        predictions: The predictions of each fold's model for the new rows, `[fold, new row]`.
        residuals: The absolute residual $R_i$ of every training row under the model of its fold, `[row]`.
        folds: The fold of each training row, `[row]`; by default each row is its own fold (jackknife+).
        level: The nominal coverage.

    Returns:
        The lower and the upper ends, `[new row]`; infinite with too few rows for the level.

    Examples:
        >>> predictions = torch.tensor([[0.0], [1.0], [2.0]])
        >>> cross_conformal_interval(predictions, residuals=torch.tensor([0.5, 0.5, 0.5]), level=0.7)
        (tensor([-0.5000]), tensor([2.5000]))
    """
    check_probability("level", level)
    outputs = finite_tensor("predictions", predictions, axes="[fold, new row]")
    spread = row_values("residuals", residuals).to(outputs)
    check_values("residuals", spread)
    fold = torch.arange(len(spread)) if folds is None else row_values("folds", folds, n_rows=len(spread)).long()
    if int(fold.min()) < 0 or int(fold.max()) >= len(outputs):
        raise ValueError(
            f"`folds` must lie between 0 and {len(outputs) - 1}, the rows of `predictions`; got {int(fold.min())} to "
            f"{int(fold.max())}."
        )
    left_out = outputs[fold.to(outputs.device)]  # [row, new row]
    n_rows = len(spread)
    upper_rank = math.ceil((n_rows + 1) * level - 1e-9)
    if upper_rank > n_rows:
        infinite = torch.full_like(outputs[0], math.inf)
        return -infinite, infinite
    # The lower end mirrors the upper one: floor((n+1)(1 - level)) = n + 1 - ceil((n+1) level).
    lower = (left_out - spread[:, None]).kthvalue(n_rows + 1 - upper_rank, 0).values
    return lower, (left_out + spread[:, None]).kthvalue(upper_rank, 0).values


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
