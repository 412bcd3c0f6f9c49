r"""Scores of an uncertainty as a ranking: does it detect errors or out-of-distribution inputs?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_probability, events, row_values, row_weights


def auroc(uncertainty: Array, event: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The area under the ROC curve: the probability that a row with the event is more uncertain than one without.

    The event is what the uncertainty should detect: "is out of distribution", or "was misclassified". Ties count half;
    ½ is chance. The uncertainty `[row]` may be infinite; `event` is true (or 1) where it happened, `[row]`, and both
    kinds must occur.

    Examples:
        >>> inside, outside = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9])
        >>> auroc(torch.cat([inside, outside]), torch.tensor([0, 0, 0, 1, 1]))  # out-of-distribution detection
        tensor(0.8333)
    """
    with_event, without, dtype = _detections(uncertainty, event, sample_weight)
    below = without.cumsum(0) - without / 2  # the weight of the rows without the event that rank lower, ties half
    return ((with_event * below).sum() / (with_event.sum() * without.sum())).to(dtype)


def average_precision(uncertainty: Array, event: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The area under the precision-recall curve (AUPR) as average precision, $\sum_k (R_k - R_{k-1}) P_k$.

    Precision and recall of "more uncertain than the threshold" as a detector of the event; the better summary when the
    event is rare. Chance is the event's frequency. The arguments are those of `auroc`.

    Examples:
        >>> wrong = torch.tensor([0, 1, 0, 1])  # misclassification detection
        >>> average_precision(torch.tensor([0.1, 0.9, 0.5, 0.4]), wrong)
        tensor(0.8333)
    """
    with_event, without, dtype = _detections(uncertainty, event, sample_weight)
    detected, flagged = with_event.flip(0), (with_event + without).flip(0)  # from the most uncertain down
    precision = detected.cumsum(0) / flagged.cumsum(0)
    return ((detected * precision).sum() / detected.sum()).to(dtype)


def fpr_at_tpr(uncertainty: Array, event: Array, *, tpr: float = 0.95, sample_weight: Array | None = None) -> Tensor:
    r"""The share of rows with the event that pass the threshold which a share `tpr` of the others pass.

    In the words of out-of-distribution detection, the false positive rate at a true positive rate of `tpr`, where the
    positives are the rows of the distribution [Liang et al. 2018]; smaller is better. The other arguments are those of
    `auroc`.

    Examples:
        >>> fpr_at_tpr(torch.tensor([0.1, 0.2, 0.3, 0.25, 0.9]), torch.tensor([0, 0, 0, 1, 1]))
        tensor(0.5000)
    """
    check_probability("tpr", tpr)
    with_event, without, dtype = _detections(uncertainty, event, sample_weight)
    passed = without.cumsum(0) >= tpr * without.sum() * (1 - 1e-12)
    return (with_event.cumsum(0)[passed.long().argmax()] / with_event.sum()).to(dtype)


def _detections(uncertainty: Array, event: Array, sample_weight: Array | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """The weight of the rows with and without the event at each level of uncertainty, in increasing order."""
    scores = row_values("uncertainty", uncertainty, infinite=True)
    happened = events("event", event, n_rows=len(scores)).to(scores.device)
    weight = row_weights(sample_weight, len(scores), like=scores)
    counted = weight > 0
    scores, happened, weight = scores[counted], happened[counted], weight[counted]
    if happened.all() or not happened.any():
        raise ValueError("`event` must be true for some rows and false for others: with one kind nothing is ranked.")
    levels, group = scores.unique(return_inverse=True)
    nothing = weight.new_zeros(len(levels))
    return nothing.index_add(0, group, weight * happened), nothing.index_add(0, group, weight * ~happened), scores.dtype


@dataclass(frozen=True)
class RiskCoverage:
    r"""The mean loss of the least uncertain rows (`risk`), for every fraction of rows retained (`coverage`).

    `area` is that under the curve, $\mathrm{AURC} = \tfrac1N \sum_k \mathrm{risk}_k$; smaller is better. The oracle
    ranks the rows by their true loss.
    """

    coverage: Tensor
    risk: Tensor
    oracle_risk: Tensor
    area: Tensor
    oracle_area: Tensor

    @property
    def excess_area(self) -> Tensor:
        """The area above the oracle's: 0 for a perfect ranking."""
        return self.area - self.oracle_area


def risk_coverage(uncertainty: Array, loss: Array, *, sample_weight: Array | None = None) -> RiskCoverage:
    r"""The risk-coverage curve: the remaining loss when the most uncertain rows are set aside.

    $\mathrm{risk}_k = \tfrac1k \sum_{i \le k} \ell_{(i)}$ with rows ordered by uncertainty, `[row]`, for any `loss` of
    each (1 for an error; a squared error; ...). Rows of equal uncertainty share their mean loss, so that the curve does
    not depend on the order of the rows; those of weight 0 are left out.

    Examples:
        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.0, 0.0, 1.0]))
        >>> curve.risk, curve.area
        (tensor([0.0000, 0.0000, 0.0000, 0.2500]), tensor(0.0625))
    """
    scores = row_values("uncertainty", uncertainty, infinite=True)
    losses = row_values("loss", loss, n_rows=len(scores)).to(scores.device)
    dtype = torch.promote_types(scores.dtype, losses.dtype)
    weight = row_weights(sample_weight, len(scores), like=scores)
    counted = weight > 0
    scores, losses, weight = scores[counted], losses[counted].double(), weight[counted]
    group = scores.unique(return_inverse=True)[1]
    total, mass = (torch.zeros_like(weight).index_add(0, group, values) for values in (weight * losses, weight))
    order, oracle_order = scores.argsort(stable=True), losses.argsort(stable=True)
    risk, area = _risk((total / mass)[group][order], weight[order])
    oracle_risk, oracle_area = _risk(losses[oracle_order], weight[oracle_order])
    retained = weight[order].cumsum(0)
    curves = (retained / retained[-1], risk, oracle_risk, area, oracle_area)
    return RiskCoverage(*(curve.to(dtype) for curve in curves))


def _risk(losses: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    r"""The running mean of ordered losses, and its area.

    A row of weight $w$ adds what $w$ rows of weight 1 would, $\sum_{j=1}^{w} \tfrac{A + j\ell}{C + j} = w\ell + (A -
    C\ell)\,[\psi(C + w + 1) - \psi(C + 1)]$ with $A$ the loss and $C$ the weight before it.
    """
    retained, total = weight.cumsum(0), (weight * losses).cumsum(0)
    before, loss_before = retained - weight, total - weight * losses
    harmonic = torch.special.digamma(retained + 1) - torch.special.digamma(before + 1)
    area = (weight * losses + (loss_before - before * losses) * harmonic).sum() / retained[-1]
    return total / retained, area
