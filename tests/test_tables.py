import csv
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.tables import (
    Column,
    Schema,
    Sink,
    encoded,
    inferred,
    kind_of,
    labels,
    neutral,
    numbers,
    open_table,
    regrouped,
    write_whole,
)
from dropbayes.tables.columns import as_json, from_json


def at(row: int) -> str:
    return "table" if row < 0 else f"row {row}"


def texts(*values: str | None) -> pa.Array:
    return pa.array(values, pa.string())


# --- reading ---------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 5), max_size=8), rows=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_regrouped_tables_have_the_same_rows_in_equal_parts(sizes, rows):
    counted = iter(range(100))
    parts = [pa.table({"a": pa.array([next(counted) for _ in range(size)], pa.int64())}) for size in sizes]
    found = [part["a"].to_pylist() for part in regrouped(parts, rows)]
    assert [value for part in found for value in part] == list(range(sum(sizes)))
    assert all(len(part) == rows for part in found[:-1]) and all(0 < len(part) <= rows for part in found)


@given(
    st.lists(
        st.lists(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=100, deadline=None)
def test_every_cell_is_read_as_the_text_it_is(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("cells") / "t.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b"], *rows])
    with open_table(path) as source:
        table = pa.concat_tables(source.blocks(2))
    assert [list(row.values()) for row in table.to_pylist()] == rows


def test_a_type_is_not_guessed_from_the_first_rows(tmp_path):
    (tmp_path / "t.csv").write_text("a\n" + "1\n" * 800_000 + "x\n")  # what comes late is in another block of bytes
    with open_table(tmp_path / "t.csv") as source:
        last = None
        for last in source.blocks(100_000):
            assert last.schema.field("a").type == pa.string()
        assert last["a"][-1].as_py() == "x" and source.place(800_000) == "t.csv, line 800002"


def test_places_are_lines_of_the_file(tmp_path):
    (tmp_path / "t.csv").write_bytes(b'\xef\xbb\xbfa,b\r\n1,"x\r\ny"\r\n\r\n2,z\r\n')
    with open_table(tmp_path / "t.csv") as source:
        assert source.names == ("a", "b")
        [table] = source.blocks()
        assert table.to_pylist() == [{"a": "1", "b": "x\r\ny"}, {"a": "2", "b": "z"}]
        assert [source.place(row) for row in (0, 1)] == ["t.csv, line 2", "t.csv, line 5"]


def test_reading_may_end_early(tmp_path):
    (tmp_path / "t.csv").write_text("a\n" + "123456789\n" * 500_000)
    with open_table(tmp_path / "t.csv") as source:
        assert next(iter(source.blocks(5))).num_rows == 5
    assert list(source.blocks()) == []


def test_parquet_is_read_with_its_types(tmp_path):
    table = pa.table({"n": [1, None], "s": ["a", "b"]})
    pq.write_table(table, tmp_path / "any.name")
    with open_table(tmp_path / "any.name") as source:
        assert (source.unit, source.size) == ("rows", 2)
        assert pa.concat_tables(source.blocks(1)).equals(table)


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "é"])
def test_delimiters_are_one_plain_character(tmp_path, delimiter):
    with pytest.raises(ValueError, match="`delimiter` must be one plain character"):
        open_table(tmp_path / "t.csv", delimiter=delimiter)


# --- cells and columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "  ", "NA", "N/A", "NaN", "nan", "NAN", "null", "NULL", "?", " NA "])
def test_missing_tokens_are_no_numbers_and_no_categories(token):
    assert np.isnan(numbers(texts(token), "a", at=at)).all()
    assert labels(texts(token), "a", at=at) == [None]


@given(st.floats(-1e100, 1e100))
@settings(max_examples=200, deadline=None)
def test_numbers_are_read_to_the_last_bit(value):
    assert numbers(texts(repr(value), f" {value!r} "), "a", at=at).tolist() == [value, value]


@pytest.mark.parametrize("text", ["1,5", "0x10", "1_000", "1 000", "--1", "1e", "one", "1d5", "+-1", "٣", "½"])
def test_what_is_no_number_is_named_with_its_row(text):
    with pytest.raises(ValueError, match="row 2, column 'a': must be a number; got "):
        numbers(texts("1", "NA", text, "2", "x"), "a", at=at)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e101])
def test_numbers_must_be_finite(value):
    for values in (pa.array([0.0, value]), texts("0", repr(value))):
        with pytest.raises(ValueError, match="row 1, column 'a': must be a finite number"):
            numbers(values, "a", at=at)


