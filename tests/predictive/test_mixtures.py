"""Tests of the predictive mixture: against torch's and SciPy's distributions, samples and numerical integrals."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from dropbayes import scores
from dropbayes.predictive import Mixture, mixtures

F64 = torch.float64
NOISES = [math.inf, 3.0, 7.5, 150.0]


def random_mixture(freedom=math.inf, *, n_draws=12, shape=(5,), seed=0):
    source = torch.Generator().manual_seed(seed)
    location = 50 + 7 * torch.randn(n_draws, *shape, dtype=F64, generator=source)
    return Mixture(location, 0.5 + 5 * torch.rand(n_draws, *shape, dtype=F64, generator=source), freedom)


def components(mixture, row):
    kind = stats.norm() if math.isinf(mixture.freedom) else stats.t(mixture.freedom)
    return kind, mixture.location[:, row].numpy(), mixture.scale[:, row].numpy()


@pytest.mark.parametrize("freedom", NOISES)
def test_the_density_is_the_mean_of_the_components_densities(freedom):
    mixture, y = random_mixture(freedom), torch.linspace(20, 80, 5, dtype=F64)
    for row in range(5):
        kind, location, scale = components(mixture, row)
        expected = np.log(np.mean(kind.pdf((float(y[row]) - location) / scale) / scale))
        assert float(mixture.log_density(y)[row]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("freedom", NOISES)
def test_the_transform_is_the_mean_of_the_components_distribution_functions(freedom):
    mixture, y = random_mixture(freedom), torch.linspace(20, 80, 5, dtype=F64)
    for row in range(5):
        kind, location, scale = components(mixture, row)
        expected = np.mean(kind.cdf((float(y[row]) - location) / scale))
        assert float(mixture.pit(y)[row]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("freedom", [2.1, 3.0, 30.0, 999.0])
def test_the_tabulated_distribution_function_is_scipys(freedom):
    z = torch.cat([torch.linspace(-40, 40, 4001, dtype=F64), torch.tensor([-1e9, 1e9], dtype=F64)])
    ours = Mixture(torch.zeros(1, len(z), dtype=F64), torch.tensor(1.0), freedom).pit(z)
    np.testing.assert_allclose(ours, stats.t(freedom).cdf(z), rtol=0, atol=1e-9)


@pytest.mark.parametrize("freedom", NOISES)
def test_moments_are_those_of_the_components(freedom):
    mixture = random_mixture(freedom)
    kind, location, scale = components(mixture, 2)
    noise = np.mean(scale**2) * kind.var()
    assert float(mixture.aleatoric[2]) == pytest.approx(noise)
    assert float(mixture.std[2]) == pytest.approx(math.sqrt(np.var(location) + noise))
    assert float(mixture.epistemic_share[2]) == pytest.approx(np.var(location) / (np.var(location) + noise))


@pytest.mark.parametrize("freedom", NOISES)
@pytest.mark.parametrize("level", [1e-4, 0.3, 0.5, 0.975])
def test_the_distribution_function_at_a_quantile_is_its_level(level, freedom):
    mixture = random_mixture(freedom, n_draws=40, shape=(30, 2))
    quantile = mixture.quantile(level)
    assert quantile.shape == (30, 2)
    reached = mixture.pit(quantile)
    torch.testing.assert_close(reached, torch.full_like(reached, level), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("freedom", [3.0, 7.5])
def test_the_crps_of_students_t_is_its_integral(freedom):
    mixture, y = random_mixture(freedom, shape=(2,)), torch.tensor([45.0, 90.0], dtype=F64)
    for row in range(2):
        kind, location, scale = components(mixture, row)

        def squared(z, *, outcome=float(y[row]), kind=kind, location=location, scale=scale):
            return (np.mean(kind.cdf((z - location) / scale)) - (outcome <= z)) ** 2

        edges = [-1e5, 0, float(y[row]), 100, 1e5]
        expected = sum(integrate.quad(squared, a, b, limit=500)[0] for a, b in itertools.pairwise(edges))
        assert float(mixture.crps(y)[row]) == pytest.approx(expected, rel=1e-5)


def test_the_crps_counts_a_draw_far_from_all_others():
    location = torch.zeros(2000, 1, dtype=F64)
    location[0] = 200.0
    student, gauss = (Mixture(location, torch.ones(1, dtype=F64), freedom) for freedom in (900.0, math.inf))
    torch.testing.assert_close(student.crps(location[1]), gauss.crps(location[1]), rtol=1e-3, atol=0)


def test_the_crps_of_light_tails_looks_no_further_than_they_reach(monkeypatch):
    looks = []
    distribution = mixtures._distribution
    monkeypatch.setattr(mixtures, "_distribution", lambda z, freedom: looks.append(z) or distribution(z, freedom))
    for freedom, most in ((2.1, 770), (12.0, 500)):
        looks.clear()
        random_mixture(freedom).crps(torch.linspace(20, 80, 5, dtype=F64))
        assert len(looks) <= most


def test_gaussian_scores_are_those_of_the_library():
    mixture, y = random_mixture(), torch.linspace(20, 80, 5, dtype=F64)
    variance = mixture.scale.square()
    torch.testing.assert_close(mixture.crps(y), scores.crps(mixture.location, y, noise_variance=variance))
    pit = torch.distributions.Normal(mixture.location, mixture.scale).cdf(y).mean(0)
    torch.testing.assert_close(mixture.pit(y), pit)


def test_many_degrees_of_freedom_are_a_gaussian():
    y = torch.linspace(40, 60, 5, dtype=F64)
    student, gauss = random_mixture(999.0), random_mixture()
    torch.testing.assert_close(student.log_density(y), gauss.log_density(y), rtol=0, atol=0.05)
    torch.testing.assert_close(student.pit(y), gauss.pit(y), rtol=0, atol=1e-3)
    torch.testing.assert_close(student.crps(y), gauss.crps(y), rtol=1e-2, atol=0)


@pytest.mark.slow
def test_outputs_share_their_draws_in_the_density_and_have_marginals_of_their_own():
    mixture = random_mixture((3.0, math.inf), shape=(6, 2))
    y = torch.full((6, 2), 52.0, dtype=F64)
    each = [stats.t(3.0), stats.norm()]
    z = ((y - mixture.location) / mixture.scale).numpy()
    log = sum(each[k].logpdf(z[..., k]) for k in range(2)) - mixture.scale.log().sum(-1).numpy()
    np.testing.assert_allclose(mixture.log_density(y), np.log(np.mean(np.exp(log), 0)), rtol=1e-9)
    for k in range(2):
        alone = mixture.output(k)
        torch.testing.assert_close(mixture.pit(y)[:, k], alone.pit(y[:, k]))
        torch.testing.assert_close(mixture.quantile(0.9)[:, k], alone.quantile(0.9))
        torch.testing.assert_close(mixture.crps(y)[:, k], alone.crps(y[:, k]))
        torch.testing.assert_close(mixture.std[:, k], alone.std)


def test_an_interval_holds_its_share_of_samples():
    mixture = random_mixture(3.0, n_draws=30)
    source = np.random.default_rng(0)
    draw = source.integers(30, size=40_000)
    kind, location, scale = components(mixture, 1)
    samples = location[draw] + scale[draw] * kind.rvs(40_000, random_state=source)
    lower, upper = (float(end[1]) for end in mixture.interval(0.9))
    assert np.mean((lower < samples) & (samples < upper)) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), torch.ones(3)), "`location` must be"),
        ((torch.zeros(3, 2), torch.zeros(3, 2)), "`scale` must be positive"),
        ((torch.zeros(3, 2), torch.tensor(1.0), 2.0), "`freedom` must be greater than 2"),
        ((torch.zeros(3, 2, 2), torch.tensor(1.0), (3.0, 4.0, 5.0)), "one number or one per output"),
    ],
)
def test_wrong_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mixture(*arguments)


def test_outcomes_of_another_shape_are_refused_before_they_broadcast():
    mixture = random_mixture()
    for method in (mixture.log_density, mixture.pit, mixture.crps):
        with pytest.raises(ValueError, match="`y` must have the shape"):
            method(torch.zeros(5, 1))
    with pytest.raises(ValueError, match="`level` must lie"):
        mixture.quantile(1.0)
    with pytest.raises(ValueError, match="`coverage` must lie"):
        mixture.interval(95)


@pytest.mark.parametrize("n_draws", [1, 7, 200, 40_000])
@pytest.mark.parametrize("freedom", [math.inf, 3.0])
def test_a_row_has_the_same_bits_alone_and_among_others(n_draws, freedom):
    mixture = random_mixture(freedom, n_draws=n_draws, shape=(11,), seed=1)
    quantile, std = mixture.quantile(0.9), mixture.std
    for rows in (slice(0, 1), slice(3, 10), slice(10, 11)):
        some = Mixture(mixture.location[:, rows], mixture.scale[:, rows], freedom)
        assert torch.equal(some.quantile(0.9), quantile[rows])
        assert torch.equal(some.std, std[rows])
