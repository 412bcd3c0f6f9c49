"""Tests of the training rows: times, weights as repetitions, copies of a row."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.rows import canonical_rows, row_groups
from tests.estimators.samples import PLAIN, QUICK, toy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"times": np.zeros(20)}, "at least 2 times"),
        ({"times": np.arange(19)}, "one time for each of the 20 rows"),
        ({"times": np.full(20, np.nan)}, "must hold a time for every row"),
        ({"times": ["2020", "2021", float("nan"), *["2022"] * 17]}, "row 2 has none"),
        ({"times": np.arange(20), "groups": np.arange(20)}, "two ways to hold rows out"),
    ],
)
def test_wrong_times_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DropoutRegressor(**QUICK).fit(np.arange(20.0)[:, None], np.arange(20.0), **arguments)


def test_groups_may_have_names_of_several_kinds_or_none():
    x, y = toy(20)
    named = np.array(["a", None, 3, "b"], dtype=object).repeat(5)
    assert sorted(canonical_rows(x, y, np.ones(20), named)[3].tolist()) == np.arange(4).repeat(5).tolist()


@pytest.mark.parametrize(
    "groups",
    [
        np.array([0.0, np.nan, 1.0, 1.0]).repeat(5),
        ["a", "a", "a", "a", "a", float("nan"), *["b"] * 14],
        pd.Series(["a", pd.NA, "b", "b"], dtype="string").repeat(5),
        pd.to_datetime(["2020-01-01", None, "2020-01-02", "2020-01-02"]).repeat(5),
    ],
    ids=["numbers", "texts", "pandas", "dates"],
)
def test_rows_without_a_group_are_refused(groups):
    x, y = toy(20)
    with pytest.raises(ValueError, match="`groups` must hold a group for every row; row 5 has none"):
        DropoutRegressor(**QUICK).fit(x, y, groups=groups)


@pytest.mark.parametrize("kind", ["datetime64[D]", "timedelta64[s]"])
def test_targets_that_are_times_are_refused(kind):
    with pytest.raises(ValueError, match=r"`y` must hold numbers; got .*64.*Pass the days"):
        DropoutRegressor(**QUICK).fit(toy(20)[0], np.arange(20).astype(kind))


def test_targets_that_are_missing_among_objects_are_refused():
    x, y = toy(20)
    with pytest.raises(ValueError, match="`y` must hold a number for every row"):
        DropoutRegressor(**QUICK).fit(x, np.where(np.arange(20) == 3, None, y))


def test_the_order_of_rows_does_not_matter_and_weights_are_repetitions():
    x, y = toy(40)
    order = np.random.default_rng(0).permutation(40)
    model = DropoutRegressor(**PLAIN, random_state=1)
    plain = clone(model).fit(x, y).predict(x)
    np.testing.assert_array_equal(plain, clone(model).fit(x[order], y[order]).predict(x))
    weight = np.arange(40) % 3
    weighted = clone(model).fit(x, y, sample_weight=weight).predict(x)
    np.testing.assert_array_equal(weighted, clone(model).fit(x.repeat(weight, 0), y.repeat(weight)).predict(x))


def test_copies_of_a_row_are_never_learned_from_and_held_out_at_once():
    # Noise alone: were copies on both sides of a split, the held-out noise would look predictable and τ too large.
    source = np.random.default_rng(0)
    x, y = source.normal(size=(60, 8)), source.normal(size=60)
    settings = PLAIN | {"hidden": (100,), "drop_prob": 0.005, "weight_decay": 1e-6, "n_steps": 300}
    once = DropoutRegressor(**settings, random_state=0).fit(x, y)
    thrice = DropoutRegressor(**settings, random_state=0).fit(x.repeat(3, 0), y.repeat(3))
    assert once.precision_ < 1.2
    assert thrice.precision_ < 1.2


def test_copies_share_a_group_and_repeated_observations_do_not():
    x = np.array([[0.0], [0.0], [1.0], [1.0], [1.0], [2.0]])
    y = np.array([5.0, 5.0, 6.0, 6.0, 7.0, 8.0])
    groups = row_groups(x, y)
    assert groups[0] == groups[1] and len(set(groups.tolist())) == 5
    assert row_groups(np.zeros((30, 1)), np.arange(30) % 2) is None  # two distinct rows, fifteen times each


def few_categories(n, seed):
    """Passengers of three classes, two sexes and two ages: at most 24 distinct rows, each with both outcomes."""
    source = np.random.default_rng(seed)
    cabin, sex, child = source.integers(3, size=n), source.random(n) < 0.35, source.random(n) < 0.1
    chance = 1 / (1 + np.exp(1.2 * cabin - 2.6 * sex - child - 0.6))
    return np.column_stack([np.eye(3)[cabin], sex, child]), source.random(n) < chance, chance


def test_a_table_of_few_distinct_rows_is_predicted_as_well_as_by_logistic_regression():
    x, y, _ = few_categories(800, 0)
    new, truth, _ = few_categories(4000, 1)
    model = DropoutClassifier(**QUICK | {"n_steps": 400}, random_state=0).fit(x, y)
    logistic = LogisticRegression().fit(x, y).predict_proba(new)[np.arange(4000), truth.astype(int)]
    assert model.log_likelihood(new, truth) > np.log(logistic).mean() - 0.01


def test_two_cells_are_predicted_by_their_shares():
    source = np.random.default_rng(0)
    x = np.repeat([[0.0], [1.0]], 200, axis=0)
    y = source.random(400) < np.repeat([0.5, 0.9], 200)
    found = DropoutClassifier(**QUICK, random_state=0).fit(x, y).predict_proba([[0.0], [1.0]])[:, 1]
    np.testing.assert_allclose(found, [y[:200].mean(), y[200:].mean()], atol=0.04)
