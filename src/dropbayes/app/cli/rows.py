r"""The rows of a table: whole to learn from, or a window at a time as a fitted model reads them.

The windows are cut at the same rows whatever the blocks a file is read in, so a row is always computed in the same
batch and has the same bits.
"""

from __future__ import annotations

import pathlib
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from dropbayes.app.cli.messages import note
from dropbayes.app.models.model import Model
from dropbayes.app.tables import Source, open_table, regroup
from dropbayes.estimators.columns import Column, Encoded, check_columns, encode
from dropbayes.estimators.columns.cells import Place
from dropbayes.predictive import Mixture
from dropbayes.runtime import files
from dropbayes.runtime.arrays import NumpyArray
from dropbayes.runtime.formatting import count, plain_number
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import quote

if TYPE_CHECKING:  # it brings SciPy, for which a prediction need not wait
    from dropbayes.predictive.scoring import ScoreValue


def read_blocks(source: Source, blocks: Iterable[pa.Table], *, title: str) -> Iterator[pa.Table]:
    """Blocks of a table's rows, with a progress bar; raises ValueError if there are no rows."""
    n_rows = 0
    with ProgressBar(title, source.size, unit=source.unit) as bar:
        for block in blocks:
            yield block
            n_rows += block.num_rows
            bar.advance_to(source.position)
    if not n_rows:
        raise ValueError(f"{source.label}: has a header but no rows.")


class Window(NamedTuple):
    table: pa.Table
    encoded: Encoded
    place: Place  # the location of each row; of -1, that of the table


def windows(model: Model, source: Source, *, allow_new: bool, title: str, rows: int | None = None) -> Iterator[Window]:
    """The rows of a table as inputs of a model; says on standard error what was missing, new or far from training."""
    check_columns(model.schema, source.names, source.label)
    missing, new, outside = Counter[str](), Counter[str](), Counter[str]()
    first = 0
    for table in read_blocks(source, regroup(source.blocks(rows), model.ensemble.block_rows), title=title):

        def place(row: int, first: int = first) -> str:
            return source.place(row if row < 0 else first + row)

        encoded = encode(model.schema, table, at=place, allow_new=allow_new)
        missing.update(encoded.missing)
        new.update(encoded.new)
        outside.update({name: int(mask.sum()) for name, mask in encoded.outside.items()})
        yield Window(table, encoded, place)
        first += table.num_rows
    _note_unusual_cells(model, missing, new, outside)


def _note_unusual_cells(model: Model, missing: Counter[str], new: Counter[str], outside: Counter[str]) -> None:
    lines = []
    for column in model.schema.columns:
        if missing[column.name]:
            warned = "" if column.flagged else "; no training row lacked it"
            taken = f"{count(missing[column.name], 'missing value')} of {column.name!r} taken as"
            lines.append(f"{taken} {filled_value(column)}{warned}.")
        if new[column.name]:
            values = f"{count(new[column.name], 'value')} of {column.name!r}"
            lines.append(f"{values} new to the model, encoded as all zeros.")
    for line in lines[:10]:
        note(line)
    if len(lines) > 10:
        note(f"the same of {count(len(lines) - 10, 'further column')}.")
    beyond = {name: n for name, n in outside.items() if name not in new}
    if beyond:
        some = ", ".join(f"{name!r} in {count(n, 'row')}" for name, n in list(beyond.items())[:5])
        more = f" and {len(beyond) - 5} more columns" if len(beyond) > 5 else ""
        dates = [column.name for column in model.schema.columns if column.kind == "date" and column.name in beyond]
        remedy = f"; to predict later dates, fit with --time {shlex.quote(dates[0])}" if dates else ""
        known = "--time" in model.origin.get("command", "")
        note(f"outside the range of the training rows: {some}{more}{'' if known else remedy}.")


def filled_value(column: Column) -> str:
    """The value that a missing cell is taken as."""
    if column.kind == "category":
        return "a category of its own" if column.flagged else "none of the categories"
    if column.kind == "date":
        return str(np.datetime64(int(column.fill), "D"))
    if column.kind == "boolean":
        return "true" if column.fill else "false"
    return plain_number(column.fill)


class Rows(NamedTuple):
    """All rows of a table, or those that have an outcome."""

    x: NumpyArray  # inputs of the network
    y: NumpyArray  # outcomes, numbers or classes; empty without a target
    table: pa.Table  # cells
    source: Source
    place: Place  # the location of each row


def read_rows(
    model: Model, data: str, *, allow_new: bool, title: str = "read", with_target: bool = False, **reading: str | None
) -> Rows:
    """The rows of a table as a model reads them, with a target those that have an outcome."""
    with open_table(data, **reading) as source:
        check_columns(model.schema, source.names, source.label, with_target=with_target)
        read = list(windows(model, source, allow_new=allow_new, title=title))
    x, table = np.concatenate([window.encoded.x for window in read]), pa.concat_tables([w.table for w in read])
    if not with_target:
        return Rows(x, np.empty(0), table, source, source.place)
    y, known = model.outcomes(table, at=source.place)
    kept = np.flatnonzero(known)
    if not len(kept):
        raise ValueError(f"{source.label}, column {quote(model.schema.target)}: no row has a value to compare with.")
    if len(kept) < len(x):
        note(f"{count(len(x) - len(kept), 'row')} without a target left out.")
    return Rows(x[kept], y[kept], table.take(kept), source, lambda row: source.place(int(kept[row])))


def scores_of(columns: Mapping[str, NumpyArray]) -> tuple[dict[str, ScoreValue], dict[str, float]]:
    """The scores that are shown, and their values for a prediction that is the same for every row."""
    from dropbayes.predictive.scoring import ClassOutcomes, RegressionOutcomes, score_values

    also: tuple[str, ...] = ("balanced_accuracy", "class_auroc")
    if "labels" in columns:
        labels, probabilities = columns["labels"], columns["probabilities"]
        shares = np.bincount(labels, minlength=probabilities.shape[1]) / len(labels)
        values = score_values(ClassOutcomes(labels, probabilities), also)
        constant = score_values(ClassOutcomes(labels, np.tile(shares, (len(labels), 1))), also)
    else:
        also, y = ("interval_width", "interval_score", "crps"), torch.from_numpy(columns["y"])
        rows: dict[str, Any] = {name: columns[name] for name in columns if name not in ("epistemic", "aleatoric")}
        values, constant, spread = score_values(RegressionOutcomes(**rows), also), {}, y.std(correction=0)
        if spread > 0:
            gaussian = Mixture(y.mean().expand(1, len(y)), spread)
            rows = RegressionOutcomes.columns(gaussian, y, ranked=slice(None))
            constant = score_values(RegressionOutcomes(**rows), also)
    return values, {name: one.value for name, one in constant.items()}


def fingerprint(data: str) -> str | None:
    """The SHA-256 of the data, if they are a file."""
    return files.digest(data) if data != "-" and pathlib.Path(data).is_file() else None


def note_training_rows(model: Model, data: str) -> bool:
    """Whether the data are the very file the model was fitted to; says so on standard error."""
    known = model.origin.get("sha256")
    if known is None or fingerprint(data) != known:
        return False
    note("these are the rows the model was fitted to, which it fits better than others; use rows that were held out.")
    return True
