"""`dropbayes fit`: a model folder from a table."""

from __future__ import annotations

import importlib.metadata
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dropbayes import folders
from dropbayes.cli.messages import note, out, print_json, reading, table
from dropbayes.tables import MISSING, Column, Schema, Source, encoded, inferred, kind_of, labels, numbers, open_table
from dropbayes.tables.reading import shown

__all__ = ["fit"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Training:
    """The rows of a table as a model learns from them, and what was done to get there."""

    x: Array
    y: Array
    schema: Schema
    missing: dict[str, int]
    n_dropped: int


def fit(
    data: str,
    *,
    target: str,
    folder: str,
    task: Literal["regression", "classification"] | None,
    ignore: Sequence[str],
    categorical: Sequence[str],
    missing: Sequence[str],
    max_categories: int,
    delimiter: str,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Fits a model to a table and writes its folder; see `dropbayes fit --help`."""
    path = pathlib.Path(folder)
    folders.check_place(pathlib.Path(path.absolute()))
    with open_table(data, delimiter=delimiter) as source:
        training = prepared(
            _whole(source), source, target=target, task=task, ignore=ignore, categorical=categorical, missing=missing,
            max_categories=max_categories,
        )  # fmt: skip
    estimator = _unfitted(training.schema, settings)
    begun = time.perf_counter()
    try:
        estimator.fit(training.x, training.y)
    finally:
        estimator.verbose = False
    seconds = time.perf_counter() - begun
    origin = {
        "file": source.label,
        "n_rows": len(training.x),
        "settings": settings,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scikit-learn", "pyarrow")},
    }
    model = folders.Model(estimator, training.schema, origin, path)
    folders.save(model)
    _say(model, training, seconds, as_json=as_json)


def _whole(source: Source) -> pa.Table:
    """All rows of a table."""
    blocks = []
    with reading(source, "read") as bar:
        for block in source.blocks():
            blocks.append(block)
            bar.advance_to(source.position)
    if not sum(block.num_rows for block in blocks):
        raise ValueError(f"{source.label}: has a header but no rows.")
    return pa.concat_tables(blocks)


def prepared(
    rows: pa.Table,
    source: Source,
    *,
    target: str,
    task: Literal["regression", "classification"] | None,
    ignore: Sequence[str],
    categorical: Sequence[str],
    missing: Sequence[str],
    max_categories: int,
) -> Training:
    """The training rows: columns understood, rows without target dropped, cells encoded."""
    for option, names in (("--target", [target]), ("--ignore", ignore), ("--categorical", categorical)):
        for name in names:
            if name not in source.names:
                have = ", ".join(map(shown, source.names[:8])) + (", …" if len(source.names) > 8 else "")
                raise ValueError(f"{source.label}: has no column {shown(name)} ({option}); it has {have}.")
    if target in ignore:
        raise ValueError(f"--ignore must not name the target {shown(target)}.")
    tokens = tuple(dict.fromkeys([*MISSING, *missing]))
    task, y, present = _target(rows[target], target, source, task, tokens)
    kept = np.flatnonzero(present)
    if len(kept) < 2:
        raise ValueError(
            f"{source.label}: {len(kept)} row with a target; at least 2 are needed, and many more to learn."
        )

    def at(row: int) -> str:
        return source.label if row < 0 else source.place(int(kept[row]))

    rows = rows if len(kept) == rows.num_rows else rows.take(pa.array(kept))
    columns: list[Column] = []
    left_out = dict.fromkeys(ignore, "asked for")
    for name in source.names:
        if name == target or name in left_out:
            continue
        column = inferred(
            rows[name], name, at=at, missing=tokens, categorical=name in categorical, max_categories=max_categories
        )
        if isinstance(column, str):
            left_out[name] = column
        else:
            columns.append(column)
    if not columns:
        raise ValueError(
            f"{source.label}: no column is left to learn from; a varying one besides the target is needed."
        )
    schema = Schema(tuple(columns), target, task, left_out, tokens)
    found = encoded(schema, rows, at=at)
    return Training(found.x, y[kept], schema, found.missing, len(present) - len(kept))


def _target(
    values: Any, name: str, source: Source, task: str | None, tokens: Sequence[str]
) -> tuple[Literal["regression", "classification"], Array, Array]:
    """The task, the targets, and which rows have one."""

    def at(row: int) -> str:
        return source.label if row < 0 else source.place(row)

    if task is None:
        task = "regression" if kind_of(values, name, at=at, missing=tokens) == "number" else "classification"
    if task == "regression":
        y = numbers(values, name, at=at, missing=tokens)
        present = ~np.isnan(y)
        distinct = np.unique(y[present])
        what = f"the value {distinct[0]:g}" if len(distinct) else "no value"
    else:
        texts = labels(values, name, at=at, missing=tokens)
        present = np.array([text is not None for text in texts], dtype=bool)
        y = np.array(["" if text is None else text for text in texts], dtype=np.str_)
        distinct = np.unique(y[present])
        what = f"the class {shown(distinct[0])}" if len(distinct) else "no value"
        if len(distinct) > max(2, 0.5 * present.sum()) and len(distinct) > 20:
            raise ValueError(
                f"{source.label}, column {shown(name)}: has {len(distinct)} classes in {present.sum()} rows; is it the "
                "target? A number column is regressed with --task regression."
            )
    if len(distinct) < 2 and present.sum() != 1:
        raise ValueError(f"{source.label}, column {shown(name)}: has {what} in every row; there is nothing to learn.")
    return task, y, present  # type: ignore[return-value]


def _unfitted(schema: Schema, settings: dict[str, Any]) -> Any:
    from rich.console import Console

    from dropbayes.estimators import DropoutClassifier, DropoutRegressor

    verbose = Console(stderr=True).is_terminal
    if schema.task == "regression":
        return DropoutRegressor(**settings, verbose=verbose)
    return DropoutClassifier(**{name: value for name, value in settings.items() if name != "noise"}, verbose=verbose)


# --- what is said --------------------------------------------------------------------------------------------------


def _say(model: folders.Model, training: Training, seconds: float, *, as_json: bool) -> None:
    from dropbayes.cli.explaining import facts

    schema, estimator = model.schema, model.estimator
    if as_json:
        print_json({
            "model": str(model.path), "seconds": round(seconds, 2), "rows_without_target": training.n_dropped,
            "missing": training.missing, **facts(model),
        })  # fmt: skip
        return
    from rich.markup import escape

    console = out()
    reason = "its values are numbers" if schema.task == "regression" else "its values are classes"
    if schema.task == "classification":
        reason = f"{len(estimator.classes_)} classes: " + _short([str(label) for label in estimator.classes_])
    console.print(f"[bold]{schema.task}[/bold] of [bold]{escape(schema.target)}[/bold] ({escape(reason)})")
    dropped = f"; {training.n_dropped} without a target dropped" if training.n_dropped else ""
    console.print(f"{len(training.x):,} rows, {len(schema.columns)} columns, {len(schema.inputs)} inputs{dropped}\n")
    rows = [
        [c.name, c.kind, str(len(c.inputs)), *_handling(c, training.missing.get(c.name, 0))] for c in schema.columns
    ]
    rows += [[name, "left out", "0", "", reason] for name, reason in schema.left_out.items()]
    console.print(table("", ["column", "kind", "inputs", "missing", "how it is read"], rows, numbers=(2, 3)))
    console.print()
    for line in _results(model):
        console.print(line)
    console.print(f"\nwritten to [bold]{escape(str(model.path))}[/bold] after {seconds:.1f} s of training")
    if not bool((estimator.population_.drop_prob > 0).any()):
        note(
            "nothing is dropped, so that draws differ only between networks; the epistemic variance will be too small."
        )
    distinct: Any = np.unique(training.y) if schema.task == "regression" else []
    if 0 < len(distinct) <= 10 and np.all(distinct == np.round(distinct)):
        note(f"{schema.target!r} has only {len(distinct)} whole values; if they are classes use --task classification.")


def _handling(column: Column, n_missing: int) -> list[str]:
    count = f"{n_missing:,}" if n_missing else ""
    if column.kind == "category":
        texts = _short(list(column.categories))
        return [
            count,
            f"one input for each of {len(column.categories)}: {texts}" + ("; one for missing" * column.flagged),
        ]
    filled = ("true" if column.fill else "false") if column.kind == "boolean" else f"the median {column.fill:g}"
    return [count, f"missing taken as {filled}, and flagged" if column.flagged else "as it is"]


def _short(texts: list[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def _results(model: folders.Model) -> list[str]:
    estimator = model.estimator
    member = estimator.population_.members[0]
    each = [f"{drop_prob:.4g}" for drop_prob in estimator.population_.drop_prob[0].tolist()]
    drop = each[0] if len(set(each)) == 1 else ", ".join(each)
    lines = [
        f"drop probability {drop}; weight decay {member.weight_decay:g}"
        + (
            f" (the best of {len(estimator.search_scores_)} on held-out rows)"
            if len(estimator.search_scores_) > 1
            else ""
        )
    ]
    if model.schema.task == "regression" and getattr(estimator, "noise", "constant") == "constant":
        lines.append(
            f"noise: standard deviation {estimator.precision_**-0.5:.4g} (precision τ = {estimator.precision_:.4g})"
        )
    best = float(estimator.search_scores_.max()) if len(estimator.search_scores_) else float("nan")
    if np.isfinite(best):
        lines.append(f"held-out log-likelihood {best:.4g} nats a row")
    return lines
