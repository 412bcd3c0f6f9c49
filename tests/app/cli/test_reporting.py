"""Tests of `dropbayes report`."""

import sys
import types

import pytest

from tests.command_line import rows_of, run


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_report_hands_over_rows_outcomes_and_what_was_done(models, tmp_path, monkeypatch, name):
    seen = {}

    def page(model, x, y, **rest):
        seen.update(x=x, y=y, **rest)
        return "<html></html>"

    monkeypatch.setitem(sys.modules, "dropbayes.app.report", types.SimpleNamespace(report=page))
    result = run("report", models / name, models / "new.csv", "-o", tmp_path / "r.html", "--seed", 4)
    assert result.code == 0 and (tmp_path / "r.html").read_text() == "<html></html>"
    rows = rows_of((models / "new.csv").read_text())
    target = "price" if name == "numbers" else "kind"
    assert seen["target"] == target and seen["x"].shape == (40, 5) and seen["seed"] == 4
    assert list(map(str, seen["y"])) == [str(float(r["price"])) if name == "numbers" else r["kind"] for r in rows]
    assert seen["columns"]["city"] == [row["city"] for row in rows] and target not in seen["columns"]
    assert seen["provenance"]["to repeat"].startswith("dropbayes report ")
    assert "--seed 4" in seen["provenance"]["to repeat"]
    assert seen["provenance"]["to fit"].startswith("dropbayes fit ")
    assert len(seen["provenance"]["SHA-256 of the training data"]) == 64
    assert seen["features"] == {"size": [0, 1], "city": [2, 3], "new": [4]}
    assert set(seen["ranges"]) == {"size"}


def test_a_report_on_the_training_rows_says_so_in_its_title(models, tmp_path):
    run("report", models / "numbers", models / "train.csv", "-o", tmp_path / "r.html")
    assert "price: train.csv, the rows it was fitted to</title>" in (tmp_path / "r.html").read_text()
