"""The settings of sampling in one record."""

from functools import partial

import pytest
import torch
from torch import nn

import dropbayes as db
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
        ({"positions": "own"}, ValueError, "`positions` must be one of None, 'tied', 'per_position'; got 'own'"),
        ({"row_offset": 1.5}, ValueError, "`row_offset` must be a whole number, at least 0; got 1.5"),
        ({"row_offset": -1}, ValueError, "`row_offset` must be a whole number, at least 0; got -1"),
        ({"ignore_modules": [3]}, TypeError, "`ignore_modules` must hold names"),
        ({"ignore_modules": 3}, TypeError, "`ignore_modules` must hold names"),
        ({"tolerance": 0.0}, ValueError, "`tolerance` must be a positive finite number; got 0.0"),
        ({"batch_invariant": "no"}, ValueError, "`batch_invariant` must be one of None, True, False; got 'no'"),
        ({"max_bytes": 0}, ValueError, "`max_bytes` must be a positive finite number; got 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_rule_and_the_value(settings, error, words):
    with pytest.raises(error, match=words.replace("'", ".")):
        Sampling(**settings)


@pytest.mark.parametrize("sampling", [None, {"sampler": "independent"}])
def test_settings_of_another_kind_are_refused(sampling):
    net, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)), torch.ones(3, 2)
    calls = [db.predict, db.draws, db.doctor, db.explain, db.sites, lambda net, x, **k: db.function_draw(net, **k),
             partial(db.evaluate, y=torch.ones(3, 1), likelihood=db.Gaussian(1.0))]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"`sampling` must be a dropbayes.Sampling; got"):
            call(net, x, sampling=sampling)
