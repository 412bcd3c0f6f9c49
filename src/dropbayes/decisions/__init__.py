r"""Decisions under uncertainty: what to hand over, to answer at a higher price, to do, and to query next.

[GG16, section Applications] names them: pass uncertain inputs to a human, use a slow network only where a fast one is
unsure, explore by Thompson sampling. All take tensors or plain callables; draws are axis 0. `dropbayes.acquisition`
chooses the rows to query, in active learning and in Bayesian optimisation.
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dropbayes.runtime import validation
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import Array, to_tensor
from dropbayes.scores.averages import cumulative_weights, weighted_quantile

__all__ = [
    "CascadeFrontier",
    "CascadePoint",
    "DeferralRule",
    "action_probabilities",
    "cascade",
    "cascade_frontier",
    "deferral_for_risk",
    "deferral_for_workload",
    "expected_cost",
    "least_cost_action",
    "thompson_action",
]


@dataclass(frozen=True)
class DeferralRule:
    """Defer the rows more uncertain than a threshold."""

    threshold: float
    guarantee: str  # in words, with its assumptions

    def defers(self, uncertainty: Array) -> Tensor:
        """True for the rows to hand over, shaped like `uncertainty`; a NaN uncertainty is handed over."""
        return ~(_levels(validation.float_tensor(uncertainty)) <= self.threshold)


def _levels(uncertainty: Tensor) -> Tensor:
    """Uncertainties in double precision, of which even -∞ lies above the threshold -∞, that of deferring every row."""
    return uncertainty.double().clamp_min(torch.finfo(torch.float64).min)


def deferral_for_workload(uncertainty: Array, *, fraction: float, sample_weight: Array | None = None) -> DeferralRule:
    r"""The rule that hands over a new row with probability at most `fraction`.

    The threshold is the $\lceil (1 - \text{fraction})(n+1) \rceil$-th smallest of $n$ held-out uncertainties `[row]`,
    of which a row of weight 2 counts as two. For new rows exchangeable with them the probability of deferral is at most
    `fraction`, the share of the work a person can take, and without ties above $\text{fraction} - 1/(n+1)$.

    Examples:
        >>> rule = deferral_for_workload(torch.arange(99.0), fraction=0.1)
        >>> rule.threshold, rule.defers(torch.tensor([50.0, 95.0]))
        (89.0, tensor([False,  True]))
    """
    scores = _held_out("uncertainty", uncertainty, infinite=True)
    validation.check_probability("fraction", fraction, closed=True)
    weight = validation.row_weights(sample_weight, len(scores), like=scores)
    threshold = weighted_quantile(scores, weight, (1 - fraction) * (weight.sum() + 1))
    row = f"A new row exchangeable with the {len(scores)} held-out rows"
    guarantee = f"{row} is deferred with probability at most {fraction:g}."
    return DeferralRule(float(threshold) if fraction < 1 else -math.inf, guarantee)


@on_cpu
def deferral_for_risk(
    uncertainty: Array,
    loss: Array,
    *,
    target: float,
    largest_loss: float = 1.0,
    confidence: float = 0.95,
    n_candidates: int = 100,
    seed: int = 0,
    sample_weight: Array | None = None,
) -> DeferralRule:
    r"""The rule that defers least while the mean loss of the rows *kept* is certified to be at most `target`.

    With probability at least `confidence` over the held-out rows, the mean loss of new rows from the same distribution
    that are kept is at most `target`. Where nothing can be certified the rule defers every row.

    Learn then Test by fixed sequences [Angelopoulos et al. 2021]. A tenth of the held-out rows sets the candidate
    thresholds, by their uncertainties alone. On the others three sequences of tests run upward, from the thresholds
    that keep two and four times the fewest rows that can certify the target, and from the lowest; each has a third of
    the level $1 - \text{confidence}$ and ends at its first failure. The p-value of the $m$ rows below a threshold is
    the binomial $P(\mathrm{Bin}(m, \text{target}) \le \sum \ell)$ for losses of 0 or 1, else Hoeffding's and Bentkus's.

    Args:
        uncertainty: Uncertainties of held-out rows the network was not fitted to, `[row]`.
        loss: The loss of each row, from 0 to `largest_loss`, `[row]`: whether it was wrong (then its mean is the error
            rate), a cost, a missed share.
        target: The mean loss to stay below among the rows kept.
        largest_loss: The largest possible loss.
        confidence: The probability that the guarantee holds.
        n_candidates: The number of thresholds to choose from; testing in sequence needs no correction for their number.
        seed: The seed of the split of the held-out rows.
        sample_weight: The number of independent rows that each row stands for, an integer.

    Examples:
        >>> uncertainty = torch.linspace(0, 1, 2000)
        >>> rule = deferral_for_risk(uncertainty, uncertainty > 0.8, target=0.02)  # at most 2 % wrong
        >>> 0.75 < rule.threshold < 0.82
        True
        >>> rule = deferral_for_risk(uncertainty, uncertainty.square(), target=0.1)  # x² averages 0.1 up to x = 0.55
        >>> 0.45 < rule.threshold < 0.55
        True
    """
    scores = _held_out("uncertainty", uncertainty, infinite=True)
    losses = _held_out("loss", loss, n_rows=len(scores))
    validation.check_positive("largest_loss", largest_loss)
    validation.check_values("loss", losses, at_most=largest_loss)
    validation.check_positive("target", target)
    validation.check_probability("target / largest_loss", share := float(target) / float(largest_loss))
    validation.check_probability("confidence", confidence)
    validation.check_count("n_candidates", n_candidates)
    scores, losses = validation.repeated_rows(sample_weight, scores, losses)
    order = torch.randperm(len(scores), generator=validation.random_generator(seed))
    pilot, rest = order[: len(scores) // 10], order[len(scores) // 10 :]
    kept, unit = scores[rest], losses[rest] / largest_loss
    levels = torch.arange(1, n_candidates, dtype=torch.float64) / n_candidates
    thresholds = [*(scores[pilot].quantile(levels).tolist() if len(pilot) else []), math.inf]
    starts = (2.0, 4.0, math.inf)  # of the sequences of tests, in rows that just certify the target
    level = (1 - confidence) / len(starts)
    fewest = math.log(level) / math.log1p(-share)  # rows without a loss that just certify the target
    certified, loss_name = None, "error rate" if losses.unique().tolist() in ([0], [1], [0, 1]) else "mean loss"
    for start in starts:
        first = math.ceil(min(1.0, start * fewest / max(1, len(rest))) * len(thresholds)) - 1
        for threshold in thresholds[max(0, first) :]:
            if _p_value(unit[kept <= threshold], share) > level:
                break
            certified = threshold if certified is None else max(certified, threshold)
    rows = f"{len(scores)} held-out rows"
    if certified is None:
        failed = f"No threshold could be certified to keep the {loss_name} at {target:g} with {rows}"
        return DeferralRule(-math.inf, f"{failed}: every row is deferred.")
    chance = f"With probability at least {confidence:g} over the {rows}"
    bound = f"the {loss_name} among new rows kept is at most {target:g} (rows independent, from one distribution)"
    return DeferralRule(certified, f"{chance}, {bound}.")


def _p_value(losses: Tensor, target: float) -> float:
    """The p-value of "the mean loss of rows like these exceeds the target"."""
    import scipy.stats

    n_kept = len(losses)
    total, mean = float(losses.sum()), min(float(losses.mean()), target)
    if bool(((losses == 0) | (losses == 1)).all()):  # as those of no row are, whose p-value is 1
        return float(scipy.stats.binom.cdf(round(total), n_kept, target))
    # Hoeffding's bound in terms of the relative entropy, and Bentkus's in terms of the binomial.
    entropy = (1 - mean) * math.log((1 - mean) / (1 - target)) + (mean * math.log(mean / target) if mean else 0.0)
    bentkus = math.e * float(scipy.stats.binom.cdf(math.ceil(total - 1e-9), n_kept, target))
    return min(1.0, math.exp(-n_kept * entropy), bentkus)


def _held_out(name: str, values: Array, *, n_rows: int | None = None, infinite: bool = False) -> Tensor:
    """The values of held-out rows, `[row]` in double precision."""
    return _levels(validation.row_values(name, values, n_rows=n_rows, infinite=infinite).detach()).cpu()


@dataclass(frozen=True)
class CascadePoint:
    """One setting of a cascade: the share of rows `escalated` above the threshold, the mean cost and loss per row."""

    threshold: float
    escalated: float
    cost: float
    loss: float


@dataclass(frozen=True)
class CascadeFrontier:
    """A `CascadePoint` for every threshold, its fields `[point]`: from escalating nothing to escalating everything."""

    threshold: Tensor
    escalated: Tensor
    cost: Tensor
    loss: Tensor

    def __getitem__(self, index: int) -> CascadePoint:
        return CascadePoint(*(float(values[index]) for values in vars(self).values()))

    def cheapest_within(self, tolerance: float) -> CascadePoint:
        """The cheapest point whose loss is at most the costly network's plus `tolerance`.

        The point is selected on these rows: on new rows its loss is similar, without a guarantee.
        """
        if not (hasattr(tolerance, "__float__") and tolerance >= 0):
            raise ValueError(f"`tolerance` must be zero or more; got {tolerance!r}.")
        good = (self.loss <= self.loss[-1] + tolerance + 1e-12).nonzero().squeeze(1)
        return self[int(good[self.cost[good].argmin()])]


@on_cpu
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
    the loss $\mathbb E[\ell_\text{cheap} \mathbb 1(u \le \theta) + \ell_\text{costly} \mathbb 1(u > \theta)]$, from the
    cheap network's uncertainty and both losses (1 for an error) on held-out rows, `[row]`. Costs are those of one
    answer (multiplications, milliseconds, ...).

    Examples:
        >>> frontier = cascade_frontier(
        ...     torch.tensor([0.25, 0.5, 0.9, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4),
        ...     cheap_cost=1, costly_cost=10)
        >>> frontier.cheapest_within(0.0)
        CascadePoint(threshold=0.5, escalated=0.5, cost=6.0, loss=0.0)
    """
    scores = _held_out("uncertainty", uncertainty, infinite=True)
    cheap = _held_out("cheap_loss", cheap_loss, n_rows=len(scores))
    costly = _held_out("costly_loss", costly_loss, n_rows=len(scores))
    validation.check_positive("cheap_cost", cheap_cost, allow_zero=True)
    validation.check_positive("costly_cost", costly_cost, allow_zero=True)
    weight = validation.row_weights(sample_weight, len(scores), like=scores)
    levels = scores.unique()
    start = torch.zeros(1, dtype=torch.float64)  # of escalating everything

    def kept_sums(values: Tensor) -> Tensor:
        return torch.cat([start, cumulative_weights(scores, weight * values, levels)[1]])

    loss = (kept_sums(cheap) + (weight * costly).sum() - kept_sums(costly)) / weight.sum()
    escalated = 1 - kept_sums(torch.ones_like(cheap)) / weight.sum()
    points = (torch.cat([start - math.inf, levels]), escalated, cheap_cost + escalated * costly_cost, loss)
    return CascadeFrontier(*(values.flip(0) for values in points))


