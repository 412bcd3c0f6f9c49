"""Tests of the runner."""

import ast
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from experiments.reproduction import reproduce, show
from experiments.uci import data as uci_data
from experiments.uci import faithful as uci_faithful
from experiments.uci import page as uci_report
from experiments.uci import run as uci

TINY_FAITHFUL = uci_faithful.Settings((2.0, 8.0), drop_probs=(0.01, 0.3), n_hidden=8, epochs=120, n_draws=40)


def _with_source():
    import os
    import pathlib

    source = pathlib.Path(uci.__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(source)}


def test_interrupted_runs_go_on_with_the_missing_splits(small, counted, tmp_path):
    uci.run_set(small, "faithful", [0, 1], out=tmp_path, splits_per_chunk=1)
    results = uci.run_set(small, "faithful", [2, 0, 1], out=tmp_path, splits_per_chunk=1)
    assert counted.asked == [0, 1, 2]
    assert [entry["split"] for entry in results["splits"]] == [0, 1, 2]
    assert json.loads((tmp_path / "faithful-small.json").read_text()) == json.loads(json.dumps(results))
    assert [path.name for path in tmp_path.iterdir()] == ["faithful-small.json"]


def test_chunks_before_an_interruption_are_kept(small, counted, tmp_path):
    counted.asked = []
    with pytest.raises(KeyboardInterrupt):
        uci.run_set(small, "faithful", [3, 4], out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_budget_leaves_sets_out_and_says_so(counted, monkeypatch, tmp_path, small, capsys):
    monkeypatch.setattr(uci_data, "load", lambda name, gap: replace(small, name=name))
    findings = uci.main(["--sets", "a,b", "--splits", "1", "--out", str(tmp_path), "--budget-seconds", "0.05"])
    show(findings)
    shown = capsys.readouterr().out
    assert "b: left out" in shown and not (tmp_path / "faithful-b.json").exists()


def test_splits_are_named_in_four_ways():
    assert uci.split_numbers("all", 3) == [0, 1, 2]
    assert uci.split_numbers("9", 3) == [0, 1, 2]
    assert uci.split_numbers("1-2,0", 3) == [1, 2, 0]
    with pytest.raises(ValueError, match="a range as 0-4"):
        uci.split_numbers("x", 3)


@pytest.mark.slow
def test_command_runs_both_methods_on_a_csv_and_writes_a_page(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    table = np.column_stack([small.x, small.y])
    path.write_text("a,b,c,y\n" + "\n".join(",".join(map(repr, row)) for row in table.tolist()) + "\n")
    monkeypatch.setattr(uci_faithful, "QUICK", {**vars(TINY_FAITHFUL)})
    for method in ("faithful", "best"):
        told = f"--csv {path} --target y --method {method} --quick --splits 0-1 --device cpu"
        findings = uci.main([*told.split(), "--out", str(tmp_path / "out")])
        assert set(findings.metrics) == {"mine"} and findings.metrics["mine"]["n_splits"] == 2
    assert capsys.readouterr().err.count("mine ") == 2
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["method"] == "best"
    uci_report.main([str(tmp_path / "out")])
    assert "# The UCI table" in capsys.readouterr().out


def test_csv_needs_its_target():
    with pytest.raises(SystemExit, match="go together"):
        uci.main(["--csv", "x.csv"])


@pytest.mark.slow
def test_run_path_needs_torch_and_numpy_only():
    script = (
        "import sys, torch, numpy; before = set(sys.modules); import experiments.uci; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before if not m.startswith('_')}))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=_with_source())
    third_party = (
        set(ast.literal_eval(out.stdout))
        - set(sys.stdlib_module_names)
        - {"dropbayes", "experiments", "torch", "numpy"}
    )
    assert not third_party, third_party


def test_the_table_is_an_experiment_like_the_others(counted, monkeypatch, tmp_path, small):
    monkeypatch.setattr(uci_data, "load", lambda name, gap: replace(small, name=name))
    settings = uci.Settings(sets=("yacht",), splits="2")
    findings = reproduce("uci", settings=settings, out=tmp_path, device="cpu")
    assert findings.metrics["yacht"]["rmse"] == 1.5 and "| yacht | 2 |" in findings.tables["Beside published results"]
    assert "yacht" in (tmp_path / "uci" / "page.md").read_text()
    again = reproduce("uci", settings=settings, out=tmp_path, device="cpu", figures_only=True)
    assert again.metrics == findings.metrics and counted.asked == [0, 1]
    with pytest.raises(FileNotFoundError, match="must hold the results of boston; 2 splits are missing"):
        reproduce("uci", settings=replace(settings, sets=("boston",)), out=tmp_path, device="cpu", figures_only=True)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="`method` must be one of faithful"):
        uci.Settings(method="luck")
