r"""Conformal prediction: intervals, sets and distributions with a coverage that holds for any model.

Every method needs rows that neither trained nor tuned the model. It guarantees coverage for new rows *exchangeable*
with them, on average over rows and held-out sets. A better uncertainty makes the answers narrower, not more valid.

| you have | use | guarantee |
|---|---|---|
| a mean and a standard deviation | `conformal_interval` | coverage at least the level |
| predicted quantiles | `conformal_quantile_interval` | the same; widths follow the quantiles |
| class probabilities | `conformal_sets`, `adaptive_conformal_sets` | the same, for sets of classes |
| classes or groups that must each be covered | `class_thresholds`, `group_thresholds` | the same within each |
| new rows of another input distribution | `conformal_threshold` with weights | the same, for the right density ratio |
| no rows to spare | `cross_conformal_interval` (jackknife+, CV+) | at least 1 - 2 (1 - level) |
| a stream that may drift | `OnlineLevel` | long-run coverage for any sequence |
| a need for probabilities, not one interval | `conformal_distribution` | calibrated in probability |

Everywhere `scores` are those of held-out rows, `[row]`, `level` is the probability to guarantee, and `sample_weight`
has the weight of each held-out row: one of weight 2 counts as two, and a new row as one.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dropbayes.runtime import validation
from dropbayes.runtime.validation import Array, to_tensor
from dropbayes.scores.averages import cumulative_weights, weighted_quantile


def conformal_threshold(
    scores: Array, *, level: float, sample_weight: Array | None = None, new_weight: Array | float = 1.0
) -> Tensor:
    r"""The threshold $q$ that the score of a new row does not exceed with probability at least `level`.

    The $\lceil (n+1)\,\text{level} \rceil$-th smallest of $n$ scores. For exchangeable rows and any score,
    $P(s_{n+1} \le q) \ge \text{level}$, and without ties $P \le \text{level} + 1/(n+1)$. With too few rows for the
    level it is infinite.

    With weights it is the smallest score $q$ with $\sum_{s_i \le q} w_i \ge \text{level}\,(\sum_i w_i + w_\text{new})$.
    Where new rows come from other inputs but the same $p(y \mid x)$, weights in proportion to the density ratio
    $w(x) = p_\text{new}(x)/p_\text{held-out}(x)$ restore the guarantee [Tibshirani et al. 2019]; each new row, with its
    `new_weight` $w_\text{new}$, `[new row]`, then has its own threshold.

    Examples:
        >>> conformal_threshold(torch.arange(1.0, 100.0), level=0.9)  # 99 scores: the 90th
        tensor(90.)
        >>> conformal_threshold(torch.tensor([1.0, 2.0]), level=0.5, sample_weight=[1, 3], new_weight=torch.tensor([1.0, 9.0]))
        tensor([2., inf])
    """  # noqa: E501 - an example of one line
    validation.check_probability("level", level)
    held_out = validation.row_values("scores", scores, infinite=True).detach()
    weight = validation.row_weights(sample_weight, len(held_out), like=held_out)
    new = validation.finite_tensor("new_weight", new_weight).to(weight)
    validation.check_values("new_weight", new)
    return weighted_quantile(held_out, weight, level * (weight.sum() + new))


def group_thresholds(
    scores: Array, groups: Array, new_groups: Array, *, level: float, sample_weight: Array | None = None
) -> Tensor:
    """The threshold of each new row, from the held-out rows of its group: the guarantee holds within each group.

    Mondrian conformal prediction [Vovk et al. 2005]. Groups, any integers, must be known before the outcome: a site, an
    age band, a predicted class. Each needs at least 1 / (1 - level) - 1 held-out rows for a finite threshold.

    Examples:
        >>> scores, groups = torch.arange(1.0, 9.0), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        >>> group_thresholds(scores, groups, torch.tensor([0, 1, 2]), level=0.8)
        tensor([4., 8., inf])
    """
    held_out = validation.row_values("scores", scores, infinite=True)
    for name, given, n_rows in (("groups", groups, len(held_out)), ("new_groups", new_groups, None)):
        values = validation.row_values(name, given, n_rows=n_rows)
        if not bool((values == values.round()).all()):
            raise ValueError(f"`{name}` must hold integers, one group per row; got {values.dtype} with fractions.")
    known, new = to_tensor(groups).long(), to_tensor(new_groups).long()  # as floats, large ones would be the same
    weight = validation.row_weights(sample_weight, len(held_out), like=held_out)
    thresholds = held_out.new_full((len(new),), math.inf)
    for group in new.unique():
        some = (known == group) & (weight > 0)
        if bool(some.any()):
            thresholds[new == group] = conformal_threshold(held_out[some], level=level, sample_weight=weight[some])
    return thresholds


def class_thresholds(
    scores: Array, labels: Array, *, n_classes: int, level: float, sample_weight: Array | None = None
) -> Tensor:
    """The threshold of each class, `[class]`, from its held-out rows: sets cover every class, rare ones too.

    The `threshold` of `conformal_sets`, from the scores of the true labels. Without it a rare class may be missed most
    of the time while the average over rows meets the guarantee; one with too few rows is in every set.
    """
    validation.check_count("n_classes", n_classes)
    n_rows = len(validation.row_values("scores", scores, infinite=True))
    truth = validation.class_labels(labels, n_rows=n_rows, n_classes=n_classes)
    return group_thresholds(scores, truth, torch.arange(n_classes), level=level, sample_weight=sample_weight)


@dataclass(frozen=True)
class OnlineLevel:
    r"""The level to use next, so that the long-run coverage is the target for any data.

    $$\text{level}_{t+1} = \text{level}_t + \gamma\,(\text{target} - \mathbb 1[\text{covered}_t])$$

    Adaptive conformal inference [Gibbs & Candès 2021]. After $T$ steps the share covered differs from the target by at
    most $\big(\max(\text{target}, 1 - \text{target}) + \gamma\big)/(\gamma T)$, for every sequence, without any
    assumption. The step γ, `rate`, is about the inverse of the number of rows within which the data drift; if it is
    large the intervals fluctuate, and some are empty or infinite. `current` is the level, by default the target.

    Examples:
        >>> level = OnlineLevel(target=0.9, rate=0.05)
        >>> round(level.after(covered=False).current, 3), round(level.after(covered=True).current, 3)
        (0.945, 0.895)
    """

    target: float
    rate: float = 0.01
    current: float | None = None

    def __post_init__(self) -> None:
        validation.check_probability("target", self.target)
        validation.check_positive("rate", self.rate)
        current = self.target if self.current is None else self.current
        validation.finite_tensor("current", current)
        object.__setattr__(self, "current", current)

    def after(self, *, covered: bool) -> Self:
        """The level once the outcome is known."""
        assert self.current is not None
        return replace(self, current=self.current + self.rate * (self.target - bool(covered)))

    def threshold(self, scores: Array) -> Tensor:
        """The threshold of the scores of recent rows at the current level; ±∞ where that left the unit interval."""
        assert self.current is not None
        recent = validation.row_values("scores", scores, infinite=True)
        if not 0 < self.current < 1:
            return recent.new_tensor(math.inf if self.current >= 1 else -math.inf)
        return conformal_threshold(recent, level=self.current)


def standardised_residuals(mean: Array, std: Array | float, y: Array) -> Tensor:
    r"""The residual in standard deviations, $|y - \mu| / \sigma$: the conformal score of a regression.

    Examples:
        >>> standardised_residuals(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]))
        tensor([1.5000])
    """
    centre, deviation, outcome = _moments(mean, std, y=y)
    return (outcome - centre).abs() / deviation


def _moments(mean: Array, std: Array | float, **others: Array) -> list[Tensor]:
    """The mean, the positive standard deviation and the other arrays, of one shape; a scalar deviation is expanded."""
    deviation = validation.finite_tensor("std", std)
    if deviation.dim() == 0:
        deviation = deviation.expand(validation.finite_tensor("mean", mean).shape)
    tensors = validation.matching_tensors({"mean": mean, "std": deviation, **others})
    validation.check_values("std", tensors[1], positive=True)
    return tensors


def conformal_interval(mean: Array, std: Array | float, *, threshold: Array | float) -> tuple[Tensor, Tensor]:
    r"""The split-conformal interval $\mu \pm q\,\sigma$, which holds the target with the probability of its threshold.

    On average over new rows and held-out sets, not for each. The threshold $q$ is that of the `standardised_residuals`
    of held-out rows: a number (`conformal_threshold`), or `[row]` (`group_thresholds`, or with weights); below 0, as
    an `OnlineLevel` may ask, both ends are the mean. A `std` of 1 makes intervals of one width.

    Examples:
        >>> conformal_interval(torch.tensor([5.0]), torch.tensor([2.0]), threshold=1.8)
        (tensor([1.4000]), tensor([8.6000]))
    """
    centre, deviation = _moments(mean, std)
    half = _per_row(threshold, centre).clamp_min(0) * deviation
    return centre - half, centre + half


def quantile_residuals(lower: Array, upper: Array, y: Array) -> Tensor:
    r"""The distance of the target outside its predicted quantiles, $\max(l - y,\; y - u)$; negative inside.

    Examples:
        >>> quantile_residuals(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 0.5]))
        tensor([ 2.0000, -0.5000])
    """
    low, high, outcome = validation.matching_tensors({"lower": lower, "upper": upper, "y": y})
    return torch.maximum(low - outcome, outcome - high)


def conformal_quantile_interval(lower: Array, upper: Array, *, threshold: Array | float) -> tuple[Tensor, Tensor]:
    r"""The conformalised quantile interval $[l - q,\; u + q]$ [Romano et al. 2019].

    Predicted quantiles (of the mixture of draws, or of a quantile network), which follow skewed noise, are widened by
    one number, or narrowed when they were too wide; where an interval would be empty, both ends are its middle. The
    threshold $q$ is that of the `quantile_residuals` of held-out rows, as in `conformal_interval`.

    Examples:
        >>> conformal_quantile_interval(torch.tensor([0.0]), torch.tensor([4.0]), threshold=0.5)
        (tensor([-0.5000]), tensor([4.5000]))
    """
    low, high = validation.matching_tensors({"lower": lower, "upper": upper})
    if bool((low > high).any()):
        raise ValueError(f"`lower` must not exceed `upper`; it does in {int((low > high).sum())} rows.")
    margin = torch.maximum(_per_row(threshold, low), (low - high) / 2)  # no interval has a negative width
    return low - margin, high + margin


def _per_row(threshold: Array | float, like: Tensor) -> Tensor:
    bound = validation.finite_tensor("threshold", threshold, infinite=True)
    if bound.dim() and bound.shape != like.shape[:1]:
        raise ValueError(f"`threshold` must be a number or [row]; got shape {tuple(bound.shape)} for {len(like)} rows.")
    bound = bound.to(like.device, torch.promote_types(bound.dtype, like.dtype))
    bound = bound * (1 + 2 * torch.finfo(bound.dtype).eps * bound.sign())  # what ties with a held-out row is inside
    return bound.reshape((*bound.shape, *(1,) * (like.dim() - 1)))


def cross_conformal_interval(
    predictions: Array, *, residuals: Array, folds: Array | None = None, level: float
) -> tuple[Tensor, Tensor]:
    r"""The jackknife+ or CV+ interval, from models that each left some rows out.

    With $\mu_{-i}$ the model that did not see row $i$ and $R_i = |y_i - \mu_{-i}(x_i)|$, the ends are the
    $\lfloor (n+1)(1 - \text{level}) \rfloor$-th smallest of $\mu_{-i}(x) - R_i$ and the $\lceil (n+1)\,\text{level}
    \rceil$-th smallest of $\mu_{-i}(x) + R_i$ [Barber et al. 2021]. Every row both trains and calibrates. For
    exchangeable rows the coverage is at least $1 - 2\,(1 - \text{level})$, for K folds of n rows less about
    $\sqrt{2/n}$; in practice it is close to the level. With too few rows for the level the ends are infinite.

    Args:
        predictions: The predictions of each fold's model for the new rows, `[fold, new row]`.
        residuals: The absolute residual $R_i$ of every training row under the model of its fold, `[row]`.
        folds: The fold of each training row, `[row]`; by default each row is its own fold (jackknife+).
        level: The nominal coverage.

    Examples:
        >>> predictions = torch.tensor([[0.0], [1.0], [2.0]])
        >>> cross_conformal_interval(predictions, residuals=torch.tensor([0.5, 0.5, 0.5]), level=0.7)
        (tensor([-0.5000]), tensor([2.5000]))
    """
    validation.check_probability("level", level)
    outputs = validation.finite_tensor("predictions", predictions, axes="[fold, new row]")
    spread = validation.row_values("residuals", residuals).to(outputs)
    validation.check_values("residuals", spread)
    fold = validation.row_values("folds", torch.arange(len(outputs)) if folds is None else folds, n_rows=len(spread))
    if fold.min() < 0 or fold.max() >= len(outputs) or bool((fold != fold.long()).any()):
        rule = f"lie between 0 and {len(outputs) - 1}, the rows of `predictions`, and be whole"
        raise ValueError(f"`folds` must {rule}; got {fold.min():g} to {fold.max():g}.")
    left_out, n_rows = outputs[fold.long().to(outputs.device)], len(spread)  # [row, new row]
    upper_rank = math.ceil((n_rows + 1) * level - 1e-9)
    if upper_rank > n_rows:
        infinite = torch.full_like(outputs[0], math.inf)
        return -infinite, infinite
    # The lower end mirrors the upper one: floor((n+1)(1 - level)) = n + 1 - ceil((n+1) level).
    lower = (left_out - spread[:, None]).kthvalue(n_rows + 1 - upper_rank, 0).values
    return lower, (left_out + spread[:, None]).kthvalue(upper_rank, 0).values


@dataclass(frozen=True, eq=False)
class ConformalDistribution:
    r"""The distribution of each new row's target: $\mu + \sigma r$ with $r$ the residuals of held-out rows.

    For exchangeable rows its distribution function at the target is uniform, so targets fall below each quantile as
    often as its level says, up to $1/(n+1)$ [Vovk et al. 2019]. The residuals are signed, in standard deviations and in
    increasing order.
    """

    mean: Tensor
    std: Tensor
    residuals: Tensor
    weight: Tensor

    def distribution(self, y: Array) -> Tensor:
        """The distribution function at `y`, `[row]`: the middle of its jump there."""
        centre, _, outcome = validation.matching_tensors({"mean": self.mean, "std": self.std, "y": y})
        standard = (outcome - centre) / self.std.to(centre)
        below, up_to, total = cumulative_weights(self.residuals.to(standard), self.weight, standard)
        return (0.5 * (below + up_to + 1) / (total + 1)).to(standard.dtype)

    def quantile(self, level: float) -> Tensor:
        """The quantile of each row, `[row]`: a new target is at most this with probability at least `level`."""
        threshold = conformal_threshold(self.residuals, level=level, sample_weight=self.weight)
        return self.mean + _per_row(threshold, self.mean) * self.std

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The central interval of each row, asymmetric about the mean when the residuals are skewed."""
        validation.check_probability("level", level)
        mirrored = replace(self, mean=-self.mean, residuals=-self.residuals)
        return -mirrored.quantile((1 + level) / 2), self.quantile((1 + level) / 2)


