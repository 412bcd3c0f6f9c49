"""Files of estimators: hostile contents with a right digest, and what `fit` accepts."""

import math

import numpy as np
import pytest
import torch

from dropbayes.estimators import DropoutClassifier
from dropbayes.estimators.files import _record
from dropbayes.estimators.process import Process
from dropbayes.runtime import storage
from tests.estimators.samples import QUICK


def _forged(path, out, change):
    """The file with its contents changed and its digest right, which anyone can compute."""
    file = storage.load(path, kinds=["DropoutRegressor", "DropoutClassifier"])
    tensors, settings = dict(file.tensors), dict(file.settings)
    change(tensors, settings)
    storage.save(out, tensors, kind=file.kind, settings=settings)
    return out


HOSTILE = {
    "a short weight": lambda t, s: t.update({"weight.0": torch.zeros(3)}),
    "a weight of other width": lambda t, s: t.update({"weight.0": torch.zeros(*t["weight.0"].shape[:2], 3)}),
    "a scale of other shape": lambda t, s: t.update(y_scale=torch.ones(2, 5)),
    "a scale of zero": lambda t, s: t.update(x_scale=0 * t["x_scale"]),
    "NaN": lambda t, s: t.update({"weight.0": t["weight.0"] * math.nan}),
    "no bias": lambda t, s: t.pop("bias.0"),
    "no members": lambda t, s: s.update(members=[]),
    "another member": lambda t, s: s.update(members=s["members"] * 2),
    "no features": lambda t, s: s.pop("n_features"),
    "features that are true": lambda t, s: s.update(n_features=True),
    "parameters of another kind": lambda t, s: s.update(parameters=[1]),
    "no classes": lambda t, s: s.pop("classes"),
    "too many classes": lambda t, s: s.update(classes=[*s["classes"], "d"]),
    "classes of a bogus dtype": lambda t, s: s.update(classes_dtype="bogus"),
    "classes of a huge dtype": lambda t, s: s.update(classes_dtype="<U200000000"),
}


@pytest.fixture(scope="module")
def classifier_file(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(40, 2))
    model = DropoutClassifier(**QUICK, random_state=0).fit(x, np.where(x[:, 0] > 0, "a", "b"))
    path = tmp_path_factory.mktemp("files") / "m.safetensors"
    model.save(path)
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_a_signed_file_of_impossible_contents_raises_value_error_and_nothing_else(classifier_file, tmp_path, name):
    path = _forged(classifier_file, tmp_path / "forged.safetensors", HOSTILE[name])
    with pytest.raises(ValueError, match="`path`") as caught:
        DropoutClassifier.load(path)
    assert type(caught.value) is ValueError


def test_what_fit_accepts_can_be_saved(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    days = np.where(x[:, 0] > 0, np.datetime64("2024-01-01"), np.datetime64("2024-06-01"))
    settings = QUICK | {"hidden": np.array([8]), "device": torch.device("cpu")}
    model = DropoutClassifier(**settings, random_state=0).fit(x, days)
    model.save(tmp_path / "m.safetensors")
    loaded = DropoutClassifier.load(tmp_path / "m.safetensors")
    assert loaded.classes_.dtype == days.dtype and (loaded.predict(x) == model.predict(x)).all()


def test_a_part_of_which_some_tensors_are_missing_is_not_left_out(classifier_file, tmp_path):
    # A process without its ranks, as another version wrote it, would predict something else.
    path = _forged(
        classifier_file, tmp_path / "part.safetensors", lambda t, s: t.update({"process.anchors": torch.zeros(2, 2)})
    )
    file = storage.load(path, kinds=["DropoutClassifier"])
    with pytest.raises(ValueError, match=r"'process\.targets' is missing.*fit the model again"):
        _record(Process, "process", dict(file.tensors))
    assert _record(Process, "other", dict(file.tensors)) is None
