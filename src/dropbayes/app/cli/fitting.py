"""`dropbayes fit`: a model folder from a table."""

from __future__ import annotations

import importlib.metadata
import itertools
import pathlib
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dropbayes.app.cli.messages import count, note, number, out, print_json, reading_bar, table
from dropbayes.app.cli.predictions import fingerprint
from dropbayes.app.models.model import Model
from dropbayes.app.models.storage import check_place
from dropbayes.app.tables import Source, open_table
from dropbayes.app.tables.training import ColumnProblems, Reading, TrainingRows, training_rows
from dropbayes.columns import Column
from dropbayes.columns.notation import PLAIN
from dropbayes.columns.schema import Task
from dropbayes.runtime.version import __version__

__all__ = ["fit"]

_MOST_ALIKE, _MOST_LINES = 20, 60  # Neighbouring columns read alike that have lines of their own; lines in all.


def fit(
    data: str,
    *,
    target: str,
    folder: str,
    task: Task | None,
    reading: Reading,
    delimiter: str | None,
    encoding: str | None,
    settings: dict[str, Any],
    command: Sequence[str],
    as_json: bool,
) -> None:
    """Fits a model to a table and writes its folder; see `dropbayes fit --help`."""
    path = pathlib.Path(folder)
    check_place(pathlib.Path(path.absolute()))
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        rows = _training_rows(source, target, task, reading, command)
    if rows.schema.task == "classification":
        settings = {name: value for name, value in settings.items() if name not in ("noise", "target_transform")}
    if not as_json:
        _show_columns(rows)
    _warn_of_target(rows, task)
    digest = fingerprint(data)
    origin = {
        "file": source.label,
        **({} if digest is None else {"sha256": digest}),
        **({} if reading.time is None else {"time": reading.time}),
        "command": shlex.join(command),
        "settings": settings,
        "versions": _versions(),
    }
    begun = time.perf_counter()
    model = Model.of_rows(rows, origin=origin, **settings, verbose=True)
    seconds = time.perf_counter() - begun
    best = _held_out_score(model)
    model.origin["scores"] = {} if best is None else {"held-out log-likelihood (nats per row)": best}
    model = model.save(path)
    _say(model, rows, seconds, as_json=as_json)
    _note_edges(model.estimator.search_edges_)


def _versions() -> dict[str, str]:
    others = ("torch", "numpy", "scikit-learn", "pyarrow")
    return {"dropbayes": __version__, **{name: importlib.metadata.version(name) for name in others}}


def _training_rows(
    source: Source, target: str, task: Task | None, reading: Reading, command: Sequence[str]
) -> TrainingRows:
    whole = _read_all(source)

    def at(row: int) -> str:
        return source.label if row < 0 else source.place(row)

    try:
        return training_rows(whole, target=target, label=source.label, at=at, task=task, reading=reading)
    except ColumnProblems as error:
        if target in error.problems:
            raise
        ignored = [part for name in error.problems for part in ("--ignore", name)]
        error.add_note(f"to fit without {_pronoun(len(error.problems))}: {shlex.join([*command, *ignored])}")
        raise


def _pronoun(n_columns: int) -> str:
    return "it" if n_columns == 1 else "them"


def _read_all(source: Source) -> pa.Table:
    """All rows of a table."""
    blocks = []
    with reading_bar(source, "read") as bar:
        for block in source.blocks():
            blocks.append(block)
            bar.advance_to(source.position)
    if not sum(block.num_rows for block in blocks):
        raise ValueError(f"{source.label}: has a header but no rows.")
    return pa.concat_tables(blocks)


# --- what is said --------------------------------------------------------------------------------------------------


def _show_columns(rows: TrainingRows) -> None:
    """How the columns are read, before anybody has to wait."""
    from rich.markup import escape

    schema, console = rows.schema, out()
    reason = "a numeric target"
    if schema.task == "classification":
        classes = [str(label) for label in np.unique(rows.y)]
        reason = f"{len(classes)} classes: {_abbreviated_list(classes)}"
    elif schema.target_notation != PLAIN:
        reason = f"a numeric target, written as {schema.target_notation.example}"
    console.print(f"[bold]{schema.task}[/bold] of [bold]{escape(schema.target)}[/bold] ({escape(reason)})")
    dropped = f"; {count(rows.n_dropped, 'row')} without a target dropped" if rows.n_dropped else ""
    sizes = ", ".join([
        count(len(rows.x), "row"), count(len(schema.columns), "column"), count(len(schema.inputs), "input")
    ])  # fmt: skip
    console.print(f"{sizes}{dropped}\n")
    lines = [[c.name, c.kind, str(len(c.inputs)), *_handling(c, rows.missing.get(c.name, 0))] for c in schema.columns]
    lines += [[name, "left out", "0", "", reason] for name, reason in schema.left_out.items()]
    lines = _join_lines(lines)
    heads = ["column", "kind", "inputs", "missing", "how it is read"]
    console.print(table("", heads, lines[:_MOST_LINES], numbers=(2, 3)))
    if len(lines) > _MOST_LINES:
        console.print(f"… and {len(lines) - _MOST_LINES:,} more lines; `dropbayes explain` lists every column")
    console.print()


