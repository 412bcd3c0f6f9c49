"""Tests of hidden units whose bias is not Gaussian."""

import pytest
import torch
from torch.distributions import Laplace, Normal, StudentT, Uniform

from dropbayes.processes import (
    Cosine,
    Deep,
    Erf,
    RandomBias,
    TanH,
    exact_process,
    finite_rank_process,
    network_prior_draws,
)
from tests.processes.layers import inputs

ZERO = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("distribution", [Uniform(ZERO - 2, ZERO + 1), Laplace(ZERO, 0.7)], ids=["uniform", "laplace"])
def test_the_covariance_is_the_mean_over_weights_and_biases(distribution):
    x = inputs(4)
    torch.manual_seed(0)
    preactivations = x @ torch.randn(3, 30_000, dtype=x.dtype) / 0.8 + distribution.sample((30_000,))
    units = torch.tanh(preactivations)
    terms = units[:, None] * units[None]
    error = terms.std(-1) / 30_000**0.5
    assert ((RandomBias(TanH(0.8), distribution, nodes=16)(x) - terms.mean(-1)).abs() < 4.5 * error).all()


@pytest.mark.slow
def test_a_gaussian_bias_is_the_closed_form_and_a_uniform_phase_the_squared_exponential():
    x = inputs(3)
    torch.testing.assert_close(RandomBias(Erf(1.3), Normal(ZERO, 0.6))(x), Erf(1.3, 0.6)(x), rtol=0, atol=5e-5)
    phase = Uniform(ZERO, ZERO + 2 * torch.pi)
    torch.testing.assert_close(RandomBias(Cosine(1.3), phase)(x), Cosine(1.3)(x), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_features_and_the_finite_rank_process_draw_biases_from_their_distribution():
    layer, x = RandomBias(TanH(0.8), Laplace(ZERO, 0.7), nodes=12), inputs(4)
    phi = layer.features(3, width=60_000)(x)
    torch.testing.assert_close(phi @ phi.T, layer(x), rtol=0, atol=0.01)
    y = x[:, 0]
    wide = finite_rank_process(layer.features(3, width=500), x, y, precision=10.0)
    torch.testing.assert_close(wide.mean(x), exact_process(layer, x, y, precision=10.0).mean(x), rtol=0, atol=0.2)


@pytest.mark.slow
def test_a_random_bias_takes_part_in_deep_processes():
    normal, plain = RandomBias(Erf(1.3), Normal(ZERO, 0.6), nodes=24), Erf(1.3, 0.6)
    x = inputs(4)
    torch.testing.assert_close(Deep((normal, plain))(x), Deep((plain, plain))(x), rtol=0, atol=1e-3)
    assert network_prior_draws([normal, normal], x, widths=[5, 6], n_draws=3).shape == (3, 4, 1)
    assert normal.with_scales({"length_scale": 2.0}).length_scale == 2.0


def test_a_distribution_without_an_inverse_distribution_function_is_refused():
    with pytest.raises(ValueError, match=r"`distribution` must have an inverse distribution function; got StudentT"):
        RandomBias(TanH(), StudentT(3.0))
