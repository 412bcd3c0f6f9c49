"""Gaussian families and mixtures of them against torch.distributions: densities and divergences."""

import math

import pytest
import torch
from torch import distributions as td

from dropbayes.layers import Bernoulli, DiagonalGaussian, Mixture, multiplicative_gaussian
from tests.layers.families import DTYPE, families, kl_monte_carlo, matrix


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


def test_mixture_density_is_that_of_torch_distributions():
    q, value = families()["low-rank mixture"], matrix(5, 3, 2)
    covariance = torch.diag_embed(q.stds.square()) + q.factors @ q.factors.mT
    oracle = td.MixtureSameFamily(
        td.Categorical(q.probs.expand(3, 3)),
        td.MultivariateNormal(q.locs.movedim(0, 1), covariance.movedim(0, 1)),
    )
    torch.testing.assert_close(q.log_density(value), oracle.log_prob(value).sum(-1))


def test_bernoulli_is_the_two_component_mixture():
    kept, value = matrix(4, 3), matrix(6, 4, 3)
    q = Bernoulli(kept, 0.8, std=0.3)
    mixture = Mixture(
        torch.tensor([0.8, 0.2], dtype=DTYPE),
        torch.stack([kept, torch.zeros_like(kept)]),
        torch.full((1, 1, 1), 0.3, dtype=DTYPE),
    )
    torch.testing.assert_close(q.log_density(value), mixture.log_density(value))
    torch.testing.assert_close(q.kl_separated(1.7), mixture.kl_separated(1.7))
    torch.testing.assert_close(q.mean, mixture.mean)
    torch.testing.assert_close(q.variance, mixture.variance)


@pytest.mark.parametrize("length_scale", [0.3, 1.0, 4.0])
def test_kl_of_separated_components_is_that_of_monte_carlo(length_scale):
    kept = 6 * torch.nn.functional.normalize(matrix(3, 5), dim=1)  # 20 σ apart: proposition 1 is exact
    q = Bernoulli(kept, 0.7, std=0.3)
    estimate, error = kl_monte_carlo(q, length_scale=length_scale, n_draws=20_000)
    assert (q.kl_separated(length_scale) - estimate).abs() < 4 * error
    factors = 0.2 * matrix(3, 2, 4, 2)
    mixture = Mixture(
        torch.tensor([0.5, 0.3, 0.2], dtype=DTYPE),
        torch.stack([torch.full((2, 4), 8.0 * i, dtype=DTYPE) for i in range(3)]),
        torch.full((1, 1, 1), 0.4, dtype=DTYPE),
        factors,
    )
    estimate, error = kl_monte_carlo(mixture, length_scale=length_scale, n_draws=20_000)
    assert (mixture.kl_separated(length_scale) - estimate).abs() < 4 * error


def test_proposition_one_errs_less_as_columns_grow_for_three_components_too():
    entropy, gaps = math.log(3), []
    for columns in (1, 4, 32):
        q = Mixture(
            torch.full((3,), 1 / 3, dtype=DTYPE), matrix(3, 50, columns), torch.full((1, 1, 1), 0.7, dtype=DTYPE)
        )
        estimate, error = kl_monte_carlo(q, length_scale=1.0, n_draws=2000)
        gaps.append((estimate - q.kl_separated(1.0)).item() / (50 * entropy))
        assert -4 * error.item() / (50 * entropy) < gaps[-1] < 1
    assert gaps[0] > 0.5 > gaps[1] > 0.05 > 0.01 > abs(gaps[2])


def test_constant_of_proposition_one_has_no_log_two_pi():
    # The statement has -K(1 + log 2π): with it the KL of q = p (one component) would not be 0.
    one = Mixture(torch.ones(1, dtype=DTYPE), torch.zeros(1, 2, 3, dtype=DTYPE), torch.ones(1, 1, 1, dtype=DTYPE))
    assert one.kl(1.0).abs() < 1e-12


def test_the_kl_of_a_mixture_lies_between_its_lower_and_its_upper_bound():
    for gap in (0.0, 0.5, 3.0):
        locs = torch.stack([torch.zeros(2, 2, dtype=DTYPE), torch.full((2, 2), gap, dtype=DTYPE)])
        q = Mixture(
            torch.tensor([0.3, 0.7], dtype=DTYPE),
            locs,
            torch.full((1, 1, 1), 0.6, dtype=DTYPE),
            0.3 * matrix(2, 2, 2, 1),
        )
        exact, error = kl_monte_carlo(q, length_scale=1.2, n_draws=40_000)
        assert q.kl_separated(1.2) - 4 * error <= exact <= q.kl(1.2) + 4 * error
