r"""Calibration maps of class probabilities, fitted on held-out rows: vector, Dirichlet and beta.

A temperature has one parameter and never changes the predicted class. Where some classes are over-confident and others
not, more parameters help, given the rows to fit them: 2 C for vector scaling, C (C + 1) for the Dirichlet map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import (
    Array,
    check_positive,
    check_values,
    class_labels,
    class_probabilities,
    events,
    finite_tensor,
    row_weights,
)


@dataclass(frozen=True, eq=False)
class ClassMap:
    r"""The map $p \mapsto \mathrm{softmax}(\mathbf W \log p + \mathbf b)$ of class probabilities.

    Args:
        weight: The matrix $\mathbf W$, `[class, class]`; the identity changes nothing.
        bias: The vector $\mathbf b$, `[class]`.
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, probabilities: Array) -> Tensor:
        """The calibrated probabilities, `[row, class]`."""
        predicted = class_probabilities("probabilities", probabilities)
        if predicted.shape[1] != len(self.bias):
            raise ValueError(f"`probabilities` must have {len(self.bias)} classes; got {predicted.shape[1]}.")
        logits = _log(predicted) @ self.weight.T.to(predicted.device) + self.bias.to(predicted.device)
        return logits.softmax(-1).to(predicted.dtype)


def vector_scaling(probabilities: Array, labels: Array, *, sample_weight: Array | None = None) -> ClassMap:
    r"""The map with one factor and one bias per class, $\mathrm{softmax}(\mathbf w \odot \log p + \mathbf b)$.

    [Guo et al. 2017]. The likelihood is concave: there is one best map.

    Args:
        probabilities: Predictive probabilities of held-out rows, `[row, class]`.
        labels: Their class indices, `[row]`.
        sample_weight: The weight of each row.

    Examples:
        >>> p = torch.tensor([[0.9, 0.1]]).repeat(10, 1)  # claims 90 %, 60 % are right
        >>> vector_scaling(p, torch.tensor([0] * 6 + [1] * 4))(p[:1]).round(decimals=3)
        tensor([[0.6000, 0.4000]])
    """
    log_p, truth, weight = _held_out(probabilities, labels, sample_weight)
    n_classes = log_p.shape[1]

    def loss(parameters: Tensor) -> Tensor:
        factors, bias = parameters.split(n_classes)
        logits = log_p * factors + bias
        # A bias common to all classes changes nothing; the small penalty selects the one of mean zero.
        return _cross_entropy(logits, truth, weight) + 1e-9 * bias.square().sum()

    best = _minimum(loss, torch.cat([torch.ones(n_classes), torch.zeros(n_classes)]))
    return ClassMap(torch.diag(best[:n_classes]), best[n_classes:])


def dirichlet_calibration(
    probabilities: Array, labels: Array, *, penalty: float = 0.01, sample_weight: Array | None = None
) -> ClassMap:
    r"""The Dirichlet map, a full matrix and a bias, $\mathrm{softmax}(\mathbf W \log p + \mathbf b)$.

    [Kull et al. 2019], with their penalty: $\lambda$ times the mean square of the off-diagonal elements of $\mathbf W$
    and of $\mathbf b$. It can move probability between classes that are mistaken for each other.

    Args:
        probabilities: Predictive probabilities of held-out rows, `[row, class]`.
        labels: Their class indices, `[row]`.
        penalty: The penalty λ; larger for fewer rows.
        sample_weight: The weight of each row.
    """
    check_positive("penalty", penalty, allow_zero=True)
    log_p, truth, weight = _held_out(probabilities, labels, sample_weight)
    n_classes = log_p.shape[1]
    others = 1 - torch.eye(n_classes, dtype=torch.float64)

    def loss(parameters: Tensor) -> Tensor:
        matrix, bias = parameters[:-n_classes].reshape(n_classes, n_classes), parameters[-n_classes:]
        size = (others * matrix).square().sum() / others.sum().clamp_min(1) + bias.square().mean()
        return _cross_entropy(log_p @ matrix.T + bias, truth, weight) + (penalty + 1e-9) * size

    start = torch.cat([torch.eye(n_classes).flatten(), torch.zeros(n_classes)])
    best = _minimum(loss, start)
    return ClassMap(best[:-n_classes].reshape(n_classes, n_classes), best[-n_classes:])


@dataclass(frozen=True)
class BetaMap:
    r"""The map $p \mapsto \sigma\big(a \log p - b \log(1 - p) + c\big)$ of the probability of one event; increasing."""

    a: float
    b: float
    c: float

    def __call__(self, probability: Array) -> Tensor:
        """The calibrated probability, shaped like `probability`."""
        p = _probability(probability)
        return torch.sigmoid(self.a * _log(p) - self.b * _log(1 - p) + self.c).to(p.dtype)


def beta_calibration(probability: Array, event: Array, *, sample_weight: Array | None = None) -> BetaMap:
    r"""The beta map of the probability of one event (two classes, or one against the rest).

    [Kull et al. 2017]: the family of maps that makes beta-distributed scores calibrated. It contains the identity
    ($a = b = 1$, $c = 0$), which Platt's sigmoid of p does not, so calibrated probabilities are unchanged.

    Args:
        probability: The claimed probability of the event on held-out rows, `[row]`.
        event: Whether it happened, `[row]`; both must occur.
        sample_weight: The weight of each row.
    """
    p = _probability(probability)
    if p.dim() != 1:
        raise ValueError(f"`probability` must be [row]; got shape {tuple(p.shape)}.")
    happened = events("event", event, n_rows=len(p)).double().cpu()
    weight = row_weights(sample_weight, len(p), like=happened)
    if len(happened[weight > 0].unique()) < 2:
        raise ValueError(
            "`event` must be true for some rows and false for others: otherwise the fit diverges to certainty."
        )
    log_p, log_q = (_log(probability.detach().double().cpu()) for probability in (p, 1 - p))

    def loss(parameters: Tensor) -> Tensor:
        a, b, c = parameters[0].exp(), parameters[1].exp(), parameters[2]  # increasing maps only
        logits = a * log_p - b * log_q + c
        misfit = torch.nn.functional.binary_cross_entropy_with_logits(logits, happened, reduction="none")
        return (misfit * weight).sum() / weight.sum()

    best = _minimum(loss, torch.zeros(3))
    return BetaMap(float(best[0].exp()), float(best[1].exp()), float(best[2]))


def _probability(probability: Array) -> Tensor:
    p = finite_tensor("probability", probability)
    check_values("probability", p, at_most=1)
    return p


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.double().clamp_min(1e-12).log()  # a probability of 0 has none


def _held_out(probabilities: Array, labels: Array, sample_weight: Array | None) -> tuple[Tensor, Tensor, Tensor]:
    predicted = class_probabilities("probabilities", probabilities).detach().cpu()
    truth = class_labels(labels, n_rows=len(predicted), n_classes=predicted.shape[1]).cpu()
    return _log(predicted), truth, row_weights(sample_weight, len(truth), like=predicted)


def _cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    misfit = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (misfit * weight).sum() / weight.sum()


def _minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The minimum of a smooth function, by L-BFGS with automatic gradients."""
    import scipy.optimize

    def value_and_gradient(values: object) -> tuple[float, object]:
        parameters = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = loss(parameters)
        (gradient,) = torch.autograd.grad(value, parameters)
        return float(value.detach()), gradient.numpy()

    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    best = scipy.optimize.minimize(
        value_and_gradient, start.double().numpy(), jac=True, method="L-BFGS-B", options=options
    )
    return torch.tensor(best.x, dtype=torch.float64)
