r"""Scores of a prediction against what happened: regression, classification, and ranking by uncertainty.

A score that every row has is returned per row (`[row]`; take `.mean()`), a score of a whole set as a scalar. Draws are
axis 0. NumPy arrays are accepted; tensors are returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dropbayes.validation import Array, float_tensor


def _matched(y: Array, prediction: Array, *, draws: bool = False) -> tuple[Tensor, Tensor]:
    """Both as floating tensors of one dtype, refused when broadcasting would pair the wrong rows."""
    outcome, predicted = float_tensor(y), float_tensor(prediction)
    if predicted.shape[int(draws) :] != outcome.shape:
        raise ValueError(
            f"`y` must have the shape of the prediction{' of each draw' if draws else ''}; got {tuple(outcome.shape)} "
            f"against {tuple(predicted.shape)}. Reshape y (y[:, None] for one-column output) or squeeze the prediction."
        )
    dtype = torch.promote_types(outcome.dtype, predicted.dtype)
    return outcome.to(dtype), predicted.to(dtype)


# ------------------------------------------------------------------------------------------------ regression


def rmse(mean: Array, y: Array) -> Tensor:
    r"""The root mean squared error $\sqrt{\tfrac1N \sum_n (y_n - \bar y_n)^2}$.

    Examples:
        >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor(1.4142)
    """
    outcome, predicted = _matched(y, mean)
    return (outcome - predicted).square().mean().sqrt()


def mae(mean: Array, y: Array) -> Tensor:
    r"""The mean absolute error $\tfrac1N \sum_n |y_n - \bar y_n|$.

    Examples:
        >>> mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor(1.)
    """
    outcome, predicted = _matched(y, mean)
    return (outcome - predicted).abs().mean()


def mixture_log_likelihood(log_density_draws: Array) -> Tensor:
    r"""The predictive log-likelihood $\log \tfrac1T \sum_t p(y \mid \omega_t)$ of the mixture of all draws.

    [GG16, eq:predictive_dist]. The mixture is the predictive distribution itself: it may have many modes. A Gaussian
    with the same mean and variance scores differently; `gaussian_log_likelihood` is that one.

    Args:
        log_density_draws: $\log p(y_n \mid \omega_t)$ of any likelihood, `[draw, row]`.

    Returns:
        The log-likelihood of each row, `[row]`.

    Examples:
        >>> mixture_log_likelihood(torch.tensor([[0.0, -1000.0], [0.0, -1001.0]]))  # no underflow
        tensor([    0.0000, -1000.3799])
    """
    log_density = float_tensor(log_density_draws)
    return log_density.logsumexp(0) - math.log(log_density.shape[0])


def gaussian_mixture_log_likelihood(draws: Array, y: Array, *, precision: float) -> Tensor:
    r"""The predictive log-likelihood of regression, a mixture of $T$ Gaussians of precision $\tau$.

    [GG16, eq:predictive_dist_reg], with $D$ outputs per row:

    $$\operatorname{logsumexp}_t\!\Big(-\tfrac12 \tau \|y - \widehat y_t\|^2\Big) - \log T - \tfrac D2 \log 2\pi
    + \tfrac D2 \log \tau$$

    Args:
        draws: Outputs of the network $\widehat y_t$, `[draw, row, ...]`.
        y: The observed targets, `[row, ...]`.
        precision: The model precision $\tau$, in units of 1/y².

    Returns:
        The log-likelihood of each row, `[row]`.

    Examples:
        >>> gaussian_mixture_log_likelihood(torch.tensor([[-1.0], [1.0]]), torch.tensor([1.0]), precision=1.0)
        tensor([-1.4852])
    """
    if not (math.isfinite(precision) and precision > 0):
        raise ValueError(f"`precision` (τ) must be a positive number; got {precision!r}.")
    outcome, drawn = _matched(y, draws, draws=True)
    squares = (outcome - drawn).square().reshape(drawn.shape[0], outcome.shape[0], -1)
    constant = 0.5 * squares.shape[-1] * (math.log(precision) - math.log(2 * math.pi))
    return mixture_log_likelihood(-0.5 * precision * squares.sum(-1)) + constant


def gaussian_log_likelihood(mean: Array, variance: Array, y: Array) -> Tensor:
    r"""The log-likelihood of the moment-matched Gaussian $\mathcal N(y; \bar y, \operatorname{Var} y)$.

    The Gaussian with the predictive mean and total variance ([GG16, prop:mean], [GG16, prop:var]). It equals
    `mixture_log_likelihood` only when the draws themselves are one Gaussian; it is the lower-variance estimate at few
    draws and the wrong one when the predictive has several modes.

    Args:
        mean: The predictive mean, `[row, ...]`.
        variance: The predictive variance (total: epistemic and aleatoric), `[row, ...]`.
        y: The observed targets, `[row, ...]`.

    Returns:
        The log-likelihood of each row, `[row]`, summed over outputs.

    Examples:
        >>> gaussian_log_likelihood(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([1.0]))
        tensor([-1.5155])
    """
    outcome, predicted = _matched(y, mean)
    spread = _matched(y, variance)[1]
    per_output = -0.5 * (torch.log(2 * math.pi * spread) + (outcome - predicted).square() / spread)
    return per_output.reshape(outcome.shape[0], -1).sum(-1)


def crps(draws: Array, y: Array, *, noise_variance: Array | float = 0.0) -> Tensor:
    r"""The continuous ranked probability score of the draw mixture $F = \tfrac1T \sum_t \mathcal N(\widehat y_t, v_t)$.

    $$\int \big(F(z) - \mathbb 1[y \le z]\big)^2 \, dz = \tfrac1T \sum_t A(y - \widehat y_t, v_t)
    - \tfrac1{2T^2} \sum_{s,t} A(\widehat y_s - \widehat y_t, v_s + v_t)$$

    with $A(\mu, v) = \mathbb E|\mathcal N(\mu, v)|$ [Grimit et al. 2006]; in the units of y, smaller is better. With
    `noise_variance=0` it is the score of the bare draws; pass $\tau^{-1}$ to score the predictive distribution.

    Args:
        draws: Outputs of the network $\widehat y_t$, `[draw, row]`.
        y: The observed targets, `[row]`.
        noise_variance: The observation variance $v$ of each draw: a number, `[row]` or `[draw, row]`.

    Returns:
        The score of each row, `[row]`.

    Examples:
        >>> crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor([0.5000])
    """
    outcome, drawn = _matched(y, draws, draws=True)
    variance = float_tensor(noise_variance).to(drawn).expand_as(drawn)
    if not bool((variance >= 0).all()):
        raise ValueError(f"`noise_variance` must be at least 0; got {variance.min().item():.3g}.")
    pairs = torch.zeros_like(outcome)
    for mean, spread in zip(drawn, variance, strict=True):  # a loop over draws: T² values never stand in memory at once
        pairs += _expected_magnitude(drawn - mean, variance + spread).mean(0)
    return _expected_magnitude(outcome - drawn, variance).mean(0) - 0.5 * pairs / drawn.shape[0]


def _expected_magnitude(mean: Tensor, variance: Tensor) -> Tensor:
    r"""$\mathbb E|z| = 2 \sigma \varphi(\mu/\sigma) + \mu\,(2\Phi(\mu/\sigma) - 1)$, and $|\mu|$ where $\sigma = 0$."""
    std = variance.sqrt()
    ratio = mean / std.clamp_min(torch.finfo(std.dtype).tiny)
    smooth = std * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square()) + mean * torch.erf(ratio / math.sqrt(2))
    return torch.where(std > 0, smooth, mean.abs())


def interval_score(lower: Array, upper: Array, y: Array, *, level: float) -> Tensor:
    r"""The interval (Winkler) score of a central interval of probability `level` $= 1 - \alpha$; smaller is better.

    $$(u - l) + \tfrac2\alpha (l - y)_+ + \tfrac2\alpha (y - u)_+$$

    Args:
        lower: The interval's lower end $l$, `[row, ...]`.
        upper: Its upper end $u$.
        y: The observed targets.
        level: The probability the interval claims.

    Returns:
        The score of each element of y.

    Examples:
        >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.5]), level=0.9)
        tensor([11.])
    """
    _check_level(level)
    outcome, low = _matched(y, lower)
    high = _matched(y, upper)[1]
    return (high - low) + 2 / (1 - level) * ((low - outcome).clamp_min(0) + (outcome - high).clamp_min(0))


def coverage(lower: Array, upper: Array, y: Array) -> Tensor:
    r"""The share of targets inside their interval, ends included.

    Examples:
        >>> coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor(0.5000)
    """
    outcome, low = _matched(y, lower)
    high = _matched(y, upper)[1]
    return ((low <= outcome) & (outcome <= high)).to(outcome.dtype).mean()


def sharpness(std: Array) -> Tensor:
    r"""The root mean predictive variance $\sqrt{\tfrac1N \sum_n \sigma_n^2}$: how narrow the claims are, right or not.

    Examples:
        >>> sharpness(torch.tensor([1.0, 7.0]))
        tensor(5.)
    """
    return float_tensor(std).square().mean().sqrt()


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"`level` must lie strictly between 0 and 1 (0.9 for a 90 % interval); got {level!r}.")


# -------------------------------------------------------------------------------------------- classification


def _classified(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    predicted = float_tensor(probabilities)
    truth = labels if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels, order="C"))
    if predicted.dim() != 2 or truth.shape != predicted.shape[:1] or truth.is_floating_point():
        raise ValueError(
            "`probabilities` must be [row, class] and `labels` integers [row]; got "
            f"{tuple(predicted.shape)} and {tuple(truth.shape)} of {truth.dtype}. Average draws over axis 0 first."
        )
    if not (predicted.min() >= 0 and (predicted.sum(-1) - 1).abs().max() <= 1e-3):
        raise ValueError(
            "`probabilities` must be at least 0 and sum to 1 over classes; got values from "
            f"{predicted.min().item():.3g} to {predicted.max().item():.3g}. Apply softmax to logits first."
        )
    return predicted, truth.long()


def class_log_likelihood(probabilities: Array, labels: Array) -> Tensor:
    r"""The log-likelihood of the labels, $\log \tfrac1T \sum_t p(y_n \mid \omega_t)$, from the *mean* probabilities.

    For classes the mixture of draws is the mean of their probabilities, so nothing is lost by averaging first.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        labels: Class numbers, `[row]`.

    Returns:
        The log-likelihood of each row, `[row]`; $-\infty$ where the label was given probability 0.

    Examples:
        >>> class_log_likelihood(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([-0.2877])
    """
    predicted, truth = _classified(probabilities, labels)
    return predicted.gather(1, truth[:, None]).squeeze(1).log()


def brier_score(probabilities: Array, labels: Array) -> Tensor:
    r"""The Brier score $\sum_c (p_c - \mathbb 1[y = c])^2$, from 0 to 2 (for two classes: twice the binary convention).

    Examples:
        >>> brier_score(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([0.1250])
    """
    predicted, truth = _classified(probabilities, labels)
    return (predicted - torch.nn.functional.one_hot(truth, predicted.shape[1])).square().sum(-1)


def accuracy(probabilities: Array, labels: Array) -> Tensor:
    r"""The share of rows whose most probable class is the label.

    Examples:
        >>> accuracy(torch.tensor([[0.25, 0.75], [0.1, 0.9]]), torch.tensor([1, 0]))
        tensor(0.5000)
    """
    predicted, truth = _classified(probabilities, labels)
    return (predicted.argmax(-1) == truth).to(predicted.dtype).mean()


def expected_calibration_error(probabilities: Array, labels: Array, *, n_bins: int = 15) -> Tensor:
    r"""The expected calibration error over bins of *equal width*, $\sum_b \tfrac{N_b}N |\text{acc}_b - \text{conf}_b|$.

    Confidence is the probability of the predicted class. The estimate grows with the number of bins even for a
    calibrated model (about $\sqrt{n_\text{bins} / N}$): compare only like with like.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        labels: Class numbers, `[row]`.
        n_bins: Bins $[b/n, (b+1)/n)$ of the unit interval, the last one closed.

    Returns:
        The error, a scalar from 0 to 1.

    Examples:
        >>> expected_calibration_error(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=1)
        tensor(0.2500)
    """
    confidence, correct = confidence_and_correctness(probabilities, labels)
    bins = (confidence * _check_bins(n_bins)).long().clamp_max(n_bins - 1)
    return _calibration_gap(confidence, correct, bins)


def adaptive_calibration_error(probabilities: Array, labels: Array, *, n_bins: int = 15) -> Tensor:
    r"""The expected calibration error over bins of *equal mass*: as many rows in each, by rank of confidence.

    Confident models put nearly all rows in one equal-width bin; equal mass resolves them.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        labels: Class numbers, `[row]`.
        n_bins: The number of bins; their sizes differ by at most one row.

    Returns:
        The error, a scalar from 0 to 1.

    Examples:
        >>> adaptive_calibration_error(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=2)
        tensor(0.4500)
    """
    confidence, correct = confidence_and_correctness(probabilities, labels)
    ranks = confidence.argsort(stable=True).argsort()
    return _calibration_gap(confidence, correct, ranks * _check_bins(n_bins) // len(ranks))


def confidence_and_correctness(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """The predicted class's probability, and 1 where it is the label (0 elsewhere): both `[row]`.

    Examples:
        >>> confidence_and_correctness(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]))
        (tensor([0.8000, 0.7000]), tensor([1., 0.]))
    """
    predicted, truth = _classified(probabilities, labels)
    confidence, chosen = predicted.max(-1)
    return confidence, (chosen == truth).to(predicted.dtype)


def _calibration_gap(confidence: Tensor, correct: Tensor, bins: Tensor) -> Tensor:
    gap = torch.zeros(int(bins.max()) + 1, dtype=confidence.dtype, device=confidence.device)
    return gap.index_add(0, bins, correct - confidence).abs().sum() / len(confidence)


def _check_bins(n_bins: int) -> int:
    if n_bins < 1:
        raise ValueError(f"`n_bins` must be at least 1; got {n_bins!r}.")
    return n_bins


# ----------------------------------------------------------------------------------- ranking by uncertainty


def auroc(uncertainty: Array, event: Array) -> Tensor:
    r"""The area under the ROC curve: the probability that a row with the event is more uncertain than one without.

    The event is what the uncertainty should detect: "is out of distribution", or "was misclassified". Ties count half.

    Args:
        uncertainty: One number per row, `[row]`.
        event: True (or 1) where the event happened, `[row]`; both kinds must occur.

    Returns:
        The area, a scalar; ½ is chance.

    Examples:
        >>> inside, outside = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9])
        >>> auroc(torch.cat([inside, outside]), torch.tensor([0, 0, 0, 1, 1]))  # out-of-distribution detection
        tensor(0.8333)
    """
    scores, events = _detected(uncertainty, event)
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)
    sizes = sizes.double()
    midranks = sizes.cumsum(0) - (sizes - 1) / 2  # the mean rank, from 1, of each group of ties
    n_events, n_others = events.double().sum(), (~events).double().sum()
    area = (midranks[group][events].sum() - n_events * (n_events + 1) / 2) / (n_events * n_others)
    return area.to(scores.dtype)


def average_precision(uncertainty: Array, event: Array) -> Tensor:
    r"""The area under the precision-recall curve (AUPR) as average precision, $\sum_k (R_k - R_{k-1}) P_k$.

    Precision and recall of "more uncertain than the threshold" as a detector of the event; the better summary when the
    event is rare. Chance is the event's frequency.

    Args:
        uncertainty: One number per row, `[row]`.
        event: True (or 1) where the event happened, `[row]`; both kinds must occur.

    Returns:
        The area, a scalar.

    Examples:
        >>> wrong = torch.tensor([0, 1, 0, 1])  # misclassification detection
        >>> average_precision(torch.tensor([0.1, 0.9, 0.5, 0.4]), wrong)
        tensor(0.8333)
    """
    scores, events = _detected(uncertainty, event)
    levels, group = scores.unique(return_inverse=True)
    found = torch.zeros(len(levels), dtype=torch.float64, device=scores.device).index_add(0, group, events.double())
    flagged = torch.bincount(group, minlength=len(levels)).double()
    found, flagged = found.flip(0), flagged.flip(0)  # from the most uncertain down
    precision = found.cumsum(0) / flagged.cumsum(0)
    return (found * precision).sum().div(found.sum()).to(scores.dtype)


def _detected(uncertainty: Array, event: Array) -> tuple[Tensor, Tensor]:
    scores = float_tensor(uncertainty)
    events = (event if isinstance(event, Tensor) else torch.from_numpy(np.array(event, order="C"))).bool()
    if scores.dim() != 1 or scores.shape != events.shape:
        raise ValueError(
            f"`uncertainty` and `event` must both be [row]; got {tuple(scores.shape)} and {tuple(events.shape)}."
        )
    if scores.isnan().any():
        raise ValueError("`uncertainty` must not contain NaN.")
    if events.all() or not events.any():
        raise ValueError("`event` must be true for some rows and false for others: with one kind nothing is ranked.")
    return scores, events


@dataclass(frozen=True)
class RiskCoverage:
    r"""The mean loss of the rows kept, for every number of rows kept, the least uncertain first.

    Args:
        coverage: The share of rows kept, `[row]`, rising to 1.
        risk: The mean loss of those rows, `[row]`; ends at the mean loss of all.
        oracle_risk: The risk had the rows been ranked by their true loss.
    """

    coverage: Tensor
    risk: Tensor
    oracle_risk: Tensor

    @property
    def area(self) -> Tensor:
        r"""The area under the curve, $\mathrm{AURC} = \tfrac1N \sum_k \mathrm{risk}_k$; smaller is better."""
        return self.risk.mean()

    @property
    def excess_area(self) -> Tensor:
        """The area above the oracle's: 0 for a ranking that could not be better."""
        return (self.risk - self.oracle_risk).mean()


