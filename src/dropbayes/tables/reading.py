"""Tables read in blocks: CSV with every cell as text, Parquet with its own types.

Nothing is guessed from the first rows of a CSV file: what a column means is decided elsewhere, from all of it or from
the model that reads it. Bytes are checked before they are parsed, so that a wrong encoding is reported by its line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import os
import pathlib
import select
import signal
import socket
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa

__all__ = ["BLOCK_BYTES", "Source", "open_table", "regrouped"]

BLOCK_BYTES = 2**20
"""The bytes of a CSV file parsed at a time; no row may be longer."""

_FOREIGN = {
    b"\xff\xfe": "UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "UTF-16 text: save it as UTF-8",
    b"\x1f\x8b": "compressed: unpack it first (gzip -dc FILE | dropbayes ... -)",
    b"PK\x03\x04": "a zip archive or a spreadsheet: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "a spreadsheet: save the sheet as CSV",
    b"%PDF": "a PDF: a table as CSV or Parquet is needed",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it first (zstd -dc FILE | dropbayes ... -)",
}


def regrouped(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly `rows` rows, the last one excepted.

    Example:
        >>> parts = [pa.table({"a": [1, 2, 3]}), pa.table({"a": [4]}), pa.table({"a": [5]})]
        >>> [part["a"].to_pylist() for part in regrouped(parts, 2)]
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
        delimiter: What separates the fields of a CSV file.
    """

    label: str
    names: tuple[str, ...]
    size: int | None
    unit: str = "bytes"
    delimiter: str = ","

    @abstractmethod
    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        """The rows, so many at a time, or as many as come."""

    @property
    @abstractmethod
    def position(self) -> int:
        """How far reading has come."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Where a row (counted from 0, the header not counted) is found, in words."""

    @abstractmethod
    def close(self) -> None:
        """Ends reading, whether or not all rows were read."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def open_table(path: str | os.PathLike[str], *, delimiter: str = ",") -> Source:
    """The table in a CSV or Parquet file; "-" is CSV from standard input.

    Args:
        path: The file.
        delimiter: What separates the fields of a CSV file.

    Raises:
        ValueError: The file is no table that can be read; the message says what it is.
        OSError: The file cannot be opened.
    """
    if len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 127:
        raise ValueError(f"`delimiter` must be one plain character, such as ',' or ';' or a tab; got {delimiter!r}.")
    if str(path) == "-":
        return _CsvSource(_standard_input(), "standard input", None, delimiter)
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name a CSV or Parquet file in it.")
    stream = path.open("rb")
    try:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        if regular and _is_parquet(path, stream):
            stream.close()
            return _ParquetSource(path)
        return _CsvSource(stream, path.name, path if regular else None, delimiter)
    except BaseException:
        stream.close()
        raise


def _is_parquet(path: pathlib.Path, stream: BinaryIO) -> bool:
    magic = stream.read(4)
    stream.seek(0)
    return magic == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")


def _checked_names(names: list[str], label: str) -> tuple[str, ...]:
    stripped = [name.strip() for name in names]
    for number, name in enumerate(stripped, start=1):
        if not name:
            raise ValueError(f"{label}: column {number} has no name in the header; every column needs one.")
        if name in stripped[: number - 1]:
            first = stripped.index(name) + 1
            raise ValueError(f"{label}: columns {first} and {number} are both named {shown(name)}; rename one of them.")
    return tuple(stripped)


def shown(value: object, *, most: int = 40) -> str:
    """A value quoted for a message: on one line, without control characters, not too long.

    Example:
        >>> shown("a" * 100)
        "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'"
    """
    text = str(value)
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def _refuse_foreign(start: bytes, label: str) -> None:
    for magic, what in _FOREIGN.items():
        if start.startswith(magic):
            raise ValueError(f"{label} is {what}.")
    if start.startswith(b"PAR1"):
        raise ValueError(f"{label} is Parquet, which cannot be read from a stream; name the file instead.")


# --- CSV -----------------------------------------------------------------------------------------------------------


class _CheckedBytes(io.RawIOBase):
    """A stream whose bytes are made sure to be UTF-8 text as they pass."""

    def __init__(self, stream: Any, label: str) -> None:
        self.stream, self.label = stream, label
        self.pushed_back = b""
        self.n_bytes, self.n_lines = 0, 1
        self.last = [b"", b""]  # enough to see how the file ends
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.error: ValueError | None = None
        self.ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self.pushed_back:
            data, self.pushed_back = self.pushed_back, b""
            if 0 <= size < len(data):
                data, self.pushed_back = data[:size], data[size:]
            return data
        data = b"" if self.ended else self.stream.read(size)
        try:
            self._check(data)
        except ValueError as error:
            self.error = error  # kept: a parser that asked for the bytes may wrap what it catches
            raise
        return data

    def _check(self, data: bytes) -> None:
        if not self.n_bytes:
            _refuse_foreign(data, self.label)
        pending = len(self.decoder.getstate()[0])
        try:
            self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = max(0, error.start - pending)
            line = self.n_lines + data.count(b"\n", 0, at)
            what = f"byte {self.n_bytes + error.start - pending + 1} (0x{error.object[error.start]:02x})"
            raise ValueError(f"{self.label}, line {line}: {what} is not UTF-8 text; save the file as UTF-8.") from None
        if b"\0" in data:
            line = self.n_lines + data.count(b"\n", 0, data.index(b"\0"))
            raise ValueError(f"{self.label}, line {line}: holds a NUL byte; this is no text file, or a damaged one.")
        self.n_bytes += len(data)
        self.n_lines += data.count(b"\n")
        if data:
            self.last = [self.last[1], data]

    def first(self, size: int) -> bytes:
        """The first bytes, which will be read again."""
        parts, left = [], size
        while left and (data := self.read(left)):
            parts.append(data)
            left -= len(data)
        self.pushed_back = b"".join(parts)
        return self.pushed_back


class _InterruptibleInput:
    """A pipe read by a thread of the parser, which a signal to the waiting main thread ends.

    While the main thread waits inside the parser no handler of Python's runs; but the signal is written to a descriptor
    at once, and the reading thread listens to that, too.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.signalled, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake = wake  # kept open

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            ready, _, _ = select.select([self.descriptor, self.signalled.fileno()], [], [])
            if self.signalled.fileno() in ready:
                raise InterruptedError("interrupted")
            data = os.read(self.descriptor, size)
            if not data:
                break
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


