"""Laws that hold for every likelihood."""

import math

import pytest
import torch
from torch import nn

from dropbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Quantiles,
    StudentT,
    predictive_variance,
)
from dropbayes.likelihoods.observation import checked_targets, sum_events

DTYPE = torch.float64
EVERY = [
    Gaussian(4.0), HeteroscedasticGaussian(), StudentT(0.5, 8.0), Quantiles((0.2, 0.8)), Categorical(), Bernoulli(),
    Poisson(),
]  # fmt: skip
ids = [type(likelihood).__name__ for likelihood in EVERY]


@pytest.mark.parametrize("likelihood", EVERY, ids=ids)
def test_samples_have_the_stated_moments(likelihood):
    n = 40_000
    output = torch.tensor([0.5, -0.7], dtype=DTYPE).expand(n, 2)
    sample = likelihood.sample(output, generator=torch.Generator().manual_seed(1))
    if isinstance(likelihood, Categorical):
        sample = nn.functional.one_hot(sample, 2).to(DTYPE)
    mean, variance = likelihood.mean(output)[0], likelihood.variance(output)[0]
    assert ((sample.mean(0) - mean).abs() < 4 * (variance / n).sqrt()).all()
    centred = (sample - mean).square()
    assert ((centred.mean(0) - variance).abs() < 4 * centred.std(0) / math.sqrt(n)).all()


@pytest.mark.parametrize("likelihood", EVERY, ids=ids)
def test_log_densities_differentiate(likelihood):
    output = torch.randn(3, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = likelihood.sample(output.detach(), generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda out: likelihood.log_density(out, y), output)


@pytest.mark.parametrize("likelihood", EVERY, ids=ids)
def test_a_density_has_one_value_per_draw_and_row(likelihood):
    output = torch.randn(6, 5, 2, dtype=DTYPE)
    y = likelihood.sample(output[0], generator=torch.Generator().manual_seed(1))
    density = likelihood.log_density(output, y)
    torch.testing.assert_close(density, torch.stack([likelihood.log_density(one, y) for one in output]))
    assert density.shape == (6, 5)


@pytest.mark.parametrize("likelihood", EVERY, ids=ids)
def test_the_predictive_variance_is_that_of_samples_from_the_mixture(likelihood):
    output = torch.randn(8, 1, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    repeated = output.expand(8, 20_000, 2)
    sample = likelihood.sample(repeated, generator=torch.Generator().manual_seed(1))
    if isinstance(likelihood, Categorical):
        sample = nn.functional.one_hot(sample, 2).to(DTYPE)
    observed = sample.flatten(0, 1).var(0)
    torch.testing.assert_close(observed, predictive_variance(likelihood, output)[0], rtol=0.05, atol=0.0)


def test_event_axes_are_summed_and_draws_and_rows_are_not():
    density = torch.randn(6, 5, 3, 2)
    torch.testing.assert_close(sum_events(density, torch.zeros(5, 3, 2)), density.sum((-2, -1)))


def test_a_wrong_shape_is_told_without_the_axis_of_draws():
    with pytest.raises(ValueError, match=r"got y \(100,\) against output \(100, 1\)"):
        checked_targets(torch.zeros(50, 100, 1), torch.zeros(100))


@pytest.mark.parametrize(
    "likelihood", [Gaussian(4.0), StudentT(1.0), Poisson(), Bernoulli(), HeteroscedasticGaussian()]
)
def test_truth_values_are_zeros_and_ones(likelihood):
    output, y = torch.randn(5, 3, 2), torch.tensor([[True], [False], [True]])
    output = output if isinstance(likelihood, HeteroscedasticGaussian) else output[..., :1]
    assert torch.equal(likelihood.log_density(output, y), likelihood.log_density(output, y.float()))
