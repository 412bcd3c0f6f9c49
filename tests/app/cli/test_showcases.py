"""Tests of the commands that show what the library does."""

import json
import sys
import types

from tests.command_line import run


def test_demo_is_called_with_its_folder(tmp_path, monkeypatch):
    called = {}

    def demo(*, out, console):
        called.update(out=out, console=console)
        return out / "report.html"

    monkeypatch.setitem(sys.modules, "dropbayes.app.cli.demo", types.SimpleNamespace(demo=demo))
    result = run("demo", "--out", tmp_path, "--json")
    assert called["out"] == tmp_path and json.loads(result.text) == {"report": str(tmp_path / "report.html")}
