"""Model folders are replaced whole, and refused when they are not what they say."""

import json
import os
import pathlib

import numpy as np
import pytest
from markdown_it import MarkdownIt

from dropbayes.app.models.model import Model, load
from dropbayes.app.models.storage import COLUMNS, MODEL, card, check_place, range_text, signed
from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.columns import Column, Schema
from dropbayes.estimators.ensembles import RegressionEnsemble

SETTINGS = {"drop_prob": 0.1, "weight_decay": 1e-4, "n_networks": 1, "noise": "constant"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    x = np.linspace(-1, 1, 20)[:, None]
    estimator = DropoutRegressor((4,), n_steps=5, random_state=0, **SETTINGS)
    path = tmp_path_factory.mktemp("models") / "line"
    schema = Schema((Column("a", "number"),), "y", "regression")
    return Model(estimator.fit(x, x[:, 0]), schema, {"n_rows": 20}).save(path)


def test_a_saved_model_predicts_the_same_bits(model):
    x = np.array([[0.5], [3.0]])
    assert np.array_equal(load(model.path).ensemble.predict(x), model.ensemble.predict(x))


def test_a_folder_with_other_files_is_left_alone(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and does not hold a model"):
        check_place(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_place_that_cannot_be_written_to_is_refused_before_the_training(monkeypatch, tmp_path):
    with pytest.raises(OSError, match="the folder '/proc' cannot be written to"):
        check_place(pathlib.Path("/proc/model"))
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(OSError, match="is a mount point, which cannot be replaced; name a folder in it"):
        check_place(tmp_path)


def other(model):
    """A model of the same columns and other networks."""
    x = np.linspace(-1, 1, 20)[:, None]
    estimator = DropoutRegressor((4,), n_steps=9, random_state=1, **SETTINGS)
    return Model(estimator.fit(x, -x[:, 0]), model.schema, {"n_rows": 20})


def test_a_calibration_is_not_written_to_a_model_that_took_the_place_of_its_own(model, tmp_path):
    rows = {"a": np.linspace(-1, 1, 30), "y": np.linspace(-1, 1, 30)}
    first = load(model.save(tmp_path / "m").path).calibrate(rows)
    second = other(model).save(tmp_path / "m")
    with pytest.raises(ValueError, match="was replaced since the model was read"):
        first.save_calibration()
    assert load(tmp_path / "m").predict(rows)["mean"] == second.predict(rows)["mean"]
    second.calibrate(rows).save_calibration()
    assert load(tmp_path / "m").origin["calibration"]["n_rows"] == 30


def test_columns_that_were_changed_or_have_another_format_are_refused(model, tmp_path):
    path = model.save(tmp_path / "m").path
    values = json.loads((path / COLUMNS).read_text())
    assert signed(values) == values
    (path / COLUMNS).write_text(json.dumps({**values, "target": "z"}))
    with pytest.raises(ValueError, match="was changed since it was written"):
        load(path)
    for number in (True, 3.0, "3", 2, 4):
        (path / COLUMNS).write_text(json.dumps(signed({**values, "format": number})))
        with pytest.raises(ValueError, match=f"has the format {number!r}; this version reads 3: fit the model again"):
            load(path)


def test_a_model_that_is_replaced_while_it_is_read_is_read_again(model, tmp_path, monkeypatch):
    second, path = other(model), model.save(tmp_path / "m").path
    loading, x = RegressionEnsemble.load, np.array([[0.5]])

    def replaced(*arguments):
        monkeypatch.undo()
        second.save(path)
        return loading(*arguments)

    monkeypatch.setattr(RegressionEnsemble, "load", replaced)
    assert np.array_equal(load(path).ensemble.predict(x), second.ensemble.predict(x))


def test_a_private_model_stays_private(model, tmp_path):
    path = model.save(tmp_path / "m").path
    path.chmod(0o700)
    for entry in path.iterdir():
        entry.chmod(0o600)
    model.save(path)
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {
        0o600
    } and path.stat().st_mode & 0o777 == 0o700


def test_a_network_that_was_changed_is_refused(model):
    (model.path / MODEL).write_bytes((model.path / MODEL).read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"is not the file that columns\.json belongs to"):
        load(model.path)


def test_a_card_says_what_the_model_reads_and_how_it_came_about():
    schema = Schema((Column("size", "number", low=1.5, high=20.0), Column("city", "category", categories=("Oslo", "a|b"))),
                    "price", "regression", {"id": "an identifier"})  # fmt: skip
    origin = {"file": "houses.csv", "n_rows": 1200, "sha256": "ab" * 32, "command": "dropbayes fit houses.csv",
              "settings": {"n_draws": 50}, "scores": {"held-out log-likelihood": -1.23456}, "versions": {"torch": "2"},
              "calibration": {"method": "scale", "values": [0.9], "n_rows": 100, "file": "held.csv"}}  # fmt: skip
    text = card(schema, origin, name="m")
    for line in (
        "| size | number | 1.5 to 20 |", "| city | category | Oslo, a\\|b |", "| id | left out | an identifier |",
        "- data: houses.csv, 1,200 rows", f"- SHA-256 of the data: {'ab' * 32}", "- command: `dropbayes fit houses.csv`",
        "- scores: held-out log-likelihood -1.235", "- calibration: scale, factor 0.9, on 100 rows of held.csv",
        'model = db.load("m")',
    ):  # fmt: skip
        assert line in text.splitlines()


def test_ranges_are_read_in_their_own_units():
    assert range_text(Column("d", "date", low=0.0, high=18262.0)) == "1970-01-01 to 2020-01-01"
    assert range_text(Column("b", "boolean")) == "true or false"
    assert range_text(Column("n", "number")) == ""


def test_names_and_categories_are_no_markup():
    hostile = "<script>alert(1)</script> [x](javascript:1) `a` | b\n# c & d"
    schema = Schema((Column(hostile, "category", categories=(hostile,)),), hostile, "regression", {hostile: hostile})
    calibration = {"method": "isotonic", "values": [0.9], "n_rows": 100, "file": hostile}
    text = card(schema, {"file": hostile, "command": hostile, "calibration": calibration}, name='"\n# m')
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert "<script" not in html and "<a " not in html and html.count("<h1>") == 1
    assert html.count("<code") == 1  # the example of its use
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:1) `a` | b # c &amp; d") == 9
