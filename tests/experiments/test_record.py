"""What an experiment keeps."""

import json

import numpy as np
import pytest
import torch

from experiments import co2
from experiments.record import Findings, Record, markdown_table


def test_a_stage_is_computed_once_for_its_key(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"a": np.arange(3)}

    record = Record(tmp_path, {"size": 1})
    record.stage("one", compute)
    np.testing.assert_array_equal(record.stage("one", compute)["a"], np.arange(3))
    assert len(calls) == 1
    Record(tmp_path, {"size": 2}).stage("one", compute)
    assert len(calls) == 2
    with pytest.raises(FileNotFoundError, match="figures-only"):
        Record(tmp_path, {"size": 3}, saved_only=True).stage("one", compute)


def test_other_settings_have_another_checkpoint(tmp_path):
    one, other = (Record(tmp_path, {"size": size}).checkpoint("net") for size in (1, 2))
    assert one != other
    assert one == Record(tmp_path, {"size": 1}).checkpoint("net")


def test_the_page_states_findings_and_command(tmp_path):
    table = markdown_table([{"a": 1, "b": 0.123456}])
    findings = Findings("A title", ["It is so."], {"x": float("nan"), "y": np.float32(1.5)}, {"Numbers": table})
    Record(tmp_path, co2.Settings.tiny()).write(findings, command="the command", device=torch.device("cpu"))
    page = (tmp_path / "page.md").read_text()
    assert "# A title" in page and "| 1 | 0.1235 |" in page and "the command" in page
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["metrics"] == {"x": None, "y": 1.5}
    assert report["settings"]["width"] == 32 and report["tables"] == {"Numbers": table}


def test_figures_drawn_from_saved_stages_leave_what_made_the_results(tmp_path):
    findings, device = Findings("A title", ["It is so."], {"x": 1.0}), torch.device("cpu")
    Record(tmp_path, {}).write(findings, command="the run", device=device)
    Record(tmp_path, {}, saved_only=True).write(findings, command="the drawing", device=device)
    assert json.loads((tmp_path / "results.json").read_text())["about"]["command"] == "the run"
