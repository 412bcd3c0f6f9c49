"""Tests of `dropbayes evaluate`, `calibrate` and `report`."""

import json
import re
import shutil
import sys
import types
import weakref

import numpy as np
import pytest
import torch

from dropbayes.app.cli import rows
from dropbayes.app.models import fields
from dropbayes.app.models.model import load
from dropbayes.app.models.storage import CARD
from dropbayes.estimators.recalibration import fit_recalibration
from tests.command_line import TINY, check, column, inputs, rows_of, run, table


@pytest.fixture(scope="module")
def scored(models):
    """What is said of each model on new rows."""
    return {
        name: json.loads(run("evaluate", models / name, models / "new.csv", "--json").text)
        for name in ("numbers", "classes")
    }


def test_evaluate_scores_as_the_estimator_does(models, scored):
    found = scored["numbers"]
    model = load(models / "numbers")
    x, y = inputs(model, models / "new.csv"), column(rows_of((models / "new.csv").read_text()), "price")
    assert found["rmse"] == pytest.approx(np.sqrt(((model.ensemble.predict(x) - y) ** 2).mean()), rel=1e-9)
    assert found["log_likelihood"] == pytest.approx(model.ensemble.log_likelihood(x, y), rel=1e-9)
    for level in (0.5, 0.8, 0.95):
        lower, upper = model.ensemble.predict_interval(x, level)
        assert found[f"coverage_{100 * level:.0f}"] == ((lower <= y) & (y <= upper)).mean()


def test_evaluate_scores_classes(models, scored):
    from sklearn.metrics import accuracy_score, log_loss

    found = scored["classes"]
    model = load(models / "classes")
    probabilities = model.ensemble.predict_proba(inputs(model, models / "new.csv"))
    labels = [row["kind"] for row in rows_of((models / "new.csv").read_text())]
    assert found["log_likelihood"] == pytest.approx(-log_loss(labels, probabilities, labels=model.ensemble.classes_))
    assert found["accuracy"] == accuracy_score(labels, model.ensemble.classes_[probabilities.argmax(1)])


def test_evaluate_scores_intervals_and_whole_distributions_with_standard_errors(models, scored):
    found = scored["numbers"]
    model = load(models / "numbers")
    x, y = inputs(model, models / "new.csv"), column(rows_of((models / "new.csv").read_text()), "price")
    lower, upper = model.ensemble.predict_interval(x, 0.95)
    penalty = 40 * (np.maximum(lower - y, 0) + np.maximum(y - upper, 0))
    assert found["interval_width"] == pytest.approx((upper - lower).mean(), rel=1e-6)
    assert found["interval_score"] == pytest.approx((upper - lower + penalty).mean(), rel=1e-6)
    assert found["crps"] == pytest.approx(float(model.ensemble.predictive(x).crps(torch.from_numpy(y)).mean()))
    error = np.abs(model.ensemble.predict(x) - y).std(ddof=1) / np.sqrt(40)
    assert found["standard_errors"]["mae"] == pytest.approx(error, rel=1e-6)


def test_a_constant_prediction_of_numbers_is_scored_beside_the_model(models, scored):
    found = scored["numbers"]["constant"]
    y = column(rows_of((models / "new.csv").read_text()), "price")
    spread = y.std()
    assert found["rmse"] == pytest.approx(spread) and found["sharpness"] == pytest.approx(spread)
    assert found["log_likelihood"] == pytest.approx(-0.5 * np.log(2 * np.pi * np.e * spread**2))
    assert found["interval_width"] == pytest.approx(2 * 1.959964 * spread, rel=1e-5)


def test_classes_are_scored_by_ranking_and_by_class_beside_their_shares(models, scored):
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    found = scored["classes"]
    model = load(models / "classes")
    x = inputs(model, models / "new.csv")
    labels = np.array([row["kind"] for row in rows_of((models / "new.csv").read_text())])
    probabilities = model.ensemble.predict_proba(x)
    assert found["class_auroc"] == pytest.approx(roc_auc_score(labels, probabilities, multi_class="ovr"))
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, model.ensemble.predict(x)))
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    assert found["constant"]["log_likelihood"] == pytest.approx((shares * np.log(shares)).sum())
    assert found["constant"]["accuracy"] == shares.max() and found["constant"]["class_auroc"] == 0.5


def test_one_row_has_scores_and_neither_standard_error_nor_constant(models, tmp_path):
    (tmp_path / "t.csv").write_text("".join((models / "new.csv").read_text().splitlines(keepends=True)[:2]))
    result = run("evaluate", models / "numbers", tmp_path / "t.csv", "--json")
    found = json.loads(result.text)
    assert result.code == 0 and found["n_rows"] == 1 and found["standard_errors"] == found["constant"] == {}


