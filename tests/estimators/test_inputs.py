"""Tests of missing values that are learned from, and of bins: against numpy and what a straight line cannot learn."""

import numpy as np
import pytest

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.inputs import Bins, MissingValues

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


def test_the_bins_of_a_column_add_up_to_its_place_among_the_edges():
    x = np.random.default_rng(0).exponential(size=(200, 2))
    bins = Bins.of(x, max_inputs=10)
    encoded = bins.encode(x)
    for column, edges in enumerate(bins.edges):
        pieces = encoded[:, 2 + 5 * column : 7 + 5 * column]
        np.testing.assert_allclose(pieces.sum(1), np.interp(x[:, column], edges, np.arange(6)))


def test_the_columns_themselves_come_first():
    x = np.random.default_rng(0).normal(size=(100, 3))
    np.testing.assert_array_equal(Bins.of(x, max_inputs=12).encode(x)[:, :3], x)


def test_bins_hold_equal_shares_of_the_rows():
    x = np.random.default_rng(0).lognormal(size=(1000, 1))
    (edges,) = Bins.of(x, max_inputs=8).edges
    counts, _ = np.histogram(x, edges)
    assert np.abs(counts - 125).max() <= 1


def test_rows_beyond_the_edges_are_at_the_ends_of_the_bins():
    bins = Bins((np.array([0.0, 1.0, 2.0]),))
    assert bins.encode(np.array([[-5.0], [5.0]]))[:, 1:].tolist() == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(("n_rows", "n_columns"), [(1000, 100), (30, 2)])
def test_very_many_columns_and_very_few_rows_have_no_bins(n_rows, n_columns):
    x = np.random.default_rng(0).normal(size=(n_rows, n_columns))
    assert Bins.of(x, max_inputs=64).n_inputs == 0


def test_a_column_of_two_values_or_one_is_left_as_it_is():
    x = np.column_stack([np.arange(100) % 2, np.ones(100), np.arange(100)]).astype(float)
    assert [len(edges) for edges in Bins.of(x, max_inputs=12).edges] == [0, 0, 5]


@pytest.mark.slow
def test_an_estimator_with_bins_is_the_same_after_saving(tmp_path):
    x = np.random.default_rng(0).normal(size=(120, 2))
    model = DropoutRegressor(n_steps=20, random_state=0).fit(x, np.sign(x[:, 0] - 0.3) + np.sign(x[:, 1] + 0.5))
    assert model.bins_.n_inputs > 0
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(DropoutRegressor.load(tmp_path / "model").predict(x), model.predict(x))


def test_a_column_of_codes_has_a_bin_between_any_two():
    source = np.random.default_rng(0)
    x = np.column_stack([source.integers(0, 4, (500, 40)), source.normal(size=(500, 2))])
    bins = Bins.of(x, max_inputs=32)
    assert [list(edges) for edges in bins.edges] == 40 * [[0.0, 1.0, 2.0, 3.0]] + 2 * [[]]
