"""Tests of the regressor."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import BayesianRidge

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.predictive import Mixture
from tests.estimators.samples import PLAIN, QUICK, toy


def test_precision_finds_the_noise_and_the_log_likelihood_that_of_the_truth(regressor):
    x, y = toy(2000, seed=1)
    truth = -0.5 * math.log(2 * math.pi * 16) - 0.5 * np.mean((y - 100 - 20 * np.sin(x[:, 0])) ** 2) / 16
    assert regressor.precision_ == pytest.approx(1 / 16, rel=0.4)
    assert truth - 0.2 < regressor.log_likelihood(x, y) < truth + 0.02
    assert regressor.score(x, y) > 0.85  # the noise leaves 0.91


def test_std_covariance_and_samples_agree(regressor):
    x, _ = toy(6, seed=2)
    mean, std = regressor.predict(x, return_std=True)
    again, covariance = regressor.predict(x, return_cov=True)
    np.testing.assert_allclose(again, mean)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std)
    assert np.linalg.eigvalsh(covariance).min() > 0
    samples = regressor.sample_y(x, 20_000)
    assert samples.shape == (6, 20_000)
    error = std / math.sqrt(20_000)
    assert (np.abs(samples.mean(1) - mean) < 5 * error).all()
    np.testing.assert_allclose(np.cov(samples), covariance, atol=0.06 * covariance.max())
    with pytest.raises(RuntimeError, match="At most one of return_std or return_cov"):
        regressor.predict(x, return_std=True, return_cov=True)


def test_intervals_are_quantiles_of_the_samples_and_cover_fresh_outcomes(regressor):
    x, y = toy(2000, seed=3)
    lower, upper = regressor.predict_interval(x, coverage=0.8)
    assert np.mean((lower < y) & (y < upper)) == pytest.approx(0.8, abs=0.06)
    samples = regressor.sample_y(x[:5], 40_000)
    np.testing.assert_allclose(lower[:5], np.quantile(samples, 0.1, axis=1), atol=0.35)
    np.testing.assert_allclose(upper[:5], np.quantile(samples, 0.9, axis=1), atol=0.35)
    with pytest.raises(ValueError, match="`coverage` must lie strictly between 0 and 1"):
        regressor.predict_interval(x, coverage=95)


def test_a_prediction_does_not_depend_on_the_other_rows(regressor):
    x, _ = toy(5000, seed=4)
    together = regressor.predict(x, return_std=True)
    for part, whole in zip(regressor.predict(x[4321:4322], return_std=True), together, strict=True):
        np.testing.assert_allclose(part, whole[4321:4322], rtol=1e-12)


def test_fractional_weights_draw_the_fit_towards_heavy_rows():
    x = np.zeros((200, 1))
    y = np.r_[np.zeros(100), np.ones(100)]
    weight = np.r_[np.full(100, 0.25), np.full(100, 0.75)]
    model = DropoutRegressor(**(PLAIN | {"n_steps": 300}), random_state=0).fit(x, y, sample_weight=weight)
    assert model.predict(x[:1])[0] == pytest.approx(0.75, abs=0.08)


def test_many_outputs_are_learned_together():
    x, y = toy(200)
    both = np.c_[y, -3 * y + 7]
    model = DropoutRegressor(**(QUICK | {"n_steps": 300}), random_state=0).fit(x, both)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == (200, 2)
    assert model.score(x, both) > 0.8
    np.testing.assert_allclose(std[:, 1] / std[:, 0], 3, rtol=0.35)
    assert model.sample_y(x[:4], 5).shape == (4, 2, 5)
    assert model.predict(x[:4], return_cov=True)[1].shape == (4, 4, 2)
    assert model.precision_.shape == (2,)
    assert math.isfinite(model.log_likelihood(x, both))


@pytest.mark.slow
def test_a_learned_variance_that_is_rounded_to_zero_far_from_the_data_is_no_error():
    x = np.linspace(0, 1, 80)[:, None]
    y = np.sin(6 * x[:, 0]) + 0.05 * np.random.default_rng(0).normal(size=80)
    settings = {"noise": "heteroscedastic", "n_steps": 300, "drop_prob": 0.05, "weight_decay": 1e-4, "random_state": 0}
    _, std = DropoutRegressor(**settings).fit(x, y).predict(np.array([[1000.0], [0.5]]), return_std=True)
    assert np.isfinite(std).all() and std[0] > 10 * std[1] > 0


def test_heteroscedastic_noise_and_learned_drop_probability():
    source = np.random.default_rng(0)
    x = source.uniform(-2, 2, size=(600, 1))
    y = x[:, 0] + np.where(x[:, 0] > 0, 1.0, 0.1) * source.normal(size=600)
    model = DropoutRegressor(
        **(QUICK | {"n_steps": 600}), noise="heteroscedastic", learn_drop_prob=True, random_state=0
    ).fit(x, y)
    _, std = model.predict([[-1.5], [1.5]], return_std=True)
    assert std[0] < 0.45
    assert std[1] == pytest.approx(1, abs=0.35)
    assert all(0 < p < 0.5 for p in model.drop_prob_)
    assert model.drop_prob_ != (0.05, 0.05)


def test_a_read_only_column_is_judged_without_a_word(recwarn):
    x, y = np.linspace(-1, 1, 40)[:, None], np.linspace(-1, 1, 40) ** 2
    model = DropoutRegressor(**PLAIN, random_state=0).fit(x, y)
    column = pd.DataFrame({"y": y})["y"]
    recwarn.clear()
    assert model.log_likelihood(x, column) == model.log_likelihood(x, y)
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_outcomes_of_another_shape_are_refused_not_broadcast(regressor):
    x, y = toy(20)
    for wrong in (y[:10], np.r_[y, y], y[:, None], np.c_[y, y]):
        with pytest.raises(ValueError, match="`y` must have the shape"):
            regressor.log_likelihood(x, wrong)
    label = np.where(y > 100, 2, 0)
    model = DropoutClassifier(**QUICK, random_state=0).fit(x, label)
    for wrong in (label[:10], label[:, None]):
        with pytest.raises(ValueError, match="one class for each"):
            model.log_likelihood(x, wrong)
    with pytest.raises(ValueError, match="must hold only the classes"):
        model.log_likelihood(x, label - 1)


def test_the_predictive_distribution_is_what_predict_reads(regressor, monkeypatch):
    x, y = toy(50, seed=7)
    mixture = regressor.predictive(x)
    assert mixture.n_draws == 2 * 200
    mean, std = regressor.predict(x, return_std=True)
    np.testing.assert_array_equal(mixture.mean, mean)
    np.testing.assert_array_equal(mixture.std, std)
    assert float(mixture.log_density(y).mean()) == pytest.approx(regressor.log_likelihood(x, y))
    np.testing.assert_allclose(mixture.aleatoric, 1 / regressor.precision_)
    monkeypatch.setattr(type(regressor), "block_rows", 20)
    blocks = list(regressor.predictive_blocks(x))
    assert [len(block.mean) for _, block in blocks] == [20, 20, 10]
    np.testing.assert_allclose(np.concatenate([block.mean for _, block in blocks]), mean, rtol=1e-12)


def test_every_output_has_a_noise_of_its_own():
    source = np.random.default_rng(0)
    x = source.normal(size=(300, 1))
    both = np.c_[x[:, 0] + 0.01 * source.normal(size=300), source.normal(size=300)]
    for noise in ("constant", "student"):
        model = DropoutRegressor(**(QUICK | {"n_steps": 200, "drop_prob": (0.0, 0.02)}), noise=noise, random_state=0)
        _, std = model.fit(x, both).predict(x, return_std=True)
        assert np.median(std[:, 0]) < 0.2 and np.median(std[:, 1]) == pytest.approx(1, abs=0.25)


@pytest.fixture(scope="module")
def plain():
    return DropoutRegressor(**QUICK, random_state=0).fit(*toy(80))


@pytest.mark.parametrize(("x_unit", "y_unit"), [(1e-11, 1e10), (1e200, 1e-10)])
def test_units_do_not_matter(plain, x_unit, y_unit):
    x, y = toy(80)
    other = DropoutRegressor(**QUICK, random_state=0).fit(x * x_unit, y * y_unit)
    for ours, theirs in zip(other.predict(x * x_unit, return_std=True), plain.predict(x, return_std=True), strict=True):
        np.testing.assert_allclose(ours / y_unit, theirs, rtol=1e-2)


def test_the_same_weights_rescaled_give_the_same_noise():
    source = np.random.default_rng(1)
    x, good = source.normal(size=(200, 2)), np.arange(200) % 2 == 0
    y = x[:, 0] + np.where(good, 0.05, 3.0) * source.normal(size=200)
    settings = QUICK | {"n_steps": 300, "noise": "constant", "drop_prob": (0.0, 0.02)}
    taus = [
        DropoutRegressor(**settings, random_state=0).fit(x, y, sample_weight=np.where(good, a, b)).precision_
        for a, b in ((10, 1), (5, 0.5), (11, 1.1))
    ]
    np.testing.assert_allclose(taus, taus[1], rtol=0.35)
    plain = DropoutRegressor(**settings, random_state=0).fit(x, y).precision_
    assert min(taus) > 2 * plain


@pytest.mark.parametrize("weight", [-1.0, 0.0])
def test_negative_or_vanishing_weights_are_refused(weight):
    x, y = toy(20)
    with pytest.raises(ValueError, match="`sample_weight` must be zero or more and not all zero"):
        DropoutRegressor(**QUICK).fit(x, y, sample_weight=np.full(20, weight))


@pytest.mark.slow
def test_heavy_tails_are_found_and_the_samples_have_them():
    source = np.random.default_rng(2)
    x = source.uniform(-2, 2, size=(600, 1))
    y = x[:, 0] + 0.1 * source.standard_t(3, size=600)
    settings = QUICK | {"n_steps": 300, "drop_prob": (0.0, 0.01)}
    student = DropoutRegressor(**settings, random_state=0).fit(x, y)
    gauss = DropoutRegressor(**settings, noise="constant", random_state=0).fit(x, y)
    new = source.uniform(-2, 2, size=(2000, 1))
    outcome = new[:, 0] + 0.1 * source.standard_t(3, size=2000)
    assert student.log_likelihood(new, outcome) > gauss.log_likelihood(new, outcome) + 0.05
    mixture = student.predictive(new[:3])
    assert mixture.freedom < 8
    samples = student.sample_y(new[:3], 20_000)
    np.testing.assert_allclose(np.quantile(samples, 0.99, axis=1), mixture.quantile(0.99), atol=0.1)


@pytest.mark.slow
def test_a_small_linear_table_is_predicted_as_well_as_by_a_linear_model():
    source, shares = np.random.default_rng(0), []
    for seed in range(3):
        x = source.normal(size=(540, 8))
        y = x @ source.normal(size=8) + source.normal(size=540)
        model = DropoutRegressor(random_state=seed, device="cpu").fit(x[:40], y[:40])
        mean, deviation = BayesianRidge().fit(x[:40], y[:40]).predict(x[40:], return_std=True)
        linear = Mixture(torch.tensor(mean)[None], torch.tensor(deviation)[None])
        scores = [mixture.crps(torch.tensor(y[40:])).mean() for mixture in (model.predictive(x[40:]), linear)]
        shares.append(float(scores[0] / scores[1]))
    assert np.mean(shares) < 1.08
