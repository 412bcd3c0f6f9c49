"""Tests of reading tables in blocks."""

import csv
import weakref

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.app.tables import open_table, regroup
from dropbayes.app.tables.streams import ParserInput


@given(sizes=st.lists(st.integers(0, 5), max_size=8), rows=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_regrouped_tables_have_the_same_rows_in_equal_parts(sizes, rows):
    counted = iter(range(100))
    parts = [pa.table({"a": pa.array([next(counted) for _ in range(size)], pa.int64())}) for size in sizes]
    found = [part["a"].to_pylist() for part in regroup(parts, rows)]
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


def test_a_parser_that_failed_holds_nothing_of_a_table_that_is_closed(tmp_path, monkeypatch):
    """A thread of it that lets go later, while the interpreter ends, aborts the process."""
    (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 40 + "3\n")
    held, made = weakref.WeakSet(), ParserInput.__init__
    monkeypatch.setattr(ParserInput, "__init__", lambda self, *given: held.add(self) or made(self, *given))
    for _ in range(600):
        with open_table(tmp_path / "t.csv") as source, pytest.raises(ValueError, match="line 42"):
            list(source.blocks())
        assert not held


def test_a_line_taken_for_the_header_is_shown_when_rows_have_more_fields(tmp_path):
    (tmp_path / "t.csv").write_text("# made on Monday\na,b\n1,2\n")
    with open_table(tmp_path / "t.csv") as source, pytest.raises(ValueError, match=r"line 2.*'# made on Monday'"):
        list(source.blocks())


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
