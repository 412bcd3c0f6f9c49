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


def test_a_model_fitted_along_the_time_is_drawn_along_it(tmp_path):
    days = [f"20{10 + k // 12}-{1 + k % 12:02d}-01" for k in range(60)]
    table = tmp_path / "sales.csv"
    table.write_text("size,day,price\n" + "".join(f"{k % 7},{day},{k + k % 7}\n" for k, day in enumerate(days)))
    fitted = ("fit", table, "--target", "price", "--quick", "--n-steps", 5, "--n-networks", 1)
    assert run(*fitted, "--time", "day", "--out", tmp_path / "along").code == 0
    assert run(*fitted, "--out", tmp_path / "random").code == 0
    for folder, drawn in (("along", True), ("random", False)):
        run("report", tmp_path / folder, table, "-o", tmp_path / "r.html")
        assert ("Predictions of price along day<" in (tmp_path / "r.html").read_text()) == drawn