def cascade(
    x: Tensor, cheap: Callable[[Tensor], tuple[Tensor, Tensor]], *, costly: Callable[[Tensor], Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """The cheap network's output, replaced by the costly one's on the rows where the cheap one is unsure, and those.

    `cheap` is a function of rows to (output, uncertainty `[row]`), `costly` to outputs of the same shape: it sees the
    rows more uncertain than the `threshold` only (`CascadeFrontier.cheapest_within`).

    Examples:
        >>> cheap = lambda x: (torch.zeros(len(x)), x.abs())
        >>> cascade(torch.tensor([0.1, 5.0]), cheap, costly=lambda x: 10 * x, threshold=1.0)
        (tensor([ 0., 50.]), tensor([False,  True]))
    """
    if not isinstance(threshold, numbers.Real) or math.isnan(threshold):
        raise ValueError(f"`threshold` must be a number; got {threshold!r}.")
    validation.check_type("x", x, (Tensor, np.ndarray), "be a tensor or an array of rows")
    answer = cheap(x)
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise ValueError(f"`cheap` must return an uncertainty [row] beside its output; got {type(answer).__name__}.")
    output, escalated = to_tensor(answer[0], name="cheap"), DeferralRule(float(threshold), "").defers(answer[1])
    if escalated.dim() != 1 or escalated.shape != output.shape[:1]:
        got = f"{tuple(escalated.shape)} beside {tuple(output.shape)}"
        raise ValueError(f"`cheap` must return an uncertainty [row] beside its output; got {got}.")
    if escalated.any():
        answers = to_tensor(costly(x[escalated]), name="costly")
        if answers.shape != output[escalated].shape or not torch.can_cast(answers.dtype, output.dtype):
            got = f"{tuple(answers.shape)} of {answers.dtype} for {tuple(output[escalated].shape)} of {output.dtype}"
            raise ValueError(f"`costly` must return outputs of the cheap one's shape and kind; got {got}.")
        output = output.index_put((escalated,), answers.to(output.dtype))
    return output, escalated


def thompson_action(function_draw: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    r"""Thompson's action $\arg\max_a Q_\omega(s, a)$ for one function $\omega \sim q(\omega)$, a draw of any Q-network.

    Use one draw (`function_draw`), from states `[row, ...]` to the values of all actions on the last axis, for a step
    or an episode, then take another: an action `[row]` is then chosen with the probability that it is the best
    (`action_probabilities`). Of actions of equal value it is the first, as in the functions below.

    Examples:
        >>> thompson_action(lambda s: torch.stack([s, 1 - s], -1), torch.tensor([0.2, 0.9]))
        tensor([1, 0])
    """
    return validation.finite_tensor("function_draw", function_draw(state), axes="[row, action]").argmax(-1)


def action_probabilities(value_draws: Array) -> Tensor:
    r"""The probability that each action is the best, $P_\omega(a = \arg\max_{a'} Q_\omega(s, a'))$: Thompson's policy.

    From the action values of every draw, `[draw, row, action]`, the probabilities `[row, action]`.

    Examples:
        >>> action_probabilities(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[3.0, 2.0]], [[5.0, 1.0]]]))
        tensor([[0.7500, 0.2500]])
    """
    values = validation.finite_tensor("value_draws", value_draws, axes="[draw, row, action]")
    return torch.nn.functional.one_hot(values.argmax(-1), values.shape[-1]).to(values.dtype).mean(0)


def expected_cost(probabilities: Array, cost: Array) -> Tensor:
    r"""The expected cost of each action, $\sum_c p_c\, \text{cost}_{c a}$, `[row, action]`.

    The `cost` is that of each action where each class is true, `[class, action]`. Add a column for "ask a person".

    Examples:
        >>> expected_cost(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.0, 1.0], [20.0, 0.0]]))
        tensor([[2.0000, 0.9000]])
    """
    predicted = validation.class_probabilities("probabilities", probabilities)
    costs = validation.finite_tensor("cost", cost, axes="[class, action]")
    if (n_classes := predicted.shape[1]) != len(costs):
        raise ValueError(f"`cost` must have a row for each of the {n_classes} classes; got shape {tuple(costs.shape)}.")
    return predicted @ costs.to(predicted)


def least_cost_action(probabilities: Array, cost: Array) -> Tensor:
    r"""The (first) action of least expected cost, $\arg\min_a \sum_c p_c\, \text{cost}_{c a}$, `[row]`.

    Optimal for the given costs when the probabilities are calibrated; recalibrate first (`calibration.temperature`).

    Examples:
        >>> least_cost_action(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.0, 1.0], [20.0, 0.0]]))
        tensor([1])
    """
    return expected_cost(probabilities, cost).argmin(-1)
