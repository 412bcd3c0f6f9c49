"""Tests of `dropbayes explain`."""

import json
import re
import statistics
import warnings

import pytest

from dropbayes.app.cli import explaining
from dropbayes.app.cli.explaining import facts, reason_lines
from dropbayes.app.models.fields import EnsembleFields
from dropbayes.app.models.model import load
from dropbayes.layers import model_precision
from dropbayes.predictive import Mixture
from tests.command_line import column, rows_of, run


def test_explain_states_the_identity_of_precision_weight_decay_and_length_scale(models):
    found = json.loads(run("explain", models / "numbers", "--json").text)
    population = load(models / "numbers").ensemble.population_
    standard = found["precision"] * float(population.y_scale[0, 0]) ** 2
    for layer in found["layers"]:
        tau = model_precision(
            weight_decay=layer["weight_decay"], keep_prob=1 - layer["drop_prob"], length_scale=layer["length_scale"],
            n_data=found["n_data"],
        )  # fmt: skip
        assert tau == pytest.approx(standard)
    assert [(layer["n_inputs"], layer["n_outputs"]) for layer in found["layers"]] == [(5, 4), (4, 1)]
    assert found["n_weights"] == 5 * 4 + 4 + 4 + 1 and found["n_draws"] == 6 and found["n_data"] == 60
    shown = run("explain", models / "numbers").text
    assert "precision τ" in shown and "length-scale l" in shown and "Oslo, Rome" in shown


def test_the_precision_of_classes_is_one(models):
    layer = facts(load(models / "classes"))["layers"][0]
    tau = model_precision(
        weight_decay=layer["weight_decay"],
        keep_prob=1 - layer["drop_prob"],
        length_scale=layer["length_scale"],
        n_data=60,
    )
    assert tau == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "background"), [("numbers", []), ("numbers", ["--background", "train.csv"]), ("classes", [])]
)
def test_the_reasons_of_a_row_sum_to_its_prediction_and_its_uncertainty(models, monkeypatch, name, background):
    monkeypatch.chdir(models)
    found = json.loads(run("explain", name, "new.csv", "--rows", 3, *background, "--json").text)["rows"]
    predicted = rows_of(run("predict", name, "new.csv", "-o", "-").text)
    doubt = (
        column(predicted, "price_epistemic_std") ** 2
        if name == "numbers"
        else column(predicted, "kind_mutual_information")
    )
    assert [one["row"] for one in found] == (-doubt).argsort(kind="stable")[:3].tolist()
    for one in found:
        row = predicted[one["row"]]
        stated = row["price_mean"] if name == "numbers" else row[f"kind_probability_{row['kind_predicted']}"]
        for what, value in (("prediction", float(stated)), ("uncertainty", doubt[one["row"]])):
            parts = [part[what] for part in one["columns"].values()]
            assert sum(parts) + one["typical"][what] == pytest.approx(value, rel=1e-5)
        assert list(one["columns"]) == ["size", "city", "new"]  # a category is one column
        assert one["columns"]["city"]["value"] == row["city"] and one["place"] == f"new.csv, line {one['row'] + 2}"


def test_without_a_background_rows_are_compared_with_one_that_could_be_in_the_table(models, tmp_path):
    """The mean of one-hot categories is between all of them: far from every row, and so unlike any prediction."""
    known = rows_of((models / "train.csv").read_text())
    middle = {
        "size": statistics.median(float(row["size"]) for row in known if row["size"]),
        **{name: statistics.mode(row[name] for row in known) for name in ("city", "new")},
    }
    (tmp_path / "middle.csv").write_text(",".join(middle) + "\n" + ",".join(map(str, middle.values())) + "\n")
    (row,) = rows_of(run("predict", models / "numbers", tmp_path / "middle.csv", "-o", "-").text)
    found = json.loads(run("explain", models / "numbers", models / "new.csv", "--rows", 2, "--json").text)["rows"]
    for one in found:
        assert one["typical"]["prediction"] == pytest.approx(float(row["price_mean"]))
        assert one["typical"]["uncertainty"] == pytest.approx(float(row["price_epistemic_std"]) ** 2)


