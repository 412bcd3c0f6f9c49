"""Tables written in blocks: whole or not at all, and harmless in a spreadsheet."""

import contextlib
import itertools
import pathlib
import sys
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from dropbayes.app.tables.reading import regroup
from dropbayes.estimators.columns.dates import days_of
from dropbayes.estimators.columns.notation import ANY_NUMBER
from dropbayes.runtime import files
from dropbayes.runtime.validation import quote


def without_formulas(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The texts with a single quote before each that a spreadsheet would run as a formula; numbers stay."""
    suspect = pc.match_substring_regex(texts, r"^[=+\-@\t\r\n＝＋－＠]")  # a number may begin with a sign
    if not pc.any(suspect).as_py():
        return texts
    dangerous = pc.and_not(suspect, pc.match_substring_regex(texts, ANY_NUMBER))
    return pc.if_else(dangerous, pc.binary_join_element_wise("'", texts, ""), texts)


def is_parquet(path: files.AnyPath) -> bool:
    """Whether a table is written to this path as Parquet, not as CSV; raises ValueError if its name says neither."""
    place = pathlib.Path(path)
    suffix, is_pipe = place.suffix.lower(), place.exists() and not place.is_file() and not place.is_dir()
    if suffix in (".parquet", ".pq"):
        return True
    if not (str(path) == "-" or is_pipe or suffix in (".csv", ".tsv", ".txt")):
        raise ValueError(f"the output must end in .csv, .tsv or .parquet, or be - (a stream); got {str(path)!r}.")
    return False


def write_tables(path: files.AnyPath, tables: Iterable[pa.Table], *, delimiter: str = ",", decimal: str = ".") -> None:
    """Writes tables of the same columns, one after the other, to a CSV or Parquet file; "-" is CSV on standard output.

    The file appears under its name once it is whole; an exception, also of the tables, leaves the previous one as it
    was. The delimiter and the decimal mark are those of a CSV file; that of a name in .tsv is a tab.
    """
    as_parquet = is_parquet(path)
    delimiter = "\t" if str(path).lower().endswith(".tsv") else delimiter
    with contextlib.nullcontext(sys.stdout.buffer) if str(path) == "-" else files.replacement(path) as file:
        if as_parquet:
            groups = regroup(tables, 65_536)  # many small ones are slow to read
            first = next(groups)
            with parquet.ParquetWriter(pa.PythonFile(file, "w"), first.schema) as writer:
                for group in itertools.chain([first], groups):
                    writer.write_table(group)
            return
        for number, table in enumerate(tables):
            if not number:
                names = _quote(without_formulas(pa.array(table.column_names, pa.string())), delimiter)
                file.write((delimiter.join(names.to_pylist()) + "\n").encode())
            for batch in table.combine_chunks().to_batches():
                file.write(_lines(batch, delimiter, decimal))
            file.flush()


def _lines(batch: pa.RecordBatch, delimiter: str, decimal: str) -> bytes:
    """The rows as lines, put together column by column; a cell has quotation marks only where it needs them."""
    t, cells = pa.types, list[pa.Array]()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if t.is_duration(column.type):  # in days, as a model reads it
            column = pa.array(days_of(column, ""), from_pandas=True)
        try:
            cells.append(pc.cast(column, pa.string()))
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            fault = f"values of type {column.type} cannot be written as CSV; write a .parquet file"
            raise ValueError(f"column {quote(name)}: {fault}, or leave the column out with `keep`.") from None
        if decimal != "." and t.is_floating(column.type):
            cells[-1] = _quote(pc.replace_substring(cells[-1], ".", decimal), delimiter)
    plain = (t.is_integer, t.is_floating, t.is_boolean, t.is_temporal, t.is_decimal)
    texts = [i for i, column in enumerate(batch.columns) if not any(is_kind(column.type) for is_kind in plain)]
    if texts:  # all at once: a pattern takes milliseconds to compile
        written = _quote(without_formulas(pa.concat_arrays([cells[i] for i in texts])), delimiter)
        for number, i in enumerate(texts):
            cells[i] = written.slice(number * len(batch), len(batch))
    if len(cells) == 1:  # an empty line would be no row
        cells = [pc.if_else(pc.equal(pc.coalesce(cells[0], pa.scalar("")), ""), '""', cells[0])]
    lines = pc.binary_join_element_wise(*cells, delimiter, null_handling="replace", null_replacement="")
    return pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")[0].as_py().encode() + b"\n"


def _quote(texts: pa.Array, delimiter: str) -> pa.Array:
    needs = pc.match_substring_regex(texts, f'["\r\n\\x{ord(delimiter):02x}]|^\\s|\\s$')
    doubled = pc.binary_join_element_wise('"', pc.replace_substring(texts, '"', '""'), '"', "")
    return pc.if_else(needs, doubled, texts)
