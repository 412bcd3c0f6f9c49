"""Tests of transformed targets: the lognormal's closed forms, numerical integrals, and predictions in the units of y."""

import math
import pickle

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.base import clone

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.recalibration import fit_recalibration, with_recalibration
from dropbayes.estimators.transforms import TargetTransform, TransformedMixture, candidate_transforms
from dropbayes.predictive.mixtures import Mixture
from tests.estimators.samples import QUICK

F64 = torch.float64
SINE = TargetTransform("arcsinh", 2.0, 3.0)


def lognormal(mu=0.3, sigma=0.6):
    mixture = Mixture(torch.full((1, 1), mu, dtype=F64), torch.tensor(sigma, dtype=F64))
    return TransformedMixture(mixture, TargetTransform("log")), scipy.stats.lognorm(s=sigma, scale=math.exp(mu))


def test_one_gaussian_of_the_logarithm_is_the_lognormal():
    ours, exact = lognormal()
    y = torch.tensor([1.7], dtype=F64)
    np.testing.assert_allclose(ours.mean, exact.mean())
    np.testing.assert_allclose(ours.variance, exact.var())
    np.testing.assert_allclose(ours.log_density(y), exact.logpdf(y))
    np.testing.assert_allclose(ours.pit(y), exact.cdf(y))
    np.testing.assert_allclose(ours.quantile(0.9), exact.ppf(0.9), rtol=1e-6)


@pytest.mark.parametrize("y", [0.2, 1.3, 9.0])
def test_the_crps_of_the_lognormal_has_its_closed_form(y):
    """y (2 F(y) - 1) - 2 e^{μ + σ²/2} (Φ(ω - σ) + Φ(σ/√2) - 1), with ω = (log y - μ)/σ (Baran and Lerch 2015)."""
    (ours, exact), normal = lognormal(), scipy.stats.norm.cdf
    omega = (math.log(y) - 0.3) / 0.6
    bracket = normal(omega - 0.6) + normal(0.6 / math.sqrt(2)) - 1
    expected = y * (2 * exact.cdf(y) - 1) - 2 * math.exp(0.3 + 0.18) * bracket
    np.testing.assert_allclose(ours.crps(torch.tensor([y], dtype=F64)), expected, rtol=1e-6)


@pytest.mark.parametrize("transform", [TargetTransform("log"), SINE, TargetTransform()])
def test_a_density_of_y_integrates_to_one_and_has_the_stated_moments(transform):
    points = transform.inverse(torch.linspace(-6, 6, 2001, dtype=F64))
    location, scale = torch.tensor([[-0.4], [0.7]], dtype=F64), torch.tensor([[0.5], [0.2]], dtype=F64)
    at_each = Mixture(location.expand(2, 2001), scale.expand(2, 2001))
    density = TransformedMixture(at_each, transform).log_density(points).exp()
    mixture = TransformedMixture(Mixture(location, scale), transform)
    np.testing.assert_allclose(torch.trapezoid(density, points), 1, rtol=1e-4)
    np.testing.assert_allclose(torch.trapezoid(density * points, points), mixture.mean[0], rtol=1e-4)
    square = torch.trapezoid(density * (points - mixture.mean).square(), points)
    np.testing.assert_allclose(square, mixture.variance[0], rtol=1e-3)


@pytest.mark.parametrize("transform", [TargetTransform("log"), SINE])
def test_a_lone_row_keeps_its_bits(transform):
    """Of functions such as `torch.sinh`, the vectorised code and that of the last few values round differently."""
    base = Mixture(torch.linspace(-2, 2, 201, dtype=F64)[None], torch.linspace(0.2, 0.7, 201, dtype=F64)[None])
    whole = TransformedMixture(base, transform)
    alone = [whole.rows(slice(row, row + 1)) for row in range(0, 201, 3)]
    for of in (lambda m: m.mean, lambda m: m.variance, lambda m: m.quantile(0.9)):
        assert torch.equal(of(whole)[::3], torch.cat([of(one) for one in alone]))


@pytest.mark.parametrize("transform", [TargetTransform("log"), SINE])
def test_the_derivative_is_that_of_the_transform(transform):
    y = torch.tensor([0.3, 2.0, 50.0], dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(transform.forward(y).sum(), y)
    torch.testing.assert_close(transform.log_derivative(y), slope.log())
    torch.testing.assert_close(transform.inverse(transform.forward(y)), y)


def skewed(n=240, seed=0):
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, 2))
    return x, np.exp(4 + 1.5 * np.sin(x[:, 0]) + 0.5 * source.normal(size=n))


SETTINGS = QUICK | {"n_steps": 200, "random_state": 0}


