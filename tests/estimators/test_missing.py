"""Tests of missing values that are learned from."""

import numpy as np
import pytest

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.missing import MissingValues

QUICK = {
    "hidden": (20,),
    "drop_prob": (0.0, 0.02),
    "weight_decay": 1e-5,
    "n_steps": 400,
    "n_folds": 2,
    "n_draws": 20,
    "n_networks": 1,
    "min_epochs": 1,
    "device": "cpu",
    "random_state": 0,
}


def test_values_are_filled_with_the_mean_and_told_apart():
    x = np.array([[1.0, 5.0, np.nan], [3.0, np.nan, np.nan], [5.0, 7.0, np.nan]])
    values = MissingValues.of(x)
    np.testing.assert_array_equal(values.columns, [1, 2])
    np.testing.assert_array_equal(values.encode(x), [[1, 5, 0, 0, 1], [3, 6, 0, 1, 1], [5, 7, 0, 0, 1]])
    np.testing.assert_array_equal(values.encode(np.full((1, 3), np.nan)), [[3, 6, 0, 1, 1]])


def test_a_regressor_learns_what_absence_says(tmp_path):
    source = np.random.default_rng(0)
    x = source.normal(size=(200, 2))
    absent = source.random(200) < 0.5
    y = x[:, 0] + 3 * absent + 0.1 * source.normal(size=200)
    x[absent, 1] = np.nan
    with pytest.raises(ValueError, match=r'Input X contains NaN\. Set `missing="learn"`'):
        DropoutRegressor(**QUICK, noise="constant", missing="error").fit(x, y)
    model = DropoutRegressor(**QUICK).fit(x, y)
    assert model.score(x, y) > 0.95 and model.n_features_in_ == 2
    assert np.isfinite(model.log_likelihood(x, y))
    model.save(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(DropoutRegressor.load(tmp_path / "m.safetensors").predict(x), model.predict(x))


def test_a_classifier_learns_what_absence_says():
    source = np.random.default_rng(1)
    x = source.normal(size=(200, 1))
    label = source.random(200) < 0.5
    x[label] = np.nan
    model = DropoutClassifier(**QUICK).fit(x, label)
    assert model.score(x, label) > 0.95
    with pytest.raises(ValueError, match="`missing` must be"):
        DropoutClassifier(**QUICK, missing="mean").fit(x, label)


def test_rows_with_missing_inputs_need_such_training_rows_or_the_wish_to_learn_from_them():
    x = np.random.default_rng(2).normal(size=(60, 2))
    y, absent = x[:, 0], np.array([[0.5, np.nan]])
    with pytest.raises(ValueError, match=r'contains NaN, which no training row did\. Set `missing="learn"`'):
        DropoutRegressor(**QUICK, noise="constant").fit(x, y).predict(absent)
    learned = DropoutRegressor(**QUICK, noise="constant", missing="learn").fit(x, y)
    np.testing.assert_array_equal(learned.predict(absent), learned.predict([[0.5, x[:, 1].mean()]]))
