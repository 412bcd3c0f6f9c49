"""`dropbayes fit` and `dropbayes demo`: a model folder from a table, or from one that is bundled."""

import pathlib
import shlex
import time as clock
from typing import Annotated, Any, Literal

import typer

from dropbayes import app
from dropbayes.app.cli import options
from dropbayes.app.cli.messages import console, note, print_result, print_text


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
    time: Annotated[str | None, options.column(help="Column of times: learn the past, hold out what follows.")] = None,
    effort: Annotated[
        Literal["quick", "standard", "best"],
        options.training(help="How long to search: seconds, the default, or minutes.", metavar=None),
    ] = "standard",
    quick: Annotated[bool, options.training("--quick", metavar="", help="The same as --effort quick.")] = False,
    seed: Annotated[int, options.training(help="Seed of weights, folds and draws.", min=0, max=2**32 - 1)] = 0,
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
        rule = f"a model predicts one column; got {', '.join(target)}. Fit one model for each"
        raise typer.BadParameter(rule, param_hint="'--target'")
    if quick and effort == "best":
        raise typer.BadParameter("is the same as --effort quick; give one effort", param_hint="'--quick'")
    import pyarrow as pa

    from dropbayes.app.cli import explaining
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
        print_text(explaining.column_lines(rows))
    explaining.note_target(rows, task)
    settings: dict[str, Any] = {"hidden": hidden, "drop_prob": drop_prob, "weight_decay": weight_decay}
    if rows.schema.task == "regression":
        settings |= {"noise": noise, "target_transform": target_transform}
    elif (noise, target_transform) != ("student", "none"):
        note(f"--noise and --target-transform are for numbers: {target[0]!r} has classes, and they change nothing.")
    settings |= {"effort": "quick" if quick else effort, "n_networks": n_networks or "auto"}
    settings |= {"n_steps": n_steps or "auto", "n_draws": n_draws, "device": device, "random_state": seed}
    known = {"file": source.label, "sha256": fingerprint(data), "command": shlex.join(command), "time": time}
    origin: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    origin |= {"settings": settings, "versions": explaining.versions()}
    begun = clock.perf_counter()
    model = app.Model.of_rows(rows, origin=origin, **settings, verbose=True)
    seconds = clock.perf_counter() - begun
    about = explaining.facts(model)
    best = about["held_out_log_likelihood"]
    model.origin["scores"] = {} if best is None else {"held-out log-likelihood (nats per row)": best}
    model = model.save(folder)
    found = {"model": str(model.path), "seconds": round(seconds, 2), "rows_without_target": rows.n_dropped}
    found |= {"missing": rows.missing, **about}
    print_result(found, explaining.result_lines(model, found), as_json=as_json)
    explaining.note_settings(model)
    if time is None and group is None:
        explaining.note_order(model, rows, cells)


def demo(
    out: Annotated[str, typer.Option(help="The folder for results.", metavar="FOLDER")] = "out",
    as_json: options.Json = False,
) -> None:
    """Fit, predict and report on CO2 (or diabetes) in a minute."""
    begun, folder, terminal = clock.perf_counter(), pathlib.Path(out), console(stderr=as_json)
    folder.mkdir(parents=True, exist_ok=True)
    with terminal.status("Loading torch ..."):
        from dropbayes.app.cli import demonstration
    demonstration.run(folder, terminal)
    terminal.print(f"[dim]{clock.perf_counter() - begun:.0f} s in all[/dim]", highlight=False)
    print_result({"report": str(folder / "report.html")}, [], as_json=as_json)
