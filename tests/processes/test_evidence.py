"""Tests of the evidence of a finite network, against integration over a grid."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from dropbayes.covariances import Cosine, ReLU, TanH
from dropbayes.processes import exact_process, network_evidence

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


def test_a_phase_without_a_density_is_refused():
    with pytest.raises(ValueError, match=r"`layer\.bias_scale` must be positive and finite"):
        network_evidence(Cosine(), X, Y, width=1, precision=1.0)
