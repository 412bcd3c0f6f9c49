r"""Recalibration, fitted on held-out rows: by one number, a monotone map of levels, or a map of class probabilities.

A temperature has one parameter and never changes the predicted class. Where some classes are over-confident and others
not, more parameters help, given the rows to fit them: 2 C for vector scaling, C (C + 1) for the Dirichlet map.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from dropbayes.calibration.conformal import standardised_residuals
from dropbayes.calibration.reliability import checked_levels
from dropbayes.runtime import validation
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import Array
from dropbayes.scores.averages import cumulative_weights, weighted_mean
from dropbayes.scores.classification import probabilities_and_labels


def std_scale(mean: Array, std: Array | float, y: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The factor $s$ on the standard deviation with the largest Gaussian likelihood.

    $$s^2 = \tfrac1N \sum_n (y_n - \mu_n)^2/\sigma_n^2$$

    Fit on held-out data, then use $s \sigma$. Above 1 the model was over-confident.

    Examples:
        >>> std_scale(torch.zeros(2), torch.ones(2), torch.tensor([3.0, -3.0]))
        tensor(3.)
    """
    return weighted_mean(standardised_residuals(mean, std, y).square(), sample_weight).sqrt()


@dataclass(frozen=True)
class IsotonicRecalibration:
    """A monotone map between the levels a model claims, from 0 to 1, and the levels observed on held-out data."""

    claimed_levels: Tensor
    observed_levels: Tensor

    def observed(self, claimed: Array) -> Tensor:
        """The level to expect where the model claims `claimed` (recalibrates a cumulative probability)."""
        return _interpolate(checked_levels("claimed", claimed, axes=None), self.claimed_levels, self.observed_levels)

    def claimed(self, observed: Array) -> Tensor:
        """The level to request from the model so that `observed` is the true level (recalibrates a quantile)."""
        return _interpolate(checked_levels("observed", observed, axes=None), self.observed_levels, self.claimed_levels)


