r"""Conformal intervals without rows to spare: jackknife+ and cross-conformal (CV+)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_probability, finite_tensor, row_values

__all__ = ["cross_conformal_interval"]


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
    if not bool((spread >= 0).all()):
        raise ValueError(f"`residuals` must be absolute, at least 0; got {spread.min().item():.3g}.")
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
