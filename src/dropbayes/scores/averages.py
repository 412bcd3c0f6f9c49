"""Averages over rows, in which a row of weight 2 counts as two, and their standard errors."""

from __future__ import annotations

from torch import Tensor

from dropbayes.runtime.validation import Array, row_weights

__all__ = ["standard_error", "weighted_mean"]


def weighted_mean(values: Tensor, sample_weight: Array | None) -> Tensor:
    """The mean over rows and all further axes, each row counted by its weight.

    Examples:
        >>> import torch
        >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]))
        tensor(2.)
    """
    if sample_weight is None:
        return values.mean()
    weight = row_weights(sample_weight, len(values), like=values)
    per_row = values.reshape(len(values), -1).mean(1).double()
    return ((per_row * weight).sum() / weight.sum()).to(values.dtype)


def standard_error(values: Tensor) -> Tensor:
    r"""The standard error $s / \sqrt N$ of the mean of independent rows of equal weight.

    Examples:
        >>> import torch
        >>> standard_error(torch.tensor([1.0, 3.0]))
        tensor(1.)
    """
    return values.std() / len(values) ** 0.5
