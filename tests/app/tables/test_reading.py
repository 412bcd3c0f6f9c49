"""Tests of reading tables in blocks: compressed, encoded and delimited in every way people have."""

import bz2
import csv
import gzip
import io
import lzma
import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.app.tables import open_table, regroup
from dropbayes.app.tables.reading import delimiter_of

TEXT = "größe,b\n" + "".join(f"{i},ø{i}\n" for i in range(5000))
ROW = b"1," + b"2" * 97 + b"\n"
CELL = st.text(st.sampled_from('ab,;|\t"0. \n'), max_size=5)


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
        table = pa.concat_tables(source.blocks())
    assert [list(row.values()) for row in table.to_pylist()] == rows


def test_a_type_is_not_guessed_from_the_first_rows(tmp_path):
    (tmp_path / "t.csv").write_text(
        "a\n" + f"{'1' * 15}\n" * 100_000 + "x\n"
    )  # what comes late is in another block of bytes
    with open_table(tmp_path / "t.csv") as source:
        last = None
        for last in source.blocks():
            assert last.schema.field("a").type == pa.string()
        assert last["a"][-1].as_py() == "x" and source.place(100_000) == "t.csv, line 100002"


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
        assert 0 < next(iter(source.blocks())).num_rows < 500_000
    assert list(source.blocks()) == []


def test_a_line_taken_for_the_header_is_shown_when_rows_have_more_fields(tmp_path):
    (tmp_path / "t.csv").write_text("# made on Monday\na,b\n1,2\n")
    with open_table(tmp_path / "t.csv") as source, pytest.raises(ValueError, match=r"line 2.*'# made on Monday'"):
        list(source.blocks())


def test_parquet_is_read_with_its_types(tmp_path):
    table = pa.table({"n": [1, None], "s": ["a", "b"]})
    pq.write_table(table, tmp_path / "any.name")
    with open_table(tmp_path / "any.name") as source:
        assert (source.unit, source.size) == ("rows", 2)
        first, second = source.blocks(1)
        assert pa.concat_tables([first, second]).equals(table)


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "é"])
def test_delimiters_are_one_plain_character(tmp_path, delimiter):
    with pytest.raises(ValueError, match="`delimiter` must be one plain character"):
        open_table(tmp_path / "t.csv", delimiter=delimiter)


def zstandard(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, zstandard])
def test_a_compressed_table_is_read_as_the_table_it_was(tmp_path, compress):
    (tmp_path / "t.csv").write_bytes(compress(TEXT.encode()))
    with open_table(tmp_path / "t.csv") as source:
        table = pa.concat_tables(source.blocks())
        assert source.place(1) == "t.csv, line 3"
        assert source.position == source.size == (tmp_path / "t.csv").stat().st_size
    assert table["größe"].to_pylist() == [str(i) for i in range(5000)]
    assert table["b"][-1].as_py() == "ø4999"


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, zstandard])
def test_compressed_data_cut_short_are_refused(tmp_path, compress):
    data = compress(TEXT.encode())
    (tmp_path / "t.csv").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"t\.csv is damaged or cut short"), open_table(tmp_path / "t.csv") as source:
        list(source.blocks())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1", "cp1252", "utf-8-sig"])
def test_other_encodings_are_read(tmp_path, encoding):
    (tmp_path / "t.csv").write_bytes(TEXT.encode(encoding))
    named = None if encoding in ("utf-16", "utf-8-sig") else encoding  # these begin with their mark
    with open_table(tmp_path / "t.csv", encoding=named) as source:
        assert source.names == ("größe", "b")
        assert pa.concat_tables(source.blocks())["b"][-1].as_py() == "ø4999"


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"PK\x03\x04", "Excel"),
        (b"\xd0\xcf\x11\xe0", "Excel"),
        (b"%PDF", "PDF"),
        (b"<!DOCTYPE html>", "a web page"),
        (b'[{"x": 1}]', "JSON"),
        (b"ARROW1\0\0", "a Feather file"),
        (lzma.compress(b"a,b\n"), "compressed with xz, which is not read: unpack it"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path, start, what):
    (tmp_path / "t.csv").write_bytes(start + b"x" * 20)
    with pytest.raises(ValueError, match=what):
        open_table(tmp_path / "t.csv")


@pytest.mark.parametrize("encoding", ["morse", "rot13", "zlib"])
def test_an_encoding_that_is_none_of_texts_is_refused(tmp_path, encoding):
    with pytest.raises(ValueError, match="`encoding` must be a text encoding"):
        open_table(tmp_path / "t.csv", encoding=encoding)


