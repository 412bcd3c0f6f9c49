"""Tests of the classifier."""

import functools
import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris

from dropbayes.estimators import DropoutClassifier
from dropbayes.population import ensembles
from tests.estimators.samples import QUICK, toy


def test_classifier_learns_a_stream_with_all_classes_named_first():
    x, y = toy(1200)
    label = np.where(y > 100, "high", "low")
    model = DropoutClassifier(**QUICK, random_state=0)
    with pytest.raises(ValueError, match="`classes` must be passed on the first call"):
        model.partial_fit(x, label)
    for rows in np.array_split(np.arange(1200), 12):
        model.partial_fit(x[rows], label[rows], classes=["low", "high", "never"])
    assert model.predict_proba(x).shape == (1200, 3)
    assert model.score(x, label) > 0.85
    with pytest.raises(ValueError, match="must hold only the classes"):
        model.partial_fit(x[:2], ["low", "other"])


@pytest.mark.parametrize("labels", [["low", "high"], [False, True], [3, -1], ["a", "b", "c"]])
def test_a_stored_classifier_keeps_its_labels(tmp_path, labels):
    x, y = toy(40)
    label = np.asarray(labels)[np.digitize(y, [100, 110]) % len(labels)]
    model = DropoutClassifier(**QUICK, random_state=0).fit(x, label)
    model.save(tmp_path / "m.safetensors")
    copy = DropoutClassifier.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(copy.predict(x), model.predict(x))
    np.testing.assert_array_equal(copy.predict_proba(x), model.predict_proba(x))
    assert copy.classes_.dtype == model.classes_.dtype


def test_classifier_is_calibrated_enough_to_beat_its_own_accuracy_baseline():
    x, y = load_iris(return_X_y=True)
    model = DropoutClassifier(**(QUICK | {"n_steps": 300}), random_state=0).fit(x[::2], y[::2])
    assert model.score(x[1::2], y[1::2]) > 0.92
    assert -0.25 < model.log_likelihood(x[1::2], y[1::2]) < 0
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1)


def test_the_temperature_is_that_of_held_out_rows_and_survives_a_file(tmp_path):
    source = np.random.default_rng(0)
    x = source.normal(size=(150, 6))
    label = (x[:, 0] + 2 * source.normal(size=150) > 0).astype(int)  # mostly noise: networks that over-fit are too sure
    settings = QUICK | {"drop_prob": 0.0, "n_steps": 600, "hidden": (50,), "weight_decay": 0.0}
    model = DropoutClassifier(**settings, random_state=0).fit(x, label)
    assert model.temperature_ > 1.5
    new = source.normal(size=(1000, 6))
    truth = (new[:, 0] + 2 * source.normal(size=1000) > 0).astype(int)
    cold = pickle.loads(pickle.dumps(model))
    cold.temperature_ = 1.0
    assert model.log_likelihood(new, truth) > cold.log_likelihood(new, truth) + 0.1
    model.save(tmp_path / "m.safetensors")
    assert DropoutClassifier.load(tmp_path / "m.safetensors").temperature_ == model.temperature_


def test_balanced_classes_raise_the_rare_one():
    source = np.random.default_rng(1)
    x = source.normal(size=(300, 1))
    label = (x[:, 0] + source.normal(size=300) > 1.8).astype(int)
    plain, balanced = (
        DropoutClassifier(**QUICK, class_weight=weight, random_state=0).fit(x, label).predict_proba(x)[:, 1].mean()
        for weight in (None, "balanced")
    )
    assert plain == pytest.approx(label.mean(), abs=0.06)
    assert balanced > 2 * plain


def test_the_search_shares_out_a_rare_class_and_keeps_groups_whole(monkeypatch):
    made = []
    monkeypatch.setattr(ensembles, "_tasks", lambda *a, _tasks=ensembles._tasks: made.append(_tasks(*a)) or made[-1])
    x, y, groups = (
        np.random.default_rng(0).normal(size=(60, 2)),
        np.repeat(["a", "b", "c"], [40, 16, 4]),
        np.arange(60) // 2,
    )
    DropoutClassifier(**QUICK | {"n_folds": 2}).fit(x, y, groups=groups)
    assert all((task.held_out[1] == 2).sum() == 2 for task in made[0])
    pairs = {tuple(row): pair for row, pair in zip(x.tolist(), groups.tolist(), strict=True)}
    sides = [{pairs[tuple(row)] for row in task.held_out[0].tolist()} for task in made[0]]
    assert not sides[0] & sides[1]


def test_the_temperature_is_that_of_the_heavy_rows():
    source = np.random.default_rng(0)
    x = source.normal(size=(400, 2))
    labels = x[:, 0] > 0
    wrong = source.random(400) < 0.3
    labels[wrong] = ~labels[wrong]
    settings = QUICK | {"n_steps": 300}
    plain, weighted = (
        DropoutClassifier(**settings, random_state=0).fit(x, labels, sample_weight=weight)
        for weight in (None, np.where(wrong, 0.01, 1.5))
    )
    assert weighted.temperature_ < plain.temperature_


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA], ids=["None", "NaN", "NA"])
@pytest.mark.parametrize("kind", [list, pd.Series, pd.Categorical, functools.partial(np.array, dtype=object)])
def test_missing_labels_are_refused(missing, kind):
    with pytest.raises(ValueError, match="`y` must hold a label for every row; row 1 has none"):
        DropoutClassifier(effort="quick").fit(np.zeros((4, 1)), kind(["a", missing, "b", "a"]))


@pytest.mark.parametrize("labels", [np.array([0, np.nan, 1, 0]), pd.Series([0, pd.NA, 1, 0], dtype="Int64")])
def test_missing_labels_among_numbers_are_refused(labels):
    with pytest.raises(ValueError, match="`y` must hold a label for every row; row 1 has none"):
        DropoutClassifier(effort="quick").fit(np.zeros((4, 1)), labels)


def test_labels_of_several_kinds_are_refused():
    x = np.arange(20.0)[:, None]
    with pytest.raises(ValueError, match="labels of one kind; got texts and others"):
        DropoutClassifier().fit(x, np.array(["a", 1] * 10, dtype=object))
