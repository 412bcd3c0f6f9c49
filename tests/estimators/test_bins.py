"""Tests of the bins: against numpy's interpolation and a regression that a straight line cannot make."""

import numpy as np
import pytest

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.bins import Bins


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


def test_an_estimator_with_bins_is_the_same_after_saving(tmp_path):
    x = np.random.default_rng(0).normal(size=(120, 2))
    model = DropoutRegressor(n_steps=200, random_state=0).fit(x, np.sign(x[:, 0] - 0.3) + np.sign(x[:, 1] + 0.5))
    assert model.bins_.n_inputs > 0
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(DropoutRegressor.load(tmp_path / "model").predict(x), model.predict(x))


def test_a_column_of_codes_has_a_bin_between_any_two():
    source = np.random.default_rng(0)
    x = np.column_stack([source.integers(0, 4, (500, 40)), source.normal(size=(500, 2))])
    bins = Bins.of(x, max_inputs=32)
    assert [list(edges) for edges in bins.edges] == 40 * [[0.0, 1.0, 2.0, 3.0]] + 2 * [[]]