def risk_coverage(uncertainty: Array, loss: Array) -> RiskCoverage:
    r"""The risk-coverage curve: what remains wrong when the most uncertain rows are set aside.

    $\mathrm{risk}_k = \tfrac1k \sum_{i \le k} \ell_{(i)}$ with rows ordered by uncertainty. Rows of equal uncertainty
    share their mean loss, so that the curve does not depend on the order of the rows.

    Args:
        uncertainty: One number per row, `[row]`.
        loss: Each row's loss (1 for an error; a squared error; ...), `[row]`.

    Returns:
        The curve, with its `area` (AURC) and `excess_area`.

    Examples:
        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.0, 0.0, 1.0]))
        >>> curve.risk, curve.area
        (tensor([0.0000, 0.0000, 0.0000, 0.2500]), tensor(0.0625))
    """
    losses, scores = _matched(loss, uncertainty)
    if losses.dim() != 1 or scores.isnan().any():
        raise ValueError(f"`uncertainty` must be [row] without NaN; got shape {tuple(scores.shape)}.")
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)
    shared = torch.zeros(len(sizes), dtype=losses.dtype, device=losses.device).index_add(0, group, losses) / sizes
    kept = torch.arange(1, len(losses) + 1, dtype=losses.dtype, device=losses.device)
    return RiskCoverage(
        kept / len(losses),
        shared[group][scores.argsort()].cumsum(0) / kept,
        losses.sort().values.cumsum(0) / kept,
    )