@pytest.fixture(scope="module")
def model():
    return DropoutRegressor(**SETTINGS, target_transform="auto").fit(*skewed())


def test_held_out_rows_choose_the_logarithm_for_lognormal_targets(model):
    assert model.transform_.name == "log" and math.isinf(model.predictive(np.zeros((1, 2))).freedom)
    x, y = skewed(seed=1)
    plain = DropoutRegressor(**SETTINGS).fit(*skewed())
    assert model.log_likelihood(x, y) > plain.log_likelihood(x, y) + 0.1


@pytest.mark.slow
def test_held_out_rows_leave_bounded_noise_in_the_scale_of_the_target():
    source = np.random.default_rng(0)
    x = source.normal(size=(300, 2))
    y = 2 + source.uniform(-1, 1, size=300)  # in the logarithm the noise would be skewed
    assert DropoutRegressor(**SETTINGS, target_transform="auto").fit(x, y).transform_.name != "log"


def test_moments_intervals_and_samples_agree_in_the_units_of_y(model):
    x, y = skewed(400, seed=2)
    mean, std = model.predict(x, return_std=True)
    few = x[:5]
    sampled = model.sample_y(few, n_samples=40_000, random_state=0)
    np.testing.assert_allclose(sampled.mean(1), mean[:5], rtol=0.05)
    lower, upper = model.predict_interval(few, coverage=0.8)
    np.testing.assert_allclose(np.quantile(sampled, [0.1, 0.9], axis=1), [lower, upper], rtol=0.05)
    np.testing.assert_allclose(np.sqrt(np.diag(model.predict(few, return_cov=True)[1])), std[:5], rtol=1e-6)
    low, high = model.predict_interval(x, coverage=0.9)
    assert 0.84 < np.mean((low <= y) & (y <= high)) < 0.96 and (low > 0).all()


def test_a_copy_a_file_and_a_pickle_keep_the_scale(model, tmp_path):
    x, _ = skewed(10, seed=3)
    assert clone(model).target_transform == "auto"
    model.save(tmp_path / "m.safetensors")
    for other in (DropoutRegressor.load(tmp_path / "m.safetensors"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.predict(x), model.predict(x))
        np.testing.assert_array_equal(other.predict_interval(x)[1], model.predict_interval(x)[1])


@pytest.mark.parametrize("method", ["scale", "isotonic", "conformal"])
def test_a_recalibrated_model_covers_rows_it_has_not_seen(model, method):
    x, y = skewed(1000, seed=4)
    again = with_recalibration(model, fit_recalibration(model, x[:500], y[:500], method=method))
    low, high = again.predict_interval(x[500:], coverage=0.8)
    assert 0.74 < np.mean((low <= y[500:]) & (y[500:] <= high)) < 0.86 and (low > 0).all()


def test_an_outcome_below_zero_is_impossible_for_the_logarithm(model):
    assert model.log_likelihood(np.zeros((1, 2)), [-1.0]) == -math.inf
    assert float(model.predictive(np.zeros((1, 2))).pit([-1.0])) == 0.0


def test_the_scores_of_the_search_are_densities_of_y(model):
    rescaled = DropoutRegressor(**SETTINGS, target_transform="log")
    x, y = skewed()
    again = rescaled.fit(x, 1000 * y)  # a density of 1000 y is smaller by that factor
    np.testing.assert_allclose(again.search_scores_, model.search_scores_ - math.log(1000), rtol=0, atol=0.02)


def test_a_stream_is_learned_in_a_named_scale():
    x, y = skewed(60)
    stream = DropoutRegressor(**QUICK, target_transform="log", random_state=0).partial_fit(x, y).partial_fit(x, y)
    assert (stream.predict_interval(x)[0] > 0).all()
    with pytest.raises(ValueError, match="must be positive, as in the first fit"):
        stream.partial_fit(x, -y)
    with pytest.raises(ValueError, match="name one for `partial_fit`"):
        DropoutRegressor(**QUICK, target_transform="auto").partial_fit(x, y)


@pytest.mark.parametrize(
    ("name", "y", "message"),
    [
        ("log", np.array([1.0, 0.0]), "needs positive targets; the smallest is 0"),
        ("square", np.array([1.0, 2.0]), "`target_transform` must be one of 'none', 'log', 'arcsinh', 'auto'"),
        ("arcsinh", np.ones((3, 2)), "must be 'none' for several outputs"),
    ],
)
def test_a_transform_that_does_not_suit_is_refused(name, y, message):
    with pytest.raises(ValueError, match=message):
        candidate_transforms(name, y)
    assert [one.name for one in candidate_transforms("auto", np.array([-1.0, 0.0, 3.0]))] == ["none", "arcsinh"]
