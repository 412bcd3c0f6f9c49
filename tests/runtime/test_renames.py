"""Modules keep their earlier names and are the same modules under both; functions warn of theirs."""

import importlib
import pickle
import sys
from typing import Any

import pytest

import dropbayes
from dropbayes.runtime.renames import RenamedModules, earlier_arguments, earlier_name

EARLIER = {
    "conversion": "add_dropout",
    "evaluation": "evaluate",
    "folders": "load",
    "mixtures": "Mixture",
    "objective": "negative_elbo",
    "precision": "Prior",
    "predictor": "Predictor",
    "recurrent": "LSTM",
    "theory": "theory_report",
    "verdict": "check",
}


@pytest.mark.parametrize(("module", "name"), EARLIER.items())
def test_a_module_that_moved_is_imported_under_its_earlier_name(module, name):
    earlier = importlib.import_module(f"dropbayes.{module}")
    assert earlier is sys.modules[earlier.__name__] is sys.modules[f"dropbayes.{module}"]
    assert earlier.__name__ != f"dropbayes.{module}"
    assert callable(getattr(earlier, name))


def test_a_moved_module_is_an_attribute_of_the_package():
    assert dropbayes.recurrent.LSTM is dropbayes.layers.LSTM


def test_pickles_that_name_the_earlier_module_are_read():
    pickled = pickle.dumps(dropbayes.layers.LSTM, protocol=0)
    earlier = pickled.replace(b"dropbayes.layers.recurrent", b"dropbayes.recurrent")
    assert earlier != pickled and pickle.loads(earlier) is dropbayes.layers.LSTM


def test_other_modules_are_left_to_the_usual_importers():
    renamed = RenamedModules("package", {"old": "new.place"})
    assert renamed.present_name("package.old.part") == "package.new.place.part"
    assert renamed.find_spec("package.older") is None and renamed.find_spec("old") is None
    with pytest.raises(ModuleNotFoundError, match=r"dropbayes\.recurrent\.missing"):
        importlib.import_module("dropbayes.recurrent.missing")


@pytest.mark.parametrize(
    ("home", "before", "now"),
    [
        (dropbayes.processes, "tuned", "tuned_covariance"),
        (dropbayes.tables, "quoted", "quote"),
        (dropbayes.tables, "regrouped", "regroup"),
        (dropbayes.Model, "recalibrated", "with_recalibration"),
    ],
)
def test_a_public_function_that_was_renamed_keeps_its_earlier_name(home, before, now):
    assert getattr(home, before).__wrapped__ is getattr(home, now)


def test_an_earlier_name_warns_at_its_caller_and_computes_the_same():
    def add(a, b):
        return a + b

    with pytest.warns(DeprecationWarning, match="`added` is now called `add`") as caught:
        assert earlier_name("added", add)(2, b=3) == 5
    assert caught[0].filename == __file__


def test_an_earlier_argument_warns_at_its_caller_and_is_passed_on():
    def raise_to(*, base, power):
        return base**power

    renamed: Any = earlier_arguments(times="power")(raise_to)
    with pytest.warns(DeprecationWarning, match="`times` is now called `power`") as caught:
        assert renamed(base=2, times=3) == 8
    assert caught[0].filename == __file__
