"""Tests of `dropbayes evaluate`."""

import json
import re

import numpy as np
import pytest

from dropbayes.app.models.model import load
from tests.command_line import column, inputs, rows_of, run


def test_evaluate_scores_as_the_estimator_does(models):
    found = json.loads(run("evaluate", models / "numbers", models / "new.csv", "--json").text)
    model = load(models / "numbers")
    x, y = inputs(model, models / "new.csv"), column(rows_of((models / "new.csv").read_text()), "price")
    assert found["rmse"] == pytest.approx(np.sqrt(((model.estimator.predict(x) - y) ** 2).mean()), rel=1e-9)
    assert found["log_likelihood"] == pytest.approx(model.estimator.log_likelihood(x, y), rel=1e-9)
    for level in (0.5, 0.8, 0.95):
        lower, upper = model.estimator.predict_interval(x, level)
        assert found[f"coverage_{100 * level:.0f}"] == ((lower <= y) & (y <= upper)).mean()


def test_evaluate_scores_classes(models):
    from sklearn.metrics import accuracy_score, log_loss

    found = json.loads(run("evaluate", models / "classes", models / "new.csv", "--json").text)
    model = load(models / "classes")
    probabilities = model.estimator.predict_proba(inputs(model, models / "new.csv"))
    labels = [row["kind"] for row in rows_of((models / "new.csv").read_text())]
    assert found["log_likelihood"] == pytest.approx(-log_loss(labels, probabilities, labels=model.estimator.classes_))
    assert found["accuracy"] == accuracy_score(labels, model.estimator.classes_[probabilities.argmax(1)])


def test_evaluate_leaves_out_rows_without_target_and_prints_a_table(models, tmp_path):
    text = (models / "new.csv").read_text()
    short = re.sub(r",-?[\d.]+,(\w+)\n", r",,\1\n", text, count=3)
    (tmp_path / "t.csv").write_text(short)
    result = run("evaluate", models / "numbers", tmp_path / "t.csv")
    assert "37 rows" in result.text and "RMSE" in result.text
    assert "3 rows without a target left out" in result.err


@pytest.mark.parametrize(("file", "told"), [("train.csv", True), ("new.csv", False)])
def test_rows_that_the_model_was_fitted_to_are_told_of(models, file, told):
    result = run("evaluate", models / "numbers", models / file)
    assert ("these are the rows the model was fitted to" in result.err) == told
