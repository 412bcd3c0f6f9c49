"""Tests of the evidence of a finite network, against integration over a grid."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, Uniform

from dropbayes.processes import Cosine, RandomBias, ReLU, TanH, exact_process, network_evidence

X = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
Y = torch.sin(2 * X[:, 0])


@pytest.mark.parametrize("layer", [TanH(0.7, 0.9), ReLU(1.5, 0.5)], ids=repr)
def test_the_evidence_of_one_hidden_unit_is_the_integral_over_its_two_parameters(layer):
    grid = torch.linspace(-7, 7, 281, dtype=torch.float64)
    w, b = (z.flatten() for z in torch.meshgrid(grid, grid, indexing="ij"))  # in units of their prior deviations
    phi = layer.nonlinearity(X[:, 0] * w[:, None] / layer.length_scale + b[:, None] * layer.bias_scale)
    covariance = phi[:, :, None] * phi[:, None, :] + torch.eye(6, dtype=X.dtype) / 20.0
    log_conditional = MultivariateNormal(torch.zeros(6, dtype=X.dtype), covariance).log_prob(Y)
    log_prior = -0.5 * (w.square() + b.square()) - math.log(2 * math.pi)
    exact = (log_conditional + log_prior).logsumexp(0) + 2 * math.log(14 / 280)
    estimate = network_evidence(layer, X, Y, width=1, precision=20.0, n_draws=4000)
    assert abs(estimate.log_evidence - exact.item()) < 4 * estimate.standard_error < 0.3
    assert estimate.effective_draws > 200


def test_the_evidence_of_wider_networks_approaches_that_of_the_process():
    layer = TanH(0.7, 0.9)
    limit = exact_process(layer, X, Y, precision=20.0).log_marginal_likelihood
    gaps = []
    for width in (1, 16):
        estimate = network_evidence(layer, X, Y, width=width, precision=20.0, n_draws=6000)
        gaps.append(abs(estimate.log_evidence - limit))
        assert estimate.standard_error < 0.2
    assert gaps[1] < gaps[0]


def test_several_outputs_share_the_hidden_layer():
    both = network_evidence(TanH(), X, torch.stack([Y, Y], 1), width=1, precision=20.0)
    alone = network_evidence(TanH(), X, Y, width=1, precision=20.0)
    assert both.log_evidence > 2 * alone.log_evidence + 0.1  # what explains one output explains the other


@pytest.mark.parametrize(
    ("layer", "biases"),
    [
        (Cosine(0.7), torch.linspace(0, 2 * math.pi, 201, dtype=torch.float64)),
        (RandomBias(TanH(0.7), Uniform(torch.zeros(()).double() - 2, torch.zeros(()).double() + 1)),
         torch.linspace(-2, 1, 201, dtype=torch.float64)),
    ],
    ids=["a uniform phase", "a uniform bias"],
)  # fmt: skip
def test_a_bias_of_any_distribution_is_integrated_too(layer, biases):
    grid = torch.linspace(-7, 7, 281, dtype=torch.float64)
    w, b = (z.flatten() for z in torch.meshgrid(grid, (biases[1:] + biases[:-1]) / 2, indexing="ij"))
    phi = layer.nonlinearity(X[:, 0] * w[:, None] / layer.length_scale + b[:, None])
    covariance = phi[:, :, None] * phi[:, None, :] + torch.eye(6, dtype=X.dtype) / 20.0
    log_conditional = MultivariateNormal(torch.zeros(6, dtype=X.dtype), covariance).log_prob(Y)
    log_prior = -0.5 * w.square() - 0.5 * math.log(2 * math.pi)
    exact = (log_conditional + log_prior).logsumexp(0) + math.log(14 / 280) - math.log(200)
    estimate = network_evidence(layer, X, Y, width=1, precision=20.0, n_draws=6000)
    assert abs(estimate.log_evidence - exact.item()) < 4 * estimate.standard_error < 0.3


def test_the_evidence_of_two_hidden_units_in_a_row_is_the_integral_over_their_four_parameters():
    layers, tau = (TanH(0.7, 0.9), ReLU(1.2, 0.5)), 20.0
    points, weights = np.polynomial.hermite_e.hermegauss(24)
    grid, log_weights = torch.as_tensor(points), torch.as_tensor(weights / weights.sum()).log()
    w1, b1, w2, b2 = (z.flatten() for z in torch.meshgrid(grid, grid, grid, grid, indexing="ij"))
    hidden = torch.tanh(X[:, 0] * w1[:, None] / 0.7 + 0.9 * b1[:, None])
    phi = torch.relu(hidden * w2[:, None] / 1.2 + 0.5 * b2[:, None])
    # log N(y; 0, φφᵀ + I/τ) by the matrix determinant lemma and the Sherman-Morrison formula.
    square, product = phi.square().sum(1), phi @ Y
    quadratic = tau * (Y.square().sum() - tau * product.square() / (1 + tau * square))
    log_conditional = -0.5 * (quadratic + torch.log1p(tau * square) - 6 * math.log(tau) + 6 * math.log(2 * math.pi))
    log_prior = sum(z.flatten() for z in torch.meshgrid(*[log_weights] * 4, indexing="ij"))
    exact = (log_conditional + log_prior).logsumexp(0).item()
    estimate = network_evidence(layers, X, Y, width=(1, 1), precision=tau, n_draws=8000)
    assert abs(estimate.log_evidence - exact) < 4 * estimate.standard_error + 0.02 and estimate.standard_error < 0.1
    with pytest.raises(ValueError, match="`width` must be one positive width for each of the 2 layers"):
        network_evidence(layers, X, Y, width=3, precision=tau)
