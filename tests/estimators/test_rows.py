"""Tests of the training rows: times, weights as repetitions, copies of a row."""

import numpy as np
import pytest
from sklearn.base import clone

from dropbayes.estimators import DropoutRegressor
from tests.estimators.samples import QUICK, toy


@pytest.mark.parametrize(("arguments", "message"), [
    ({"times": np.zeros(20)}, "at least 2 times"),
    ({"times": np.arange(19)}, "one time for each of the 20 rows"),
    ({"times": np.full(20, np.nan)}, "some are missing"),
    ({"times": np.arange(20), "groups": np.arange(20)}, "two ways to hold rows out"),
])  # fmt: skip
def test_wrong_times_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DropoutRegressor(**QUICK).fit(np.arange(20.0)[:, None], np.arange(20.0), **arguments)


def test_the_order_of_rows_does_not_matter_and_weights_are_repetitions():
    x, y = toy(40)
    order = np.random.default_rng(0).permutation(40)
    model = DropoutRegressor(**QUICK, random_state=1)
    plain = clone(model).fit(x, y).predict(x)
    np.testing.assert_array_equal(plain, clone(model).fit(x[order], y[order]).predict(x))
    weight = np.arange(40) % 3
    weighted = clone(model).fit(x, y, sample_weight=weight).predict(x)
    np.testing.assert_array_equal(weighted, clone(model).fit(x.repeat(weight, 0), y.repeat(weight)).predict(x))


def test_copies_of_a_row_are_never_learned_from_and_held_out_at_once():
    # Noise alone: were copies on both sides of a split, the held-out noise would look predictable and τ too large.
    source = np.random.default_rng(0)
    x, y = source.normal(size=(60, 8)), source.normal(size=60)
    settings = QUICK | {"hidden": (100,), "drop_prob": 0.005, "weight_decay": 1e-6, "n_steps": 600}
    once = DropoutRegressor(**settings, random_state=0).fit(x, y)
    thrice = DropoutRegressor(**settings, random_state=0).fit(x.repeat(3, 0), y.repeat(3))
    assert once.precision_ < 1.2
    assert thrice.precision_ < 1.2
