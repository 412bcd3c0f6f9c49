"""`dropbayes fit`: a model folder from a table."""

from __future__ import annotations

import itertools
import pathlib
import shlex
import time as clock
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dropbayes import app
from dropbayes.app.cli import options
from dropbayes.app.cli.explaining import facts
from dropbayes.app.cli.messages import bold, escaped, note, print_result, print_text, table
from dropbayes.runtime import __version__
from dropbayes.runtime.formatting import count, plain_number

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import RenderableType

    from dropbayes.app.tables.training import TrainingRows
    from dropbayes.estimators.columns import Column


def fit(
    context: typer.Context,
    data: options.Data,
    target: Annotated[list[str], typer.Option(help="The column to predict.", metavar="COLUMN")],
    folder: Annotated[str, options.output(help="The folder to write; a model in it is replaced.", metavar="FOLDER")],
    task: Annotated[
        Literal["regression", "classification"] | None,
        typer.Option(help="Default: regression for a numeric target other than 0 and 1, else classification."),
    ] = None,
    ignore: Annotated[list[str] | None, options.column(help="A column to leave out; may be repeated.")] = None,
    categorical: Annotated[
        list[str] | None, options.column(help="A numeric column whose numbers are categories; may be repeated.")
    ] = None,
    missing: Annotated[
        list[str] | None, options.column(help="A further text that means 'no value'; may be repeated.", metavar="TEXT")
    ] = None,
    max_categories: Annotated[int, options.column(help="The most categories per column.", min=2, metavar="N")] = 100,
    decimal: options.Decimal = None,
    weights: Annotated[str | None, options.column(help="The column with the weight of each row.")] = None,
    group: Annotated[str | None, options.column(help="The column of groups, each held out whole.")] = None,
    time: Annotated[
        str | None, options.column(help="The column of times: learn the past, hold out what follows.")
    ] = None,
    effort: Annotated[
        Literal["quick", "standard", "best"],
        options.training(help="How long to search: seconds, the default, or an hour.", metavar=None),
    ] = "standard",
    quick: Annotated[bool, options.training("--quick", metavar="", help="The same as --effort quick.")] = False,
    seed: Annotated[
        int, options.training(help="Seed of the weights, the folds and the draws.", min=0, max=2**32 - 1)
    ] = 0,
    hidden: options.Hidden = "auto",
    drop_prob: options.DropProb = "search",
    weight_decay: options.WeightDecay = "search",
    noise: Annotated[
        Literal["student", "constant", "heteroscedastic"],
        options.training(metavar="KIND", help="Noise of a regression: student, constant or heteroscedastic."),
    ] = "student",
    target_transform: Annotated[
        Literal["none", "log", "arcsinh", "auto"],
        options.training(
            metavar="KIND",
            help="Scale in which a regression learns: none, log, arcsinh, or auto to choose by held-out rows.",
        ),
    ] = "none",
    n_networks: Annotated[int | None, options.training(help="Networks whose draws are pooled.", min=1)] = None,
    n_steps: Annotated[int | None, options.training(help="Training steps on small data.", min=1)] = None,
    n_draws: Annotated[int, options.training(help="Draws per network and prediction.", min=1)] = 50,
    device: Annotated[str, options.training(help="auto, cpu, cuda ...", metavar="NAME")] = "auto",
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Fit a model to a table and write it to a folder."""
    if len(target) > 1:
        raise typer.BadParameter(
            f"a model predicts one column; got {', '.join(target)}. Fit one model for each", param_hint="'--target'"
        )
    import pyarrow as pa

    from dropbayes.app.cli.rows import fingerprint, read_blocks
    from dropbayes.app.models.storage import check_place
    from dropbayes.app.tables import open_table
    from dropbayes.app.tables.training import ColumnProblems, Reading, training_rows

    check_place(pathlib.Path(folder).absolute())
    command = ["dropbayes", *(context.obj or ["fit", data])]
    reading = Reading(ignore or [], categorical or [], missing or [], max_categories, decimal, weights, group, time)
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        cells = pa.concat_tables(read_blocks(source, source.blocks(), title="read"))
        try:
            rows = training_rows(cells, target=target[0], at=source.place, task=task, reading=reading)
        except ColumnProblems as error:
            if target[0] not in error.problems:
                ignored = [part for name in error.problems for part in ("--ignore", name)]
                these = "it" if len(error.problems) == 1 else "them"
                error.add_note(f"to fit without {these}: {shlex.join([*command, *ignored])}")
            raise
    if not as_json:
        print_text(_columns(rows))
    _note_target(rows, task)
    settings: dict[str, Any] = {"hidden": hidden, "drop_prob": drop_prob, "weight_decay": weight_decay}
    if rows.schema.task == "regression":
        settings |= {"noise": noise, "target_transform": target_transform}
    settings |= {"effort": "quick" if quick else effort, "n_networks": n_networks or "auto"}
    settings |= {"n_steps": n_steps or "auto", "min_epochs": 1 if quick else 10, "n_draws": n_draws}
    settings |= {"device": device, "random_state": seed}
    known = {"file": source.label, "sha256": fingerprint(data), "command": shlex.join(command), "time": time}
    origin: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    origin |= {"settings": settings, "versions": versions()}
    begun = clock.perf_counter()
    model = app.Model.of_rows(rows, origin=origin, **settings, verbose=True)
    seconds = clock.perf_counter() - begun
    about = facts(model)
    best = about["held_out_log_likelihood"]
    model.origin["scores"] = {} if best is None else {"held-out log-likelihood (nats per row)": best}
    model = model.save(folder)
    found = {"model": str(model.path), "seconds": round(seconds, 2), "rows_without_target": rows.n_dropped}
    found |= {"missing": rows.missing, **about}
    print_result(found, _results(model, found), as_json=as_json)
    _note_settings(model)
    if time is None and group is None:
        _note_order(model, rows, cells)


def versions() -> dict[str, str]:
    import importlib.metadata

    others = ("torch", "numpy", "scikit-learn", "pyarrow")
    return {"dropbayes": __version__, **{name: importlib.metadata.version(name) for name in others}}


# --- the columns, before the training ------------------------------------------------------------------------------


def _columns(rows: TrainingRows) -> Iterator[RenderableType]:
    from dropbayes.estimators.columns.notation import PLAIN

    schema = rows.schema
    reason = "a numeric target"
    if schema.task == "classification":
        classes = sorted({str(label) for label in rows.y})
        reason = f"{len(classes)} classes: {_abbreviated_list(classes)}"
    elif schema.target_notation != PLAIN:
        reason = f"a numeric target, written as {schema.target_notation.example}"
    yield f"{bold(schema.task)} of {bold(schema.target)} ({escaped(reason)})"
    sizes = [count(len(rows.x), "row"), count(len(schema.columns), "column"), count(len(schema.inputs), "input")]
    dropped = f"; {count(rows.n_dropped, 'row')} without a target dropped" if rows.n_dropped else ""
    yield f"{', '.join(sizes)}{dropped}\n"
    lines = [
        [c.name, c.kind, str(len(c.inputs)), f"{rows.missing[c.name]:,}" if rows.missing.get(c.name) else "", _read(c)]
        for c in schema.columns
    ]
    lines += [[name, "left out", "0", "", reason] for name, reason in schema.left_out.items()]
    shown: list[list[str]] = []
    for _, run in itertools.groupby(lines, key=lambda line: line[1:]):
        alike = list(run)
        if len(alike) > 20:  # neighbouring columns that are read alike stand in one line
            name = f"{alike[0][0]} to {alike[-1][0]}, {len(alike):,} columns"
            alike = [[name, alike[0][1], f"{sum(int(line[2]) for line in alike):,}", *alike[0][3:]]]
        shown += alike
    yield table("", ["column", "kind", "inputs", "missing", "how it is read"], shown[:60], numbers=(2, 3))
    if len(shown) > 60:
        yield f"… and {len(shown) - 60:,} more lines; `dropbayes explain` lists every column"
    yield ""


def _read(column: Column) -> str:
    """How a column is read, in words."""
    from dropbayes.app.cli.rows import filled_value
    from dropbayes.estimators.columns.notation import PLAIN

    if column.kind == "category":
        texts = f"one input for each of {len(column.categories)}: {_abbreviated_list(list(column.categories))}"
        return texts + ("; one for missing" if column.flagged else "")
    how = "" if column.notation == PLAIN else f"numbers written as {column.notation.example}"
    if column.kind == "date":
        how = f"dates as {', '.join(column.parts)}"
    if not column.flagged:
        return how or "as it is"
    median = "" if column.kind == "boolean" else "the median "
    return f"{how}{'; ' if how else ''}missing taken as {median}{filled_value(column)}, and flagged"


def _abbreviated_list(texts: list[str]) -> str:
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")


def _note_target(rows: TrainingRows, task: str | None) -> None:
    """Notes on a target that is probably not what it seems, or too rare to learn."""
    import numpy as np

    name = rows.schema.target
    distinct, counts = np.unique(rows.y, return_counts=True)
    if rows.schema.task == "classification":
        if task is None and distinct.tolist() == ["0", "1"]:
            note(f"{name!r} holds 0 and 1, which are classes; to predict a number use --task regression.")
        rare = [str(label) for label, n in zip(distinct, counts, strict=True) if n < 5]
        if rare:
            note(f"fewer than 5 rows of {_abbreviated_list(rare)}: their probabilities cannot be learned well.")
    elif len(distinct) <= 10 and np.all(distinct == np.round(distinct)):
        note(f"{name!r} has only {len(distinct)} whole values; if they are classes use --task classification.")


# --- the model, after it -------------------------------------------------------------------------------------------


def _results(model: app.Model, found: dict[str, Any]) -> Iterator[str]:
    estimator, population = model.ensemble, model.ensemble.population_
    each = [f"{drop_prob:.4g}" for drop_prob in population.drop_prob[0].tolist()]
    n_tried = len(estimator.search_scores_)
    tried = f" (the best of {n_tried} on held-out rows)" if n_tried > 1 else ""
    drop = each[0] if len(set(each)) == 1 else ", ".join(each)
    yield f"drop probability {drop}; weight decay {population.members[0].weight_decay:g}{tried}"
    yield f"{count(len(population), 'network')}, {count(int(estimator.n_draws), 'draw')} of each per prediction"
    if found.get("noise") == "constant":
        precision = estimator.precision_
        yield f"noise: standard deviation {plain_number(precision**-0.5)} (precision τ = {plain_number(precision)})"
    if found.get("target_transform", "none") != "none":
        yield f"learned: {estimator.transform_.unit}"
    if found["held_out_log_likelihood"] is not None:
        of = "target's own distribution" if model.schema.task == "regression" else "class shares"
        baseline = f"{plain_number(estimator.baseline_score_)} of the {of} alone"
        yield f"held-out log-likelihood {plain_number(found['held_out_log_likelihood'])} nats per row ({baseline})"
    yield f"\nwritten to {bold(found['model'])} after {found['seconds']:.1f} s of training"


def _note_settings(model: app.Model) -> None:
    """Notes on settings of the fit that a user would change."""
    if not bool((model.ensemble.population_.drop_prob > 0).any()):
        note("nothing is dropped, so that draws differ only between networks; the epistemic variance is too small.")
    for name, value in model.ensemble.search_edges_.items():
        is_drop = name == "drop_prob"
        factor, words = (2, "drop probability") if is_drop else (10, name.replace("_", " "))
        beyond = ",".join(f"{v:g}" for v in (value / factor, value, value * factor) if v < 1 or not is_drop)
        option = name.replace("_", "-")
        note(f"the best {words}, {value:g}, is at the edge of those tried; --{option} {beyond} tries beyond it.")


def _note_order(model: app.Model, rows: TrainingRows, cells: pa.Table) -> None:
    """Notes on rows that resemble their neighbours, of which folds of single rows say too much good."""
    import numpy as np
    from sklearn.base import clone

    from dropbayes.estimators.columns.encoding import column_values

    for column in rows.schema.columns:
        if column.kind not in ("number", "date") or len(rows.x) < 50:
            continue
        values = column_values(column, cells[column.name], str, rows.schema.missing)[rows.kept]
        steps = np.diff(values)
        n_distinct, n_runs = len(np.unique(values)), 1 + int((steps != 0).sum())
        in_order = bool((steps >= 0).all() or (steps <= 0).all())
        counts_time = column.kind == "date" or column.name.casefold() in ("year", "time", "t", "trend")
        if in_order and n_distinct > 2 and (counts_time or np.allclose(steps, steps[0], rtol=0.1, atol=0.0)):
            # Networks with the settings of the fit, scored on random folds and on those that follow what was learned.
            population = model.ensemble.population_
            settings = {
                "hidden": tuple(model.ensemble.hidden_),
                "drop_prob": tuple(population.drop_prob[0].tolist()),
                "weight_decay": float(population.members[0].weight_decay),
                "n_networks": 1,
                "verbose": False,
            }
            probes = [clone(model.estimator).set_params(**settings) for _ in range(2)]
            with warnings.catch_warnings(action="ignore"):  # what they warn of is not true of the model
                for probe, times in zip(probes, (None, np.unique(values, return_inverse=True)[1]), strict=True):
                    probe.fit(rows.x, rows.y, sample_weight=rows.weight, times=times)
            at_random, forward = (float(max(probe.search_scores_)) for probe in probes)
            if forward < at_random - 0.1:
                scores = plain_number(at_random), plain_number(forward)
                note(
                    f"the rows are in order of {column.name!r}: held out at random they score {scores[0]} nats per "
                    f"row, held out after those learned from {scores[1]}; to predict rows that come later, fit with "
                    f"--time {shlex.quote(column.name)}."
                )
            return
        if column.kind == "number" and n_distinct == n_runs and 10 <= n_distinct <= len(values) / 2:
            each = plain_number(len(values) / n_distinct, digits=2)
            note(
                f"{column.name!r} repeats in runs: {n_distinct:,} values of about {each} rows; if rows of one value "
                f"belong together, fit with --group {shlex.quote(column.name)} to hold them out together."
            )
            return
