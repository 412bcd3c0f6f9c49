"""Tables read in blocks: CSV with every cell as text, Parquet with its own types.

Nothing is guessed from the first rows of a CSV file: what a column means is decided elsewhere, from all of it or from
the model that reads it. Bytes are checked before they are parsed, so that a wrong encoding is reported by its line.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import pathlib
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from dropbayes.app.tables.decoding import as_utf8, check_encoding
from dropbayes.app.tables.delimiters import delimiter_of
from dropbayes.app.tables.streams import (
    CheckedBytes,
    InterruptibleInput,
    ParserInput,
    interruptible,
    standard_input,
    wait_for_release,
)
from dropbayes.columns.inference import UNNAMED
from dropbayes.runtime.validation import quote

__all__ = ["BLOCK_BYTES", "Source", "open_table", "regroup"]


BLOCK_BYTES = 2**20
"""The bytes of a CSV file parsed at a time; no row may be longer."""


def regroup(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly `rows` rows, the last one excepted.

    Example:
        >>> parts = [pa.table({"a": [1, 2, 3]}), pa.table({"a": [4]}), pa.table({"a": [5]})]
        >>> [part["a"].to_pylist() for part in regroup(parts, 2)]
        [[1, 2], [3, 4], [5]]
    """
    waiting: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while count + table.num_rows - start >= rows:
            taken = rows - count
            waiting.append(table.slice(start, taken))
            yield pa.concat_tables(waiting)
            waiting, count, start = [], 0, start + taken
        if start < table.num_rows:
            waiting.append(table.slice(start))
            count += table.num_rows - start
    if waiting:
        yield pa.concat_tables(waiting)


