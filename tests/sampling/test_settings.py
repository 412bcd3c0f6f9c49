"""The settings of sampling in one record."""

import pytest

from dropbayes.sampling import Sampling
from dropbayes.sampling.masks import Keys


def test_keys_hold_the_sampler():
    assert Sampling(sampler="independent").keys(7, 3) == Keys(3, 7, "independent")


def test_ignored_modules_are_names_in_order():
    assert Sampling(ignore_modules="Augment").ignored == ("Augment",)
    assert Sampling(ignore_modules=["b", "a"]).ignored == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"sampler": "sobol"}, ValueError, "`sampler` must be one of 'stratified', 'independent'; got 'sobol'"),
        ({"positions": "own"}, ValueError, "`positions` must be None or one of 'tied', 'per_position'; got 'own'"),
        ({"row_offset": 1.5}, TypeError, "`row_offset` must be a whole number; got 1.5"),
        ({"row_offset": -1}, ValueError, "`row_offset` must be zero or more; got -1"),
        ({"ignore_modules": [3]}, TypeError, "`ignore_modules` must hold names"),
        ({"tolerance": 0.0}, ValueError, "`tolerance` must be a positive number; got 0.0"),
        ({"max_bytes": 0}, ValueError, "`max_bytes` must be a positive number of bytes; got 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_rule_and_the_value(settings, error, words):
    with pytest.raises(error, match=words.replace("'", ".")):
        Sampling(**settings)
