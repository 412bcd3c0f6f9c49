"""Tests of the noise around an output against torch.distributions."""

import math

import pytest
import scipy.stats
import torch

import dropbayes as db
from dropbayes.likelihoods import Gaussian, HeteroscedasticGaussian, StudentT

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_gaussian_log_density_is_that_of_torch_distributions():
    output, y = torch.randn(7, 5, 3, dtype=DTYPE), torch.randn(5, 3, dtype=DTYPE)
    expected = torch.distributions.Normal(output, 4.0**-0.5).log_prob(y).sum(-1)
    torch.testing.assert_close(db.Gaussian(precision=4.0).log_density(output, y), expected)


def test_column_output_against_flat_targets_is_refused():
    with pytest.raises(ValueError, match=r"`y` must have the shape"):
        db.Gaussian(precision=1.0).log_density(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("precision", [1e-12, 1e12])
def test_gaussian_is_finite_and_right_at_extreme_precisions(precision):
    likelihood, output = Gaussian(precision), torch.zeros(3, 2, dtype=DTYPE)
    y = torch.full((3, 2), precision**-0.5, dtype=DTYPE)
    expected = torch.full((3,), 2 * (0.5 * math.log(precision) - 0.5 * math.log(2 * math.pi) - 0.5), dtype=DTYPE)
    torch.testing.assert_close(likelihood.log_density(output, y), expected)
    torch.testing.assert_close(likelihood.variance(output), torch.full_like(output, 1 / precision))


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_precisions_are_refused(precision):
    with pytest.raises(ValueError, match="`precision` must be a positive finite number"):
        Gaussian(precision)


def test_heteroscedastic_log_density_is_that_of_torch_distributions():
    output, y = torch.randn(7, 5, 6, dtype=DTYPE), torch.randn(5, 3, dtype=DTYPE)
    normal = torch.distributions.Normal(output[..., :3], torch.exp(0.5 * output[..., 3:]))
    likelihood = HeteroscedasticGaussian()
    torch.testing.assert_close(likelihood.log_density(output, y), normal.log_prob(y).sum(-1))
    torch.testing.assert_close(likelihood.mean(output), normal.mean)
    torch.testing.assert_close(likelihood.variance(output), normal.variance)


def test_heteroscedastic_with_constant_log_variance_is_the_gaussian():
    mean, y = torch.randn(5, 2, dtype=DTYPE), torch.randn(5, 2, dtype=DTYPE)
    output = torch.cat([mean, torch.full_like(mean, -math.log(3.0))], -1)
    torch.testing.assert_close(HeteroscedasticGaussian().log_density(output, y), Gaussian(3.0).log_density(mean, y))


def test_odd_heteroscedastic_outputs_are_refused():
    with pytest.raises(ValueError, match="even last axis"):
        HeteroscedasticGaussian().mean(torch.zeros(2, 3))


@pytest.mark.parametrize("nu", [2.1, 4.0, 30.0])
def test_student_density_and_moments_are_those_of_torch_distributions(nu):
    output, y = torch.randn(7, 5, 3, dtype=DTYPE), 3 * torch.randn(5, 3, dtype=DTYPE)
    oracle = torch.distributions.StudentT(torch.tensor(nu, dtype=DTYPE), output, 0.7)
    likelihood = StudentT(scale=0.7, degrees_of_freedom=nu)
    torch.testing.assert_close(likelihood.log_density(output, y), oracle.log_prob(y).sum(-1))
    torch.testing.assert_close(likelihood.mean(output), oracle.mean)
    torch.testing.assert_close(likelihood.variance(output), oracle.variance)


def test_student_of_many_degrees_of_freedom_is_the_gaussian():
    output, y = torch.randn(5, 2, dtype=DTYPE), torch.randn(5, 2, dtype=DTYPE)
    near = StudentT(scale=0.5, degrees_of_freedom=1e7).log_density(output, y)
    torch.testing.assert_close(near, Gaussian(precision=4.0).log_density(output, y), rtol=1e-5, atol=1e-5)


def test_student_samples_follow_its_distribution():
    sample = StudentT(scale=2.0, degrees_of_freedom=3.0).sample(torch.ones(20_000, 1, dtype=DTYPE))
    test = scipy.stats.kstest(sample[:, 0].numpy(), scipy.stats.t(df=3.0, loc=1.0, scale=2.0).cdf)
    assert test.pvalue > 1e-3


@pytest.mark.parametrize(
    ("scale", "nu", "name"),
    [(0.0, 4.0, "scale"), *((1.0, nu, "degrees_of_freedom") for nu in (2.0, math.inf, math.nan, None, "4"))],
)
def test_a_student_without_scale_or_variance_is_refused(scale, nu, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        StudentT(scale, nu)


def test_every_output_may_have_a_precision_of_its_own():
    torch.manual_seed(0)
    output, y = torch.randn(5, 4, 2, dtype=DTYPE), torch.randn(4, 2, dtype=DTYPE)
    likelihood = Gaussian(torch.tensor([0.5, 8.0], dtype=DTYPE))
    columns = [Gaussian(tau).log_density(output[..., d : d + 1], y[:, d : d + 1]) for d, tau in enumerate((0.5, 8.0))]
    torch.testing.assert_close(likelihood.log_density(output, y), columns[0] + columns[1])
    torch.testing.assert_close(likelihood.variance(output)[0, 0], torch.tensor([2.0, 0.125], dtype=DTYPE))
    net = torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(9, 2))
    x = torch.randn(6, 3)
    for n_draws in (20, "auto"):
        aleatoric = db.predict(net, x, likelihood=Gaussian(torch.tensor([0.5, 8.0])), n_draws=n_draws).aleatoric
        torch.testing.assert_close(aleatoric, torch.tensor([2.0, 0.125]).expand(6, 2))
    judged = db.evaluate(net, x, torch.zeros(6, 2), likelihood=Gaussian(torch.tensor([4.0, 4.0])), n_draws=20, seed=0)
    same = db.evaluate(net, x, torch.zeros(6, 2), likelihood=Gaussian(4.0), n_draws=20, seed=0)
    assert judged.log_likelihood == pytest.approx(same.log_likelihood)
    with pytest.raises(ValueError, match="`precision` must be one number or one for each output; got 3"):
        Gaussian(torch.ones(3)).log_density(output, y)
    with pytest.raises(ValueError, match="`precision` must be a positive"):
        Gaussian(torch.tensor([1.0, 0.0]))
