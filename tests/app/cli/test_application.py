"""Tests of the application: its help, and what it says of errors."""

import os
import pathlib
import subprocess
import sys

import pytest

from dropbayes.app.cli import predicting
from tests.command_line import check, run

SOURCE = pathlib.Path(__file__).parent.parent.parent.parent / "src"


def test_help_imports_neither_torch_nor_arrow():
    script = (
        "import sys; from dropbayes.app.cli import main; main(['--help']); main(['fit', '--help']); main(['--version'])\n"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'sklearn'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.splitlines()[-1] == "[]"
    assert "Usage: dropbayes" in out.stdout and "dropbayes 0." in out.stdout


@pytest.mark.parametrize("name", ["fit", "predict", "evaluate", "calibrate", "explain", "report", "demo", "page"])
def test_every_command_has_help(name):
    result = run(name, "--help")
    assert result.code == 0 and f"Usage: dropbayes {name}" in result.text


def test_no_line_about_a_command_is_cut_short():
    assert "..." not in run("--help").text.replace("COMMAND [ARGS]...", "")


def test_nothing_asked_is_answered_with_help():
    result = run()
    assert result.code == 2 and "Usage: dropbayes" in result.text and result.err == ""


def test_what_nobody_expected_is_one_line_unless_debugging(models, monkeypatch):
    def surprised(*_, **__):
        raise RuntimeError("the unforeseen\nhappened")

    monkeypatch.setattr(predicting.Predictor, "predict_inputs", surprised)
    arguments = ["predict", models / "numbers", models / "train.csv", "-o", os.devnull]
    check(run(*arguments), 1, "unexpected RuntimeError: the unforeseen happened. Set DROPBAYES_DEBUG=1")
    with pytest.raises(RuntimeError):
        run("--debug", *arguments)
    monkeypatch.setenv("DROPBAYES_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run(*arguments)
