"""What a user may get wrong: each gets one clear line, the right exit code, and finds the previous files as they were."""

import csv
import errno
import io
import json
import os
import pathlib
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropbayes import folders
from dropbayes.cli import predicting
from tests.command_line import TINY, make_models, run, table


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def check(result, code, pattern):
    """One line on standard error that says what was expected, nothing on standard output."""
    lines = [line for line in result.err.splitlines() if not line.startswith("dropbayes: note: ")]
    assert result.code == code, result.err
    assert len(lines) == 1 and lines[0].startswith("dropbayes: error: "), result.err
    assert re.search(pattern, lines[0]), lines[0]
    assert "Traceback" not in result.err and "\x1b" not in result.err
    assert result.out == b""


HEAD = b"size,city,new\n"
GOOD = b"1,Oslo,true\n"

# The contents of a table given to `predict`, and what its one line must say.
WRONG_ROWS = {
    "empty file": (b"", "t.csv is empty; a header line"),
    "only blank lines": (b"\n\n  \n", "t.csv is empty"),
    "header only": (HEAD, "t.csv: has a header but no rows"),
    "header only without its newline": (HEAD[:-1], "t.csv: has a header but no rows"),
    "a field too few": (HEAD + GOOD + b"1,Oslo\n", "t.csv, line 3: 2 fields where the header has 3"),
    "a field too many": (HEAD + b"1,Oslo,true,9\n" + GOOD, "t.csv, line 2: 4 fields where the header has 3"),
    "ragged after a quoted newline": (b"size,city,new,n\n1,Oslo,true,\"a\nb\"\n1\n", "line 4: 1 fields"),
    "ragged after blank lines": (HEAD + b"\n\n" + GOOD + b"1\n", "line 5: 1 fields"),
    "ragged with carriage returns": (HEAD.replace(b"\n", b"\r\n") + b"1,Oslo,true\r\n1,2\r\n", "line 3: 2 fields"),
    "quotation mark never closed": (HEAD + GOOD + b'1,Oslo,"true\n1,Oslo,true\n', "line 3: a quotation mark is opened"),
    "header never closed": (b'"size,city,new\n1,Oslo,true\n', "line 1: a quotation mark is opened and never closed"),
    "duplicate header": (b"size,city,new,city\n1,Oslo,true,Rome\n", "columns 2 and 4 are both named 'city'"),
    "header alike but for spaces": (b"size,city,new, city\n1,Oslo,true,Rome\n", "columns 2 and 4 are both named 'city'"),
    "empty header": (b"size,city,new,\n1,Oslo,true,5\n", "column 4 has no name in the header"),
    "unnamed index": (b",size,city,new\n0,1,Oslo,true\n", "column 1 has no name in the header"),
    "latin-1": ("size,city,new\n1,Oslo,true\n1,Tromsø,true\n".encode("latin-1"), r"line 3: byte 34 \(0xf8\) is not UTF-8"),
    "latin-1 header": ("size,city,new,größe\n".encode("latin-1"), "line 1: byte 17"),
    "cut inside a character": (HEAD + "1,Oslo,ø".encode()[:-1], "line 2: byte 22 .* is not UTF-8"),
    "UTF-16": ("size,city,new\n1,Oslo,true\n".encode("utf-16"), "t.csv is UTF-16 text: save it as UTF-8"),
    "NUL byte": (HEAD + GOOD + b"1,Os\0lo,true\n", "line 3: holds a NUL byte"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"x" * 20, "t.csv is compressed: unpack it first"),
    "spreadsheet": (b"PK\x03\x04" + b"x" * 20, "t.csv is a zip archive or a spreadsheet: save the sheet as CSV"),
    "PDF": (b"%PDF-1.7 ...", "t.csv is a PDF"),
    "Parquet cut short": (b"PAR1" + b"x" * 20, "t.csv is not a whole Parquet file"),
    "semicolons": (b"size;city;new\n1;Oslo;true\n", "separated by ';'. Say so with --delimiter ';'"),
    "tabs": (b"size\tcity\tnew\n1\tOslo\ttrue\n", r"separated by a tab\. Say so with --delimiter"),
    "text where numbers were": (HEAD + GOOD + b"large,Oslo,true\n", "line 3, column 'size': must be a number; got 'large'"),
    "decimal comma": (HEAD + b'"1,5",Oslo,true\n', r"line 2, column 'size': must be a number; got '1,5' \(a decimal comma"),
    "hexadecimal": (HEAD + b"0x10,Oslo,true\n", "line 2, column 'size': must be a number; got '0x10'"),
    "thousands": (HEAD + b"1 000,Oslo,true\n", "must be a number; got '1 000'"),
    "a unit": (HEAD + b"5 kg,Oslo,true\n", "must be a number; got '5 kg'"),
    "infinity": (HEAD + GOOD + b"inf,Oslo,true\n", "line 3, column 'size': must be a finite number .*; got 'inf'"),
    "minus infinity": (HEAD + b"-Infinity,Oslo,true\n", "must be a finite number .*; got '-Infinity'"),
    "overflow": (HEAD + b"1e999,Oslo,true\n", "must be a finite number .*; got '1e999'"),
    "enormous": (HEAD + b"1e200,Oslo,true\n", r"must be a finite number of at most 1e\+100; got '1e200'"),
    "too far for the network": (HEAD + GOOD + b"1e90,Oslo,true\n", "line 3: the prediction is not finite"),
    "a date where numbers were": (HEAD + b"2024-01-31,Oslo,true\n", "must be a number; got '2024-01-31'"),
    "a new category": (HEAD + GOOD + b"1,Bergen,true\n", "line 3, column 'city': 'Bergen' was not seen .*'Oslo', 'Rome'"),
    "another case of a category": (HEAD + b"1,oslo,true\n", "'oslo' was not seen in training"),
    "no boolean": (HEAD + b"1,Oslo,maybe\n", "line 2, column 'new': must be true or false, as in training; got 'maybe'"),
    "a missing column": (b"size,new\n1,true\n", "lacks the column 'city' that the model reads; it has 'size', 'new'"),
    "two missing columns": (b"size,x\n1,true\n", "lacks the columns 'city', 'new'"),
    "a foreign table": (b"x,y\n1,2\n", "lacks the columns 'size', 'city', 'new'"),
    "terminal escapes": (HEAD + b"1,\x1b[31mred\x1b[0m,true\n", "was not seen in training"),
    "a name with a line break": (b'"a\nb",size\n1,2\n', "lacks the columns 'city', 'new'"),
    "a column it would add": (b"size,city,new,price_mean\n1,Oslo,true,5\n", "has a column 'price_mean', which the prediction"),
    "a gigantic field": (HEAD + b"1," + b"x" * 10**6 + b",true\n", "column 'city': 'xxx.*…' was not seen in training"),
    "a row longer than a block": (HEAD + b"1," + b"x" * 3 * 10**6 + b",true\n", "a row is longer than 1 MB"),
    "binary rubbish": (bytes(range(1, 256)) * 4, "t.csv"),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "pattern"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_wrong_rows_are_one_line_and_leave_the_previous_file(models, tmp_path, contents, pattern):
    (tmp_path / "t.csv").write_bytes(contents)
    (tmp_path / "out.csv").write_text("previous")
    check(run("predict", models / "numbers", tmp_path / "t.csv", "-o", tmp_path / "out.csv"), 1, pattern)
    assert (tmp_path / "out.csv").read_text() == "previous"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "t.csv"]


