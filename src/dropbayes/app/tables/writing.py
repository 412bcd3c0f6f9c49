"""Tables written in blocks: whole or not at all, and harmless in a spreadsheet."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns.notation import ANY_NUMBER
from dropbayes.runtime import files
from dropbayes.runtime.validation import quote


def without_formulas(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The texts with a single quote before each that a spreadsheet would run as a formula; numbers stay.

    Example:
        >>> without_formulas(pa.array(["=1+1", "-5,5 €", "-x", "plain"])).to_pylist()
        ["'=1+1", '-5,5 €', "'-x", 'plain']
    """
    suspect = pc.match_substring_regex(texts, r"^[=+\-@\t\r\n＝＋－＠]")  # a number may begin with a sign
    if not pc.any(suspect).as_py():
        return texts
    dangerous = pc.and_not(suspect, pc.match_substring_regex(texts, ANY_NUMBER))
    return pc.if_else(dangerous, pc.binary_join_element_wise("'", texts, ""), texts)


class Sink:
    """A CSV or Parquet file that appears under its name once it is whole; "-" is CSV on standard output.

    Use it as a context: leaving it by an exception removes what was written and leaves the previous file as it was.

    Args:
        path: The file; its name ends in .csv, .parquet or .pq.
        delimiter: The delimiter of a CSV file.
        decimal: The decimal mark of the numbers in a CSV file.
    """

    def __init__(self, path: str | os.PathLike[str], *, delimiter: str = ",", decimal: str = ".") -> None:
        self.to_stdout = str(path) == "-"
        self.delimiter, self.decimal = delimiter, decimal
        self.path = pathlib.Path(path)
        special = not self.to_stdout and self.path.exists() and not self.path.is_file() and not self.path.is_dir()
        self.as_parquet = not self.to_stdout and self.path.suffix.lower() in (".parquet", ".pq")
        if not (self.to_stdout or self.as_parquet or special or self.path.suffix.lower() in (".csv", ".tsv", ".txt")):
            raise ValueError(f"the output must end in .csv or .parquet, or be - (standard output); got {str(path)!r}.")
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self._writer: Any = None
        self._waiting: list[pa.Table] = []

    def __enter__(self) -> Sink:
        place = contextlib.nullcontext(sys.stdout.buffer) if self.to_stdout else files.replacement(self.path)
        self._file = self._stack.enter_context(place)
        self._stack.push(self._close_writer)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)

    def _close_writer(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._writer is None or not self.as_parquet:
            return
        if failure is None:
            self._write_group(1)
            self._writer.close()
        else:  # the rows it still holds are not wanted, and a full disk would only fail again
            with contextlib.suppress(Exception):
                self._writer.close()

    def _write_group(self, n_rows: int) -> None:
        """Writes the rows that wait as one group of a Parquet file, once there are so many."""
        if sum(table.num_rows for table in self._waiting) >= n_rows:
            self._writer.write_table(pa.concat_tables(self._waiting))
            self._waiting = []

    def write(self, table: pa.Table) -> None:
        """Appends rows; the columns of all calls must be the same."""
        if self.as_parquet:
            from pyarrow import parquet

            self._writer = self._writer or parquet.ParquetWriter(pa.PythonFile(self._file, "w"), table.schema)
            self._waiting.append(table)
            self._write_group(65_536)  # many small groups are slow to read
            return
        if self._writer is None:
            self._writer = self._file
            names = _quote(without_formulas(pa.array(table.column_names, pa.string())), self.delimiter)
            self._file.write((self.delimiter.join(names.to_pylist()) + "\n").encode())
        for batch in table.combine_chunks().to_batches():
            self._file.write(self._lines(batch))
        if self.to_stdout:
            self._file.flush()

    def _lines(self, batch: pa.RecordBatch) -> bytes:
        """The rows as lines, put together column by column; a cell has quotation marks only where it needs them."""
        t, cells = pa.types, []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                texts = pc.cast(column, pa.string())
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
                raise ValueError(
                    f"column {quote(name)}: values of type {column.type} cannot be written as CSV; write a .parquet "
                    "file, or leave the column out with `keep`."
                ) from None
            plain = (t.is_integer, t.is_floating, t.is_boolean, t.is_temporal, t.is_decimal)
            if not any(is_kind(column.type) for is_kind in plain):
                texts = _quote(without_formulas(texts), self.delimiter)
            elif self.decimal != "." and t.is_floating(column.type):
                texts = _quote(pc.replace_substring(texts, ".", self.decimal), self.delimiter)
            cells.append(texts)
        if len(cells) == 1:  # an empty line would be no row
            cells = [pc.if_else(pc.equal(pc.coalesce(cells[0], pa.scalar("")), ""), '""', cells[0])]
        options = {"null_handling": "replace", "null_replacement": ""}
        lines = pc.binary_join_element_wise(*cells, self.delimiter, **options)
        return pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")[0].as_py().encode() + b"\n"


def _quote(texts: pa.Array, delimiter: str) -> pa.Array:
    needs = pc.match_substring_regex(texts, f'["\r\n\\x{ord(delimiter):02x}]|^\\s|\\s$')
    if not pc.any(needs).as_py():
        return texts
    doubled = pc.binary_join_element_wise('"', pc.replace_substring(texts, '"', '""'), '"', "")
    return pc.if_else(needs, doubled, texts)