def _standard_input() -> Any:
    in_main = threading.current_thread() is threading.main_thread()
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):  # no file: a test's
        return sys.stdin.buffer
    return _InterruptibleInput(descriptor) if in_main and os.name == "posix" else sys.stdin.buffer


class _CsvSource(Source):
    def __init__(self, stream: Any, label: str, path: pathlib.Path | None, delimiter: str) -> None:
        self.label, self.delimiter, self._path = label, delimiter, path
        self.size = None if path is None else os.fstat(stream.fileno()).st_size
        self._bytes = _CheckedBytes(stream, label)
        self._reader: Any = None
        head = self._bytes.first(BLOCK_BYTES)
        self._raw_names, self._has_rows = self._header(head)
        self.names = _checked_names(self._raw_names, label)

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
                    option = "$'\\t'" if other == "\t" else f"'{other}'"
                    raise ValueError(
                        f"{self.label}: the header has no {self.delimiter!r}; its fields seem to be separated by "
                        f"{word}. Say so with --delimiter {option}."
                    )
        return names, has_rows

    @property
    def position(self) -> int:
        return self._bytes.n_bytes

    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        tables = self._tables()
        return tables if rows is None else regrouped(tables, rows)

    def _tables(self) -> Iterator[pa.Table]:
        from pyarrow import csv as arrow_csv

        if not self._has_rows or self._bytes.ended:
            return
        ragged: list[Any] = []

        def note(row: Any) -> str:
            ragged.append(row)
            return "error"

        try:
            self._reader = arrow_csv.open_csv(
                self._bytes,
                read_options=arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=note
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(self._raw_names, pa.string()), strings_can_be_null=False
                ),
            )
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
            raise self._explained(error, ragged) from None

    def close(self) -> None:
        """Ends reading; a thread of the parser that is still at it must be done before the interpreter can end."""
        self._bytes.ended = True
        if isinstance(self._bytes.stream, _InterruptibleInput):
            self._bytes.stream.close()
        if self._reader is not None:
            with contextlib.suppress(pa.ArrowException, OSError, ValueError):
                for _ in self._reader:
                    pass
        if self._path is not None:
            self._bytes.stream.close()

    def _ends_open(self, last_cell: str) -> bool:
        """Whether the file ends inside a quoted field, which then has swallowed all rows after its first."""
        end = b"".join(self._bytes.last)
        cell = b'"' + last_cell.replace('"', '""').encode()
        before = end[: -len(cell)][-1:]
        return end.endswith(cell) and before in (b"", b"\n", b"\r", self.delimiter.encode())

    def _explained(self, error: Exception, ragged: list[Any]) -> Exception:
        if self._bytes.error is not None:
            return self._bytes.error
        if ragged:
            row = ragged[0]
            hint = "a separator or a quotation mark too many or too few?"
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
            with self._path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
                reader = _records(file, self.delimiter)
                line = 1
                for record in reader:
                    yield line, record
                    line = reader.line_num + 1
        except (csv.Error, OSError):
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
