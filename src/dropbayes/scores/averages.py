"""Averages: over draws; over rows, weighted (a row of weight 2 counts twice), with quantiles and standard errors."""

import functools
import math

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, row_weights


def weighted_mean(values: Tensor, sample_weight: Array | None) -> Tensor:
    """The mean over rows and all further axes, with rows weighted."""
    if sample_weight is None:
        return values.mean()
    weight = row_weights(sample_weight, len(values), like=values)
    per_row = values.reshape(len(values), -1).mean(1).double()
    return ((per_row * weight).sum() / weight.sum()).to(values.dtype)


def weighted_quantile(values: Tensor, weight: Tensor, mass: Tensor) -> Tensor:
    """The smallest of `[row]` values whose cumulative weight is at least `mass`; infinite if the total is less."""
    ordered, order = values.sort()
    # A tolerance for the rounding of, for example, 100 * 0.9.
    rank = torch.searchsorted(weight[order].cumsum(0), mass * (1 - 1e-12))
    return torch.cat([ordered, ordered.new_full((1,), math.inf)])[rank]


def cumulative_weights(values: Tensor, weight: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of the `[row]` values below each point, of those up to it (ties included), and of all."""
    ordered, order = values.sort()
    mass = torch.cat([weight.new_zeros(1), weight[order].cumsum(0)])
    below, up_to = (mass[torch.searchsorted(ordered, at.contiguous(), right=right)] for right in (False, True))
    return below, up_to, mass[-1]


def standard_error(values: Tensor) -> Tensor:
    r"""The standard error $s / \sqrt N$ of the mean of independent rows, each averaged first; NaN for a single one."""
    n_rows = len(values)
    return values.reshape(n_rows, -1).mean(1).std() / n_rows**0.5 if n_rows > 1 else values.new_tensor(math.nan)


def draw_mean(values: Tensor) -> Tensor:
    """The mean over axis 0, with bits that do not depend on the other rows or on their number."""
    # In a plain reduction over axis 0, or a matrix product, the order of the additions depends on the whole shape.
    return last_axis_mean(values.movedim(0, -1).contiguous())


def last_axis_mean(values: Tensor) -> Tensor:
    """The mean over the last axis of contiguous values, with bits as those of `draw_mean`."""
    chunks = values.split(2**14, -1)  # torch splits longer sums of a single row among threads
    # One after another: the order in which torch adds few numbers depends on the processor and the number of rows.
    return functools.reduce(torch.add, [chunk.sum(-1) for chunk in chunks]) / values.shape[-1]
