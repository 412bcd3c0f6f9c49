"""Tests of files as UTF-8 text: compressed and encoded in every way people have, or refused by name."""

import bz2
import gzip
import io
import lzma

import pyarrow as pa
import pytest

from dropbayes.app.tables import open_table
from dropbayes.app.tables.decoding import as_utf8, check_encoding

TEXT = "größe,b\n" + "".join(f"{i},ø{i}\n" for i in range(5000))


def zstandard(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstandard])
def test_a_compressed_table_is_read_as_the_table_it_was(tmp_path, compress):
    (tmp_path / "t.csv").write_bytes(compress(TEXT.encode()))
    with open_table(tmp_path / "t.csv") as source:
        table = pa.concat_tables(source.blocks(700))
        assert source.place(1) == "t.csv, line 3"
    assert table["größe"].to_pylist() == [str(i) for i in range(5000)]
    assert table["b"][-1].as_py() == "ø4999"


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_data_cut_short_are_refused(tmp_path, compress):
    data = compress(TEXT.encode())
    (tmp_path / "t.csv").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"t\.csv is damaged or cut short"), open_table(tmp_path / "t.csv") as source:
        list(source.blocks())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1", "cp1252", "utf-8-sig"])
def test_other_encodings_are_read(tmp_path, encoding):
    (tmp_path / "t.csv").write_bytes(TEXT.encode(encoding))
    named = None if encoding in ("utf-16", "utf-8-sig") else encoding  # these say themselves what they are
    with open_table(tmp_path / "t.csv", encoding=named) as source:
        assert source.names == ("größe", "b")
        assert pa.concat_tables(source.blocks())["b"][-1].as_py() == "ø4999"


def test_text_in_parts_is_the_same_text():
    stream, compressed = as_utf8(io.BytesIO(TEXT.encode("utf-16")), "t")
    parts = []
    while part := stream.read(7):
        parts.append(part)
    assert b"".join(parts).decode() == TEXT
    assert not compressed


@pytest.mark.parametrize(("start", "what"), [(b"PK\x03\x04", "Excel"), (b"\xd0\xcf\x11\xe0", "Excel"), (b"%PDF", "PDF"),
                                             (b"<!doctype html>", "a web page"), (b'[{"x": 1}]', "JSON"),
                                             (b"PAR1", "Parquet, which cannot be read from a stream")])  # fmt: skip
def test_what_is_no_table_is_refused_by_name(start, what):
    with pytest.raises(ValueError, match=what):
        as_utf8(io.BytesIO(start + b"x" * 20), "t")


def test_an_unknown_encoding_is_refused():
    with pytest.raises(ValueError, match="`encoding` must be a text encoding"):
        check_encoding("morse")