@pytest.mark.parametrize(("values", "kind"), [
    (texts("1", "2.5", "NA"), "number"), (texts("a", "b"), "category"), (texts("true", "FALSE", ""), "boolean"),
    (texts("1", "a", "b"), "category"), (pa.array([1, 2]), "number"), (pa.array([True, None]), "boolean"),
    (pa.array(["a", "b"]).dictionary_encode(), "category"), (texts("0", "1"), "number"), (pa.nulls(2), "number"),
    (pa.array([None, 1], pa.decimal128(5, 2)), "number"),
])  # fmt: skip
def test_the_kind_of_a_column(values, kind):
    assert kind_of(values, "a", at=at) == kind


def test_a_number_is_filled_by_its_median_and_flagged():
    column = inferred(texts("1", "", "2", "10"), "a", at=at)
    assert column == Column("a", "number", fill=2.0, flagged=True)
    found = encoded(Schema((column,), "y", "regression"), pa.table({"a": ["5", "NA"]}), at=at)
    assert found.x.tolist() == [[5.0, 0.0], [2.0, 1.0]] and found.missing == {"a": 1}


def test_a_category_has_one_input_for_each_text_and_one_for_missing():
    column = inferred(texts("b", "a", "?", "b"), "c", at=at)
    assert column.inputs == ("c = a", "c = b", "c is missing")
    schema = Schema((column,), "y", "regression")
    found = encoded(schema, pa.table({"c": ["a", "b", "", "z"]}), at=at, allow_new=True)
    assert found.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]] and found.new == {"c": 1}
    with pytest.raises(ValueError, match="row 3, column 'c': 'z' was not seen in training"):
        encoded(schema, pa.table({"c": ["a", "b", "", "z"]}), at=at)


def test_booleans_are_one_and_zero_however_written():
    schema = Schema((inferred(texts("True", "false", "", "TRUE"), "b", at=at),), "y", "regression")
    for values in (["true", "False", "NA"], [True, False, None]):
        assert encoded(schema, pa.table({"b": values}), at=at).x.tolist() == [[1, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize(("values", "reason"), [
    (texts("", "NA"), "no value in any row"), (texts("3", "3.0"), "3 in every row"), (texts("a", "a"), "'a' in every row"),
])  # fmt: skip
def test_columns_that_teach_nothing_are_left_out_with_the_reason(values, reason):
    assert inferred(values, "a", at=at) == reason


def test_a_constant_that_is_sometimes_missing_teaches_something():
    assert inferred(texts("3", "", "3"), "a", at=at) == Column("a", "number", fill=3.0, flagged=True)
    assert inferred(texts("x", "", "x"), "a", at=at) == Column("a", "category", categories=("x",), flagged=True)


def test_classes_have_one_spelling():
    assert labels(texts("1", "1.0", "01", "True", "x "), "a", at=at) == ["1", "1", "1", "true", "x"]
    assert labels(pa.array([1.0, 2.5]), "a", at=at) == ["1", "2.5"]
    assert labels(pa.array([True, None]), "a", at=at) == ["true", None]


def test_a_schema_comes_back_from_json():
    schema = Schema(
        (Column("a", "number", 1.5, (), True), Column("ü", "category", 0.0, ("x", "="), False), Column("b", "boolean")),
        "y", "classification", {"id": "asked for"}, ("", "-"),
    )  # fmt: skip
    assert from_json(as_json(schema)) == schema


# --- writing ---------------------------------------------------------------------------------------------------------


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
    with Sink(path, delimiter=delimiter) as sink:
        sink.write(table.slice(0, 1))
        sink.write(table.slice(1))
    found = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), delimiter=delimiter))
    assert found[0] == ["text", "n"]
    for (text, n), (cell, number) in zip(rows, found[1:], strict=True):
        assert cell in (text, "'" + text)
        assert (number == "") if n is None else (float(number) == n)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_text_begins_like_a_formula_unless_it_is_a_number(text):
    [found] = neutral(texts(text)).to_pylist()
    assert found in (text, "'" + text)
    if found[:1] in tuple("=+-@\t\r\n"):
        float(found)


def test_nulls_and_other_types_are_written(tmp_path):
    table = pa.table({
        "when": pa.array([1, None], pa.timestamp("s")), "flag": [True, None], "text": ["", None],
        "category": pa.array(["=a", "b"]).dictionary_encode(),
    })  # fmt: skip
    with Sink(tmp_path / "t.csv") as sink:
        sink.write(table)
    lines = ["when,flag,text,category", "1970-01-01 00:00:01,true,,'=a", ",,,b"]
    assert (tmp_path / "t.csv").read_text().splitlines() == lines


def test_a_context_left_by_an_exception_leaves_nothing(tmp_path):
    for name in ("t.csv", "t.parquet"):
        with pytest.raises(RuntimeError), Sink(tmp_path / name) as sink:
            sink.write(pa.table({"a": [1]}))
            raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_file_keeps_its_permissions_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "real.csv").chmod(0o640)
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    write_whole(tmp_path / "link.csv", "new")
    assert (tmp_path / "real.csv").read_text() == "new" and (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").stat().st_mode & 0o777 == 0o640
