"""Tests of the commands that show what the library does."""

import json
import sys
import types

from tests.command_line import check, run


def test_demo_is_called_with_its_folder(tmp_path, monkeypatch):
    called = {}

    def demo(*, out, console):
        called.update(out=out, console=console)
        return out / "report.html"

    monkeypatch.setitem(sys.modules, "dropbayes.cli.demo", types.SimpleNamespace(demo=demo))
    result = run("demo", "--out", tmp_path, "--json")
    assert called["out"] == tmp_path and json.loads(result.text) == {"report": str(tmp_path / "report.html")}


def test_further_arguments_are_taken_by_uci_alone():
    check(run("reproduce", "toy", "--method", "best"), 2, "only uci takes further arguments")
    check(run("reproduce", "uci", "--set", "method=best"), 2, "uci has options of its own")
