"""Tests of tables written in blocks."""

import csv
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.app.tables import open_table, without_formulas, write_tables
from dropbayes.estimators.columns import Cells
from dropbayes.estimators.columns.notation import notation_of
from tests.estimators.columns.places import texts


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
            st.floats(allow_nan=False, allow_infinity=False) | st.none(),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(",;\t|"),
)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read_back_by_python(tmp_path_factory, rows, delimiter):
    path = tmp_path_factory.mktemp("written") / "t.csv"
    table = pa.table(
        {"text": pa.array([t for t, _ in rows], pa.string()), "n": pa.array([n for _, n in rows], pa.float64())}
    )
    write_tables(path, [table.slice(0, 1), table.slice(1)], delimiter=delimiter)
    found = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), delimiter=delimiter))
    assert found[0] == ["text", "n"]
    for (text, n), (cell, number) in zip(rows, found[1:], strict=True):
        assert cell in (text, "'" + text)
        assert (number == "") if n is None else (float(number) == n)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_text_begins_like_a_formula_unless_it_is_a_number(text):
    [found] = without_formulas(texts(text)).to_pylist()
    assert found in (text, "'" + text)
    if found[:1] in tuple("=+-@\t\r\n"):
        assert notation_of(texts(found)) is not None


@pytest.mark.parametrize("number", ["-5", "-1,5", "+1.234,5", "-7 %", "-$3", "-5,5 €", "-1 234,5"])
def test_a_number_in_any_notation_is_no_formula(number):
    assert without_formulas(texts(number)).to_pylist() == [number]


def test_a_table_is_delimited_as_its_name_says(tmp_path):
    for name, line in (("t.tsv", "1\tx,y"), ("t.csv", '1,"x,y"')):
        write_tables(tmp_path / name, [pa.table({"a": [1], "b": ["x,y"]})])
        assert (tmp_path / name).read_text().splitlines()[1] == line


@pytest.mark.parametrize(("delimiter", "cell"), [(";", "-1,5"), (",", '"-1,5"')])
def test_numbers_are_written_with_the_decimal_mark_asked_for(tmp_path, delimiter, cell):
    table = pa.table({"a": [-1.5, None], "n": [7, 8], "s": ["x.y", "z"]})
    write_tables(tmp_path / "t.csv", [table], delimiter=delimiter, decimal=",")
    lines = [["a", "n", "s"], [cell, "7", "x.y"], ["", "8", "z"]]
    assert (tmp_path / "t.csv").read_text().splitlines() == [delimiter.join(line) for line in lines]


def test_nulls_and_other_types_are_written(tmp_path):
    table = pa.table({
        "when": pa.array([1, None], pa.timestamp("s")), "flag": [True, None], "text": ["", None],
        "category": pa.array(["=a", "b"]).dictionary_encode(),
    })  # fmt: skip
    write_tables(tmp_path / "t.csv", [table])
    lines = ["when,flag,text,category", "1970-01-01 00:00:01,true,,'=a", ",,,b"]
    assert (tmp_path / "t.csv").read_text().splitlines() == lines


def test_durations_are_written_as_the_days_that_a_model_reads(tmp_path):
    spans = pa.table({"span": pa.array([0, 129_600_000_000, None], pa.duration("us")), "n": [1, 2, 3]})
    write_tables(tmp_path / "t.csv", [spans])
    assert (tmp_path / "t.csv").read_text().splitlines() == ["span,n", "0,1", "1.5,2", ",3"]
    [written] = open_table(tmp_path / "t.csv").blocks()
    read = [Cells(table["span"], "span", str).numbers() for table in (spans, written)]
    np.testing.assert_array_equal(*read)


@pytest.mark.parametrize("values", [pa.array([[1.0]]), pa.array([{"a": 1}]), pa.array([b"\xff"])])
def test_values_that_csv_cannot_hold_are_refused_by_the_name_of_their_column(tmp_path, values):
    message = r"column 'odd': values of type .* cannot be written as CSV; write a \.parquet file"
    with pytest.raises(ValueError, match=message):
        write_tables(tmp_path / "t.csv", [pa.table({"a": [1], "odd": values})])
    assert list(tmp_path.iterdir()) == []
    write_tables(tmp_path / "t.parquet", [pa.table({"odd": values})])
    assert pq.read_table(tmp_path / "t.parquet")["odd"].to_pylist() == values.to_pylist()


def test_tables_that_end_in_an_exception_leave_nothing(tmp_path):
    def tables():
        yield pa.table({"a": range(70_000)})
        raise RuntimeError

    for name in ("t.csv", "t.parquet"):
        with pytest.raises(RuntimeError):
            write_tables(tmp_path / name, tables())
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_file_keeps_its_permissions_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "real.csv").chmod(0o640)
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    write_tables(tmp_path / "link.csv", [pa.table({"new": [1]})])
    assert (tmp_path / "real.csv").read_text() == "new\n1\n" and (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").stat().st_mode & 0o777 == 0o640
