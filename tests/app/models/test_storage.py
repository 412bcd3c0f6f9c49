"""Model folders are replaced whole, and refused when they are not what they say."""

import numpy as np
import pytest

from dropbayes.app.models.model import Model, load
from dropbayes.app.models.storage import MODEL, check_place
from dropbayes.columns import Column, Schema
from dropbayes.estimators import DropoutRegressor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    x = np.linspace(-1, 1, 20)[:, None]
    estimator = DropoutRegressor((4,), drop_prob=0.1, weight_decay=1e-4, n_steps=5, n_networks=1, random_state=0)
    path = tmp_path_factory.mktemp("models") / "line"
    schema = Schema((Column("a", "number"),), "y", "regression")
    return Model(estimator.fit(x, x[:, 0]), schema, {"n_rows": 20}).save(path)


def test_a_saved_model_predicts_the_same_bits(model):
    x = np.array([[0.5], [3.0]])
    assert np.array_equal(load(model.path).estimator.predict(x), model.estimator.predict(x))


def test_a_folder_with_other_files_is_left_alone(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and does not hold a model"):
        check_place(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_network_that_was_changed_is_refused(model):
    (model.path / MODEL).write_bytes((model.path / MODEL).read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"is not the file that columns\.json belongs to"):
        load(model.path)