def conformal_distribution(
    mean: Array, std: Array, *, calibration_residuals: Array, sample_weight: Array | None = None
) -> ConformalDistribution:
    r"""The conformal predictive distribution of new rows, from their predictive mean and standard deviation, `[row]`.

    `calibration_residuals` are the signed residuals $(y - \mu)/\sigma$ of held-out rows, `[row]`.

    Examples:
        >>> known = torch.tensor([-2.0, -1.0, 0.0, 1.0, 5.0])  # skewed: now and then a target is far above
        >>> new = conformal_distribution(torch.tensor([10.0]), torch.tensor([1.0]), calibration_residuals=known)
        >>> new.quantile(0.5), new.interval(0.6), new.distribution(torch.tensor([10.5]))
        (tensor([10.]), (tensor([8.0000]), tensor([15.0000])), tensor([0.5833]))
    """
    centre, deviation = _moments(validation.row_values("mean", mean), std)
    residuals, order = validation.row_values("calibration_residuals", calibration_residuals).sort()
    weight = validation.row_weights(sample_weight, len(residuals), like=residuals)[order]
    return ConformalDistribution(centre, deviation, residuals, weight)


def label_scores(probabilities: Array, labels: Array) -> Tensor:
    """The conformal score of a classification, one minus the probability of the label, `[row]`.

    Examples:
        >>> label_scores(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([0.2500])
    """
    return _of_label(1 - validation.class_probabilities("probabilities", probabilities), labels)


