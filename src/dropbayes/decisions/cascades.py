r"""Cascades: a cheap network first, the costly one only where it is unsure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.decisions.deferral import DeferralRule, held_out_uncertainty
from dropbayes.runtime.validation import Array, check_positive, row_values, row_weights


@dataclass(frozen=True)
class CascadePoint:
    """One setting of a cascade: escalate rows above `threshold`, at this mean cost and loss per row."""

    threshold: float
    escalated: float
    cost: float
    loss: float


@dataclass(frozen=True)
class CascadeFrontier:
    """The cost and the loss of a cascade at every threshold, from escalating nothing to escalating everything.

    Args:
        threshold: Rows more uncertain than it are escalated, `[point]`, in decreasing order.
        escalated: The share of rows escalated.
        cost: The mean cost per row.
        loss: The mean loss per row.
    """

    threshold: Tensor
    escalated: Tensor
    cost: Tensor
    loss: Tensor

    def __getitem__(self, index: int) -> CascadePoint:
        return CascadePoint(*(float(axis[index]) for axis in (self.threshold, self.escalated, self.cost, self.loss)))

    def cheapest_within(self, tolerance: float) -> CascadePoint:
        """The cheapest point whose loss is at most the costly network's plus `tolerance`.

        The point is selected on these rows: on new rows its loss is similar, without a guarantee.
        """
        good = (self.loss <= self.loss[-1] + tolerance + 1e-12).nonzero().squeeze(1)
        return self[int(good[self.cost[good].argmin()])]


def cascade_frontier(
    uncertainty: Array,
    cheap_loss: Array,
    costly_loss: Array,
    *,
    cheap_cost: float,
    costly_cost: float,
    sample_weight: Array | None = None,
) -> CascadeFrontier:
    r"""The frontier of cost and loss when the costly network answers only where the cheap one is unsure.

    At threshold $\theta$ the cost is $c_\text{cheap} + P(u > \theta)\, c_\text{costly}$ (every row pays for the cheap),
    the loss $\mathbb E[\ell_\text{cheap} \mathbb 1(u \le \theta) + \ell_\text{costly} \mathbb 1(u > \theta)]$.

    Args:
        uncertainty: The cheap network's uncertainty on held-out rows, `[row]`.
        cheap_loss: Its loss (1 for an error), `[row]`.
        costly_loss: The costly network's loss on the same rows, `[row]`.
        cheap_cost: The cost of one cheap answer (multiplications, milliseconds, ...).
        costly_cost: The cost of one costly answer, in the same unit.
        sample_weight: The weight of each row.

    Examples:
        >>> frontier = cascade_frontier(
        ...     torch.tensor([0.25, 0.5, 0.9, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4),
        ...     cheap_cost=1, costly_cost=10)
        >>> frontier.cheapest_within(0.0)
        CascadePoint(threshold=0.5, escalated=0.5, cost=6.0, loss=0.0)
    """
    scores = held_out_uncertainty(uncertainty)
    cheap, costly = (
        row_values(name, loss, n_rows=len(scores)).detach().double().cpu()
        for name, loss in (("cheap_loss", cheap_loss), ("costly_loss", costly_loss))
    )
    for name, cost in (("cheap_cost", cheap_cost), ("costly_cost", costly_cost)):
        check_positive(name, cost, allow_zero=True)
    weight = row_weights(sample_weight, len(scores), like=scores)
    levels, group = scores.unique(return_inverse=True)
    nothing = torch.zeros(1, dtype=torch.float64)

    def sums_up_to_level(values: Tensor) -> Tensor:
        sums = torch.zeros(len(levels), dtype=torch.float64).index_add(0, group, weight * values)
        return torch.cat([nothing, sums.cumsum(0)])

    total = weight.sum()
    loss = (sums_up_to_level(cheap) + (weight * costly).sum() - sums_up_to_level(costly)) / total
    escalated = 1 - sums_up_to_level(torch.ones_like(cheap)) / total
    threshold = torch.cat([torch.full((1,), -math.inf, dtype=torch.float64), levels])
    return CascadeFrontier(
        threshold.flip(0), escalated.flip(0), (cheap_cost + escalated * costly_cost).flip(0), loss.flip(0)
    )


@dataclass(frozen=True)
class CascadePrediction:
    """A cascade's output, and which rows the costly network answered."""

    output: Tensor
    escalated: Tensor


def cascade(
    x: Tensor, cheap: Callable[[Tensor], tuple[Tensor, Tensor]], *, costly: Callable[[Tensor], Tensor], threshold: float
) -> CascadePrediction:
    """The cheap network's output, replaced by the costly one's on the rows where the cheap one is unsure.

    Args:
        x: Input rows.
        cheap: A function of rows that returns (output, uncertainty `[row]`).
        costly: A function of rows that returns an output of the same shape; it sees the uncertain rows only.
        threshold: Rows with a larger uncertainty are escalated (`CascadeFrontier.cheapest_within`).

    Examples:
        >>> cheap = lambda x: (torch.zeros(len(x)), x.abs())
        >>> cascade(torch.tensor([0.1, 5.0]), cheap, costly=lambda x: 10 * x, threshold=1.0).output
        tensor([ 0., 50.])
    """
    if not isinstance(threshold, (int, float)) or math.isnan(threshold):
        raise ValueError(f"`threshold` must be a number; got {threshold!r}.")
    output, uncertainty = cheap(x)
    escalated = DeferralRule(threshold, "").defers(uncertainty)
    if escalated.shape != output.shape[:1]:
        raise ValueError(
            f"`cheap` must return an uncertainty [row] beside its output; got {tuple(escalated.shape)} beside "
            f"{tuple(output.shape)}."
        )
    if escalated.any():
        answers = costly(x[escalated])
        if answers.shape != output[escalated].shape:
            raise ValueError(
                f"`costly` must return outputs of the cheap one's shape; got {tuple(answers.shape)} for "
                f"{tuple(output[escalated].shape)}."
            )
        output = output.clone()
        output[escalated] = answers.to(output.dtype)
    return CascadePrediction(output, escalated)
