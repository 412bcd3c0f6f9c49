"""Tables written in blocks: whole or not at all, and harmless in a spreadsheet."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.columns.notation import ANY_NUMBER
from dropbayes.runtime import files

__all__ = ["Sink", "without_formulas", "write_whole"]

# What a spreadsheet takes for the start of a formula, also in full width; a number may begin with a sign.
_FORMULA = r"^[=+\-@\t\r\n＝＋－＠]"


def without_formulas(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The texts with a single quote before each that a spreadsheet would run as a formula; numbers stay.

    Example:
        >>> without_formulas(pa.array(["=1+1", "-5,5 €", "-x", "plain"])).to_pylist()
        ["'=1+1", '-5,5 €', "'-x", 'plain']
    """
    suspect = pc.match_substring_regex(texts, _FORMULA)
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
            raise ValueError(
                f"the output must end in .csv or .parquet, or be - for standard output; got {str(path)!r}."
            )
        self._context: Any = None
        self._writer: Any = None
        self._file: Any = None
        self._started = False
        self._waiting: list[pa.Table] = []

    def __enter__(self) -> Sink:
        self._context = contextlib.nullcontext(sys.stdout.buffer) if self.to_stdout else files.replacement(self.path)
        self._file = self._context.__enter__()
        return self

    def write(self, table: pa.Table) -> None:
        """Appends rows; the columns of all calls must be the same."""
        if self.as_parquet:
            self._write_parquet(table)
        else:
            self._write_csv(table)

    def _write_parquet(self, table: pa.Table) -> None:
        if self._writer is None:
            from pyarrow import parquet

            self._writer = parquet.ParquetWriter(pa.PythonFile(self._file, "w"), table.schema)
        self._waiting.append(table)
        if sum(table.num_rows for table in self._waiting) >= 65_536:  # many small groups are slow to read
            self._write_group()

    def _write_group(self) -> None:
        self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting = []

    def _write_csv(self, table: pa.Table) -> None:
        if not self._started:
            names = pa.array(table.column_names, pa.string())
            header = _quote(without_formulas(names), self.delimiter).to_pylist()
            self._file.write((self.delimiter.join(header) + "\n").encode())
            self._started = True
        for text in _csv_text(table, self.delimiter, self.decimal):
            self._file.write(text)
        if self.to_stdout:
            self._file.flush()

    def __exit__(self, *failure: object) -> None:
        try:
            if self._writer is not None:
                if failure[0] is None:
                    if self._waiting:
                        self._write_group()
                    self._writer.close()
                else:  # what it still holds is not wanted; a full disk would only fail again
                    with contextlib.suppress(Exception):
                        self._writer.close()
        except BaseException:
            self._context.__exit__(*sys.exc_info())
            raise
        self._context.__exit__(*failure)


def _csv_text(table: pa.Table, delimiter: str, decimal: str) -> Iterator[bytes]:
    """The rows as lines, put together column by column; a cell has quotation marks only where it needs them."""
    for batch in table.combine_chunks().to_batches():
        cells = []
        for column in batch.columns:
            texts = pc.cast(column, pa.string())
            if not _is_simple(column.type):
                texts = _quote(without_formulas(texts), delimiter)
            elif decimal != "." and pa.types.is_floating(column.type):
                texts = _quote(pc.replace_substring(texts, ".", decimal), delimiter)
            cells.append(texts)
        if len(cells) == 1:  # an empty line would be no row
            cells = [pc.if_else(pc.equal(pc.coalesce(cells[0], pa.scalar("")), ""), '""', cells[0])]
        options = {"null_handling": "replace", "null_replacement": ""}
        lines = pc.binary_join_element_wise(*cells, delimiter, **options)
        yield pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")[0].as_py().encode() + b"\n"


def _quote(texts: pa.Array, delimiter: str) -> pa.Array:
    needs = pc.match_substring_regex(texts, f'["\r\n\\x{ord(delimiter):02x}]|^\\s|\\s$')
    if not pc.any(needs).as_py():
        return texts
    doubled = pc.binary_join_element_wise('"', pc.replace_substring(texts, '"', '""'), '"', "")
    return pc.if_else(needs, doubled, texts)


def _is_simple(kind: pa.DataType) -> bool:
    """Whether the values are numbers, booleans or times, whose texts need no care."""
    t = pa.types
    return any(is_kind(kind) for is_kind in (t.is_integer, t.is_floating, t.is_boolean, t.is_temporal, t.is_decimal))


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file that is whole or not there; "-" is standard output."""
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    files.write_text(path, text)
