r"""The rows of a table: whole to learn from, or a window at a time as a fitted model reads them.

The windows are cut at the same rows whatever the blocks a file is read in, so a row is always computed in the same
batch and has the same bits.
"""

from __future__ import annotations

import pathlib
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dropbayes.app.cli.messages import note
from dropbayes.app.models.model import Model
from dropbayes.app.models.predictor import check_finite
from dropbayes.app.tables import Source, open_table, regroup
from dropbayes.estimators.columns import Column, Encoded, check_columns, encode
from dropbayes.estimators.columns.cells import Place
from dropbayes.predictive import Mixture, draw_mean
from dropbayes.runtime import files
from dropbayes.runtime.arrays import NumpyArray
from dropbayes.runtime.formatting import count, plain_number
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import quote

if TYPE_CHECKING:  # it brings SciPy, for which a prediction need not wait
    from dropbayes.predictive.scoring import ScoreValue


def whole_table(source: Source) -> pa.Table:
    """All rows of a table."""
    blocks = []
    with ProgressBar("read", source.size, unit=source.unit) as bar:
        for block in source.blocks():
            blocks.append(block)
            bar.advance_to(source.position)
    if not sum(block.num_rows for block in blocks):
        raise ValueError(f"{source.label}: has a header but no rows.")
    return pa.concat_tables(blocks)


class Window(NamedTuple):
    """Some rows of a table."""

    table: pa.Table
    encoded: Encoded
    place: Place  # the location of each row; of -1, that of the table
    y: NumpyArray  # outcomes, class numbers for classes; NaN without a target
    known: NumpyArray  # which rows have an outcome; all without a target


def windows(
    model: Model, source: Source, *, allow_new: bool, title: str, rows: int | None = None, with_target: bool = False
) -> Iterator[Window]:
    """The rows of a table as inputs of a model; says on standard error what was missing, new or far from training.

    `title` is that of the progress bar; so many `rows` are read at a time.
    """
    check_columns(model.schema, source.names, source.label, with_target=with_target)
    missing, new, outside = Counter[str](), Counter[str](), Counter[str]()
    first = n_absent = 0
    with ProgressBar(title, source.size, unit=source.unit) as bar:
        for table in regroup(source.blocks(rows), model.ensemble.block_rows):

            def place(row: int, first: int = first) -> str:
                return source.place(row if row < 0 else first + row)

            encoded = encode(model.schema, table, at=place, allow_new=allow_new)
            missing.update(encoded.missing)
            new.update(encoded.new)
            outside.update({name: int(mask.sum()) for name, mask in encoded.outside.items()})
            y, known = np.full(table.num_rows, np.nan), np.ones(table.num_rows, dtype=bool)
            if with_target:
                y, known = model.outcomes(table, at=place)
            yield Window(table, encoded, place, y, known)
            first += table.num_rows
            n_absent += int((~known).sum())
            bar.advance_to(source.position)
    if not first:
        raise ValueError(f"{source.label}: has a header but no rows.")
    _note_unusual_cells(model, missing, new, outside)
    if n_absent == first:
        raise ValueError(f"{source.label}, column {quote(model.schema.target)}: no row has a value to compare with.")
    if n_absent:
        note(f"{count(n_absent, 'row')} without a target left out.")


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
    y: NumpyArray  # outcomes, numbers or classes; NaN without a target
    table: pa.Table  # cells
    source: Source


def read_rows(
    model: Model, data: str, *, allow_new: bool, title: str = "read", with_target: bool = False, **reading: str | None
) -> Rows:
    """The rows of a table as a model reads them, with a target those that have an outcome.

    `reading` goes to `open_table`, the rest to `windows`.
    """
    with open_table(data, **reading) as source:
        read = list(windows(model, source, allow_new=allow_new, title=title, with_target=with_target))
    x = np.concatenate([window.encoded.x[window.known] for window in read])
    y = np.concatenate([window.y[window.known] for window in read])
    y = model.ensemble.classes_[y] if with_target and model.schema.task == "classification" else y
    return Rows(x, y, pa.concat_tables([window.table.filter(window.known) for window in read]), source)


def scored(model: Model, source: Source, *, allow_new: bool) -> dict[str, Tensor]:
    """What the scores read of a table's rows that have an outcome; the CRPS of at most 100 of each window."""
    from dropbayes.predictive.scoring import RegressionOutcomes

    blocks = []
    for window in windows(model, source, allow_new=allow_new, title="evaluate", with_target=True):
        kept, outcome = torch.from_numpy(window.known), torch.from_numpy(window.y[window.known])
        if not len(outcome):
            continue
        if model.schema.task == "classification":
            probabilities = draw_mean(model.ensemble.draws(window.encoded.x))
            check_finite({"probabilities": probabilities.numpy()}, window.place)
            blocks.append({"labels": outcome, "probabilities": probabilities[kept]})
        else:
            mixture = model.ensemble.predictive(window.encoded.x)
            check_finite({"mean": mixture.mean.numpy()}, window.place)
            ranked = slice(None, None, -(-len(outcome) // 100))
            blocks.append(RegressionOutcomes.columns(mixture.rows(kept), outcome, ranked=ranked))
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def scores_of(rows: dict[str, Tensor]) -> tuple[dict[str, ScoreValue], dict[str, float]]:
    """The scores that are shown, and their values for a prediction that is the same for every row."""
    from dropbayes.predictive.scoring import ClassOutcomes, RegressionOutcomes, score_values

    also: tuple[str, ...] = ("balanced_accuracy", "class_auroc")
    if "labels" in rows:
        labels = rows["labels"]
        shares = torch.bincount(labels, minlength=rows["probabilities"].shape[1]).double() / len(labels)
        values = score_values(ClassOutcomes(**rows), also)
        constant = score_values(ClassOutcomes(labels, shares.expand(len(labels), -1)), also)
    else:
        also, y = ("interval_width", "interval_score", "crps"), rows["y"]
        values, constant, spread = score_values(RegressionOutcomes(**rows), also), {}, y.std(correction=0)
        if spread > 0:
            gaussian = Mixture(y.mean().expand(1, len(y)), spread)
            columns = RegressionOutcomes.columns(gaussian, y, ranked=slice(None))
            constant = score_values(RegressionOutcomes(**columns), also)
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