def _join_lines(lines: list[list[str]]) -> list[list[str]]:
    """The lines with runs of neighbouring columns that are read alike, beyond a handful, in one line."""
    result: list[list[str]] = []
    for _, run in itertools.groupby(lines, key=lambda line: line[1:]):
        alike = list(run)
        if len(alike) <= _MOST_ALIKE:
            result += alike
            continue
        n_inputs = sum(int(line[2]) for line in alike)
        name = f"{alike[0][0]} to {alike[-1][0]}, {len(alike):,} columns"
        result.append([name, alike[0][1], f"{n_inputs:,}", alike[0][3], alike[0][4]])
    return result


def _warn_of_target(rows: TrainingRows, task: Task | None) -> None:
    schema = rows.schema
    distinct: Any
    distinct, counts = np.unique(rows.y, return_counts=True)
    if schema.task == "regression" and len(distinct) <= 10 and np.all(distinct == np.round(distinct)):
        note(f"{schema.target!r} has only {len(distinct)} whole values; if they are classes use --task classification.")
    if task is None and schema.task == "classification" and distinct.tolist() == ["0", "1"]:
        note(f"{schema.target!r} holds 0 and 1, which are classes; to predict a number use --task regression.")
    rare = [str(label) for label, n in zip(distinct, counts, strict=True) if n < 5]
    if schema.task == "classification" and rare:
        note(f"fewer than 5 rows of {_abbreviated_list(rare)}: their probabilities cannot be learned well.")


def _handling(column: Column, n_missing: int) -> list[str]:
    missing = f"{n_missing:,}" if n_missing else ""
    if column.kind == "category":
        texts = f"one input for each of {len(column.categories)}: {_abbreviated_list(list(column.categories))}"
        return [missing, texts + ("; one for missing" * column.flagged)]
    how = "as it is"
    if column.notation != PLAIN:
        how = f"numbers written as {column.notation.example}"
    if column.kind == "date":
        how = f"dates as {', '.join(column.parts)}"
    if not column.flagged:
        return [missing, how]
    median = str(np.datetime64(int(column.fill), "D")) if column.kind == "date" else number(column.fill)
    filled = ("true" if column.fill else "false") if column.kind == "boolean" else f"the median {median}"
    kept = "" if how == "as it is" else f"{how}; "
    return [missing, f"{kept}missing taken as {filled}, and flagged"]


def _abbreviated_list(texts: list[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def _held_out_score(model: Model) -> float | None:
    scores = np.asarray(model.ensemble.search_scores_, dtype=float)
    best = float(scores.max()) if len(scores) else float("nan")
    return best if np.isfinite(best) else None


def _say(model: Model, rows: TrainingRows, seconds: float, *, as_json: bool) -> None:
    from dropbayes.app.cli.explaining import facts

    if as_json:
        print_json({
            "model": str(model.path), "seconds": round(seconds, 2), "rows_without_target": rows.n_dropped,
            "missing": rows.missing, **facts(model),
        })  # fmt: skip
        return
    from rich.markup import escape

    console = out()
    for line in _results(model):
        console.print(line)
    console.print(f"\nwritten to [bold]{escape(str(model.path))}[/bold] after {seconds:.1f} s of training")
    if not bool((model.ensemble.population_.drop_prob > 0).any()):
        note(
            "nothing is dropped, so that draws differ only between networks; the epistemic variance will be too small."
        )


def _note_edges(edges: Mapping[str, float]) -> None:
    for name, value in edges.items():
        factor = 2 if name == "drop_prob" else 10
        beyond = ",".join(f"{v:g}" for v in (value / factor, value, value * factor) if v < 1 or name != "drop_prob")
        words = name.replace("prob", "probability").replace("_", " ")
        option = name.replace("_", "-")
        note(f"the best {words}, {value:g}, is at the edge of those tried; --{option} {beyond} tries beyond it.")


def _results(model: Model) -> list[str]:
    estimator = model.ensemble
    population = estimator.population_
    each = [f"{drop_prob:.4g}" for drop_prob in population.drop_prob[0].tolist()]
    drop = each[0] if len(set(each)) == 1 else ", ".join(each)
    n_tried = len(estimator.search_scores_)
    tried = f" (the best of {n_tried} on held-out rows)" if n_tried > 1 else ""
    lines = [f"drop probability {drop}; weight decay {population.members[0].weight_decay:g}{tried}"]
    lines.append(f"{count(len(population), 'network')}, {count(int(estimator.n_draws), 'draw')} of each per prediction")
    if model.schema.task == "regression" and getattr(estimator, "noise", "constant") == "constant":
        precision = estimator.precision_
        lines.append(f"noise: standard deviation {number(precision**-0.5)} (precision τ = {number(precision)})")
    if model.schema.task == "regression" and estimator.transform_.name != "none":
        lines.append(f"learned: {estimator.transform_.unit}")
    best = _held_out_score(model)
    if best is not None:
        of = "target's own distribution" if model.schema.task == "regression" else "class shares"
        baseline = f"{number(estimator.baseline_score_)} of the {of} alone"
        lines.append(f"held-out log-likelihood {number(best)} nats per row ({baseline})")
    return lines
