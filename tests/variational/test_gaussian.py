"""Gaussian families against torch.distributions."""

import math

import torch
from torch import distributions as td

from dropbayes.variational import (
    Bernoulli,
    DiagonalGaussian,
    multiplicative_gaussian,
)
from tests.variational.samples import (
    DTYPE,
    matrix,
)


def test_gaussian_kl_is_that_of_torch_distributions_and_zero_at_the_prior():
    q = DiagonalGaussian(matrix(3, 2), torch.rand(3, 2, dtype=DTYPE) + 0.1)
    prior = td.Normal(torch.zeros(3, 2, dtype=DTYPE), 1 / 2.5)
    torch.testing.assert_close(q.kl(2.5), td.kl_divergence(td.Normal(q.loc, q.std), prior).sum())
    at_prior = DiagonalGaussian(torch.zeros(3, 2, dtype=DTYPE), torch.tensor(0.4, dtype=DTYPE))
    assert at_prior.kl(2.5).abs() < 1e-12


def test_multiplicative_gaussian_kl_is_exact():
    q = multiplicative_gaussian(matrix(3, 2), 0.5)
    exact = td.kl_divergence(td.Normal(q.loc, 0.5 * q.loc.abs()), td.Normal(torch.zeros_like(q.loc), 1 / 1.3)).sum()
    torch.testing.assert_close(q.kl(1.3), exact)


def test_multiplicative_gaussian_has_the_variance_of_dropout_when_matched():
    stored, keep = matrix(3, 2), 0.8
    gaussian = multiplicative_gaussian(stored, math.sqrt((1 - keep) / keep))
    torch.testing.assert_close(gaussian.variance, Bernoulli(stored / keep, keep).variance)


def test_a_zero_weight_under_multiplicative_noise_costs_finitely():
    loc = torch.tensor([[0.0, 1.0]], dtype=DTYPE, requires_grad=True)
    q = multiplicative_gaussian(loc, 0.5)
    q.kl(1.0).backward()
    assert q.kl(1.0).isfinite() and loc.grad.isfinite().all()
    torch.testing.assert_close(q.kl(1.0), td.kl_divergence(td.Normal(q.loc, q.std), td.Normal(0.0, 1.0)).sum())


def test_products_with_a_row_of_zeros_have_finite_gradients():
    loc = matrix(3, 2).requires_grad_()
    multiplicative_gaussian(loc, 0.5).product(torch.zeros(4, 3, dtype=DTYPE)).sum().backward()
    assert loc.grad.isfinite().all()
