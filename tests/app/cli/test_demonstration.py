"""The demonstration: it fits, predicts past the data, prints what it wrote, and says so without the series too."""

import csv
import io
import json
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from dropbayes.app.cli import demonstration
from dropbayes.estimators import DropoutRegressor
from dropbayes.runtime.formatting import percent
from tests.command_line import run

QUICK = {"n_steps": 40, "n_networks": 2, "n_folds": 2}


def ran(folder, width=80):
    written = io.StringIO()
    folder.mkdir(parents=True, exist_ok=True)
    demonstration.run(folder, Console(file=written, width=width))
    return folder / "report.html", written.getvalue()


def table_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows, name):
    return np.array([float(row[name]) if row[name] else np.nan for row in rows])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    pytest.importorskip("statsmodels", reason="the series comes with statsmodels")
    folder = tmp_path_factory.mktemp("demo") / "not" / "yet"
    before, threads = dict(demonstration.SETTINGS), torch.get_num_threads()
    demonstration.SETTINGS.update(QUICK)
    path, printed = ran(folder)
    demonstration.SETTINGS.update(before)
    assert torch.get_num_threads() == threads  # as it was
    return folder, path, printed


def test_everything_is_written_where_it_says(quick):
    folder, path, printed = quick
    assert path == folder / "report.html" and path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {p.name for p in folder.iterdir()} == {"report.html", "co2.csv", "model"}
    joined = printed.replace("\n", "")
    assert all(str(folder / name) in joined for name in ("report.html", "co2.csv", "model"))


def test_no_line_is_wider_than_a_terminal(quick):
    assert max(len(line.rstrip()) for line in quick[2].splitlines() if str(quick[0]) not in line) <= 80
    assert "…" not in quick[2]


def test_the_predictions_are_those_of_the_model_that_was_saved(quick):
    folder, _, _ = quick
    rows = table_of(folder / "co2.csv")
    case = demonstration.carbon_dioxide()
    model = DropoutRegressor.load(folder / "model" / "model.safetensors")
    x = np.column_stack(list(case.columns.values()))
    mean, std = model.predict(x, return_std=True)
    lower, upper = model.predict_interval(x)
    for name, values in {"mean": mean, "std": std, "lower": lower, "upper": upper, "CO₂ (ppm)": case.truth}.items():
        np.testing.assert_allclose(numbers(rows, name), values, rtol=1e-6, err_msg=name)
    parts = numbers(rows, "epistemic_std") ** 2 + numbers(rows, "aleatoric_std") ** 2
    np.testing.assert_allclose(parts, numbers(rows, "std") ** 2, rtol=1e-6)
    assert [row["part"] for row in rows] == case.parts.tolist()


def test_what_is_printed_is_what_was_written(quick):
    folder, _, printed = quick
    rows, case = table_of(folder / "co2.csv"), demonstration.carbon_dioxide()
    lines = {
        line.split()[0]: line.split()
        for line in printed.splitlines()
        if line.split() and line[:7].strip()[:2] in ("19", "20")
    }
    assert len(lines) == len(case.printed) == 10
    for index in case.printed:
        row = rows[index]
        shown = lines[f"{float(row['year']):.1f}"]
        assert [float(v) for v in shown[1:5]] == [
            pytest.approx(float(row[name]), abs=0.0051) for name in ("mean", "std", "epistemic_std", "aleatoric_std")
        ]
        assert float(shown[5]) == pytest.approx(float(row["lower"]), abs=0.051)
        assert float(shown[7]) == pytest.approx(float(row["upper"]), abs=0.051)
    held = [row for row in rows if row["part"] == "held out"]
    truth = numbers(held, "CO₂ (ppm)")
    inside = ((numbers(held, "lower") <= truth) & (truth <= numbers(held, "upper"))).mean()
    text = f"and {percent(inside)} in their 95 % interval. 204 rows that follow one another err together"
    assert text in " ".join(printed.split())
    error = np.sqrt(np.mean((numbers(held, "mean") - truth) ** 2))
    assert f"the error is {error:.2f} (RMS)" in " ".join(printed.split())


def test_nothing_after_1984_is_learned_from():
    pytest.importorskip("statsmodels", reason="the series comes with statsmodels")
    case = demonstration.carbon_dioxide()
    trained, held, unknown = (case.rows(part)[0][:, 0] for part in ("trained on", "held out", "unknown"))
    assert trained.max() < 1985 < held.min()
    assert held.max() < unknown.min() and unknown.max() < 2007
    assert (len(trained), len(held)) == (317, 204)
    assert np.isnan(case.truth[case.parts == "unknown"]).all() and np.isnan(case.truth).sum() == len(unknown)
    np.testing.assert_allclose(np.diff(unknown), 1 / 12, atol=1e-9)
    np.testing.assert_allclose(case.columns["season sin"] ** 2 + case.columns["season cos"] ** 2, 1)


def test_without_the_series_it_takes_the_diabetes_table_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    monkeypatch.setitem(sys.modules, "statsmodels.datasets", None)
    path, printed = ran(tmp_path)
    assert "scikit-learn's diabetes table takes its place" in " ".join(printed.split())
    rows = table_of(tmp_path / "diabetes.csv")
    assert len(rows) == 442 and sum(row["part"] == "held out" for row in rows) == 147
    assert "disease progression" in path.read_text(encoding="utf-8")
    assert "As far as 147 rows can tell, it is calibrated." in " ".join(printed.split())


@pytest.mark.slow
def test_the_band_widens_past_the_data_and_holds_what_happened(tmp_path):
    pytest.importorskip("statsmodels", reason="the series comes with statsmodels")
    ran(tmp_path)
    rows = table_of(tmp_path / "co2.csv")
    std, parts = numbers(rows, "std"), np.array([row["part"] for row in rows])
    trained, after, ahead = (std[parts == part].mean() for part in ("trained on", "held out", "unknown"))
    assert 2 * trained < after and 1.3 * after < ahead
    assert 0.2 < numbers(rows, "aleatoric_std").mean() < 0.5  # what the months scatter about their seasons
    held = [row for row in rows if row["part"] == "held out"]
    truth, mean = numbers(held, "CO₂ (ppm)"), numbers(held, "mean")
    assert np.sqrt(np.mean((mean - truth) ** 2)) < 2
    assert ((numbers(held, "lower") <= truth) & (truth <= numbers(held, "upper"))).mean() > 0.9
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Mend the bias" not in page and "too few to judge calibration" in page  # 17 years are one path, not 204 rows


def test_the_next_commands_work_on_what_it_wrote(quick, tmp_path):
    folder, _, _ = quick
    held = [row for row in table_of(folder / "co2.csv") if row["part"] == "held out"]
    scores = json.loads(run("evaluate", folder / "model", folder / "co2.csv", "--json").text)
    assert scores["n_rows"] == sum(bool(row["CO₂ (ppm)"]) for row in table_of(folder / "co2.csv")) > len(held)
    for command in (["predict"], ["report"]):
        out = tmp_path / ("p.csv" if command == ["predict"] else "r.html")
        assert run(*command, folder / "model", folder / "co2.csv", "-o", out).code == 0
        assert out.exists()


@pytest.mark.slow
def test_the_report_is_told_as_json(monkeypatch, tmp_path):
    for name, value in QUICK.items():
        monkeypatch.setitem(demonstration.SETTINGS, name, value)
    result = run("demo", "--out", tmp_path, "--json")
    assert json.loads(result.text) == {"report": str(tmp_path / "report.html")}
