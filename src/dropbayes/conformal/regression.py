r"""Conformal intervals of a regression: around a mean, or between predicted quantiles."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dropbayes.conformal.thresholds import threshold_of
from dropbayes.runtime.validation import Array, finite_tensor, matching_tensors

__all__ = ["conformal_interval", "conformal_quantile_interval", "quantile_residuals", "standardised_residuals"]


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
    if not bool((tensors[1] > 0).all()):
        raise ValueError(f"`std` must be positive; got {tensors[1].min().item():.3g}.")
    return tensors


def conformal_interval(
    mean: Array,
    std: Array | float,
    *,
    calibration_scores: Array | None = None,
    level: float | None = None,
    threshold: Array | float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The split-conformal interval $\mu \pm q\,\sigma$, which holds the target with probability at least `level`.

    The guarantee is over new rows *and* held-out sets, for exchangeable rows; it holds for any model, on average over
    rows and not for each row. A better uncertainty makes the interval narrower, not more valid.

    Args:
        mean: Predictive mean of the new rows.
        std: Their predictive standard deviation (1 for intervals of one width).
        calibration_scores: `standardised_residuals` of held-out rows.
        level: The coverage to guarantee.
        threshold: The threshold $q$, instead of scores and level: a number or `[row]`, from `conformal_threshold` with
            weights or from `group_thresholds`.

    Returns:
        The lower and the upper ends.

    Examples:
        >>> scores = torch.arange(1.0, 20.0) / 10  # |y - mean| / std of 19 held-out rows
        >>> conformal_interval(torch.tensor([5.0]), torch.tensor([2.0]), calibration_scores=scores, level=0.9)
        (tensor([1.4000]), tensor([8.6000]))
    """
    centre, deviation = _moments({"mean": mean}, std)
    half = _per_row(threshold_of(calibration_scores, level, threshold), centre) * deviation
    return centre - half, centre + half


def quantile_residuals(lower: Array, upper: Array, y: Array) -> Tensor:
    r"""The distance of the target outside its predicted quantiles, $\max(l - y,\; y - u)$; negative inside.

    Examples:
        >>> quantile_residuals(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.5]))
        tensor([ 2.0000, -0.5000])
    """
    low, high, outcome = matching_tensors({"lower": lower, "upper": upper, "y": y})
    return torch.maximum(low - outcome, outcome - high)


def conformal_quantile_interval(
    lower: Array,
    upper: Array,
    *,
    calibration_scores: Array | None = None,
    level: float | None = None,
    threshold: Array | float | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The conformalised quantile interval $[l - q,\; u + q]$ [Romano et al. 2019].

    Predicted quantiles (of the mixture of draws, or of a quantile network) are widened by one number, or narrowed when
    they were too wide. Unlike $\mu \pm q\sigma$, they follow skewed noise.

    Args:
        lower: The predicted lower quantile of the new rows, `[row]`.
        upper: Their predicted upper quantile.
        calibration_scores: `quantile_residuals` of held-out rows.
        level: The coverage to guarantee.
        threshold: The threshold, instead of scores and level, as in `conformal_interval`.

    Returns:
        The lower and the upper ends; where a narrowed interval would be empty, both are its middle.

    Examples:
        >>> scores = torch.linspace(-1, 1, 19)
        >>> conformal_quantile_interval(torch.tensor([0.0]), torch.tensor([4.0]), calibration_scores=scores, level=0.9)
        (tensor([-0.8889]), tensor([4.8889]))
    """
    low, high = matching_tensors({"lower": lower, "upper": upper})
    if bool((low > high).any()):
        raise ValueError(f"`lower` must not exceed `upper`; it does in {int((low > high).sum())} rows.")
    margin = _per_row(threshold_of(calibration_scores, level, threshold), low)
    margin = torch.maximum(margin, (low - high) / 2)  # no interval has a negative width
    return low - margin, high + margin


def _per_row(threshold: Tensor, like: Tensor) -> Tensor:
    if threshold.dim() and threshold.shape != like.shape[:1]:
        raise ValueError(
            f"`threshold` must be a number or [row]; got shape {tuple(threshold.shape)} for {len(like)} rows."
        )
    spread = threshold.to(like.device, torch.promote_types(threshold.dtype, like.dtype))
    return spread.reshape(*threshold.shape, *(1,) * (like.dim() - 1)) if threshold.dim() else spread
