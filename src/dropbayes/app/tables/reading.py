"""Tables read in blocks: CSV with every cell as text, Parquet with its own types.

Nothing is guessed from the first rows of a CSV file: what a column means is decided elsewhere, from all of it or from
the model that reads it. Only a message needs the line of a row, so lines are counted by reading the file again.
"""

import codecs
import contextlib
import csv
import io
import itertools
import pathlib
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from dropbayes.estimators.columns.inference import UNNAMED
from dropbayes.runtime.files import AnyPath
from dropbayes.runtime.formatting import count
from dropbayes.runtime.validation import quote

_BLOCK_BYTES = 2**20  # of a CSV file, parsed at a time; no row may be longer
_FOREIGN: dict[bytes | tuple[bytes, ...], str] = {  # by how such files begin, in small letters and without blanks
    b"par1": "Parquet, which cannot be read from a stream; name the file instead",
    b"arrow1": "a Feather file, which is not read: save the table as CSV or Parquet",
    (b"pk\x03\x04", b"\xd0\xcf\x11"): "an Excel workbook or a zip archive, which is not read: save the sheet as CSV",
    b"\xfd7zxz\0": "compressed with xz, which is not read: unpack it with unxz, or compress it with gzip or zstd",
    (b"<!doctyp", b"<html"): "a web page, perhaps one that asks for a login: download the table itself",
    (b"[{", b'{"'): "JSON, which is not read: save the table as CSV or Parquet",
    b"%pdf": "a PDF, which is not read: save the table as CSV or Parquet",
    b"sqliteformat3\0": "an SQLite database, which is not read: save the table as CSV or Parquet",
    b"\x93numpy": "a NumPy array, which is not read: save the table as CSV or Parquet",
}


def regroup(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly `rows` rows, the last one excepted."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if (n_rows := sum(part.num_rows for part in waiting)) >= rows:
            joined, end = pa.concat_tables(waiting), n_rows - n_rows % rows
            yield from (joined.slice(start, rows) for start in range(0, end, rows))
            waiting = [joined.slice(end)]
    if any(part.num_rows for part in waiting):
        yield pa.concat_tables(waiting)


def delimiter_of(text: str) -> str:
    """The delimiter that splits the first records into equally many fields, and most of them; "," if none does."""
    beginning = "".join(text.splitlines(keepends=True)[:100])
    counts: dict[str, list[int]] = {}
    for candidate in ",;\t|":
        with contextlib.suppress(csv.Error):
            records = csv.reader(io.StringIO(beginning, newline=""), delimiter=candidate)
            counts[candidate] = [len(record) for record in records if record] or [0]
    even = [candidate for candidate, sizes in counts.items() if sizes[0] > 1 and len(set(sizes)) == 1]
    # Rows of unequal lengths are reported as such later, under the header's own delimiter.
    return max(even or counts, key=lambda candidate: counts[candidate][0], default=",")


class Source(contextlib.AbstractContextManager["Source"]):
    """A table that is read once, from its first row to its last; a context that closes it."""

    label: str  #: Its name in messages.
    names: tuple[str, ...]  #: Its columns.
    size: int  #: The last value of `position`.
    position: int = 0  #: The position of the reader.
    unit: str = "bytes"  #: The unit of `size` and `position`: "bytes" of a CSV file, "rows" of a Parquet file.
    delimiter: str = ","  #: The delimiter of a CSV file.

    @abstractmethod
    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        """The rows in blocks: of so many rows in a Parquet file, of about a megabyte in a CSV file."""

    def place(self, row: int) -> str:
        """The location of a row (counted from 0, the header not counted), in words; the table's name for -1."""
        return self.label if row < 0 else f"{self.label}, row {row + 1}"


def open_table(path: AnyPath, *, delimiter: str | None = None, encoding: str | None = None) -> Source:
    """The table in a CSV or Parquet file; "-" is CSV from standard input.

    CSV may be compressed with gzip, zstd or bzip2. Standard input, pipes and encodings other than UTF-8 are read into
    memory. By default the delimiter is detected from the first lines, and the encoding is UTF-8, or UTF-16 where the
    file begins with its mark. Raises ValueError for a file that is no table, with its kind.
    """
    try:
        "".encode(encoding or "utf-8")
    except LookupError:
        rule = "must be a text encoding such as utf-8, utf-16 or cp1252"
        raise ValueError(f"`encoding` {rule}; got {encoding!r}.") from None
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 127):
        raise ValueError(f"`delimiter` must be one plain character, such as ',' or ';' or a tab; got {delimiter!r}.")
    if str(path) == "-":
        return _CsvSource(_read_whole(sys.stdin.buffer), "standard input", delimiter, encoding)
    if "://" in str(path):
        raise ValueError(f"{str(path)!r} is an address; download the file first.")
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name a CSV or Parquet file in it.")
    with path.open("rb") as file:
        if not path.is_file():  # a pipe
            return _CsvSource(_read_whole(file), path.name, delimiter, encoding)
        if file.read(4) == b"PAR1" or path.suffix.lower() in (".parquet", ".pq"):
            if delimiter is not None or encoding is not None:
                raise ValueError(f"{path.name} is Parquet, which has no `delimiter` or `encoding`; leave them out.")
            return _ParquetSource(path)
    return _CsvSource(path, path.name, delimiter, encoding)