def test_evaluate_leaves_out_rows_without_target_and_prints_a_table(models, tmp_path):
    text = (models / "new.csv").read_text()
    short = re.sub(r",-?[\d.]+,(\w+)\n", r",,\1\n", text, count=3)
    (tmp_path / "t.csv").write_text(short)
    result = run("evaluate", models / "numbers", tmp_path / "t.csv")
    assert "37 rows" in result.text and "RMSE" in result.text
    assert "3 rows without a target left out" in result.err


@pytest.mark.slow
def test_evaluate_holds_one_window_of_a_table_and_ranks_every_so_many_rows(models, tmp_path, monkeypatch):
    model, path = load(models / "numbers"), tmp_path / "many.csv"
    path.write_text(table(300, seed=3))
    monkeypatch.setattr(type(model.ensemble), "block_rows", 100)
    monkeypatch.setitem(fields.outcome_columns.__kwdefaults__, "max_ranked", 80)
    held, most, read = [], [], rows.windows

    def watched(*arguments, **settings):
        for window in read(*arguments, **settings):
            held.append(weakref.ref(window.encoded))
            most.append(sum(one() is not None for one in held))
            yield window

    monkeypatch.setattr(rows, "windows", watched)
    found = json.loads(run("evaluate", models / "numbers", path, "--json").text)
    x, y = inputs(model, path), column(rows_of(path.read_text()), "price")
    crps = model.ensemble.predictive(x[::4]).crps(torch.from_numpy(y[::4]))
    assert found["crps"] == pytest.approx(float(crps.mean()))
    assert found["n_rows"] == 300 and len(held) == 3 and max(most) <= 2


@pytest.mark.parametrize(("file", "told"), [("train.csv", True), ("new.csv", False)])
def test_rows_that_the_model_was_fitted_to_are_told_of(models, file, told):
    result = run("evaluate", models / "classes", models / file)
    assert ("these are the rows the model was fitted to" in result.err) == told


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
    found = json.loads(run("calibrate", model, tmp_path / "held.csv", "--json").text)
    assert found["factor"] == pytest.approx(fit_recalibration(loaded.ensemble, x, y, method="scale").factor)


@pytest.mark.parametrize("method", ["isotonic", "conformal"])
def test_intervals_hold_their_share_of_the_rows_they_were_set_on(model, tmp_path, method):
    run("calibrate", model, tmp_path / "held.csv", "--method", method)
    scores = json.loads(run("evaluate", model, tmp_path / "held.csv", "--json").text)
    for level in (50, 80, 95):
        assert abs(scores[f"coverage_{level}"] - level / 100) <= 2 / 80


def test_too_few_rows_to_calibrate_on_are_those_of_a_file(model, tmp_path):
    (tmp_path / "few.csv").write_text("".join((tmp_path / "held.csv").read_text().splitlines(keepends=True)[:6]))
    answer = run("calibrate", model, tmp_path / "few.csv")
    check(answer, 1, "few.csv must hold at least 20 held-out rows to calibrate on; got 5.")


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


def test_evaluate_says_how_often_a_set_of_labels_holds_the_truth(models, tmp_path):
    shutil.copytree(models / "classes", tmp_path / "c")
    (tmp_path / "held.csv").write_text(table(80, seed=5))
    (tmp_path / "new.csv").write_text(table(40, seed=6))
    assert "set_coverage" not in json.loads(run("evaluate", tmp_path / "c", tmp_path / "new.csv", "--json").text)
    run("calibrate", tmp_path / "c", tmp_path / "held.csv", "--method", "conformal")
    found = json.loads(run("evaluate", tmp_path / "c", tmp_path / "new.csv", "--json").text)
    rows = rows_of(run("predict", tmp_path / "c", tmp_path / "new.csv", "-o", "-").text)
    sets = [[label for label in row["kind_labels"].split("; ") if label] for row in rows]
    held = [row["kind"] in labels for row, labels in zip(rows, sets, strict=True)]
    assert found["set_coverage"] == pytest.approx(np.mean(held))
    assert found["set_size"] == pytest.approx(np.mean([len(labels) for labels in sets]))
    assert found["standard_errors"]["set_coverage"] == pytest.approx((0.95 * 0.05 / 40) ** 0.5)
    assert "set_coverage" not in found["constant"]
    run("report", tmp_path / "c", tmp_path / "new.csv", "-o", tmp_path / "r.html")
    assert "95 % sets hold" in (tmp_path / "r.html").read_text()