@pytest.mark.parametrize(
    "name", ["a field too few", "latin-1", "a new category", "empty file", "text where numbers were"]
)
def test_wrong_rows_from_a_stream_are_found_too(models, name):
    contents, pattern = WRONG_ROWS[name]
    pattern = re.sub("line 3", "(line 3|row 2)", pattern).replace("t.csv", "standard input")
    check(run("predict", models / "numbers", "-", "-o", os.devnull, stdin=contents), 1, pattern)


def rows(*columns, n=12):
    return "\n".join(",".join(str(c(i)) for c in columns) for i in range(n)) + "\n"


number, text = lambda i: i * 1.5, lambda i: "ab"[i % 2]

# The contents of a table given to `fit --target y`, further options, and what the one line must say.
WRONG_TRAINING = {
    "target absent": ("x,z\n" + rows(number, number), [], "has no column 'y' .*; it has 'x', 'z'"),
    "one row": ("x,y\n1,2\n", [], "1 row with a target; at least 2 are needed"),
    "header only": ("x,y\n", [], "has a header but no rows"),
    "constant target": ("x,y\n" + rows(number, lambda i: 3), [], "column 'y': has the value 3 in every row"),
    "one class": ("x,y\n" + rows(number, lambda i: "a"), [], "column 'y': has the class 'a' in every row; there is nothing to learn"),
    "target without values": ("x,y\n" + rows(number, lambda i: "NA"), [], "column 'y': has no value in every row"),
    "one row with a target": ("x,y\n" + rows(number, lambda i: "" if i else 1), [], "1 row with a target"),
    "infinite target": ("x,y\n" + rows(number, lambda i: "inf" if i == 5 else i), [], "line 7, column 'y': must be a finite"),
    "infinite column": ("x,y\n" + rows(lambda i: "-inf" if i == 2 else i, number), [], "line 4, column 'x': must be a finite"),
    "a typing error among numbers": ("x,y\n" + rows(lambda i: "1O" if i == 3 else i, number), [], "line 5, column 'x': '1O' among numbers; .*--categorical"),
    "a typing error in the target": ("x,y\n" + rows(number, lambda i: "1O" if i == 3 else i), [], "line 5, column 'y': '1O' among numbers"),
    "dates": ("day,y\n" + rows(lambda i: f"2024-01-{i + 1:02}", number), [], "column 'day': holds dates such as '2024-01-01'"),
    "other dates": ("day,y\n" + rows(lambda i: f"{i + 1}/3/2024", number), [], "column 'day': holds dates"),
    "an identifier": ("id,y\n" + rows(lambda i: f"k{i}", number), ["--max-categories", "5"], "has 12 different texts, more than 5; .*--ignore"),
    "nothing to learn from": ("y\n" + rows(number), [], "no column is left to learn from"),
    "only constants": ("x,y\n" + rows(lambda i: 1, number), [], "no column is left to learn from"),
    "ignoring the target": ("x,y\n" + rows(number, number), ["--ignore", "y"], "must not name the target 'y'"),
    "ignoring nothing": ("x,y\n" + rows(number, number), ["--ignore", "z"], r"has no column 'z' \(--ignore\)"),
    "unknown categorical": ("x,y\n" + rows(number, number), ["--categorical", "z"], r"has no column 'z' \(--categorical\)"),
    "regressing texts": ("x,y\n" + rows(number, text), ["--task", "regression"], "line 2, column 'y': must be a number; got 'a'"),
    "names as classes": ("x,y\n" + rows(number, lambda i: f"n{i}", n=50), [], "has 50 classes in 50 rows; is it the target"),
    "duplicate header": ("x,x,y\n" + rows(number, number, number), [], "columns 1 and 2 are both named 'x'"),
    "unknown device": ("x,y\n" + rows(number, number), ["--device", "toaster"], "toaster"),
    "ragged": ("x,y\n1,2\n1,2,3\n", [], "line 3: 3 fields"),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "options", "pattern"), WRONG_TRAINING.values(), ids=WRONG_TRAINING)
