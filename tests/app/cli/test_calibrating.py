"""Tests of `dropbayes calibrate`."""

import json
import shutil

import numpy as np
import pytest

from dropbayes.app.models.model import load
from dropbayes.app.models.storage import CARD
from tests.command_line import check, column, inputs, rows_of, run, table


@pytest.fixture
def model(models, tmp_path):
    shutil.copytree(models / "numbers", tmp_path / "m")
    (tmp_path / "held.csv").write_text(table(80, seed=5))
    return tmp_path / "m"


def test_predict_and_evaluate_say_something_else_from_then_on(model, models, tmp_path):
    before = rows_of(run("predict", model, models / "new.csv", "-o", "-").text)
    found = json.loads(run("calibrate", model, tmp_path / "held.csv", "--json").text)
    after = rows_of(run("predict", model, models / "new.csv", "-o", "-").text)
    assert found["method"] == "scale"
    np.testing.assert_allclose(column(after, "price_std"), found["factor"] * column(before, "price_std"), rtol=1e-9)
    np.testing.assert_allclose(column(after, "price_mean"), column(before, "price_mean"), rtol=1e-9)
    scores = json.loads(run("evaluate", model, tmp_path / "held.csv", "--json").text)
    assert scores["sharpness"] == pytest.approx(scores["rmse"], rel=0.2)


def test_the_factor_is_the_one_of_the_held_out_residuals(model, tmp_path):
    loaded = load(model)
    x, y = inputs(loaded, tmp_path / "held.csv"), column(rows_of((tmp_path / "held.csv").read_text()), "price")
    mean, std = loaded.estimator.predict(x, return_std=True)
    found = json.loads(run("calibrate", model, tmp_path / "held.csv", "--json").text)
    assert found["factor"] == pytest.approx(np.sqrt(np.mean(((y - mean) / std) ** 2)))


@pytest.mark.parametrize("method", ["isotonic", "conformal"])
def test_intervals_hold_their_share_of_the_rows_they_were_set_on(model, tmp_path, method):
    run("calibrate", model, tmp_path / "held.csv", "--method", method)
    scores = json.loads(run("evaluate", model, tmp_path / "held.csv", "--json").text)
    for level in (50, 80, 95):
        assert abs(scores[f"coverage_{level}"] - level / 100) <= 2 / 80


def test_a_calibration_can_be_taken_back_and_is_told(model, models, tmp_path):
    before = run("predict", model, models / "new.csv", "-o", "-").text
    run("calibrate", model, tmp_path / "held.csv", "--method", "conformal")
    assert "conformal, on 80 rows of held.csv" in run("explain", model).text
    assert run("predict", model, models / "new.csv", "-o", "-").text != before
    run("calibrate", model, "--method", "none")
    assert run("predict", model, models / "new.csv", "-o", "-").text == before
    assert "conformal" not in (model / CARD).read_text()


def test_classes_get_sets_of_labels(models, tmp_path):
    shutil.copytree(models / "classes", tmp_path / "c")
    (tmp_path / "held.csv").write_text(table(80, seed=5))
    run("calibrate", tmp_path / "c", tmp_path / "held.csv", "--method", "conformal")
    rows = rows_of(run("predict", tmp_path / "c", tmp_path / "held.csv", "-o", "-", "--coverage", "0.9").text)
    held = [row["kind"] in row["kind_labels"].split("; ") for row in rows]
    assert np.mean(held) >= 0.9
    check(run("calibrate", tmp_path / "c", tmp_path / "held.csv", "--method", "isotonic"), 1, "--method isotonic maps")


def test_the_training_table_is_warned_of(model, models, tmp_path):
    assert "the rows the model was fitted to" in run("calibrate", model, models / "train.csv").err
    (tmp_path / "train.csv").write_text((models / "new.csv").read_text())
    assert "has the name of the training table" in run("calibrate", model, tmp_path / "train.csv").err