def isotonic_recalibration(pit: Array, *, sample_weight: Array | None = None) -> IsotonicRecalibration:
    r"""The recalibration map of predictive levels, piecewise linear through $(u_{(i)}, \tfrac{i}{n+1})$.

    [Kuleshov et al. 2018]. The frequencies of held-out transforms $u_i = F_i(y_i)$, the `pit`, rise with the level, so
    isotonic regression leaves them as they are; $i/(n+1)$ is the expected level of the $i$-th smallest of $n$. Some
    transforms must lie strictly between 0 and 1.

    Examples:
        >>> recalibration = isotonic_recalibration(torch.tensor([0.4, 0.5, 0.6]))  # claims too wide a spread
        >>> recalibration.claimed(torch.tensor([0.25, 0.5, 0.75]))
        tensor([0.4000, 0.5000, 0.6000])
    """
    values = checked_levels("pit", pit).detach().flatten().double()
    weight, levels = validation.row_weights(sample_weight, len(values), like=values), values.unique()
    below, up_to, total = cumulative_weights(values, weight, levels)
    rank = 0.5 * (below + up_to + 1) / (total + 1)  # of ties, the middle one
    inside = (levels > 0) & (levels < 1) & (up_to > below)
    if not bool(inside.any()):
        rule = "have values strictly between 0 and 1; all are 0 or 1: every target lies outside the claims"
        raise ValueError(f"`pit` must {rule}. Widen them first (`std_scale`).")
    zero, one = levels.new_zeros(1), levels.new_ones(1)
    return IsotonicRecalibration(*(torch.cat([zero, points[inside], one]) for points in (levels, rank)))


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear interpolation through rising `x`, in double precision: levels close to 0 would coincide in single."""
    points, claimed, observed = (one.detach().double().cpu().numpy() for one in (at, x, y))
    return torch.as_tensor(np.interp(points, claimed, observed)).to(at)


def temperature(logit_draws: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The temperature with the largest likelihood of the mixture of draws.

    $$\arg\max_\theta \sum_n \log \tfrac1T \sum_t \mathrm{softmax}(\widehat y_t/\theta)_{y_n}$$

    Fit on held-out data, logits `[draw, row, class]` (a deterministic network's as `logits[None]`), then divide every
    draw's logits by it. Above 1 the model was over-confident. The search stays within 1/20 and 20: held-out data
    without a single error would ask for 0.

    Examples:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])  # claims 98 %
        >>> temperature(logits[None], torch.tensor([0, 0, 0, 1]))  # 75 % are right: 4 / log 3
        tensor(3.6410)
    """
    from scipy.optimize import minimize_scalar

    logits = validation.finite_tensor("logit_draws", logit_draws)
    if logits.dim() != 3:
        raise ValueError(f"`logit_draws` must be [draw, row, class]; got {tuple(logits.shape)}. Try logits[None].")
    if bool((logits >= 0).all() and ((logits.sum(-1) - 1).abs() <= 1e-3).all()):
        raise ValueError("`logit_draws` must be logits; got what sums to 1, as probabilities do. Pass their logarithm.")
    truth = validation.class_labels(labels, n_rows=logits.shape[1], n_classes=logits.shape[2], device=logits.device)
    weight = validation.row_weights(sample_weight, len(truth), like=logits)
    double, index = logits.detach().double(), truth.expand(logits.shape[:2])[..., None]

    def negative_log_likelihood(log_temperature: float) -> float:
        log_probabilities = (double / math.exp(log_temperature)).log_softmax(-1).gather(2, index)
        return -float((log_probabilities.logsumexp(0).squeeze(-1) * weight).sum() / weight.sum())

    # The likelihood of a mixture may have several maxima: a grid finds the highest, a bounded search refines it. Of
    # equal likelihoods, as those of logits that are all the same, the temperature nearest to 1 is taken.
    end, n = math.log(20), 15
    start = min(sorted((step * end / n for step in range(-n, n + 1)), key=abs), key=negative_log_likelihood)
    bounds = max(start - end / n, -end), min(start + end / n, end)
    best = minimize_scalar(negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return logits.new_tensor(math.exp(min(start, best.x, key=negative_log_likelihood)))


@dataclass(frozen=True, eq=False)
class ClassMap:
    r"""The map $p \mapsto \mathrm{softmax}(\mathbf W \log p + \mathbf b)$ of class probabilities."""

    weight: Tensor  # [class, class]; the identity changes nothing
    bias: Tensor  # [class]

    def __call__(self, probabilities: Array) -> Tensor:
        """The calibrated probabilities, `[row, class]`."""
        predicted = validation.class_probabilities("probabilities", probabilities)
        if predicted.shape[1] != len(self.bias):
            raise ValueError(f"`probabilities` must have {len(self.bias)} classes; got {predicted.shape[1]}.")
        logits = _log(predicted) @ self.weight.T.to(predicted.device) + self.bias.to(predicted.device)
        return logits.softmax(-1).to(predicted.dtype)


@on_cpu
def vector_scaling(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> ClassMap:
    r"""The map with one factor and one bias per class, $\mathrm{softmax}(\mathbf w \odot \log p + \mathbf b)$.

    [Guo et al. 2017], fitted to the predictive probabilities `[row, class]` and class indices `[row]` of held-out rows.
    The likelihood is concave: there is one best map. Every class must occur.

    Examples:
        >>> p = torch.tensor([[0.9, 0.1]]).repeat(10, 1)  # claims 90 %, 60 % are right
        >>> vector_scaling(p, torch.tensor([0] * 6 + [1] * 4))(p[:1]).round(decimals=3)
        tensor([[0.6000, 0.4000]])
    """
    return _class_map(probabilities, labels, sample_weight, full=False, penalty=0.0)


@on_cpu
def dirichlet_calibration(
    probabilities: Array, labels: Array, *, penalty: float = 0.01, sample_weight: Array | None = None
) -> ClassMap:
    r"""The Dirichlet map, a full matrix and a bias, $\mathrm{softmax}(\mathbf W \log p + \mathbf b)$.

    [Kull et al. 2019], with their `penalty`: $\lambda$, larger for fewer rows, times the mean square of the
    off-diagonal elements of $\mathbf W$ and of $\mathbf b$. Fitted to held-out rows as `vector_scaling` is.
    """
    validation.check_positive("penalty", penalty, allow_zero=True)
    return _class_map(probabilities, labels, sample_weight, full=True, penalty=penalty)


def _class_map(
    probabilities: Array, labels: Array, sample_weight: Array | None, *, full: bool, penalty: float
) -> ClassMap:
    """The map with a full or a diagonal matrix of the least loss; every class must occur."""
    predicted, truth = (one.detach().cpu() for one in probabilities_and_labels(probabilities, labels))
    weight, n_classes = validation.row_weights(sample_weight, len(truth), like=predicted), predicted.shape[1]
    if absent := set(range(n_classes)) - set(truth[weight > 0].tolist()):
        raise ValueError(f"`labels` must hold every class; {sorted(absent)} never occur. Add rows of them.")
    log_p, identity = _log(predicted), torch.eye(n_classes, dtype=torch.float64)

    def map_of(parameters: Tensor) -> ClassMap:
        matrix, bias = parameters[:-n_classes], parameters[-n_classes:]
        return ClassMap(matrix.reshape(n_classes, n_classes) if full else torch.diag(matrix), bias)

    def loss(parameters: Tensor) -> Tensor:
        found = map_of(parameters)
        misfit = cross_entropy(log_p @ found.weight.T + found.bias, truth, reduction="none")
        others = (1 - identity) * found.weight
        size = others.square().sum() / max(1, n_classes * (n_classes - 1)) + found.bias.square().mean()
        # A bias common to all classes changes nothing; the small penalty selects the one of mean zero.
        return weighted_mean(misfit, weight) + (penalty + 1e-9) * size

    start = identity.flatten() if full else torch.ones(n_classes)
    return map_of(_minimum(loss, torch.cat([start, torch.zeros(n_classes)])))


@dataclass(frozen=True)
class BetaMap:
    r"""The map $p \mapsto \sigma\big(a \log p - b \log(1 - p) + c\big)$ of the probability of one event; increasing."""

    a: float
    b: float
    c: float

    def __call__(self, probability: Array) -> Tensor:
        """The calibrated probability, shaped like `probability`."""
        p = checked_levels("probability", probability, axes=None)
        return torch.sigmoid(self.a * _log(p) - self.b * _log(1 - p) + self.c).to(p.dtype)


@on_cpu
def beta_calibration(probability: Array, event: Array, *, sample_weight: Array | None = None) -> BetaMap:
    r"""The beta map of the probability of one event (two classes, or one against the rest).

    [Kull et al. 2017]. It contains the identity ($a = b = 1$, $c = 0$), which Platt's sigmoid of p does not. Fitted to
    the claimed probability of the event on held-out rows, `[row]`, and whether it happened, `[row]`; both must occur.
    """
    p = checked_levels("probability", probability, axes="[row]")
    happened = validation.events("event", event, n_rows=len(p)).double().cpu()
    weight = validation.row_weights(sample_weight, len(p), like=happened)
    if len(happened[weight > 0].unique()) < 2:
        raise ValueError("`event` must be true for some rows and false for others, or the fit diverges to certainty.")
    log_p, log_q = (_log(probability.detach().double().cpu()) for probability in (p, 1 - p))

    def loss(parameters: Tensor) -> Tensor:
        a, b, c = parameters[0].exp(), parameters[1].exp(), parameters[2]  # increasing maps only
        logits = a * log_p - b * log_q + c
        return weighted_mean(binary_cross_entropy_with_logits(logits, happened, reduction="none"), weight)

    best = _minimum(loss, torch.zeros(3))
    return BetaMap(float(best[0].exp()), float(best[1].exp()), float(best[2]))


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.double().clamp_min(1e-12).log()  # a probability of 0 has none


def _minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The minimum of a smooth function, by L-BFGS with automatic gradients."""
    import scipy.optimize

    def value_and_gradient(values: object) -> tuple[float, object]:
        parameters = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = loss(parameters)
        (gradient,) = torch.autograd.grad(value, parameters)
        return float(value.detach()), gradient.numpy()

    how = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}}
    best = scipy.optimize.minimize(value_and_gradient, start.double().numpy(), **how)
    return torch.tensor(best.x, dtype=torch.float64)
