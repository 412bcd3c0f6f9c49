"""Tests of hidden units whose bias is not Gaussian."""

import pytest
import torch
from torch.distributions import Laplace, Normal, Uniform

from dropbayes.covariances import Cosine, Erf, RandomBias, TanH
from tests.covariances.samples import inputs

ZERO = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("distribution", [Uniform(ZERO - 2, ZERO + 1), Laplace(ZERO, 0.7)], ids=["uniform", "laplace"])
def test_the_covariance_is_the_mean_over_weights_and_biases(distribution):
    x = inputs(4)
    torch.manual_seed(0)
    preactivations = x @ torch.randn(3, 400_000, dtype=x.dtype) / 0.8 + distribution.sample((400_000,))
    units = torch.tanh(preactivations)
    terms = units[:, None] * units[None]
    error = terms.std(-1) / 400_000**0.5
    assert ((RandomBias(TanH(0.8), distribution)(x) - terms.mean(-1)).abs() < 4.5 * error).all()


def test_a_gaussian_bias_is_the_closed_form_and_a_uniform_phase_the_squared_exponential():
    x = inputs(5)
    torch.testing.assert_close(RandomBias(Erf(1.3), Normal(ZERO, 0.6))(x), Erf(1.3, 0.6)(x), rtol=0, atol=5e-5)
    phase = Uniform(ZERO, ZERO + 2 * torch.pi)
    torch.testing.assert_close(RandomBias(Cosine(1.3), phase)(x), Cosine(1.3)(x), rtol=0, atol=1e-9)
