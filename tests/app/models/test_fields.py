"""The fields of a prediction are those of the draws, for an estimator and for a network."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.app.models.fields import even_selection, round_digits
from dropbayes.app.models.model import load
from dropbayes.scores import information


def test_the_moments_of_a_regression_are_those_of_the_draws(models, columns):
    model = load(models / "numbers")
    predictor = db.Predictor(model, coverage=0.8)
    mixture = model.ensemble.predictive(predictor.encode(columns))
    found = predictor(columns)
    np.testing.assert_allclose(found["mean"], mixture.location.mean(0), rtol=1e-10)
    np.testing.assert_allclose(found["epistemic"], mixture.location.var(0, correction=0), rtol=1e-9)
    factor = mixture.freedom / (mixture.freedom - 2)  # the variance of Student's t of scale 1
    np.testing.assert_allclose(found["aleatoric"], factor * mixture.scale.square().mean(0), rtol=1e-10)
    np.testing.assert_allclose(found["std"] ** 2, found["epistemic"] + found["aleatoric"], rtol=1e-10)
    inside = mixture.pit(found["upper"]) - mixture.pit(found["lower"])
    np.testing.assert_allclose(inside, 0.8, atol=1e-8)


def test_the_information_of_classes_is_that_of_the_draws(models, columns):
    predictor, model = db.Predictor.load(models / "classes"), load(models / "classes")
    found = predictor(columns)
    draws = model.ensemble.draws(predictor.encode(columns))
    np.testing.assert_allclose(found["probabilities"], draws.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["mutual_information"], information.mutual_information(draws.double()), atol=1e-9)
    assert np.array_equal(found["predicted"], predictor.classes[found["probabilities"].argmax(1)])


def test_a_network_is_predicted_by_the_linear_method():
    net, x = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)), torch.randn(5, 2)
    linear = db.Predictor(net, likelihood=db.Gaussian(precision=4.0), method="linear")({"x": x.numpy()})
    exact = db.predict(net, x, likelihood=db.Gaussian(precision=4.0))
    np.testing.assert_allclose(linear["std"], exact.std.numpy(), rtol=1e-4)


def test_a_network_needs_a_likelihood_and_an_estimator_has_one(models):
    with pytest.raises(ValueError, match="`likelihood` must say"):
        db.Predictor(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="pass them with a network only"):
        db.Predictor(load(models / "numbers"), likelihood=db.Gaussian(1.0))
    with pytest.raises(TypeError, match=r"a network or the result of load\(folder\); got 'model'"):
        db.Predictor("model")


def test_a_network_with_columns_is_read_by_its_likelihood():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    predictor = db.Predictor(net, likelihood=db.Gaussian(precision=4.0), columns=("a", "b"), n_draws=20, seed=3)
    x = torch.randn(9, 2)
    found = predictor({"a": x[:, 0], "b": x[:, 1]})
    draws = db.draws(net, x, n_draws=20, seed=3)
    np.testing.assert_allclose(found["mean"], draws.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["aleatoric"], 0.25)
    alone = predictor({"a": x[4:5, 0], "b": x[4:5, 1]})
    assert all(np.array_equal(alone[name], found[name][4:5]) for name in found)


def test_a_network_of_classes_over_pixels_keeps_its_shape():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.5), nn.Conv2d(4, 3, 1))
    predictor = db.Predictor(net, likelihood=db.Categorical(class_axis=-3), n_draws=5)
    found = predictor({"x": np.random.default_rng(0).normal(size=(2, 1, 6, 6)).astype(np.float32)})
    assert found["probabilities"].shape == (2, 6, 6, 3) and found["entropy"].shape == (2, 6, 6)
    np.testing.assert_allclose(found["probabilities"].sum(-1), 1, rtol=1e-5)


def test_digits_are_significant_ones_and_other_kinds_are_left_alone():
    values = np.array([[1 / 3, 2e-30 / 3], [np.inf, -123456.789]])
    rounded = round_digits(values)
    np.testing.assert_allclose(rounded, values, rtol=5e-12)
    assert rounded[0, 0] == 0.333333333333
    assert round_digits(np.array(["a"])).tolist() == ["a"]


def test_an_even_selection_has_both_ends():
    assert (even_selection(5, 3).tolist(), even_selection(2, 3).tolist()) == ([0, 2, 4], [0, 1])
