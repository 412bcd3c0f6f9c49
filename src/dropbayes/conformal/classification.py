r"""Conformal sets of classes: by one threshold, or adaptive ones whose size follows the uncertainty."""

from __future__ import annotations

import torch
from torch import Tensor

from dropbayes.runtime.validation import (
    Array,
    check_count,
    check_positive,
    check_values,
    class_labels,
    class_probabilities,
    finite_tensor,
    row_values,
)


def label_scores(probabilities: Array, labels: Array) -> Tensor:
    """The conformal score of a classification, one minus the probability of the label, `[row]`.

    Examples:
        >>> label_scores(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([0.2500])
    """
    predicted = class_probabilities("probabilities", probabilities)
    return _of_label(1 - predicted, labels)


def _of_label(scores: Tensor, labels: Array) -> Tensor:
    truth = class_labels(labels, n_rows=len(scores), n_classes=scores.shape[1], device=scores.device)
    return scores.gather(1, truth[:, None]).squeeze(1)


def conformal_sets(probabilities: Array, *, threshold: Array | float) -> Tensor:
    """The split-conformal set of classes, which holds the label with the probability of its threshold, `[row, class]`.

    The guarantee is that of `conformal_interval`. These sets are the smallest on average [Sadinle et al. 2019]; a set
    is empty when no class is probable enough. The size of `adaptive_conformal_sets` follows the uncertainty.

    Args:
        probabilities: Predictive probabilities of the new rows, `[row, class]`.
        threshold: The threshold of the `label_scores` of held-out rows: a number (`conformal_threshold`), `[class]`
            (`class_thresholds`) or `[row, 1]`.

    Examples:
        >>> conformal_sets(torch.tensor([[0.6, 0.4], [0.9, 0.1]]), threshold=0.5)
        tensor([[ True, False],
                [ True, False]])
    """
    predicted = class_probabilities("probabilities", probabilities)
    return _at_most(1 - predicted, threshold)


def _at_most(scores: Tensor, threshold: Array | float) -> Tensor:
    """Where the scores are at most the threshold.

    Scores equal up to rounding count as equal: a probability converted to float32 must not lose its label.
    """
    bound = finite_tensor("threshold", threshold, infinite=True)
    if bound.dim() and bound.shape not in ((scores.shape[1],), (len(scores), 1)):
        raise ValueError(
            f"`threshold` must be a number, [class] or [row, 1]; got shape {tuple(bound.shape)} for probabilities "
            f"{tuple(scores.shape)}."
        )
    rounding = 4 * max(torch.finfo(scores.dtype).eps, torch.finfo(bound.dtype).eps)
    return scores.double() <= bound.to(scores.device).double() + rounding


def adaptive_scores(
    probabilities: Array, *, penalty: float = 0.0, free_classes: int = 1, uniform: Array | None = None
) -> Tensor:
    r"""The adaptive score of every class: the probability of the classes more probable than it, and its own.

    $$s_c = \sum_{c':\, p_{c'} > p_c} p_{c'} + u\,p_c + \lambda\,(\mathrm{rank}_c - k)_+$$

    [Romano et al. 2020]; regularised for $\lambda > 0$ [Angelopoulos et al. 2021]: the penalty on sets of more than $k$
    classes keeps many improbable classes out.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        penalty: The regularisation $\lambda$ per class beyond the free ones.
        free_classes: The size $k$ of a set without penalty.
        uniform: A uniform random number $u$ per row, `[row]`, which makes the coverage exact; by default 1, which makes
            it conservative and the same for every call.

    Examples:
        >>> adaptive_scores(torch.tensor([[0.5, 0.2, 0.3]]))
        tensor([[0.5000, 1.0000, 0.8000]])
    """
    check_positive("penalty", penalty, allow_zero=True)
    check_count("free_classes", free_classes, at_least=0)
    predicted = class_probabilities("probabilities", probabilities)
    ones = torch.ones_like(predicted[:, 0])
    share = ones if uniform is None else row_values("uniform", uniform, n_rows=len(predicted))
    check_values("uniform", share, at_most=1)
    ordered, order = predicted.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(1, predicted.shape[1] + 1, device=predicted.device)
    scores = ordered.cumsum(-1) - ordered * (1 - share.to(predicted)[:, None])
    scores = scores + penalty * (rank - free_classes).clamp_min(0)
    return torch.empty_like(scores).scatter(-1, order, scores)


def adaptive_label_scores(
    probabilities: Array, labels: Array, *, penalty: float = 0.0, free_classes: int = 1, uniform: Array | None = None
) -> Tensor:
    """The adaptive score of each row's label, `[row]`; see `adaptive_scores`.

    Examples:
        >>> adaptive_label_scores(torch.tensor([[0.5, 0.2, 0.3]]), torch.tensor([2]))
        tensor([0.8000])
    """
    scores = adaptive_scores(probabilities, penalty=penalty, free_classes=free_classes, uniform=uniform)
    return _of_label(scores, labels)


def adaptive_conformal_sets(
    probabilities: Array,
    *,
    threshold: Array | float,
    penalty: float = 0.0,
    free_classes: int = 1,
    uniform: Array | None = None,
) -> Tensor:
    """The adaptive conformal set of classes: small where one class stands out, large where many compete.

    Args:
        probabilities: Predictive probabilities of the new rows, `[row, class]`.
        threshold: The threshold of the `adaptive_label_scores` of held-out rows, of the same `penalty` and
            `free_classes`, as in `conformal_sets`.
        penalty: The regularisation per class beyond the free ones.
        free_classes: The size of a set without penalty.
        uniform: A uniform random number per new row, if the calibration scores had them.

    Examples:
        >>> adaptive_conformal_sets(torch.tensor([[0.5, 0.3, 0.2]]), threshold=0.9)
        tensor([[ True,  True, False]])
    """
    scores = adaptive_scores(probabilities, penalty=penalty, free_classes=free_classes, uniform=uniform)
    return _at_most(scores, threshold)
