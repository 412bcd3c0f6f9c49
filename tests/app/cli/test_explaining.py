"""Tests of `dropbayes explain`."""

import json
import re

import pytest

from dropbayes.app.cli.explaining import facts
from dropbayes.app.models.model import load
from dropbayes.weight_layers.precision import model_precision
from tests.command_line import column, rows_of, run


def test_explain_states_the_identity_of_precision_weight_decay_and_length_scale(models):
    found = json.loads(run("explain", models / "numbers", "--json").text)
    population = load(models / "numbers").estimator.population_
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


def test_a_model_without_dropout_is_explained_and_warned_of(models, tmp_path):
    options = ["--hidden", "4", "--n-steps", "5", "--n-networks", "1", "--drop-prob", "0", "--weight-decay", "0"]
    result = run(
        "fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *options
    )
    assert result.code == 0 and "nothing is dropped" in result.err
    assert re.search(r"\n +1 +nothing +0 ", run("explain", tmp_path / "m").text)
    rows = rows_of(run("predict", tmp_path / "m", models / "new.csv", "-o", "-").text)
    assert set(column(rows, "price_epistemic_std")) == {0.0}
