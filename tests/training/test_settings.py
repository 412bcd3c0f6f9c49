"""The settings of `fit` in groups, and one by one."""

import inspect
from typing import get_type_hints

import pytest
import torch

import dropbayes as db
from dropbayes.training import Bound, Checkpoint, Descent, EarlyStopping, fit
from dropbayes.training.settings import FitOptions, settings_of
from tests.training.toys import network, toy


def test_groups_are_the_same_as_their_fields_one_by_one():
    x, y = toy()
    nets = [network(), network()]
    rows = {"likelihood": db.Gaussian(4.0), "epochs": 3, "device": "cpu"}
    one_by_one = fit(nets[0], x, y, **rows, learn_precision=True, held_out=(x, y), patience=1, learning_rate=0.02)
    stopping = EarlyStopping((x, y), patience=1)
    groups = {"bound": Bound(learn_precision=True), "stopping": stopping, "descent": Descent(learning_rate=0.02)}
    assert fit(nets[1], x, y, **rows, **groups) == one_by_one
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_a_field_given_by_name_comes_before_that_of_its_group():
    settings = settings_of(None, Descent(learning_rate=0.1), None, None, None, {"learning_rate": 0.2})
    assert settings.descent.learning_rate == 0.2


def test_every_field_of_a_group_is_an_option_of_fit():
    names = {name for group in (Bound, Descent, EarlyStopping) for name in inspect.signature(group).parameters}
    assert names | {"checkpoint_every", "weight"} == set(get_type_hints(FitOptions))


def test_a_checkpoint_may_be_a_path_or_say_how_often_it_is_written():
    for given, options in (("run", {"checkpoint_every": 3}), (Checkpoint("run", every=3), {})):
        assert settings_of(None, None, None, given, None, options).checkpoint == Checkpoint("run", every=3)


def test_an_option_that_no_group_has_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rat'"):
        fit(network(), *toy(), likelihood=db.Gaussian(4.0), learning_rat=0.1)  # type: ignore[call-arg]


def test_fit_has_few_named_parameters():
    named = [p for p in inspect.signature(fit).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert len(named) <= 16