class Source(ABC):
    """A table that is read once, from its first row to its last; a context that closes it.

    Attributes:
        label: What to call it in messages.
        names: Its columns.
        size: What `position` ends at; None if unknown.
        unit: What both count: "bytes" of a CSV file, "rows" of a Parquet file.
        delimiter: The delimiter of a CSV file.
    """

    label: str
    names: tuple[str, ...]
    size: int | None
    unit: str = "bytes"
    delimiter: str = ","

    @abstractmethod
    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        """The rows in blocks of this size, or of the reader's own."""

    @property
    @abstractmethod
    def position(self) -> int:
        """The position of the reader."""

    @abstractmethod
    def place(self, row: int) -> str:
        """The location of a row (counted from 0, the header not counted), in words."""

    @abstractmethod
    def close(self) -> None:
        """Ends reading, whether or not all rows were read."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def open_table(path: str | os.PathLike[str], *, delimiter: str | None = None, encoding: str | None = None) -> Source:
    """The table in a CSV or Parquet file; "-" is CSV from standard input.

    CSV may be compressed with gzip, zstd, bzip2 or xz.

    Args:
        path: The file.
        delimiter: The delimiter of a CSV file; by default, detected from its first lines.
        encoding: The encoding of a CSV file; by default UTF-8, or UTF-16 where the file says so itself.

    Raises:
        ValueError: The file is no table that can be read; the message says what it is.
        OSError: The file cannot be opened.
    """
    check_encoding(encoding)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 127):
        raise ValueError(f"`delimiter` must be one plain character, such as ',' or ';' or a tab; got {delimiter!r}.")
    if str(path) == "-":
        return _CsvSource(standard_input(), "standard input", None, delimiter, encoding)
    if "://" in str(path):
        raise ValueError(f"{str(path)!r} is an address; download the file first.")
    path = pathlib.Path(path)
    if path.suffix.lower() in (".xlsx", ".xls", ".xlsm", ".ods") and path.is_file():
        raise ValueError(f"{path.name} is a spreadsheet, which is not read: save the sheet as CSV.")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name a CSV or Parquet file in it.")
    stream = path.open("rb")
    try:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        if regular and _is_parquet(path, stream):
            stream.close()
            return _ParquetSource(path)
        if regular:
            return _CsvSource(stream, path.name, path, delimiter, encoding)
        return _CsvSource(interruptible(stream), path.name, None, delimiter, encoding)
    except BaseException:
        stream.close()
        raise


def _is_parquet(path: pathlib.Path, stream: BinaryIO) -> bool:
    magic = stream.read(4)
    stream.seek(0)
    return magic == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")


def _checked_names(names: list[str], label: str) -> tuple[str, ...]:
    # An index that was written without a name, as pandas does, is named by its place.
    stripped = [name.strip() or f"{UNNAMED}{number}" for number, name in enumerate(names, start=1)]
    for number, name in enumerate(stripped, start=1):
        if name in stripped[: number - 1]:
            first = stripped.index(name) + 1
            raise ValueError(f"{label}: columns {first} and {number} are both named {quote(name)}; rename one of them.")
    return tuple(stripped)


# --- CSV -----------------------------------------------------------------------------------------------------------


class _CsvSource(Source):
    def __init__(
        self, stream: Any, label: str, path: pathlib.Path | None, delimiter: str | None, encoding: str | None
    ) -> None:
        self.label, self._path, self._encoding = label, path, encoding
        self.size = None if path is None else os.fstat(stream.fileno()).st_size
        self._stream = stream
        self._reader: Any = None
        self._parser_input: Callable[[], ParserInput | None] = lambda: None
        text, compressed = as_utf8(stream, label, encoding=encoding)
        self._file = stream if compressed and path is not None else None  # tells how far reading has come
        self._bytes = CheckedBytes(text, label)
        try:
            head = self._bytes.first(BLOCK_BYTES)
            self.delimiter = delimiter or delimiter_of(head.decode("utf-8-sig", errors="ignore"))
            self._raw_names, self._has_rows = self._header(head)
            self.names = _checked_names(self._raw_names, label)
        except BaseException:
            self.close()
            raise

    def _header(self, head: bytes) -> tuple[list[str], bool]:
        """The names in the first record, and whether another one follows."""
        text = head.decode("utf-8-sig", errors="ignore")  # the last character may be cut
        if not text.strip():
            raise ValueError(f"{self.label} is empty; a header line with the names of the columns is needed.")
        records = (record for record in _records(io.StringIO(text, newline=""), self.delimiter) if record)
        try:
            names = next(records)
            has_rows = next(records, None) is not None
        except csv.Error as error:
            raise ValueError(f"{self.label}, line 1: the header cannot be read ({error}).") from None
        if len(head) == BLOCK_BYTES and not has_rows:
            raise ValueError(
                f"{self.label}, line 1: longer than {BLOCK_BYTES // 2**20} MB; a quotation mark left open?"
            )
        if not has_rows and any("\n" in name for name in names):
            raise ValueError(f"{self.label}, line 1: a quotation mark is opened and never closed.")
        if len(names) == 1:
            for other, word in ((";", "';'"), ("\t", "a tab"), ("|", "'|'"), (",", "','")):
                if other != self.delimiter and other in names[0]:
                    raise ValueError(
                        f"{self.label}: the header has no {self.delimiter!r}; its fields seem to be separated by "
                        f"{word}. Change the `delimiter`, or leave it out to have it found."
                    )
        return names, has_rows

    @property
    def position(self) -> int:
        return self._bytes.n_bytes if self._file is None or self._file.closed else self._file.tell()

    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        tables = self._tables()
        return tables if rows is None else regroup(tables, rows)

    def _tables(self) -> Iterator[pa.Table]:
        if not self._has_rows or self._bytes.ended:
            return
        ragged: list[Any] = []
        try:
            self._reader = self._open_reader(ragged)
            if self._reader.schema.names != self._raw_names:
                raise ValueError(f"{self.label}, line 1: the header cannot be read; check its quotation marks.")
            n_rows = 0
            for batch in self._reader:
                n_rows += batch.num_rows
                if batch.num_rows:
                    last_cell = batch.column(batch.num_columns - 1)[-1].as_py()
                yield pa.Table.from_batches([batch]).rename_columns(list(self.names))
            if n_rows and self._ends_open(last_cell):
                raise ValueError(f"{self.place(n_rows - 1)}: a quotation mark is opened and never closed.")
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, pa.ArrowException) and self._bytes.error is None:
                raise
            raise self._explain(error, ragged) from None

    def _open_reader(self, ragged: list[Any]) -> Any:
        from pyarrow import csv as arrow_csv

        parser_input = ParserInput(self._bytes.read, ragged)
        self._parser_input = weakref.ref(parser_input)
        try:
            return arrow_csv.open_csv(
                parser_input,
                read_options=arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=parser_input.refuse
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(self._raw_names, pa.string()), strings_can_be_null=False
                ),
            )
        finally:
            del parser_input  # which the traceback of an error would keep alive

    def close(self) -> None:
        """Ends reading; a thread of the parser that is still at it must be done before the interpreter can end."""
        self._bytes.ended = True
        stream = self._stream
        if isinstance(stream, InterruptibleInput):
            stream.wake()
        if self._reader is not None:
            with contextlib.suppress(pa.ArrowException, OSError, ValueError):
                for _ in self._reader:
                    pass
            self._reader = None
        wait_for_release(self._parser_input)
        if self._path is not None or isinstance(stream, InterruptibleInput):
            stream.close()

    def _ends_open(self, last_cell: str) -> bool:
        """Whether the file ends inside a quoted field, which then has swallowed all rows after its first."""
        end = b"".join(self._bytes.last)
        cell = b'"' + last_cell.replace('"', '""').encode()
        before = end[: -len(cell)][-1:]
        return end.endswith(cell) and before in (b"", b"\n", b"\r", self.delimiter.encode())

    def _explain(self, error: Exception, ragged: list[Any]) -> Exception:
        if self._bytes.error is not None:
            return self._bytes.error
        if ragged:
            row = ragged[0]
            hint = "a separator or a quotation mark too many or too few?"
            if row.expected_columns == 1:
                hint = f"the first line, {quote(self._raw_names[0])}, is taken for the header."
            expected = f"the header has {row.expected_columns}"
            where = self._ragged_place(row)
            return ValueError(f"{where}: {row.actual_columns} fields where {expected}; {hint}")
        if "straddl" in str(error):
            return ValueError(
                f"{self.label}: a row is longer than {BLOCK_BYTES // 2**20} MB; is a quotation mark left open?"
            )
        return ValueError(f"{self.label}: cannot be read as CSV: {error}")

    def _ragged_place(self, row: Any) -> str:
        if self._path is not None:
            for line, record in self._numbered_records():
                if len(record) not in (0, row.expected_columns):
                    return f"{self.label}, line {line}"
        return self.label if row.number is None else f"{self.label}, row {row.number - 1}"

    def place(self, row: int) -> str:
        if self._path is not None:
            seen = -2
            for line, record in self._numbered_records():
                seen += bool(record)
                if seen == row:
                    return f"{self.label}, line {line}"
        return f"{self.label}, row {row + 1}"

    def _numbered_records(self) -> Iterator[tuple[int, list[str]]]:
        """The records of the file with their first lines, read again: only a message needs them."""
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                text, _ = as_utf8(file, self.label, encoding=self._encoding)
                lines = io.TextIOWrapper(io.BufferedReader(text), "utf-8-sig", errors="replace", newline="")
                reader = _records(lines, self.delimiter)
                line = 1
                for record in reader:
                    yield line, record
                    line = reader.line_num + 1
        except (csv.Error, OSError, ValueError):
            return


def _records(lines: Iterable[str], delimiter: str) -> Any:
    csv.field_size_limit(max(csv.field_size_limit(), BLOCK_BYTES))
    return csv.reader(lines, delimiter=delimiter)


# --- Parquet -------------------------------------------------------------------------------------------------------


class _ParquetSource(Source):
    unit = "rows"

    def __init__(self, path: pathlib.Path) -> None:
        from pyarrow import parquet

        self.label, self._row = path.name, 0
        try:
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES)  # in parts
        except pa.ArrowException as error:
            raise ValueError(f"{self.label} is not a whole Parquet file ({_first_sentence(error)}).") from None
        self.size = self._file.metadata.num_rows
        self.names = _checked_names(list(self._file.schema_arrow.names), self.label)

    @property
    def position(self) -> int:
        return self._row

    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        try:
            for batch in self._file.iter_batches(batch_size=rows or 65_536, use_threads=False):
                self._row += batch.num_rows
                yield pa.Table.from_batches([batch]).rename_columns(list(self.names))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.label} is a damaged Parquet file ({_first_sentence(error)}).") from None

    def place(self, row: int) -> str:
        return f"{self.label}, row {row + 1}"

    def close(self) -> None:
        self._file.close(force=True)


def _first_sentence(error: BaseException) -> str:
    return str(error).split(". ")[0].split("\n")[0].rstrip(".")
