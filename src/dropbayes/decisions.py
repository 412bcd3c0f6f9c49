r"""Actions taken on uncertainty: defer to a person, cascade to a costlier network, explore, weigh costs.

[GG16, section Applications] names them: pass uncertain inputs to a human, use a slow network only where a fast one is
unsure, explore by Thompson sampling. All take tensors or plain callables; draws are axis 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, float_tensor

# ------------------------------------------------------------------------------------------------- defer


@dataclass(frozen=True)
class DeferralRule:
    """Defer the rows more uncertain than a threshold.

    Args:
        threshold: Rows with a larger uncertainty are deferred.
        guarantee: What is promised, under which assumption.
    """

    threshold: float
    guarantee: str

    def defers(self, uncertainty: Array) -> Tensor:
        """True for the rows to hand over, shaped like `uncertainty`; a NaN uncertainty is handed over."""
        return ~(float_tensor(uncertainty).double() <= self.threshold)


def deferral_for_workload(uncertainty: Array, *, fraction: float) -> DeferralRule:
    r"""The rule that hands over a new row with probability at most `fraction`.

    The threshold is the $\lceil (1 - \text{fraction})(n+1) \rceil$-th smallest of $n$ held-out uncertainties. For new
    rows exchangeable with them the probability of deferral is at most `fraction`, and without ties above
    $\text{fraction} - 1/(n+1)$.

    Args:
        uncertainty: Uncertainties of held-out rows, `[row]`.
        fraction: The share of the work a person can take.

    Examples:
        >>> rule = deferral_for_workload(torch.arange(99.0), fraction=0.1)
        >>> rule.threshold, rule.defers(torch.tensor([50.0, 95.0]))
        (89.0, tensor([False,  True]))
    """
    scores = _held_out(uncertainty)
    if not 0 <= fraction <= 1:
        raise ValueError(f"`fraction` must lie between 0 and 1; got {fraction!r}.")
    rank = math.ceil((1 - fraction) * (len(scores) + 1) - 1e-9)  # 1e-9 forgives the rounding of the product
    if rank > len(scores):
        threshold = math.inf
    else:
        threshold = scores.kthvalue(rank).values.item() if rank > 0 else -math.inf
    return DeferralRule(
        threshold,
        f"A new row exchangeable with the {len(scores)} held-out rows is deferred with probability at most "
        f"{fraction:g}.",
    )


def deferral_for_error(
    uncertainty: Array, wrong: Array, *, target: float, confidence: float = 0.95, n_candidates: int = 20
) -> DeferralRule:
    r"""The rule that defers least while the error rate of the rows *kept* is certified to be at most `target`.

    Candidate thresholds are the $k$-th smallest held-out uncertainties for $k = \lceil jn/J \rceil$, $j = 1, \dots, J$
    (the last keeps everything). Given the threshold, the rows below it are independent, so the number of errors among
    those $m$ is binomial; a candidate is certified when $P(\mathrm{Bin}(m, \text{target}) \le \text{errors}) \le
    (1 - \text{confidence})/J$, and the largest certified one is taken. With probability at least `confidence` over the
    held-out set, new rows from the same distribution that are kept are wrong at a rate of at most `target`.

    Args:
        uncertainty: Uncertainties of held-out rows the network was not fitted to, `[row]`.
        wrong: True (or 1) where the prediction was wrong, `[row]` (for a regression: off by more than you can accept).
        target: The error rate to stay below among the rows kept.
        confidence: The probability that the promise holds.
        n_candidates: The number $J$ of thresholds tried; more give a finer choice, each at a stricter level.

    Returns:
        The rule. Where nothing can be certified it defers every row, and its `guarantee` says so.

    Examples:
        >>> uncertainty = torch.linspace(0, 1, 1000)
        >>> rule = deferral_for_error(uncertainty, uncertainty > 0.8, target=0.02)
        >>> round(rule.threshold, 2)
        0.8
    """
    scores = _held_out(uncertainty)
    errors = float_tensor(wrong).double().flatten().cpu()
    if errors.shape != scores.shape or not bool(((errors == 0) | (errors == 1)).all()):
        raise ValueError(f"`wrong` must hold 0 or 1 for each of the {len(scores)} rows; got {tuple(errors.shape)}.")
    if not (0 < target < 1 and 0 < confidence < 1):
        raise ValueError(
            f"`target` and `confidence` must lie strictly between 0 and 1; got {target!r}, {confidence!r}."
        )
    import scipy.stats

    for step in range(n_candidates, 0, -1):
        rank = math.ceil(step * len(scores) / n_candidates)
        cut = math.inf if step == n_candidates else scores.kthvalue(rank).values.item()
        kept = scores < cut
        tail = scipy.stats.binom.cdf(int(errors[kept].sum()), int(kept.sum()), target)
        if tail <= (1 - confidence) / n_candidates:
            return DeferralRule(
                math.nextafter(cut, -math.inf),  # keeps exactly the rows strictly below the cut, which were counted
                f"With probability at least {confidence:g} over the {len(scores)} held-out rows, the error rate among "
                f"new rows kept is at most {target:g} (rows independent, from one distribution).",
            )
    return DeferralRule(
        -math.inf,
        f"No threshold could be certified for an error rate of {target:g} with {len(scores)} held-out rows: every row "
        "is deferred.",
    )


def _held_out(uncertainty: Array) -> Tensor:
    scores = float_tensor(uncertainty).detach().double().cpu()
    if scores.dim() != 1 or len(scores) == 0 or scores.isnan().any():
        raise ValueError(f"`uncertainty` must be a non-empty [row] without NaN; got shape {tuple(scores.shape)}.")
    return scores


# ----------------------------------------------------------------------------------------------- cascade


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
        threshold: Rows more uncertain than it are escalated, `[point]`, falling.
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

        An optimum picked on these rows: on new rows the loss will be close, not guaranteed.
        """
        good = (self.loss <= self.loss[-1] + tolerance + 1e-12).nonzero().squeeze(1)
        return self[int(good[self.cost[good].argmin()])]