def test_a_bar_is_no_longer_than_twenty_characters_whatever_the_share(models):
    uncertainties = {"size": 30.0, "city": -29.5}
    parts = {name: {"prediction": 1.0, "uncertainty": u, "value": "7"} for name, u in uncertainties.items()}
    typical = {"prediction": 0.0, "uncertainty": 0.5}
    found = {"place": "a row", "prediction": 2.0, "uncertainty": 1.0, "typical": typical, "columns": parts}
    shown, _ = reason_lines(load(models / "numbers"), [found])
    assert [len(bar) for bar in shown.columns[-1].cells] == [20, 0, 0]


def test_shares_beyond_the_whole_are_said_to_be_of_columns_that_go_together(models, monkeypatch):
    def reasons(*_, **__):
        shares = {"size": 7.0, "city": -6.5, "new": 0.4}
        columns = {name: {"prediction": 1.0, "uncertainty": u, "value": "7"} for name, u in shares.items()}
        typical = {"prediction": 0.0, "uncertainty": 0.1}
        stated = {"row": 0, "place": "a row", "prediction": 3.0, "uncertainty": 1.0}
        return [{**stated, "typical": typical, "columns": columns}]

    assert "beyond 100 %" not in run("explain", models / "numbers", models / "new.csv").err
    monkeypatch.setattr(explaining, "reasons", reasons)
    said = run("explain", models / "numbers", models / "new.csv").err
    assert "shares of 'size', 'city' beyond 100 %: columns that go together are exchanged" in said


def test_the_background_is_what_a_row_is_compared_with(models, tmp_path):
    """A row compared with itself has no reasons."""
    header, row = (models / "new.csv").read_text().splitlines()[:2]
    (tmp_path / "one.csv").write_text(f"{header}\n{row}\n")
    (one,) = json.loads(
        run("explain", models / "numbers", tmp_path / "one.csv", "--background", tmp_path / "one.csv", "--json").text
    )["rows"]
    assert all(part["prediction"] == part["uncertainty"] == 0 for part in one["columns"].values())
    assert one["typical"] == {"prediction": one["prediction"], "uncertainty": one["uncertainty"]}


def test_reasons_take_no_quantiles(models, monkeypatch):
    """The thousands of rows that are put together have a mean and a variance; an interval of each costs as much."""
    monkeypatch.setattr(Mixture, "quantile", None)
    assert len(json.loads(run("explain", models / "numbers", models / "new.csv", "--json").text)["rows"]) == 5


@pytest.mark.filterwarnings("always:.*rows are far")
def test_a_warning_of_rows_that_are_not_in_the_table_is_not_shown(models, monkeypatch):
    """Shapley values predict rows put together from two, which may be far from those of training."""
    predict = EnsembleFields.__call__

    def warned(self, x, *settings):
        warnings.warn(f"{len(x)} rows are far", stacklevel=2)
        return predict(self, x, *settings)

    monkeypatch.setattr(EnsembleFields, "__call__", warned)
    assert run("explain", models / "numbers", models / "new.csv", "--rows", 3).err.count("rows are far") == 1


def test_reasons_are_printed_with_the_largest_share_first(models):
    shown = run("explain", models / "numbers", models / "new.csv", "--rows", 1).text
    shares = [int(share) for share in re.findall(r"(-?\d+) %", shown)]
    assert shares[:3] == sorted(shares[:3], reverse=True) and sum(shares) == pytest.approx(100, abs=2)
    assert "price" in shown and "epistemic deviation" in shown and "(typical rows)" in shown
    assert "probability" in run("explain", models / "classes", models / "new.csv", "--rows", 1).text


def test_a_model_without_dropout_is_explained_and_warned_of(models, tmp_path):
    options = ["--hidden", "4", "--n-steps", "5", "--n-networks", "1", "--drop-prob", "0", "--weight-decay", "0"]
    result = run(
        "fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *options
    )
    assert result.code == 0 and "nothing is dropped" in result.err
    assert re.search(r"\n +1 +nothing +0 ", run("explain", tmp_path / "m").text)
    rows = rows_of(run("predict", tmp_path / "m", models / "new.csv", "-o", "-").text)
    assert set(column(rows, "price_epistemic_std")) == {0.0}
