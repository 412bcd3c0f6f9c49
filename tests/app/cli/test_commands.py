"""Tests of the commands as they are called: help, wrong arguments, streams, signals, failing machines."""

import contextlib
import io
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dropbayes.app.cli import main
from dropbayes.app.models.predictor import Predictor
from dropbayes.app.models.storage import COLUMNS, MODEL, signed
from tests.command_line import check, run, table

SOURCE = pathlib.Path(__file__).parent.parent.parent.parent / "src"


def process(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dropbayes", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)


@pytest.mark.slow
def test_the_module_runs_and_the_first_lines_can_be_taken_from_a_pipe(models, tmp_path):
    (tmp_path / "many.csv").write_text(table(20_000, seed=3))
    with process("predict", models / "numbers", tmp_path / "many.csv", "-o", "-", stdout=subprocess.PIPE) as child:
        assert child.stdout.readline().startswith(b"size,city")
        child.stdout.close()
        assert child.wait(60) == 1
        assert child.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("from_stream", [False, True], ids=["file", "stream"])
def test_an_interruption_leaves_the_previous_file(models, tmp_path, from_stream):
    out, data = tmp_path / "out" / "out.csv", tmp_path / "many.csv"
    out.parent.mkdir()
    out.write_text("previous")
    text = table(2000, seed=3)
    many = text + text[text.index("\n") + 1 :] * 200
    data.write_text(many)
    with process(
        "predict", models / "numbers", "-" if from_stream else data, "-o", out, stdin=subprocess.PIPE
    ) as child:
        if from_stream:
            child.stdin.write(many.encode())  # more than a pipe holds, so it is being read; and no end
            child.stdin.flush()
        deadline = time.monotonic() + 60
        while not from_stream and len(list(out.parent.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # until it has begun to write
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert child.stderr.read() == b"dropbayes: error: interrupted; nothing was left half-written.\n"
        assert out.read_text() == "previous" and [p.name for p in out.parent.iterdir()] == ["out.csv"]


def test_a_full_disk_is_one_line(models, capsys):
    with open("/dev/full", "wb", buffering=0) as full, contextlib.redirect_stdout(io.TextIOWrapper(full)) as stream:
        assert main([str(word) for word in ("predict", models / "numbers", models / "new.csv", "-o", "-")]) == 1
        stream.detach()  # nothing is left to flush
    said = capsys.readouterr().err
    assert re.fullmatch(r"(dropbayes: note: .*\n)*dropbayes: error: No space left on device\.\n", said)


def test_closed_standard_streams_are_empty(models, tmp_path, monkeypatch):
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    assert main(["predict", str(models / "numbers"), str(models / "new.csv"), "-o", str(tmp_path / "out.csv")]) == 0
    with sys.stdin, sys.stdout, contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["predict", str(models / "numbers"), "-", "-o", str(tmp_path / "again.csv")]) == 1
    assert "standard input is empty" in said.getvalue() and [p.name for p in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.slow
def test_a_file_that_cannot_grow_leaves_the_previous_one(models, tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("previous")
    (tmp_path / "many.csv").write_text(table(3000))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    with process("predict", models / "numbers", tmp_path / "many.csv", "-o", out, preexec_fn=limit) as child:
        assert child.wait(60) == 1
        assert re.fullmatch(rb"dropbayes: error: '.*out\.csv': File too large\.\n", child.stderr.read())
        assert out.read_text() == "previous" and sorted(p.name for p in tmp_path.iterdir()) == ["many.csv", "out.csv"]


# Arguments, with {models} for the folder of the models; the exit code and what the line must say.
WRONG_CALLS = {
    "no such command": ("fly", 2, "No such command 'fly'"),
    "no such effort": ("fit {models}/train.csv --target price --out m --effort slow", 2, "Invalid value for '--effort': 'slow' is not one of"),
    "a report in no folder": ("report {models}/numbers {models}/nothing.csv -o {models}/none/r.html", 1, "none' does not exist; make it first"),
    "a command misspelt": ("fitt x", 2, r"No such command 'fitt'. Did you mean 'fit'\? See dropbayes --help"),
    "no such option": ("explain {models}/numbers --colour red", 2, "No such option"),
    "no target": ("fit {models}/train.csv --out m", 2, "Missing option '--target'"),
    "no output": ("predict {models}/numbers {models}/train.csv", 2, "Missing option '--out'"),
    "no model": ("explain", 2, "Missing argument 'MODEL'"),
    "coverage above one": ("predict {models}/numbers {models}/train.csv -o - --coverage 95", 2, "--coverage.*between 0 and 1; got 95"),
    "no draws": ("predict {models}/numbers {models}/train.csv -o - --n-draws 0", 2, "n-draws"),
    "draws in words": ("predict {models}/numbers {models}/train.csv -o - --n-draws many", 2, "n-draws.*must be a number of draws, or auto; got 'many'"),
    "long delimiter": ("predict {models}/numbers {models}/train.csv -o - --delimiter ab", 2, "one plain character; got 'ab'"),
    "no block": ("predict {models}/numbers {models}/train.csv -o - --block-rows ten", 2, "'--block-rows': must be a valid integer.*; got 'ten'. See"),
    "json and table on one stream": ("predict {models}/numbers {models}/train.csv -o - --json", 2, "together with --json"),
    "two targets": ("fit {models}/train.csv --target price --target size --out m", 2, "a model predicts one column; got price, size"),
    "a typing error in a name": ("fit {models}/train.csv --target Price --out m", 1, "has no column 'Price'.*Did you mean 'price'"),
    "an address": ("predict {models}/numbers https://a.b/c.csv -o -", 1, "'https://a.b/c.csv' is an address; download"),
    "unknown encoding": ("predict {models}/numbers {models}/train.csv -o - --encoding morse", 1, "--encoding must be a text encoding"),
    "a stream for an engine": ("predict {models}/numbers {models}/train.csv -o - --engine processes", 2, "must name a folder with --engine"),
    "a background for nothing": ("explain {models}/numbers --background {models}/train.csv", 2, "--background.*name a table"),
    "more rows of nothing": ("explain {models}/numbers --rows 3", 2, "--rows.*name a table"),
    "two efforts": ("fit {models}/train.csv --target price --out m --quick --effort best", 2, "--quick.*give one effort"),
    "rows to take a calibration back": ("calibrate {models}/numbers {models}/train.csv --method none", 1, "--method none takes no rows: leave DATA out"),
    "calibrating on nothing": ("calibrate {models}/numbers", 1, "need DATA, a table of held-out rows"),
    "unknown task": ("fit {models}/train.csv --target price --out m --task ranking", 2, "ranking"),
    "hidden in words": ("fit {models}/train.csv --target price --out m --hidden wide", 2, "--hidden.*must be widths of layers such as 50,50; got 'wide'"),
    "half a unit": ("fit {models}/train.csv --target price --out m --hidden 2.5", 2, "widths of layers such as 50,50"),
    "drop probability of one": ("fit {models}/train.csv --target price --out m --drop-prob 1", 2, r"must lie in \[0, 1\)"),
    "negative decay": ("fit {models}/train.csv --target price --out m --weight-decay -1", 2, "must be 0 or more"),
    "negative seed": ("fit {models}/train.csv --target price --out m --seed -1", 2, "'--seed': must be greater than or equal to 0; got '-1'. See"),
    "missing file": ("predict {models}/numbers {models}/none.csv -o -", 1, "none.csv': No such file or directory"),
    "a folder for a file": ("predict {models}/numbers {models} -o -", 1, "is a folder; name a CSV or Parquet file in it"),
    "output without folder": ("predict {models}/numbers {models}/train.csv -o {models}/none/out.csv", 1, "the folder '.*none' does not exist"),
    "output is a folder": ("predict {models}/numbers {models}/train.csv -o {models}/sub.csv", 1, "is a folder; name a file in it"),
    "output of unknown kind": ("predict {models}/numbers {models}/train.csv -o out.xlsx", 1, "must end in .csv, .tsv or .parquet"),
    "keeping nothing known": ("predict {models}/numbers {models}/train.csv -o - --keep colour", 1, r"has no column 'colour' \(--keep\)"),
    "colliding prefix": ("predict {models}/numbers {models}/train.csv -o - --prefix= --keep size,mean", 1, "has no column 'mean'"),
    "model over other files": ("fit {models}/train.csv --target price --out {models}", 1, "is not empty and does not hold a model"),
    "model over a file": ("fit {models}/train.csv --target price --out {models}/train.csv", 1, "is a file; name a folder"),
    "model without folder": ("fit {models}/train.csv --target price --out {models}/none/m", 1, "the folder '.*none' does not exist"),
    "scores without target": ("evaluate {models}/numbers {models}/no_target.csv", 1, "lacks the target 'price'"),
    "scores of empty targets": ("evaluate {models}/numbers {models}/empty_target.csv", 1, "no row has a value to compare with"),
    "scores of texts": ("evaluate {models}/numbers {models}/text_target.csv", 1, "line 2, column 'price': must be a number written as 1234.5; got 'dear'"),
    "scores of a new class": ("evaluate {models}/classes {models}/new_class.csv", 1, "line 2, column 'kind': the class 'odd' was not seen"),
    "report on one row": ("report {models}/numbers {models}/one.csv -o r.html", 1, "one.csv: 1 row with a target; at least 2"),
    "report without target": ("report {models}/numbers {models}/no_target.csv -o r.html", 1, "lacks the target 'price'"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "pattern"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls_are_one_line(models, tmp_path, monkeypatch, arguments, code, pattern):
    monkeypatch.chdir(tmp_path)
    check(run(*[part.format(models=models) for part in arguments.split()]), code, pattern)
    assert list(tmp_path.iterdir()) == []


# Changes to a model folder, and what `explain` and `predict` must say.
WRONG_MODELS = {
    "absent": (shutil.rmtree, "there is no model folder"),
    "a file": (lambda m: (shutil.rmtree(m), m.write_text("x")), "is not a model folder"),
    "an empty folder": (lambda m: (shutil.rmtree(m), m.mkdir()), "is not a model folder: it must hold columns.json and"),
    "no network": (lambda m: (m / MODEL).unlink(), "is not a model folder"),
    "no columns": (lambda m: (m / COLUMNS).unlink(), "is not a model folder"),
    "network cut short": (lambda m: (m / MODEL).write_bytes((m / MODEL).read_bytes()[:-9]), "is not the file that columns.json belongs to"),
    "network of another fit": (lambda m: (m / MODEL).write_bytes(b"x"), "is not the file that columns.json belongs to"),
    "columns cut short": (lambda m: (m / COLUMNS).write_text((m / COLUMNS).read_text()[:50]), "columns.json' is damaged"),
    "columns of something else": (lambda m: (m / COLUMNS).write_text("[1, 2]"), "columns.json' is damaged"),
    "columns not text": (lambda m: (m / COLUMNS).write_bytes(b"\xff\xfe\x00"), "columns.json' is damaged"),
    "another format": (lambda m: edit(m, format=99), "has the format 99; this version reads 3: fit the model again, or upgrade"),
    "columns changed": (lambda m: (m / COLUMNS).write_text((m / COLUMNS).read_text().replace("Oslo", "Rome")), "columns.json' was changed since it was written"),
    "parts missing": (lambda m: edit(m, columns=None), "lacks parts or has unknown ones"),
    "unknown kind": (lambda m: edit(m, task="ranking"), "lacks parts or has unknown ones"),
    "another task": (lambda m: edit(m, task="classification"), "model.safetensors.*: `path` holds a 'DropoutRegressor'"),
    "a column alone": (lambda m: edit(m, columns=json.loads((m / COLUMNS).read_text())["columns"][:1]), r"the network has 5 inputs, columns.json names \d"),
}  # fmt: skip


def edit(folder, **changes):
    values = json.loads((folder / COLUMNS).read_text())
    (folder / COLUMNS).write_text(json.dumps(signed({**values, **changes})))


@pytest.mark.parametrize(("change", "pattern"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_wrong_models_are_refused(models, tmp_path, change, pattern):
    shutil.copytree(models / "numbers", tmp_path / "m")
    change(tmp_path / "m")
    check(run("explain", tmp_path / "m"), 1, pattern)
    check(run("predict", tmp_path / "m", models / "train.csv", "-o", tmp_path / "out.csv"), 1, pattern)
    assert not (tmp_path / "out.csv").exists()


def test_an_interruption_is_one_line_and_code_130(models, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "out.csv").write_text("previous")
    monkeypatch.setattr(Predictor, "predict_inputs", interrupted)
    check(run("predict", models / "numbers", models / "train.csv", "-o", tmp_path / "out.csv"), 130, "interrupted")
    assert (tmp_path / "out.csv").read_text() == "previous" and len(list(tmp_path.iterdir())) == 1


def test_a_missing_package_is_named(models, monkeypatch):
    def lacking(*_, **__):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(Predictor, "predict_inputs", lacking)
    result = run("predict", models / "numbers", models / "train.csv", "-o", os.devnull)
    check(result, 1, "the package 'matplotlib' is needed for this: pip install matplotlib")


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

    monkeypatch.setattr(Predictor, "predict_inputs", surprised)
    arguments = ["predict", models / "numbers", models / "train.csv", "-o", os.devnull]
    check(run(*arguments), 1, "unexpected RuntimeError: the unforeseen happened. Set DROPBAYES_DEBUG=1")
    with pytest.raises(RuntimeError):
        run("--debug", *arguments)
    monkeypatch.setenv("DROPBAYES_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run(*arguments)
