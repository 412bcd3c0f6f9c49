"""Tests of the parameters: what is refused, and the steps and batches that they amount to."""

import numpy as np
import pytest

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from tests.estimators.samples import QUICK, toy


def test_a_width_that_is_no_tuple_is_refused_with_an_example():
    with pytest.raises(ValueError, match=r"`hidden` must be 'auto' or a tuple of widths such as \(50, 50\); got 50"):
        DropoutRegressor(**QUICK | {"hidden": 50}).fit(*toy(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_draws": 0}, "`n_draws` must be a positive integer"),
        ({"drop_prob": "auto"}, "`drop_prob` must be 'search'"),
        ({"drop_prob": None}, "`drop_prob` must be 'search'"),
        ({"drop_prob": []}, "`drop_prob` must be 'search'"),
        ({"drop_prob": np.full(2, 0.1)}, "`drop_prob` must be 'search'"),
        ({"weight_decay": (1e-4, 1e-5)}, "`weight_decay` must be 'search'"),
        ({"weight_decay": -1}, r"`weight_decay` must be 'search', a number >= 0.*got -1"),
        ({"weight_decay": [1e-4, np.nan]}, "`weight_decay` must be 'search', a number >= 0"),
        ({"n_jobs": 0}, "`n_jobs` must be None or a whole number but 0"),
        ({"n_jobs": "all"}, "`n_jobs` must be None or a whole number but 0"),
        ({"hidden": (10.5,)}, "`hidden` must be 'auto'"),
        ({"noise": "gaussian"}, "`noise` must be one of"),
        ({"learning_rate": 0}, "`learning_rate` must be 'auto' or a positive"),
        ({"n_folds": 0}, "`n_folds` must be 'auto'"),
    ],
)
def test_bad_parameters_are_refused_in_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        DropoutRegressor(**(QUICK | settings)).fit(*toy(20))


def test_twice_the_rows_in_a_step_are_half_the_steps_at_a_greater_rate():
    def steps_and_rate(batch_size):
        model = DropoutRegressor(batch_size=batch_size)
        epochs = model._epochs(51_200)
        return epochs * 51_200 // batch_size, model._grid(51_200)[0][0].learning_rate

    (many, slow), (few, fast) = steps_and_rate(128), steps_and_rate(256)
    assert abs(many - 2 * few) <= 2 * 51_200 // 256
    np.testing.assert_allclose(fast / slow, 2**0.5)


def test_a_large_table_has_fewer_networks_unless_their_number_is_given():
    assert DropoutRegressor()._n_networks(2000) < DropoutRegressor()._n_networks(1999)
    assert DropoutRegressor(n_networks=7)._n_networks(10**6) == 7


def test_numbers_of_a_small_table_have_candidates_whose_decay_is_that_of_one_prior():
    small, large = DropoutRegressor()._grid(100)[0], DropoutRegressor()._grid(180)[0]
    assert sorted(100 * member.weight_decay for member in small) == pytest.approx([1e-4, 1e-4, 0.1, 0.1, 1.0])
    assert {member.weight_decay for member in large} == {1e-6} and len(large) == 6
    named, classes = DropoutRegressor(weight_decay=[1e-3])._grid(100)[0], DropoutClassifier()
    assert [(one.drop_prob, one.weight_decay) for one in named] == [(one.drop_prob, 1e-3) for one in large]
    classes.classes_ = np.arange(2)
    assert [one.drop_prob for one in classes._grid(100)[0]] == [one.drop_prob for one in large]


def test_a_stream_has_not_the_decay_of_its_first_few_rows():
    x, y = toy(60)
    streamed = DropoutRegressor(n_networks=1).partial_fit(x, y)
    settings = {"hidden": (10,), "n_steps": 40, "min_epochs": 1, "n_folds": 2, "device": "cpu", "random_state": 0}
    fitted = DropoutRegressor(**settings).fit(x, 100 * x[:, 0] + y)
    assert max(member.weight_decay for member in fitted.population_.members) > 1e-3
    for model in (streamed, fitted.partial_fit(x, y)):
        assert {member.weight_decay for member in model.population_.members} == {1e-6}