def _read_whole(stream: Any) -> pa.Buffer:
    """All bytes, read in parts: between them the interpreter handles signals."""
    return pa.py_buffer(b"".join(iter(lambda: stream.read1(_BLOCK_BYTES), b"")))


def _checked_names(names: list[str], label: str) -> tuple[str, ...]:
    # An index that was written without a name, as pandas does, is named by its place.
    numbers: dict[str, int] = {}
    for number, given in enumerate(names, start=1):
        name = given.strip() or f"{UNNAMED}{number}"
        if (first := numbers.setdefault(name, number)) != number:
            fault = f"columns {first} and {number} are both named {quote(name)}"
            raise ValueError(f"{label}: {fault}; rename one of them, or add the line of names if it is missing.")
    return tuple(numbers)


class _CsvSource(Source):
    def __init__(
        self, origin: pathlib.Path | pa.Buffer, label: str, delimiter: str | None, encoding: str | None
    ) -> None:
        self.label, self._origin = label, origin
        self._compression: str | None = None
        self._raw_names: list[str] = []
        self._raw = self._open()
        with self._explained():
            head = self._head(encoding)
        self.size = self._raw.size()
        self.delimiter = delimiter or delimiter_of(head)
        self._raw_names, self._has_rows = self._header(head)
        self.names = _checked_names(self._raw_names, label)

    def _head(self, encoding: str | None) -> str:
        """The beginning of the text, once its compression and its encoding are known."""
        start = self._raw.read(8)
        compressions = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
        self._compression = next((name for magic, name in compressions.items() if start.startswith(magic)), None)
        start = self._open().read(64)
        shown = b"".join(start.lower().removeprefix(codecs.BOM_UTF8).split())  # JSON may be indented
        for magic, what in _FOREIGN.items():
            if shown.startswith(magic):
                raise ValueError(f"{self.label} is {what}.")
        if encoding is None and start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "utf-16"
        if encoding is not None and codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig"):
            # Arrow would call Python's decoder from a thread of its own; one that waits for the interpreter while it
            # ends aborts the process.
            try:
                self._origin = pa.py_buffer(self._open().read().decode(encoding).encode())
            except UnicodeDecodeError as error:
                line = error.object.count(b"\n", 0, error.start) + 1
                raise self._bad_byte(error, encoding, line=line, n_before=0) from None
            self._compression = None
            self._raw = self._open()
        if "\0" in (head := self._text().read(_BLOCK_BYTES)):
            self._refuse("it holds a NUL byte")
        return head

    def _open(self) -> pa.NativeFile:
        """The bytes from their beginning, decompressed."""
        return pa.input_stream(self._origin, compression=self._compression)

    def _text(self, errors: str = "strict") -> io.TextIOWrapper:
        return io.TextIOWrapper(self._open(), "utf-8-sig", errors=errors, newline="")

    def _header(self, head: str) -> tuple[list[str], bool]:
        """The names in the first record, and whether another one follows."""
        if not head.strip():
            raise ValueError(f"{self.label} is empty; a header line with the names of the columns is needed.")
        records = (record for _, record in self._records(io.StringIO(head, newline="")))
        try:
            names, has_rows = next(records), next(records, None) is not None
        except csv.Error as error:
            raise ValueError(f"{self.label}, line 1: the header cannot be read ({error}).") from None
        if len(head) == _BLOCK_BYTES and not has_rows:
            raise ValueError(f"{self.label}, line 1: longer than 1 MB; a quotation mark left open?")
        if not has_rows and any("\n" in name for name in names):
            raise ValueError(f"{self.label}, line 1: a quotation mark is opened and never closed.")
        if len(names) == 1:
            for other, word in ((";", "';'"), ("\t", "a tab"), ("|", "'|'"), (",", "','")):
                if other != self.delimiter and other in names[0]:
                    fault = f"the header has no {self.delimiter!r}; its fields seem to be separated by {word}"
                    remedy = "Change the `delimiter`, or leave it out to have it found."
                    raise ValueError(f"{self.label}: {fault}. {remedy}")
        return names, has_rows

    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        if not self._has_rows or self._raw.closed:
            return
        self._raw.seek(0)
        last_cell, n_rows, texts = "", 0, dict.fromkeys(self._raw_names, pa.string())
        with self._explained():
            reader = arrow_csv.open_csv(
                pa.input_stream(self._raw, compression=self._compression),
                read_options=arrow_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
                parse_options=arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(column_types=texts, strings_can_be_null=False),
            )
            if reader.schema.names != self._raw_names:
                raise ValueError(f"{self.label}, line 1: the header cannot be read; check its quotation marks.")
            for batch in reader:
                if any(b"\0" in memoryview(column.buffers()[2] or b"").tobytes() for column in batch.columns):
                    self._refuse("it holds a NUL byte")
                n_rows += batch.num_rows
                last_cell = batch.column(batch.num_columns - 1)[-1].as_py() if batch.num_rows else last_cell
                self.position = self._raw.tell()
                yield pa.Table.from_batches([batch]).rename_columns(list(self.names))
        if "\n" in last_cell:  # perhaps it was never closed, and has swallowed all rows after its first
            try:
                for _ in csv.reader(self._text("replace"), delimiter=self.delimiter, strict=True):
                    pass
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    place = self.place(n_rows - 1)
                    raise ValueError(f"{place}: a quotation mark is opened and never closed.") from None

    def __exit__(self, *failure: object) -> None:
        self._raw.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of the decompression, of the encoding and of the parser into those of the file."""
        try:
            yield
        except (UnicodeDecodeError, pa.ArrowException) as error:
            self._refuse(str(error))
        except OSError as error:
            if error.errno is not None:  # the disk's, not the decompression's
                raise
            fault = f"its {self._compression} data end badly ({error})"
            raise ValueError(f"{self.label} is damaged or cut short: {fault}.") from None

    def _refuse(self, reason: str) -> NoReturn:
        """Raises the error for the first line that is no text, or the first record that is no row."""
        if "straddl" in reason:
            raise ValueError(f"{self.label}: a row is longer than 1 MB; is a quotation mark left open?") from None
        expected = len(self._raw_names)
        hint = "a separator or a quotation mark too many or too few?"
        if expected == 1 or self._raw_names[:1] == ["sep="]:  # a title, or Excel's note of its delimiter
            first = quote(self.delimiter.join(self._raw_names))
            hint = f"the first line, {first}, is taken for the header; remove it if it is none."
        with contextlib.suppress(csv.Error):
            for line, record in self._records(self._checked_lines()):
                if expected and len(record) != expected:
                    fault = f"{count(len(record), 'field')} where the header has {expected}"
                    raise ValueError(f"{self.label}, line {line}: {fault}; {hint}") from None
        raise ValueError(f"{self.label}: cannot be read as CSV: {reason}") from None

    def _checked_lines(self) -> Iterator[str]:
        """The lines of the text; an error at the first byte that is none."""
        n_before = 0
        for number, line in enumerate(io.BufferedReader(self._open()), start=1):
            try:
                text = line.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise self._bad_byte(error, "UTF-8", line=number, n_before=n_before) from None
            if "\0" in text:
                what = "holds a NUL byte; this is no text, or needs its `encoding`, such as utf-16-le or utf-32"
                raise ValueError(f"{self.label}, line {number}: {what}.") from None
            n_before += len(line)
            yield text

    def _bad_byte(self, error: UnicodeDecodeError, encoding: str, *, line: int, n_before: int) -> ValueError:
        byte = f"byte {n_before + error.start + 1} (0x{error.object[error.start]:02x})"
        remedy = "name the `encoding` of the file (cp1252 is Windows' own), or save it as UTF-8"
        if min(self._open().read(64)) < 9:
            remedy = "the file looks like no text at all: save the table as CSV or Parquet, or name its `encoding`"
        return ValueError(f"{self.label}, line {line}: {byte} is not {encoding} text; {remedy}.")

    def place(self, row: int) -> str:
        if row >= 0:
            with contextlib.suppress(csv.Error, OSError):
                for line, _ in itertools.islice(self._records(self._text("replace")), row + 1, None):
                    return f"{self.label}, line {line}"
        return self.label

    def _records(self, text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """The records that are not blank, each with its first line."""
        csv.field_size_limit(max(csv.field_size_limit(), _BLOCK_BYTES))
        reader = csv.reader(text, delimiter=self.delimiter)
        line = 1
        for record in reader:
            if record:
                yield line, record
            line = reader.line_num + 1


class _ParquetSource(Source):
    unit = "rows"

    def __init__(self, path: pathlib.Path) -> None:
        self.label = path.name
        try:
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BLOCK_BYTES)  # in parts
        except pa.ArrowException as error:
            raise ValueError(f"{self.label} is not a whole Parquet file ({_first_sentence(error)}).") from None
        self.size = self._file.metadata.num_rows
        self.names = _checked_names(list(self._file.schema_arrow.names), self.label)

    def blocks(self, rows: int | None = None) -> Iterator[pa.Table]:
        try:
            for batch in self._file.iter_batches(batch_size=rows or 65_536, use_threads=False):
                self.position += batch.num_rows
                yield pa.Table.from_batches([batch]).rename_columns(list(self.names))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.label} is a damaged Parquet file ({_first_sentence(error)}).") from None

    def __exit__(self, *failure: object) -> None:
        self._file.close(force=True)


def _first_sentence(error: BaseException) -> str:
    return str(error).split(". ")[0].split("\n")[0].rstrip(".")
