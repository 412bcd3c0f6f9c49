"""Tests of the process of finite rank."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from dropbayes.processes import (
    Cosine,
    ReLU,
    TanH,
    exact_process,
    finite_rank_process,
)
from tests.processes.samples import GRID, PRECISION, toy_data


def function_space(features, x):
    """The kernel of the finite-rank covariance, as an oracle of weight space."""
    phi = features(x)
    return phi @ phi.T


@pytest.mark.parametrize("width", [5, 15, 60])
@pytest.mark.parametrize("precision", [0.5, 1e6])
def test_weight_space_equals_function_space(width, precision):
    x, y = toy_data()
    features = TanH(0.5).features(1, width, seed=1)
    process = finite_rank_process(features, x, y, precision=precision, output_bias=0.3)
    noisy = function_space(features, x) + torch.eye(15, dtype=x.dtype) / precision
    expected = MultivariateNormal(torch.full_like(y, 0.3), noisy).log_prob(y)
    assert process.log_marginal_likelihood == pytest.approx(float(expected), rel=1e-6)
    cross = features(GRID) @ features(x).T
    mean = 0.3 + cross @ torch.linalg.solve(noisy, y - 0.3)
    covariance = function_space(features, GRID) - cross @ torch.linalg.solve(noisy, cross.T)
    torch.testing.assert_close(process.mean(GRID), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(process.covariance(GRID), covariance, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(process.variance(GRID), process.covariance(GRID).diagonal())


def test_weight_space_takes_more_rows_than_a_covariance_matrix_would_allow():
    x = torch.linspace(-2, 2, 100_000, dtype=torch.float64)[:, None]  # its matrix would be 80 GB
    process = finite_rank_process(Cosine(0.7).features(1, 30), x, torch.sin(x[:, 0]), precision=100.0)
    assert (process.mean(GRID[2:-2]) - torch.sin(GRID[2:-2, 0])).abs().max() < 0.01


def test_finite_rank_posterior_approaches_the_exact_one():
    x, y = toy_data()
    exact = exact_process(ReLU(), x, y, precision=PRECISION)
    errors = []
    for width in (30, 30_000):
        features = ReLU().features(1, width, seed=3)
        phi = features(torch.cat([x, GRID]))
        train, test = phi[:15], phi[15:]
        mean = test @ train.T @ torch.linalg.solve(train @ train.T + torch.eye(15, dtype=x.dtype) / PRECISION, y)
        errors.append(float((mean - exact.mean(GRID)).abs().max()))
    assert errors[1] < 0.05 < 0.1 < errors[0]


@pytest.mark.parametrize("n_outputs", [None, 2])
@pytest.mark.parametrize("make", [exact_process, finite_rank_process])
def test_the_predictive_density_is_the_ratio_of_two_evidences(make, n_outputs):
    # p(y* | x*, X, Y) = p(y*, Y | x*, X) / p(Y | X).
    x, y = toy_data()
    y = y if n_outputs is None else torch.stack([y, -2 * y], 1)
    prior = TanH(0.5) if make is exact_process else TanH(0.5).features(1, 6, seed=1)
    less, more = make(prior, x[:-1], y[:-1], precision=7.0), make(prior, x, y, precision=7.0)
    expected = more.log_marginal_likelihood - less.log_marginal_likelihood
    assert less.log_density(x[-1:], y[-1:]).item() == pytest.approx(expected, abs=1e-8)
    assert less.log_density(x, y).shape == (len(x),)
    with pytest.raises(ValueError, match="`y` must have the shape"):
        less.log_density(x, y[:, None])