def _of_label(scores: Tensor, labels: Array) -> Tensor:
    truth = validation.class_labels(labels, n_rows=len(scores), n_classes=scores.shape[1], device=scores.device)
    return scores.gather(1, truth[:, None]).squeeze(1)


def conformal_sets(probabilities: Array, *, threshold: Array | float) -> Tensor:
    """The split-conformal set of classes, which holds the label with the probability of its threshold, `[row, class]`.

    These sets are the smallest on average [Sadinle et al. 2019]; one is empty when no class is probable enough. The
    threshold is that of the `label_scores` of held-out rows: a number (`conformal_threshold`), `[class]`
    (`class_thresholds`) or `[row, 1]`.

    Examples:
        >>> conformal_sets(torch.tensor([[0.6, 0.4], [0.9, 0.1]]), threshold=0.5)
        tensor([[ True, False],
                [ True, False]])
    """
    return _at_most(1 - validation.class_probabilities("probabilities", probabilities), threshold)


def _at_most(scores: Tensor, threshold: Array | float) -> Tensor:
    """Where the scores are at most the threshold, up to rounding: one converted to float32 must not lose its label."""
    bound = validation.finite_tensor("threshold", threshold, infinite=True)
    if bound.dim() and bound.shape not in ((scores.shape[1],), (len(scores), 1)):
        got = f"shape {tuple(bound.shape)} for probabilities {tuple(scores.shape)}"
        raise ValueError(f"`threshold` must be a number, [class] or [row, 1]; got {got}.")
    rounding = 4 * max(torch.finfo(scores.dtype).eps, torch.finfo(bound.dtype).eps)
    return scores.double() <= bound.to(scores.device).double() + rounding


