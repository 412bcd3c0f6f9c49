"""Tests of the rows of a table as a model reads them: what is wrong with one is said in one line."""

import csv
import io
import os
import pathlib
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.command_line import TINY, check, rows_of, run, table


def test_what_was_missing_or_new_is_said(models, tmp_path):
    (tmp_path / "t.csv").write_text("size,city,new\n,Oslo,true\n1,,false\n1,Bergen,TRUE\n")
    result = run("predict", models / "numbers", tmp_path / "t.csv", "-o", "-", "--allow-new")
    assert result.code == 0 and len(rows_of(result.text)) == 3
    notes = result.err.splitlines()
    assert re.fullmatch(r"dropbayes: note: 1 missing value of 'size' taken as -?[\d.]+\.", notes[0])
    assert notes[1:] == [
        "dropbayes: note: 1 missing value of 'city' taken as none of the categories; no training row lacked it.",
        "dropbayes: note: 1 value of 'city' new to the model, encoded as all zeros.",
    ]


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
    "ragged after a quoted newline": (b"size,city,new,n\n1,Oslo,true,\"a\nb\"\n1\n", "line 4: 1 field"),
    "ragged after blank lines": (HEAD + b"\n\n" + GOOD + b"1\n", "line 5: 1 field"),
    "ragged with carriage returns": (HEAD.replace(b"\n", b"\r\n") + b"1,Oslo,true\r\n1,2\r\n", "line 3: 2 fields"),
    "quotation mark never closed": (HEAD + GOOD + b'1,Oslo,"true\n1,Oslo,true\n', "line 3: a quotation mark is opened"),
    "header never closed": (b'"size,city,new\n1,Oslo,true\n', "line 1: a quotation mark is opened and never closed"),
    "duplicate header": (b"size,city,new,city\n1,Oslo,true,Rome\n", "columns 2 and 4 are both named 'city'"),
    "no header": (b"1,Oslo,1\n2,Rome,1\n", "both named '1'; rename one of them, or add the line of names if it is missing"),
    "header alike but for spaces": (b"size,city,new, city\n1,Oslo,true,Rome\n", "columns 2 and 4 are both named 'city'"),
    "latin-1": ("size,city,new\n1,Oslo,true\n1,Tromsø,true\n".encode("latin-1"), r"line 3: byte 34 \(0xf8\) is not UTF-8"),
    "latin-1 header": ("size,city,new,größe\n".encode("latin-1"), "line 1: byte 17"),
    "cut inside a character": (HEAD + "1,Oslo,ø".encode()[:-1], "line 2: byte 22 .* is not UTF-8"),
    "UTF-16 cut short": ("size,city,new\n1,Oslo,true\n".encode("utf-16")[:-1], "is not utf-16 text"),
    "NUL byte": (HEAD + GOOD + b"1,Os\0lo,true\n", "line 3: holds a NUL byte"),
    "gzip cut short": (b"\x1f\x8b\x08\x00" + b"x" * 20, "t.csv is damaged or cut short: its gzip data"),
    "spreadsheet": (b"PK\x03\x04" + b"x" * 20, "t.csv is an Excel workbook or a zip archive, which is not read: save the sheet as CSV"),
    "PDF": (b"%PDF-1.7 ...", "t.csv is a PDF"),
    "database": (b"SQLite format 3\0\x10\0\x01\x01", "t.csv is an SQLite database, which is not read"),
    "array": (b"\x93NUMPY\x01\0v\0{'descr'", "t.csv is a NumPy array, which is not read"),
    "image": (b"\x89PNG\r\n\x1a\n\0\0\0", "byte 1 .0x89. is not UTF-8 text; the file looks like no text at all: save the"),
    "Parquet cut short": (b"PAR1" + b"x" * 20, "t.csv is not a whole Parquet file"),
    "text where numbers were": (HEAD + GOOD + b"large,Oslo,true\n", "line 3, column 'size': must be a number written as 1234.5; got 'large'"),
    "decimal comma": (HEAD + b'"1,5",Oslo,true\n', r"line 2, column 'size': must be a number written as 1234.5; got '1,5'"),
    "hexadecimal": (HEAD + b"0x10,Oslo,true\n", "line 2, column 'size': must be a number written as 1234.5; got '0x10'"),
    "thousands": (HEAD + b"1 000,Oslo,true\n", "must be a number written as 1234.5; got '1 000'"),
    "a unit": (HEAD + b"5 kg,Oslo,true\n", "must be a number written as 1234.5; got '5 kg'"),
    "infinity": (HEAD + GOOD + b"inf,Oslo,true\n", "line 3, column 'size': must be a finite number .*; got 'inf'"),
    "minus infinity": (HEAD + b"-Infinity,Oslo,true\n", "must be a finite number .*; got '-Infinity'"),
    "overflow": (HEAD + b"1e999,Oslo,true\n", "must be a finite number .*; got '1e999'"),
    "enormous": (HEAD + b"1e200,Oslo,true\n", r"must be a finite number of at most 1e\+100; got '1e200'"),
    "a date where numbers were": (HEAD + b"2024-01-31,Oslo,true\n", "must be a number written as 1234.5; got '2024-01-31'"),
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


PARQUET = {
    "dates": ({"size": pa.array([1], pa.date32()), "city": ["Oslo"], "new": [True]}, "column 'size': must hold numbers; got date32"),
    "lists": ({"size": [[1.0]], "city": ["Oslo"], "new": [True]}, "column 'size': must hold numbers; got list"),
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


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(contents=mutated())
def test_thousands_of_mutated_tables_are_predicted_whole_or_refused_in_one_line(models, place: pathlib.Path, contents):
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


def test_notes_on_many_columns_are_few(tmp_path):
    names = [f"g{k}" for k in range(25)]
    rows = [",".join([*(str((7 * row + k) % 11) for k in range(25)), str(row % 5)]) for row in range(40)]
    (tmp_path / "train.csv").write_text("\n".join([",".join([*names, "y"]), *rows]))
    (tmp_path / "new.csv").write_text(",".join(names) + "\n" + "," * 24 + "\n")
    run("fit", tmp_path / "train.csv", "--target", "y", "--out", tmp_path / "m", *TINY)
    notes = run("predict", tmp_path / "m", tmp_path / "new.csv", "-o", "-").err.splitlines()
    assert len(notes) == 11 and notes[-1] == "dropbayes: note: the same of 15 further columns."


@pytest.mark.parametrize("options", [[], ["--time", "day"]])
def test_later_dates_are_noted_with_the_option_that_learns_the_past(tmp_path, options):
    days = [f"20{row // 12 + 10}-{row % 12 + 1:02}-01" for row in range(60)]
    (tmp_path / "train.csv").write_text("\n".join(["day,y", *(f"{day},{k % 7}.5" for k, day in enumerate(days))]))
    (tmp_path / "new.csv").write_text("day\n2031-01-01\n")
    run("fit", tmp_path / "train.csv", "--target", "y", "--out", tmp_path / "m", *TINY, *options)
    said = run("predict", tmp_path / "m", tmp_path / "new.csv", "-o", "-").err
    assert "'day' in 1 row" in said
    assert ("to predict later dates, fit with --time day" in said) == (not options)