def cascade_frontier(
    uncertainty: Array, cheap_loss: Array, costly_loss: Array, *, cheap_cost: float, costly_cost: float
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

    Examples:
        >>> frontier = cascade_frontier(
        ...     torch.tensor([0.25, 0.5, 0.9, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4),
        ...     cheap_cost=1, costly_cost=10)
        >>> frontier.cheapest_within(0.0)
        CascadePoint(threshold=0.5, escalated=0.5, cost=6.0, loss=0.0)
    """
    scores = _held_out(uncertainty)
    cheap, costly = (float_tensor(loss).detach().double().cpu() for loss in (cheap_loss, costly_loss))
    if not scores.shape == cheap.shape == costly.shape:
        raise ValueError(
            "`uncertainty`, `cheap_loss` and `costly_loss` must all be [row]; got "
            f"{tuple(scores.shape)}, {tuple(cheap.shape)} and {tuple(costly.shape)}."
        )
    levels, group, sizes = scores.unique(return_inverse=True, return_counts=True)
    nothing = torch.zeros(1, dtype=torch.float64)

    def sums_up_to_level(values: Tensor) -> Tensor:
        return torch.cat([nothing, torch.zeros(len(levels), dtype=torch.float64).index_add(0, group, values).cumsum(0)])

    kept = torch.cat([nothing, sizes.double().cumsum(0)])
    loss = (sums_up_to_level(cheap) + costly.sum() - sums_up_to_level(costly)) / len(scores)
    escalated = 1 - kept / len(scores)
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
    x: Tensor,
    cheap: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    costly: Callable[[Tensor], Tensor],
    threshold: float,
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
    output, uncertainty = cheap(x)
    escalated = DeferralRule(threshold, "").defers(uncertainty)
    if escalated.any():
        output = output.clone()
        output[escalated] = costly(x[escalated]).to(output.dtype)
    return CascadePrediction(output, escalated)


# ----------------------------------------------------------------------------------------------- explore


def thompson_action(function_draw: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    r"""Thompson's action $\arg\max_a Q_\omega(s, a)$ for one function $\omega \sim q(\omega)$, a draw of any Q-network.

    Keep one draw while it should act as one opinion (a step, or an episode), then take another: an action is then
    chosen with the probability that it is the best (`action_probabilities`).

    Args:
        function_draw: A deterministic function of states with values of all actions on the last axis (`function_draw`).
        state: States, `[row, ...]`.

    Returns:
        The actions, `[row]`.

    Examples:
        >>> thompson_action(lambda s: torch.stack([s, 1 - s], -1), torch.tensor([0.2, 0.9]))
        tensor([1, 0])
    """
    return function_draw(state).argmax(-1)


def action_probabilities(value_draws: Array) -> Tensor:
    r"""The probability that each action is the best, $P_\omega(a = \arg\max_{a'} Q_\omega(s, a'))$: Thompson's policy.

    Args:
        value_draws: Action values of every draw, `[draw, row, action]`.

    Returns:
        The probabilities, `[row, action]`.

    Examples:
        >>> action_probabilities(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[3.0, 2.0]], [[5.0, 1.0]]]))
        tensor([[0.7500, 0.2500]])
    """
    values = float_tensor(value_draws)
    best = torch.nn.functional.one_hot(values.argmax(-1), values.shape[-1])
    return best.to(values.dtype).mean(0)


# ----------------------------------------------------------------------------------------- weigh costs


def expected_cost(probabilities: Array, cost: Array) -> Tensor:
    r"""The expected cost of each action, $\sum_c p_c\, \text{cost}_{c a}$.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        cost: The cost of each action where each class is true, `[class, action]`. Add a column for "ask a person".

    Returns:
        The expected costs, `[row, action]`.

    Examples:
        >>> expected_cost(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.0, 1.0], [20.0, 0.0]]))
        tensor([[2.0000, 0.9000]])
    """
    predicted, costs = float_tensor(probabilities), float_tensor(cost)
    if predicted.dim() != 2 or costs.dim() != 2 or predicted.shape[1] != costs.shape[0]:
        raise ValueError(
            "`probabilities` must be [row, class] and `cost` [class, action]; got "
            f"{tuple(predicted.shape)} and {tuple(costs.shape)}."
        )
    return predicted @ costs.to(predicted)


def least_cost_action(probabilities: Array, cost: Array) -> Tensor:
    r"""The action of least expected cost, $\arg\min_a \sum_c p_c\, \text{cost}_{c a}$, `[row]`.

    Optimal for the given costs when the probabilities are calibrated; recalibrate first (`calibration.temperature`).

    Examples:
        >>> least_cost_action(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.0, 1.0], [20.0, 0.0]]))
        tensor([1])
    """
    return expected_cost(probabilities, cost).argmin(-1)
