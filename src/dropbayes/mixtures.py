r"""Quantiles of the predictive distribution, the mixture of the draws' Gaussians."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["mixture_quantile", "row_mean"]

_SUMMED_DRAWS = 2**14  # torch divides longer sums of a lone row among threads


def mixture_quantile(mean: Tensor, scale: Tensor, level: float) -> Tensor:
    r"""The quantile of an equally weighted mixture of Gaussians over axis 0: the root of its distribution function.

    Found in units of the mixture's own standard deviation, first in single precision, which is four times as fast, then
    from there in double.

    Example:
        >>> one = torch.zeros(3, 1, dtype=torch.float64)
        >>> mixture_quantile(one, one + 1, 0.975)
        tensor([1.9600], dtype=torch.float64)
    """
    shape = mean.shape[1:]
    mean, scale = mean.flatten(1).T.contiguous(), scale.flatten(1).T.contiguous()  # [row, draw]
    centre = row_mean(mean)
    spread = (row_mean((mean - centre[:, None]).square()) + row_mean(scale.square())).sqrt()
    places, widths = (mean - centre[:, None]) / spread[:, None], scale / spread[:, None]
    z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    rough = _root(places.float(), widths.float(), level, torch.full_like(centre, z).float())
    root = _root(places, widths, level, rough.double())
    return (centre + spread * root).view(shape)


def _root(places: Tensor, widths: Tensor, level: float, start: Tensor) -> Tensor:
    """The root by Newton's method, inside a bracket that bisection narrows: a step that would leave it is halved."""
    z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    ends = places + z * widths
    low, high = ends.amin(1), ends.amax(1)  # a mixture's quantile lies between those of its parts
    root = start.clamp(low, high)
    rows = torch.arange(len(root))  # those not yet settled
    near = 1e-7 if root.dtype == torch.float64 else 1e-4  # from here one step, just made, squares the error
    for _ in range(60):
        at = root[rows]
        standard = (at[:, None] - places) / widths
        excess = 0.5 + 0.5 * row_mean(torch.erf(standard * math.sqrt(0.5))) - level
        density = row_mean(torch.exp(-0.5 * standard.square()) / widths) / math.sqrt(2 * math.pi)
        low, high = torch.where(excess < 0, at, low), torch.where(excess < 0, high, at)
        step = at - excess / density
        step = torch.where((step >= low) & (step <= high), step, 0.5 * (low + high))  # also where it is NaN
        root[rows] = step
        moving = ((step - at).abs() > near).nonzero()[:, 0]
        if not len(moving):
            break
        if len(moving) < len(rows):
            rows, low, high = rows[moving], low[moving], high[moving]
            places, widths = places[moving], widths[moving]
    return root


def row_mean(values: Tensor) -> Tensor:
    """The mean of each row of `[row, draw]`, with bits that do not depend on the other rows or on their number.

    A mean over axis 0, or a product, adds up in an order that follows from the shape of the whole array.
    """
    return sum(part.sum(-1) for part in values.contiguous().split(_SUMMED_DRAWS, -1)) / values.shape[-1]