def test_the_training_table_is_warned_of(model, models, tmp_path):
    assert "the rows the model was fitted to" in run("calibrate", model, models / "train.csv").err
    (tmp_path / "train.csv").write_text((models / "new.csv").read_text())
    assert "has the name of the training table" in run("calibrate", model, tmp_path / "train.csv").err


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_report_hands_over_rows_outcomes_and_what_was_done(models, tmp_path, monkeypatch, name):
    seen = {}

    def page(model, x, y, **rest):
        seen.update(model=model, x=x, y=y, **rest)
        return "<html></html>"

    monkeypatch.setitem(sys.modules, "dropbayes.app.report", types.SimpleNamespace(report=page))
    result = run("report", models / name, models / "new.csv", "-o", tmp_path / "r.html", "--seed", 4)
    assert result.code == 0 and (tmp_path / "r.html").read_text() == "<html></html>"
    rows = rows_of((models / "new.csv").read_text())
    target = "price" if name == "numbers" else "kind"
    assert seen["target"] == target and seen["x"].shape == (40, 5) and seen["model"].seed_ == 4
    assert list(map(str, seen["y"])) == [str(float(r["price"])) if name == "numbers" else r["kind"] for r in rows]
    assert seen["columns"]["city"] == [row["city"] for row in rows] and target not in seen["columns"]
    assert seen["provenance"]["to repeat"].startswith("dropbayes report ")
    assert "--seed 4" in seen["provenance"]["to repeat"]
    assert seen["provenance"]["to fit"].startswith("dropbayes fit ")
    assert len(seen["provenance"]["SHA-256 of the training data"]) == 64
    assert seen["features"] == {"size": [0, 1], "city": [2, 3], "new": [4]}
    assert set(seen["ranges"]) == {"size"}


def test_a_report_numbers_its_rows_as_the_table_does(models, tmp_path):
    lines = (models / "new.csv").read_text().splitlines()
    lines[1:6] = [",".join([*line.split(",")[:3], "", ""]) for line in lines[1:6]]  # without a target
    (tmp_path / "some.csv").write_text("\n".join([*lines[:9], ""]))
    assert run("report", models / "numbers", tmp_path / "some.csv", "-o", tmp_path / "r.html").code == 0
    page = (tmp_path / "r.html").read_text()
    first = re.search(r"least sure about is row (\d+)", page)[1]
    table = page[page.index('id="uncertain"') :]
    assert int(first) in (6, 7, 8) and all(f">{number}<" in table for number in (6, 7, 8))


def test_a_report_is_not_written_over_a_table_that_it_reads(models, tmp_path):
    rows, training = tmp_path / "rows", tmp_path / "training"  # a table needs no suffix, nor does a page
    for path in (rows, training):
        path.write_text((models / "new.csv").read_text())
        result = run("report", models / "numbers", rows, "-o", path, "--training", training)
        assert result.code == 2 and "'-o': is a table that is read; name another" in result.err
        assert path.read_text() == (models / "new.csv").read_text()


def test_a_report_is_a_page_of_html(models, tmp_path):
    result = run("report", models / "numbers", models / "new.csv", "-o", tmp_path / "r.pdf")
    assert result.code == 2
    assert "must name an HTML file" in result.err
    assert not any(tmp_path.iterdir())


def test_a_report_on_the_training_rows_says_so_in_its_title(models, tmp_path):
    run("report", models / "classes", models / "train.csv", "-o", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "kind: train.csv, the rows it was fitted to</title>" in page and "Judge held-out rows" in page


@pytest.mark.slow
def test_a_model_fitted_along_the_time_is_drawn_along_it(tmp_path):
    days = [f"20{10 + k // 12}-{1 + k % 12:02d}-01" for k in range(60)]
    table = tmp_path / "sales.csv"
    table.write_text("size,day,price\n" + "".join(f"{k % 7},{day},{k + k % 7}\n" for k, day in enumerate(days)))
    fitted = ("fit", table, "--target", "price", *TINY)
    assert run(*fitted, "--time", "day", "--out", tmp_path / "along").code == 0
    assert run(*fitted, "--out", tmp_path / "random").code == 0
    for folder, drawn in (("along", True), ("random", False)):
        run("report", tmp_path / folder, table, "-o", tmp_path / "r.html")
        assert ("Predictions of price along day<" in (tmp_path / "r.html").read_text()) == drawn
