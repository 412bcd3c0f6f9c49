"""Tests of fitted ensembles: they predict as the estimators do, from the same files, without scikit-learn."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

import dropbayes as db
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.ensembles import ClassEnsemble, RegressionEnsemble
from dropbayes.estimators.recalibration import Recalibration, with_recalibration
from dropbayes.population import network

# On the CPU: how near a linearisation comes depends on the weights, which devices train to others.
SMALL = {
    "hidden": (8,),
    "n_steps": 20,
    "n_networks": 2,
    "n_draws": 10,
    "drop_prob": 0.2,
    "weight_decay": 1e-4,
    "device": "cpu",
}
X = np.random.default_rng(0).normal(size=(60, 2))
Y = X[:, 0] - X[:, 1]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ensembles") / "model.safetensors"
    DropoutRegressor(**SMALL, random_state=0).fit(X, Y).save(path)
    return path


def test_an_ensemble_predicts_the_very_numbers_of_its_estimator(file):
    mean, std = RegressionEnsemble.load(file).predict(X, return_std=True)
    expected = DropoutRegressor.load(file).predict(X, return_std=True)
    assert np.array_equal(mean, expected[0]) and np.array_equal(std, expected[1])


def test_an_ensemble_of_classes_predicts_the_probabilities_of_its_estimator(tmp_path):
    estimator = DropoutClassifier(**SMALL, random_state=0).fit(X, np.where(Y > 0, "up", "down"))
    estimator.save(tmp_path / "m")
    ensemble = ClassEnsemble.load(tmp_path / "m")
    assert np.array_equal(ensemble.predict_proba(X), estimator.predict_proba(X))
    assert np.array_equal(np.exp(ensemble.predict_log_proba(X)).round(12), estimator.predict_proba(X).round(12))
    assert ensemble.predict(X).tolist() == estimator.predict(X).tolist()


@pytest.mark.parametrize(("kind", "y"), [(DropoutRegressor, Y[::-1]), (DropoutClassifier, (Y > 0)[::-1])])
def test_arrays_that_run_backwards_are_read_as_their_copies(kind, y, file):
    x, model = X[::-1, ::-1], kind(**SMALL, random_state=0)
    copied = kind(**SMALL, random_state=0).fit(x.copy(), y.copy()).predict(x.copy())
    np.testing.assert_array_equal(model.fit(x, y).predict(x), copied)
    ensemble = RegressionEnsemble.load(file)
    np.testing.assert_array_equal(ensemble.predict(x), ensemble.predict(x.copy()))


def test_the_networks_are_torch_modules_of_standardised_inputs(file):
    ensemble = RegressionEnsemble.load(file)
    first, _ = ensemble.networks_
    assert [site.drop_prob for site in db.sites(first, torch.zeros(1, 2))] == pytest.approx([0.2, 0.2])
    assert first(torch.zeros(3, 2)).shape == (3, 1)


def test_a_prediction_leaves_the_global_generators_alone(file):
    before, legacy = torch.get_rng_state(), np.random.get_state()[1:]
    DropoutRegressor.load(file).sample_y(X)
    RegressionEnsemble.load(file).predict(X, return_std=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state()[1:], legacy, strict=True))


def test_the_uncertainty_of_classes_is_entropy_with_its_epistemic_part():
    model = DropoutClassifier(**SMALL, random_state=0).fit(X, np.where(Y > 0, "up", "down"))
    draws = model.draws(X).numpy()
    entropy, mutual = model.predict_uncertainty(X)
    mean = draws.mean(0)
    np.testing.assert_allclose(entropy, -(mean * np.log(mean)).sum(1), rtol=1e-6)
    np.testing.assert_allclose(mutual, entropy + (draws * np.log(draws)).sum(2).mean(0), atol=1e-9)


def test_a_prediction_without_draws_is_close_to_one_of_many(file):
    ensemble = RegressionEnsemble.load(file)
    many = ensemble.with_draws(n_draws=2000)
    mean, covariance = many.predict(X[:12], return_cov=True)
    for method in ("linear", "moments"):
        found, close = ensemble.with_draws(method=method).predict(X[:12], return_cov=True)
        size = np.sqrt(np.diag(covariance))
        np.testing.assert_allclose(found, mean, atol=0.1 * size.max())
        np.testing.assert_allclose(close, covariance, atol=0.1 * size.max() ** 2)
        assert np.array_equal(found, ensemble.with_draws(method=method, seed=99).predict(X[:12]))
    with pytest.raises(ValueError, match=r"`method` must be one of .*'magic'"):
        ensemble.with_draws(method="magic")


@pytest.mark.parametrize("method", ["sampling", "linear", "moments"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_by_every_method(file, method):
    ensemble = RegressionEnsemble.load(file).with_draws(method=method)
    whole = np.stack(ensemble.predict(X, return_std=True))
    alone = np.concatenate([ensemble.predict(X[i : i + 1], return_std=True) for i in range(4)], axis=1)
    np.testing.assert_array_equal(alone, whole[:, :4])


def test_class_probabilities_without_draws_are_close_to_those_of_many():
    model = DropoutClassifier(**SMALL, random_state=0).fit(X, np.where(Y > 0, "up", "down"))
    model.temperature_ = 1.0  # a lower one widens the logits of the draws, which the moments know to the second order
    expected = model.with_draws(n_draws=2000).predict_proba(X)
    np.testing.assert_allclose(model.with_draws(method="moments").predict_proba(X), expected, atol=0.02)


def test_a_saved_ensemble_is_the_estimator_again(file, tmp_path):
    RegressionEnsemble.load(file).save(tmp_path / "copy")
    copy = DropoutRegressor.load(tmp_path / "copy")
    assert copy.get_params() == DropoutRegressor.load(file).get_params()
    assert np.array_equal(copy.predict(X), DropoutRegressor.load(file).predict(X))


def test_without_dropout_a_prediction_is_the_mean_of_the_plain_networks(file):
    ensemble = RegressionEnsemble.load(file)
    ensemble.noise_ = None
    population = ensemble.population_
    standard = ((torch.from_numpy(X) - population.x_mean[0]) / population.x_scale[0]).float()
    plain = torch.stack([network(population, i).eval()(standard) for i in range(2)]).mean(0)
    expected = plain[:, 0] * population.y_scale[0] + population.y_mean[0]
    np.testing.assert_allclose(ensemble.without_dropout().predict(X), expected.detach(), rtol=1e-5, atol=1e-6)
    assert not np.allclose(ensemble.predict(X), expected.detach(), rtol=1e-3)


def test_an_ensemble_refuses_rows_it_cannot_read(file):
    ensemble = RegressionEnsemble.load(file)
    with pytest.raises(ValueError, match=r"`X` must be shaped \[row, 2\]; got \[60, 3\]"):
        ensemble.predict(np.zeros((60, 3)))
    with pytest.raises(ValueError, match="`X` must hold finite numbers"):
        ensemble.predict(np.full((1, 2), np.nan))


def test_an_estimator_that_was_not_fitted_says_so():
    with pytest.raises(NotFittedError):
        DropoutRegressor().with_draws(n_draws=3)


def test_fitting_again_forgets_the_recalibration_of_other_networks():
    model = DropoutRegressor(**SMALL, noise="constant", random_state=0).fit(X, Y)
    fresh = model.predict(X, return_std=True)[1]
    view = with_recalibration(model, Recalibration("scale", (3.0,), 60))
    assert np.array_equal(view.fit(X, Y).predict(X, return_std=True)[1], fresh)


@pytest.mark.slow
def test_a_file_is_read_and_predicted_from_without_scikit_learn(file):
    script = (
        "import sys, numpy as np\n"
        "from dropbayes.estimators.ensembles import RegressionEnsemble\n"
        f"RegressionEnsemble.load({str(file)!r}).predict(np.zeros((3, 2)))\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'sklearn', 'scipy', 'pandas'}))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"