def test_wrong_training_is_one_line_and_leaves_the_previous_model(models, tmp_path, contents, options, pattern):
    (tmp_path / "t.csv").write_text(contents)
    shutil.copytree(models / "numbers", tmp_path / "m")
    before = (tmp_path / "m" / folders.COLUMNS).read_bytes()
    check(run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", *TINY, *options), 1, pattern)
    assert (tmp_path / "m" / folders.COLUMNS).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t.csv"]


# Changes to a model folder, and what `explain` and `predict` must say.
WRONG_MODELS = {
    "absent": (shutil.rmtree, "there is no model folder"),
    "a file": (lambda m: (shutil.rmtree(m), m.write_text("x")), "is no model folder"),
    "an empty folder": (lambda m: (shutil.rmtree(m), m.mkdir()), "is no model folder: it must hold columns.json and"),
    "no network": (lambda m: (m / folders.MODEL).unlink(), "is no model folder"),
    "no columns": (lambda m: (m / folders.COLUMNS).unlink(), "is no model folder"),
    "network cut short": (lambda m: (m / folders.MODEL).write_bytes((m / folders.MODEL).read_bytes()[:-9]), "is not the file that columns.json belongs to"),
    "network of another fit": (lambda m: (m / folders.MODEL).write_bytes(b"x"), "is not the file that columns.json belongs to"),
    "columns cut short": (lambda m: (m / folders.COLUMNS).write_text((m / folders.COLUMNS).read_text()[:50]), "columns.json' is damaged"),
    "columns of something else": (lambda m: (m / folders.COLUMNS).write_text("[1, 2]"), "columns.json' is damaged"),
    "columns not text": (lambda m: (m / folders.COLUMNS).write_bytes(b"\xff\xfe\x00"), "columns.json' is damaged"),
    "a later format": (lambda m: edit(m, format=99), "has the format 99; this version reads 1 to 1"),
    "parts missing": (lambda m: edit(m, columns=None), "lacks parts or has unknown ones"),
    "unknown kind": (lambda m: edit(m, task="ranking"), "lacks parts or has unknown ones"),
    "another task": (lambda m: edit(m, task="classification"), "model.safetensors.*: `path` holds a 'DropoutRegressor'"),
    "a column fewer": (lambda m: edit(m, columns=[{"name": "a", "kind": "number", "flagged": False, "fill": 0}]), "the network has 5 inputs, columns.json names 1"),
}  # fmt: skip


def edit(folder, **changes):
    values = json.loads((folder / folders.COLUMNS).read_text())
    (folder / folders.COLUMNS).write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize(("change", "pattern"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_wrong_models_are_refused(models, tmp_path, change, pattern):
    shutil.copytree(models / "numbers", tmp_path / "m")
    change(tmp_path / "m")
    check(run("explain", tmp_path / "m"), 1, pattern)
    check(run("predict", tmp_path / "m", models / "train.csv", "-o", tmp_path / "out.csv"), 1, pattern)
    assert not (tmp_path / "out.csv").exists()


# Arguments, with {models} for the folder of the models; the exit code and what the line must say.
WRONG_CALLS = {
    "no such command": ("fly", 2, "No such command 'fly'"),
    "no such option": ("explain {models}/numbers --colour red", 2, "No such option"),
    "no target": ("fit {models}/train.csv --out m", 2, "Missing option '--target'"),
    "no output": ("predict {models}/numbers {models}/train.csv", 2, "Missing option '--output'"),
    "no model": ("explain", 2, "Missing argument 'MODEL'"),
    "coverage above one": ("predict {models}/numbers {models}/train.csv -o - --coverage 95", 2, "--coverage.*between 0 and 1; got 95"),
    "no draws": ("predict {models}/numbers {models}/train.csv -o - --n-draws 0", 2, "n-draws"),
    "draws in words": ("predict {models}/numbers {models}/train.csv -o - --n-draws many", 2, "n-draws.*(integer|'many' is not a valid int)"),
    "long delimiter": ("predict {models}/numbers {models}/train.csv -o - --delimiter ab", 2, "one plain character; got 'ab'"),
    "no block": ("predict {models}/numbers {models}/train.csv -o - --block-rows 0", 2, "block-rows"),
    "json and table on one stream": ("predict {models}/numbers {models}/train.csv -o - --json", 2, "together with --json"),
    "unknown task": ("fit {models}/train.csv --target price --out m --task ranking", 2, "ranking"),
    "hidden in words": ("fit {models}/train.csv --target price --out m --hidden wide", 2, "--hidden.*must be a number, or several"),
    "half a unit": ("fit {models}/train.csv --target price --out m --hidden 2.5", 2, "widths of layers such as 50,50"),
    "drop probability of one": ("fit {models}/train.csv --target price --out m --drop-prob 1", 2, r"must lie in \[0, 1\)"),
    "negative decay": ("fit {models}/train.csv --target price --out m --weight-decay -1", 2, "must be 0 or more"),
    "negative seed": ("fit {models}/train.csv --target price --out m --seed -1", 2, "seed"),
    "unknown experiment": ("reproduce mnist", 2, "must be one of adversarial, .*, uci; got 'mnist'"),
    "further arguments": ("reproduce toy --method best", 2, "only uci takes further arguments; got --method best"),
    "unknown setting": ("reproduce toy --quick --set colour=red", 1, "`--set` must name one of"),
    "missing file": ("predict {models}/numbers {models}/none.csv -o -", 1, "none.csv': No such file or directory"),
    "a folder for a file": ("predict {models}/numbers {models} -o -", 1, "is a folder; name a CSV or Parquet file in it"),
    "output without folder": ("predict {models}/numbers {models}/train.csv -o {models}/none/out.csv", 1, "the folder '.*none' does not exist"),
    "output is a folder": ("predict {models}/numbers {models}/train.csv -o {models}/sub.csv", 1, "is a folder; name a file in it"),
    "output of unknown kind": ("predict {models}/numbers {models}/train.csv -o out.xlsx", 1, "must end in .csv or .parquet"),
    "keeping nothing known": ("predict {models}/numbers {models}/train.csv -o - --keep colour", 1, "has no column 'colour' to keep"),
    "colliding prefix": ("predict {models}/numbers {models}/train.csv -o - --prefix= --keep size,mean", 1, "has no column 'mean'"),
    "model over other files": ("fit {models}/train.csv --target price --out {models}", 1, "holds other files than a model"),
    "model over a file": ("fit {models}/train.csv --target price --out {models}/train.csv", 1, "is a file; name a folder"),
    "model without folder": ("fit {models}/train.csv --target price --out {models}/none/m", 1, "the folder '.*none' does not exist"),
    "scores without target": ("evaluate {models}/numbers {models}/no_target.csv", 1, "lacks the target 'price'"),
    "scores of empty targets": ("evaluate {models}/numbers {models}/empty_target.csv", 1, "no row has a value to score against"),
    "scores of texts": ("evaluate {models}/numbers {models}/text_target.csv", 1, "line 2, column 'price': must be a number; got 'dear'"),
    "scores of a new class": ("evaluate {models}/classes {models}/new_class.csv", 1, "line 2, column 'kind': the class 'odd' was not seen"),
    "report without target": ("report {models}/numbers {models}/no_target.csv -o r.html", 1, "lacks the target 'price'"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "pattern"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls_are_one_line(models, tmp_path, monkeypatch, arguments, code, pattern):
    monkeypatch.chdir(tmp_path)
    (models / "sub.csv").mkdir(exist_ok=True)
    (models / "no_target.csv").write_text("size,city,new\n1,Oslo,true\n")
    (models / "empty_target.csv").write_text("size,city,new,price\n1,Oslo,true,\n")
    (models / "text_target.csv").write_text("size,city,new,price\n1,Oslo,true,dear\n")
    (models / "new_class.csv").write_text("size,city,new,kind\n1,Oslo,true,odd\n")
    check(run(*[part.format(models=models) for part in arguments.split()]), code, pattern)
    assert list(tmp_path.iterdir()) == []


PARQUET = {
    "dates": ({"size": pa.array([1], pa.date32()), "city": ["Oslo"], "new": [True]}, "column 'size': holds dates or times"),
    "lists": ({"size": [[1.0]], "city": ["Oslo"], "new": [True]}, "holds values of type list"),
    "texts for numbers": ({"size": ["x"], "city": ["Oslo"], "new": [True]}, "t.parquet, row 1, column 'size': must be a number"),
    "infinity": ({"size": [1.0, float("inf")], "city": ["Oslo"] * 2, "new": [True] * 2}, "t.parquet, row 2, column 'size': must be a finite"),
    "a new category": ({"size": [1], "city": ["Bergen"], "new": [True]}, "row 1, column 'city': 'Bergen' was not seen"),
    "no rows": ({"size": pa.array([], pa.float64()), "city": pa.array([], pa.string()), "new": pa.array([], pa.bool_())}, "has a header but no rows"),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "pattern"), PARQUET.values(), ids=PARQUET)
def test_wrong_parquet_is_one_line(models, tmp_path, columns, pattern):
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    check(run("predict", models / "numbers", tmp_path / "t.parquet", "-o", tmp_path / "o.parquet"), 1, pattern)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_damaged_parquet_file_is_one_line(models, tmp_path):
    pq.write_table(
        pa.table({"size": [1.5] * 1000, "city": ["Oslo"] * 1000, "new": [True] * 1000}), tmp_path / "t.parquet"
    )
    contents = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(contents[:40] + b"\xff" * 60 + contents[100:])
    check(
        run("predict", models / "numbers", tmp_path / "t.parquet", "-o", tmp_path / "o.csv"), 1, "damaged|whole|must be"
    )
    assert not (tmp_path / "o.csv").exists()


# --- machines that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["out.csv", "out.parquet"])
def test_no_space_left_leaves_the_previous_file(models, tmp_path, monkeypatch, out):
    (tmp_path / out).write_text("previous")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    check(run("predict", models / "numbers", models / "train.csv", "-o", tmp_path / out), 1, "No space left on device")
    assert (tmp_path / out).read_text() == "previous" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("place", ["os.fsync", "os.rename"])
def test_a_model_that_cannot_be_written_leaves_the_previous_one(models, tmp_path, monkeypatch, place):
    shutil.copytree(models / "numbers", tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    true_rename = os.rename

    def fail(*arguments):
        if place == "os.rename" and not str(arguments[0]).endswith(".part"):
            return true_rename(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(place, fail)
    options = ["--target", "kind", "--ignore", "price", "--out", tmp_path / "m", *TINY]
    check(run("fit", models / "train.csv", *options), 1, "No space left on device")
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_interruption_is_one_line_and_code_130(models, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "out.csv").write_text("previous")
    monkeypatch.setattr(predicting.Predictor, "predict_inputs", interrupted)
    check(run("predict", models / "numbers", models / "train.csv", "-o", tmp_path / "out.csv"), 130, "interrupted")
    assert (tmp_path / "out.csv").read_text() == "previous" and len(list(tmp_path.iterdir())) == 1


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


def test_a_missing_package_is_named(models, monkeypatch):
    def lacking(*_, **__):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(predicting.Predictor, "predict_inputs", lacking)
    result = run("predict", models / "numbers", models / "train.csv", "-o", os.devnull)
    check(result, 1, "the package 'matplotlib' is needed for this: pip install matplotlib")


# --- mutations -------------------------------------------------------------------------------------------------------

ROWS = table(6, seed=4).splitlines(keepends=True)
TEXT = "".join(ROWS).encode()
CELLS = [
    "", " ", "NA", "nan", "NaN", "inf", "-inf", "1e999", "-1e-999", "1,5", "0x10", "1_0", "1e5", "+.5", "true", "TRUE", "Oslo ",
    "Bergen", "=1+1", "-x", "@x", '"', '""', '"a', "a\nb", "a\r\nb", "é", "\ufeff", "\x7f", "2024-01-01", "9" * 400, "x" * 3000,
    "\t", ";", "'", "\\N", "None", "१", "\u2028", "1\xa0000", "<b>", "%s", "{0}",
]  # fmt: skip
NOISE = [
    b"\0",
    b"\xff",
    b"\xc3",
    b"\r",
    b"\n",
    b",",
    b'"',
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"-",
    b"=",
    b"1e9",
    b"\n\n",
    b",,",
]


@st.composite
def mutated(draw):
    """The table with one to four changes: of cells, rows, bytes."""
    lines = [line.rstrip("\n").split(",") for line in ROWS]
    quote = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        first = 0 if draw(st.integers(0, 9)) == 9 else min(1, len(lines) - 1)  # the header seldom
        row, kind = draw(st.integers(first, len(lines) - 1)), draw(st.integers(0, 12))
        place = draw(st.integers(0, max(0, len(lines[row]) - 1)))
        if kind <= 8 and lines[row]:
            lines[row][place] = draw(st.one_of(st.sampled_from(CELLS), st.text(max_size=6), st.floats().map(repr)))
        elif kind == 9:
            del lines[row][place:]
        elif kind == 10:
            lines.insert(row, list(lines[draw(st.integers(0, len(lines) - 1))]))
        elif kind == 11 and len(lines) > 1:
            del lines[row]
        else:
            lines[row].append(draw(st.sampled_from(CELLS)))
    if quote:
        out = io.StringIO()
        csv.writer(out, lineterminator=draw(st.sampled_from(["\n", "\r\n"]))).writerows(lines)
        contents = out.getvalue().encode("utf-8", "surrogatepass")
    else:
        contents = "\n".join(",".join(line) for line in lines).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.integers(0, 1))):
        first = 0 if draw(st.integers(0, 9)) == 9 else min(len(ROWS[0]), len(contents))
        at = draw(st.integers(first, len(contents)))
        cut = draw(st.integers(0, 5))
        contents = contents[:at] + draw(st.sampled_from([*NOISE, b""])) + contents[at + cut :]
    return contents


def n_records(contents: bytes) -> int:
    """The rows of a table as Python's own reader counts them, blank lines and the header left out."""
    return sum(bool(record) for record in csv.reader(io.StringIO(contents.decode("utf-8-sig"), newline=""))) - 1


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("mutations")


@settings(max_examples=3600, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(contents=mutated())
def test_mutated_tables_are_predicted_whole_or_refused_in_one_line(models, place: pathlib.Path, contents):
    data, out = place / "t.csv", place / "out.csv"
    data.write_bytes(contents)
    out.write_text("previous")
    result = run("predict", models / "numbers", data, "-o", out)
    assert sorted(path.name for path in place.iterdir()) == ["out.csv", "t.csv"]
    assert "Traceback" not in result.err and "unexpected" not in result.err
    if result.code == 0:
        found = list(csv.reader(io.StringIO(out.read_text(), newline="")))
        assert len(found) - 1 == n_records(contents)
        assert len({len(record) for record in found}) == 1
        header = found[0]
        for record in found[1:]:
            assert all(float(record[header.index(f"price_{name}")]) < float("inf") for name in ("mean", "std", "upper"))
            assert not any(cell[:1] in ("=", "+", "-", "@") and not is_number(cell) for cell in record)
    else:
        check(result, 1, "t.csv|the input has a column")
        assert out.read_text() == "previous"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
