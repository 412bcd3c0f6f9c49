r"""Deferral: hand the uncertain rows to a person, within a workload or below a certified loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import (
    Array,
    check_count,
    check_positive,
    check_probability,
    check_values,
    events,
    float_tensor,
    random_generator,
    row_counts,
    row_values,
    row_weights,
)
from dropbayes.scores.averages import weighted_quantile

_PILOT, _STARTS = 10, (2.0, 4.0, math.inf)  # one row in ten sets the thresholds; the starts of the sequences of tests


@dataclass(frozen=True)
class DeferralRule:
    """Defer the rows more uncertain than a threshold.

    Args:
        threshold: Rows with a larger uncertainty are deferred.
        guarantee: The guarantee in words, with its assumptions.
    """

    threshold: float
    guarantee: str

    def defers(self, uncertainty: Array) -> Tensor:
        """True for the rows to hand over, shaped like `uncertainty`; a NaN uncertainty is handed over."""
        return ~(float_tensor(uncertainty).double() <= self.threshold)


def deferral_for_workload(uncertainty: Array, *, fraction: float, sample_weight: Array | None = None) -> DeferralRule:
    r"""The rule that hands over a new row with probability at most `fraction`.

    The threshold is the $\lceil (1 - \text{fraction})(n+1) \rceil$-th smallest of $n$ held-out uncertainties. For new
    rows exchangeable with them the probability of deferral is at most `fraction`, and without ties above
    $\text{fraction} - 1/(n+1)$.

    Args:
        uncertainty: Uncertainties of held-out rows, `[row]`.
        fraction: The share of the work a person can take.
        sample_weight: The weight of each held-out row; a new row has weight 1.

    Examples:
        >>> rule = deferral_for_workload(torch.arange(99.0), fraction=0.1)
        >>> rule.threshold, rule.defers(torch.tensor([50.0, 95.0]))
        (89.0, tensor([False,  True]))
    """
    scores = held_out_uncertainty(uncertainty)
    check_probability("fraction", fraction, closed=True)
    weight = row_weights(sample_weight, len(scores), like=scores)
    threshold = weighted_quantile(scores, weight, (1 - fraction) * (weight.sum() + 1))
    return DeferralRule(
        float(threshold) if fraction < 1 else -math.inf,
        f"A new row exchangeable with the {len(scores)} held-out rows is deferred with probability at most "
        f"{fraction:g}.",
    )


def deferral_for_error(
    uncertainty: Array,
    wrong: Array,
    *,
    target: float,
    confidence: float = 0.95,
    n_candidates: int = 100,
    seed: int = 0,
    sample_weight: Array | None = None,
) -> DeferralRule:
    r"""The rule that defers least while the error rate of the rows *kept* is certified to be at most `target`.

    `deferral_for_risk` with a loss of 0 or 1, whose p-value is the exact binomial one.

    Args:
        uncertainty: Uncertainties of held-out rows the network was not fitted to, `[row]`.
        wrong: True (or 1) where the prediction was wrong, `[row]` (for a regression: off by more than you can accept).
        target: The error rate to stay below among the rows kept.
        confidence: The probability that the guarantee holds.
        n_candidates: The number of thresholds to choose from.
        seed: The seed of the split of the held-out rows.
        sample_weight: The number of independent rows that each row stands for, an integer.

    Returns:
        The rule. Where nothing can be certified it defers every row, and its `guarantee` says so.

    Examples:
        >>> uncertainty = torch.linspace(0, 1, 1000)
        >>> rule = deferral_for_error(uncertainty, uncertainty > 0.8, target=0.02)
        >>> 0.75 < rule.threshold < 0.82
        True
    """
    scores = held_out_uncertainty(uncertainty)
    errors = events("wrong", wrong, n_rows=len(scores)).double().cpu()
    return deferral_for_risk(
        scores,
        errors,
        target=target,
        confidence=confidence,
        n_candidates=n_candidates,
        seed=seed,
        sample_weight=sample_weight,
        loss_name="error rate",
    )


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
    loss_name: str = "mean loss",
) -> DeferralRule:
    r"""The rule that defers least while the mean loss of the rows *kept* is certified to be at most `target`.

    Learn then Test by fixed sequences [Angelopoulos et al. 2021]. A tenth of the held-out rows sets the candidate
    thresholds, by their uncertainties alone. On the other rows three sequences of tests run upward. Two start at the
    thresholds that keep two and four times the fewest rows that can certify the target, the third at the lowest;
    each test has a third of the level $1 - \text{confidence}$, and a sequence ends at its first failure. Given a
    threshold, the $m$ rows below it are independent, and the p-value of "the mean loss exceeds the target" is the
    binomial $P(\mathrm{Bin}(m, \text{target}) \le \sum \ell)$ for losses of 0 or 1, that of Hoeffding and Bentkus for
    other losses. With probability at least `confidence` over the held-out rows, the mean loss of new rows from the same
    distribution that are kept is at most `target`.

    Args:
        uncertainty: Uncertainties of held-out rows the network was not fitted to, `[row]`.
        loss: The loss of each row, from 0 to `largest_loss`, `[row]`: an error, a cost, a missed share.
        target: The mean loss to stay below among the rows kept.
        largest_loss: The largest possible loss.
        confidence: The probability that the guarantee holds.
        n_candidates: The number of thresholds to choose from; testing in sequence needs no correction for their number.
        seed: The seed of the split of the held-out rows.
        sample_weight: The number of independent rows that each row stands for, an integer.
        loss_name: The name of the loss in the guarantee.

    Returns:
        The rule. Where nothing can be certified it defers every row, and its `guarantee` says so.

    Examples:
        >>> uncertainty = torch.linspace(0, 1, 2000)
        >>> rule = deferral_for_risk(uncertainty, uncertainty.square(), target=0.1)  # x² averages 0.1 up to x = 0.55
        >>> 0.45 < rule.threshold < 0.55
        True
    """
    scores = held_out_uncertainty(uncertainty)
    losses = row_values("loss", loss, n_rows=len(scores)).detach().double().cpu()
    check_positive("largest_loss", largest_loss)
    check_values("loss", losses, at_most=largest_loss)
    check_probability("target", target / largest_loss if isinstance(target, (int, float)) else target)
    check_probability("confidence", confidence)
    check_count("n_candidates", n_candidates)
    counts = row_counts(sample_weight, len(scores), like=scores)
    scores, losses = scores.repeat_interleave(counts), losses.repeat_interleave(counts)
    share, unit = target / largest_loss, losses / largest_loss
    order = torch.randperm(len(scores), generator=random_generator(seed))
    pilot, rest = order[: len(scores) // _PILOT], order[len(scores) // _PILOT :]
    levels = torch.arange(1, n_candidates, dtype=torch.float64) / n_candidates
    thresholds = [*(scores[pilot].quantile(levels).tolist() if len(pilot) else []), math.inf]
    level = (1 - confidence) / len(_STARTS)
    fewest = math.log(level) / math.log1p(-share)  # rows without a loss that just certify the target
    certified = None
    for start in _STARTS:
        first = math.ceil(min(1.0, start * fewest / max(1, len(rest))) * len(thresholds)) - 1
        for threshold in thresholds[max(0, first) :]:
            if _p_value(unit, scores, rest, threshold, share) > level:
                break
            certified = threshold if certified is None else max(certified, threshold)
    if certified is None:
        return DeferralRule(
            -math.inf,
            f"No threshold could be certified to keep the {loss_name} at {target:g} with {len(scores)} held-out rows: "
            "every row is deferred.",
        )
    return DeferralRule(
        certified,
        f"With probability at least {confidence:g} over the {len(scores)} held-out rows, the {loss_name} among new "
        f"rows kept is at most {target:g} (rows independent, from one distribution).",
    )


def _p_value(losses: Tensor, scores: Tensor, rows: Tensor, threshold: float, target: float) -> float:
    """The p-value of "the mean loss of the rows at most as uncertain as the threshold exceeds the target"."""
    import scipy.stats

    kept_losses = losses[rows][scores[rows] <= threshold]
    n_kept = len(kept_losses)
    if not n_kept:
        return 1.0
    total, mean = float(kept_losses.sum()), min(float(kept_losses.mean()), target)
    if bool(((kept_losses == 0) | (kept_losses == 1)).all()):
        return float(scipy.stats.binom.cdf(round(total), n_kept, target))
    # Hoeffding's bound in terms of the relative entropy, and Bentkus's in terms of the binomial.
    entropy = (1 - mean) * math.log((1 - mean) / (1 - target)) + (mean * math.log(mean / target) if mean else 0.0)
    bentkus = math.e * float(scipy.stats.binom.cdf(math.ceil(total - 1e-9), n_kept, target))
    return min(1.0, math.exp(-n_kept * entropy), bentkus)


def held_out_uncertainty(uncertainty: Array) -> Tensor:
    """The uncertainties of held-out rows, `[row]` in double precision; they may be infinite."""
    return row_values("uncertainty", uncertainty, infinite=True).detach().double().cpu()
