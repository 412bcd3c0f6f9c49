r"""The conformal threshold, a bound on the score of a new row: overall, by group, under shift, on a stream."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dropbayes.runtime.validation import (
    Array,
    check_count,
    check_positive,
    check_probability,
    check_values,
    class_labels,
    finite_tensor,
    row_values,
    row_weights,
)
from dropbayes.scores.averages import weighted_quantile


def conformal_threshold(
    scores: Array, *, level: float, sample_weight: Array | None = None, new_weight: Array | float = 1.0
) -> Tensor:
    r"""The threshold $q$ that the score of a new row does not exceed with probability at least `level`.

    The $\lceil (n+1)\,\text{level} \rceil$-th smallest of $n$ scores. For exchangeable rows and any score,
    $P(s_{n+1} \le q) \ge \text{level}$, and without ties $P \le \text{level} + 1/(n+1)$. With too few rows for the
    level it is infinite.

    With weights it is the smallest score $q$ with $\sum_{s_i \le q} w_i \ge \text{level}\,(\sum_i w_i + w_\text{new})$:
    a row of weight 2 counts as two. Where new rows come from other inputs but the same $p(y \mid x)$, weights in
    proportion to the density ratio $w(x) = p_\text{new}(x)/p_\text{held-out}(x)$ restore the guarantee [Tibshirani et
    al. 2019]; each new row then has its own threshold.

    Args:
        scores: Scores of held-out rows the model was not fitted to, `[row]`.
        level: The probability to guarantee.
        sample_weight: The weights $w_i$ of the held-out rows.
        new_weight: The weight $w_\text{new}$ of the new row, or of each new row, `[new row]`.

    Examples:
        >>> conformal_threshold(torch.arange(1.0, 100.0), level=0.9)  # 99 scores: the 90th
        tensor(90.)
        >>> conformal_threshold(torch.tensor([1.0, 2.0]), level=0.5, sample_weight=[1, 3], new_weight=torch.tensor([1.0, 9.0]))
        tensor([2., inf])
    """  # noqa: E501 - an example of one line
    check_probability("level", level)
    held_out = row_values("scores", scores, infinite=True).detach()
    weight = row_weights(sample_weight, len(held_out), like=held_out)
    new = finite_tensor("new_weight", new_weight).to(weight)
    check_values("new_weight", new)
    return weighted_quantile(held_out, weight, level * (weight.sum() + new))


def group_thresholds(
    scores: Array, groups: Array, new_groups: Array, *, level: float, sample_weight: Array | None = None
) -> Tensor:
    """The threshold of each new row, from the held-out rows of its group: the guarantee holds within each group.

    Mondrian conformal prediction [Vovk et al. 2005]. Groups must be known before the outcome: a site, an age band, a
    predicted class. Each group needs at least 1 / (1 - level) - 1 rows for a finite threshold.

    Args:
        scores: Scores of held-out rows, `[row]`.
        groups: Their groups, any integers, `[row]`.
        new_groups: The groups of the new rows, `[new row]`; a group without held-out rows has an infinite threshold.
        level: The probability to guarantee in every group.
        sample_weight: The weight of each held-out row; a new row has weight 1.

    Examples:
        >>> scores, groups = torch.arange(1.0, 9.0), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        >>> group_thresholds(scores, groups, torch.tensor([0, 1, 2]), level=0.8)
        tensor([4., 8., inf])
    """
    held_out = row_values("scores", scores, infinite=True)
    known = _groups("groups", groups, n_rows=len(held_out))
    new = _groups("new_groups", new_groups)
    weight = row_weights(sample_weight, len(held_out), like=held_out)
    thresholds = held_out.new_full((len(new),), math.inf)
    for group in new.unique():
        in_group = (known == group) & (weight > 0)
        if bool(in_group.any()):
            thresholds[new == group] = conformal_threshold(
                held_out[in_group], level=level, sample_weight=weight[in_group]
            )
    return thresholds


def _groups(name: str, groups: Array, *, n_rows: int | None = None) -> Tensor:
    values = row_values(name, groups, n_rows=n_rows)
    if not bool((values == values.round()).all()):
        raise ValueError(f"`{name}` must hold integers, one group per row; got {values.dtype} with fractions.")
    return values.long()


def class_thresholds(
    scores: Array, labels: Array, *, n_classes: int, level: float, sample_weight: Array | None = None
) -> Tensor:
    """The threshold of each class, from the held-out rows of that class: sets cover every class, rare ones too.

    Pass it as the `threshold` of `conformal_sets`. Without it a rare class may be missed most of the time while the
    average over rows meets the guarantee.

    Args:
        scores: Scores of the true labels of held-out rows, `[row]` (`label_scores`, `adaptive_label_scores`).
        labels: Their class indices, `[row]`.
        n_classes: The number of classes.
        level: The probability to guarantee for every class.
        sample_weight: The weight of each held-out row; a new row has weight 1.

    Returns:
        The thresholds, `[class]`; infinite for a class with too few rows, which is then in every set.
    """
    check_count("n_classes", n_classes)
    held_out = row_values("scores", scores, infinite=True)
    truth = class_labels(labels, n_rows=len(held_out), n_classes=n_classes)
    return group_thresholds(held_out, truth, torch.arange(n_classes), level=level, sample_weight=sample_weight)


@dataclass(frozen=True)
class OnlineLevel:
    r"""The level to use next, so that the long-run coverage is the target for any data.

    $$\text{level}_{t+1} = \text{level}_t + \gamma\,(\text{target} - \mathbb 1[\text{covered}_t])$$

    Adaptive conformal inference [Gibbs & Candès 2021]. After $T$ steps the share covered differs from the target by at
    most $\big(\max(\text{target}, 1 - \text{target}) + \gamma\big)/(\gamma T)$, for every sequence, without any
    assumption. With a large γ the intervals fluctuate, and some are empty or infinite.

    Args:
        target: The long-run coverage.
        rate: The step γ; about the inverse of the number of rows within which the data drift.
        current: The current level; by default the target.

    Examples:
        >>> level = OnlineLevel(target=0.9, rate=0.05)
        >>> round(level.after(covered=False).current, 3), round(level.after(covered=True).current, 3)
        (0.945, 0.895)
    """

    target: float
    rate: float = 0.01
    current: float | None = None

    def __post_init__(self) -> None:
        check_probability("target", self.target)
        check_positive("rate", self.rate)
        if self.current is None:
            object.__setattr__(self, "current", self.target)

    def after(self, *, covered: bool) -> OnlineLevel:
        """The level once the outcome is known."""
        assert self.current is not None
        return replace(self, current=self.current + self.rate * (self.target - bool(covered)))

    def threshold(self, scores: Array) -> Tensor:
        """The threshold of the scores at the current level; ±∞ where the level has left the unit interval.

        Args:
            scores: Scores of recent rows, `[row]`.
        """
        assert self.current is not None
        recent = row_values("scores", scores, infinite=True)
        if not 0 < self.current < 1:
            return recent.new_tensor(math.inf if self.current >= 1 else -math.inf)
        return conformal_threshold(recent, level=self.current)