def adaptive_scores(
    probabilities: Array, *, penalty: float = 0.0, free_classes: int = 1, uniform: Array | None = None
) -> Tensor:
    r"""The adaptive score of every class: the probability of those more probable (or equal and before it), and its own.

    $$s_c = \sum_{c':\, p_{c'} > p_c} p_{c'} + u\,p_c + \lambda\,(\mathrm{rank}_c - k)_+$$

    [Romano et al. 2020]; regularised for $\lambda > 0$ [Angelopoulos et al. 2021]: the `penalty` on sets of more than
    $k$, the `free_classes`, keeps many improbable classes out. A `uniform` random number $u$ per row, `[row]`, makes
    the coverage exact; by default it is 1, which makes it conservative and the same for every call.

    Examples:
        >>> adaptive_scores(torch.tensor([[0.5, 0.2, 0.3]]))
        tensor([[0.5000, 1.0000, 0.8000]])
    """
    validation.check_positive("penalty", penalty, allow_zero=True)
    validation.check_count("free_classes", free_classes, at_least=0)
    predicted = validation.class_probabilities("probabilities", probabilities)
    ones = torch.ones_like(predicted[:, 0])
    share = ones if uniform is None else validation.row_values("uniform", uniform, n_rows=len(predicted))
    validation.check_values("uniform", share, at_most=1)
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

    The threshold is that of the `adaptive_label_scores` of held-out rows, whose other arguments must be the same.

    Examples:
        >>> adaptive_conformal_sets(torch.tensor([[0.5, 0.3, 0.2]]), threshold=0.9)
        tensor([[ True,  True, False]])
    """
    scores = adaptive_scores(probabilities, penalty=penalty, free_classes=free_classes, uniform=uniform)
    return _at_most(scores, threshold)