@pytest.mark.parametrize("before", [1, 12_000])  # in the first block of bytes, and after it
@pytest.mark.parametrize(
    ("row", "encoding", "message"),
    [
        (b"3,\xff\n", None, r"t\.csv, line {line}: byte {byte} \(0xff\) is not UTF-8 text; name the `encoding`"),
        (b"3,\x81\n", "cp1252", r"t\.csv, line {line}: byte {byte} \(0x81\) is not cp1252 text"),
        (b"3,\xc3", None, r"t\.csv, line {line}: byte {byte} \(0xc3\) is not UTF-8 text"),
        (b"3,\0\n", None, r"t\.csv, line {line}: holds a NUL byte"),
        (b"3\n", None, r"t\.csv, line {line}: 1 field where the header has 2"),
        (b'3,"x\n4,5\n', None, r"t\.csv, line {line}: a quotation mark is opened and never closed"),
    ],
)
def test_a_bad_row_or_byte_is_reported_with_its_line(tmp_path, before, row, encoding, message):
    (tmp_path / "t.csv").write_bytes(b"a,b\n" + ROW * before + row)
    expected = message.format(line=before + 2, byte=100 * before + 7)
    with pytest.raises(ValueError, match=expected), open_table(tmp_path / "t.csv", encoding=encoding) as source:
        list(source.blocks())


@pytest.mark.parametrize(
    ("rows", "message"),
    [(b"3\n4,\xff\n", "line 12002: 1 field where"), (b"3,\xff\n4\n", r"line 12002: byte 1200010 \(0xff\)")],
)
def test_of_several_faults_the_first_is_reported(tmp_path, rows, message):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfa,b\n" + ROW * 12_000 + rows)
    with pytest.raises(ValueError, match=message), open_table(tmp_path / "t.csv") as source:
        list(source.blocks())


@pytest.mark.parametrize(("first", "rest"), [("Report of 2024", "a,b,c\n1,2,3\n"), ("sep=;", "a;b;c\n1;2;3\n")])
def test_a_line_above_the_header_is_quoted(tmp_path, first, rest):
    (tmp_path / "t.csv").write_text(f"{first}\n{rest}")
    message = (
        f"t.csv, line 2: 3 fields where the header has .*; the first line, '{first}', is taken for the header; remove"
    )
    with pytest.raises(ValueError, match=message), open_table(tmp_path / "t.csv") as source:
        list(source.blocks())


def test_a_pipe_is_read_whole(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(gzip.compress(b"a,b\n1,2\n\n3,x\n")))
    writer.start()
    with open_table(tmp_path / "pipe") as source:
        assert pa.concat_tables(source.blocks()).to_pydict() == {"a": ["1", "3"], "b": ["2", "x"]}
        assert source.place(1) == "pipe, line 4"
    writer.join(timeout=10)


@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=2, max_size=6), st.sampled_from(",;\t|"))
@settings(max_examples=200, deadline=None)
def test_a_table_as_python_writes_it_is_read_with_its_delimiter_if_no_other_fits(rows, delimiter):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("x", "y", "z"), *rows])
    assert delimiter_of(out.getvalue()) == delimiter


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a;b\n1,5;2,5\n", ";"),
        ("a,b\n1;2,3\n", ","),
        ("one\n1\n2\n", ","),
        ("a|b\n1|2\n", "|"),
        ("", ","),
        ("a;b;c\n1;2\n3;4;5\n", ";"),
        ("name;note\nx;yes, please\n", ";"),
    ],
)
def test_the_delimiter_of_what_people_write(text, delimiter):
    assert delimiter_of(text) == delimiter


@pytest.mark.parametrize("setting", [{"delimiter": ";"}, {"encoding": "cp1252"}])
def test_a_setting_of_csv_is_refused_for_parquet(tmp_path, setting):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "table.parquet")
    with pytest.raises(ValueError, match=r"table.parquet is Parquet, which has no `delimiter` or `encoding`"):
        open_table(tmp_path / "table.parquet", **setting)


@pytest.mark.parametrize("text", ['[\n    {"a": 1}]', ' \n{"a": 1}\n{"a": 2}\n', '\ufeff{\n  "a": {"0": 1}}'])
def test_json_is_told_however_it_is_indented(tmp_path, text):
    (tmp_path / "table.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"table.json is JSON, which is not read"):
        open_table(tmp_path / "table.json")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32"])
def test_a_wide_encoding_that_is_not_found_by_itself_may_be_named(tmp_path, encoding):
    (tmp_path / "table.csv").write_bytes("a,b\n1,2\n".encode(encoding))
    with pytest.raises(ValueError, match=r"line 1: holds a NUL byte; this is no text, or needs its `encoding`"):
        open_table(tmp_path / "table.csv")
    with open_table(tmp_path / "table.csv", encoding=encoding) as source:
        assert source.names == ("a", "b")


def test_what_a_file_is_says_its_contents_and_not_its_name(tmp_path):
    (tmp_path / "t.xls").write_text("a\tb\n1\t2\n")  # as many programs export
    with open_table(tmp_path / "t.xls") as source:
        assert source.names == ("a", "b")
