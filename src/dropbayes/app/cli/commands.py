"""The commands on tables and models, with their options; each imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from dropbayes.app.cli.application import app
from dropbayes.app.cli.options import (
    AllowNew,
    BlockRows,
    Data,
    Delimiter,
    Draws,
    Encoding,
    Json,
    ModelFolder,
    Outcomes,
    Seed,
    check_one_output,
    delimiter_character,
    hidden_widths,
    search_space,
)


@app.command()
def fit(
    context: typer.Context,
    data: Data,
    target: Annotated[list[str], typer.Option(help="The column to predict.", metavar="COLUMN")],
    folder: Annotated[
        str,
        typer.Option("--out", "-o", help="The folder to write; a model in it is replaced.", metavar="FOLDER"),
    ],
    task: Annotated[
        Literal["regression", "classification"] | None,
        typer.Option(help="Default: regression for a numeric target other than 0 and 1, else classification."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A column to leave out; may be repeated.", metavar="COLUMN", rich_help_panel="Columns"),
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(
            help="A numeric column whose numbers are categories; may be repeated.",
            metavar="COLUMN",
            rich_help_panel="Columns",
        ),
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(
            help="A further text that means 'no value'; may be repeated.", metavar="TEXT", rich_help_panel="Columns"
        ),
    ] = None,
    max_categories: Annotated[
        int, typer.Option(help="The most categories per column.", min=2, metavar="N", rich_help_panel="Columns")
    ] = 100,
    decimal: Annotated[
        str | None,
        typer.Option(help="Decimal mark, . or , (detected by default).", metavar="CHAR", rich_help_panel="Columns"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="The column with the weight of each row.", metavar="COLUMN", rich_help_panel="Columns"),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="The column of groups, each held out whole.", metavar="COLUMN", rich_help_panel="Columns"),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="The column of times: learn the past, hold out what follows.",
            metavar="COLUMN",
            rich_help_panel="Columns",
        ),
    ] = None,
    effort: Annotated[
        Literal["quick", "standard", "best"],
        typer.Option(
            help="How long to search: seconds, the default, or an hour.", rich_help_panel="Model and training"
        ),
    ] = "standard",
    quick: Annotated[
        bool,
        typer.Option("--quick", metavar="", help="The same as --effort quick.", rich_help_panel="Model and training"),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the weights, the folds and the draws.",
            min=0,
            max=2**32 - 1,
            metavar="N",
            rich_help_panel="Model and training",
        ),
    ] = 0,
    hidden: Annotated[
        str, typer.Option(help="Widths of the hidden layers.", metavar="WIDTHS", rich_help_panel="Model and training")
    ] = "auto",
    drop_prob: Annotated[
        str,
        typer.Option(
            help="Drop probability, or several to try.", metavar="NUMBERS", rich_help_panel="Model and training"
        ),
    ] = "search",
    weight_decay: Annotated[
        str,
        typer.Option(
            help="Weight decay λ, or several to try.", metavar="NUMBERS", rich_help_panel="Model and training"
        ),
    ] = "search",
    noise: Annotated[
        Literal["student", "constant", "heteroscedastic"],
        typer.Option(
            metavar="KIND",
            help="Noise of a regression: student, constant or heteroscedastic.",
            rich_help_panel="Model and training",
        ),
    ] = "student",
    target_transform: Annotated[
        Literal["none", "log", "arcsinh", "auto"],
        typer.Option(
            metavar="KIND",
            help="Scale in which a regression learns: none, log, arcsinh, or auto to choose by held-out rows.",
            rich_help_panel="Model and training",
        ),
    ] = "none",
    learn_drop_prob: Annotated[
        bool,
        typer.Option(
            "--learn-drop-prob",
            metavar="",
            help="Learn each layer's drop probability.",
            rich_help_panel="Model and training",
        ),
    ] = False,
    activation: Annotated[
        Literal["relu", "tanh"], typer.Option(help="The non-linearity.", rich_help_panel="Model and training")
    ] = "relu",
    n_networks: Annotated[
        int | None,
        typer.Option(help="Networks whose draws are pooled.", min=1, metavar="N", rich_help_panel="Model and training"),
    ] = None,
    n_steps: Annotated[
        int | None,
        typer.Option(help="Training steps on small data.", min=1, metavar="N", rich_help_panel="Model and training"),
    ] = None,
    n_draws: Annotated[
        int,
        typer.Option(
            help="Draws per network and prediction.", min=1, metavar="N", rich_help_panel="Model and training"
        ),
    ] = 50,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Adam's initial step size.", min=1e-12, metavar="X", rich_help_panel="Model and training"),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda ...", metavar="NAME", rich_help_panel="Model and training")
    ] = "auto",
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Fit a model to a table and write it to a folder."""
    if len(target) > 1:
        raise typer.BadParameter(
            f"a model predicts one column; got {', '.join(target)}. Fit one model for each", param_hint="'--target'"
        )
    if decimal not in (None, ".", ","):
        raise typer.BadParameter(f"must be . or , ; got {decimal!r}", param_hint="'--decimal'")
    from dropbayes.app.cli import fitting

    settings: dict[str, Any] = {
        "hidden": hidden_widths(hidden),
        "drop_prob": search_space(drop_prob, "--drop-prob", probability=True),
        "weight_decay": search_space(weight_decay, "--weight-decay", probability=False),
        "noise": noise,
        "target_transform": target_transform,
        "learn_drop_prob": learn_drop_prob,
        "activation": activation,
        "effort": "quick" if quick else effort,
        "n_networks": n_networks or "auto",
        "n_steps": n_steps or "auto",
        "min_epochs": 1 if quick else 10,
        "n_draws": n_draws,
        "learning_rate": learning_rate or "auto",
        "device": device,
        "random_state": seed,
    }
    from dropbayes.app.tables.training import Reading

    reading = Reading(ignore or [], categorical or [], missing or [], max_categories, decimal, weights, group, time)
    fitting.fit(
        data, target=target[0], folder=folder, task=task, reading=reading, delimiter=delimiter_character(delimiter),
        encoding=encoding, settings=settings, command=["dropbayes", *(context.obj or ["fit", data])], as_json=as_json,
    )  # fmt: skip


@app.command()
def predict(
    model: ModelFolder,
    data: Data,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="A .csv or .parquet file, or with --engine a folder; - is CSV on standard output.",
            metavar="FILE",
        ),
    ],
    coverage: Annotated[
        float, typer.Option(help="Probability that an interval contains the outcome.", metavar="X")
    ] = 0.95,
    n_draws: Draws = None,
    seed: Seed = None,
    keep: Annotated[
        str, typer.Option(help="Which input columns to keep: all, none, or names with commas.", metavar="COLUMNS")
    ] = "all",
    prefix: Annotated[
        str | None,
        typer.Option(help="Prefix of the new columns' names; by default the target and _.", metavar="TEXT"),
    ] = None,
    allow_new: AllowNew = False,
    block_rows: BlockRows = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    engine: Annotated[
        Literal["processes", "ray", "dask", "spark"] | None,
        typer.Option(help="Predict Parquet files, or a folder of them, with many workers."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers; one per core by default.", min=1, metavar="N")] = None,
    address: Annotated[
        str | None, typer.Option(help="The engine's cluster; this machine by default.", metavar="ADDRESS")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the rows of a table, with uncertainty.

    Adds for numbers: mean, std with its parts epistemic_std and aleatoric_std, lower, upper.

    Adds for classes: predicted, probabilities, entropy, mutual information.

    Adds for both: outside, the columns whose value lies beyond those of the training rows.
    """
    if not 0 < coverage < 1:
        raise typer.BadParameter(f"must lie between 0 and 1; got {coverage:g}", param_hint="'--coverage'")
    if engine is not None:
        if keep != "all" or block_rows is not None or delimiter is not None or encoding is not None:
            raise typer.BadParameter("has no --keep, --block-rows, --delimiter or --encoding", param_hint="'--engine'")
        from dropbayes.app.cli import scaling

        scaling.predict(
            model, data, folder=output, coverage=coverage, n_draws=n_draws, seed=seed, prefix=prefix,
            allow_new=allow_new, engine=engine, workers=workers, address=address, as_json=as_json,
        )  # fmt: skip
        return
    if workers is not None or address is not None:
        raise typer.BadParameter("are those of an engine; name one with --engine", param_hint="'--workers, --address'")
    check_one_output(output, as_json)
    from dropbayes.app.cli import predicting

    predicting.predict(
        model, data, output=output, coverage=coverage, n_draws=n_draws, seed=seed, keep=keep, prefix=prefix,
        delimiter=delimiter_character(delimiter), encoding=encoding, block_rows=block_rows, allow_new=allow_new,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def evaluate(
    model: ModelFolder,
    data: Outcomes,
    n_draws: Draws = None,
    seed: Seed = None,
    allow_new: AllowNew = False,
    block_rows: BlockRows = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Score a model against the outcomes in a table."""
    from dropbayes.app.cli import evaluating

    evaluating.evaluate(
        model, data, n_draws=n_draws, seed=seed, delimiter=delimiter_character(delimiter), encoding=encoding,
        block_rows=block_rows, allow_new=allow_new, as_json=as_json,
    )  # fmt: skip


@app.command()
def calibrate(
    model: ModelFolder,
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="Held-out rows with the target column."),
    ] = None,
    method: Annotated[
        Literal["scale", "isotonic", "conformal", "none"],
        typer.Option(help="How to correct; none takes it back."),
    ] = "scale",
    allow_new: AllowNew = False,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Correct a model's intervals or probabilities on held-out rows.

    The correction is recorded in the model: predict, evaluate and report use it from then on.
    """
    from dropbayes.app.cli import calibrating

    calibrating.calibrate(
        model, data, method=method, delimiter=delimiter_character(delimiter), encoding=encoding, allow_new=allow_new,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def explain(model: ModelFolder, as_json: Json = False) -> None:
    """Describe a model: what it reads, and what it is.

    The columns with their ranges, the sizes of the networks, drop probabilities, precision and length-scales.
    """
    from dropbayes.app.cli import explaining

    explaining.explain(model, as_json=as_json)


@app.command()
def report(
    model: ModelFolder,
    data: Outcomes,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The HTML file to write; - is standard output.", metavar="FILE")
    ],
    title: Annotated[str | None, typer.Option(help="Title of the page.", metavar="TEXT")] = None,
    training: Annotated[
        str | None,
        typer.Option(help="The training table, for simple models and a comparison of rows.", metavar="DATA"),
    ] = None,
    n_draws: Draws = None,
    seed: Seed = None,
    allow_new: AllowNew = False,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Write an HTML report on a model's predictions for a table."""
    check_one_output(output, as_json)
    from dropbayes.app.cli import reporting

    reporting.report(
        model, data, output=output, title=title, training=training, n_draws=n_draws, seed=seed,
        delimiter=delimiter_character(delimiter), encoding=encoding, allow_new=allow_new, as_json=as_json,
    )  # fmt: skip


@app.command()
def serve(
    models: Annotated[list[str], typer.Argument(help="Model folders, served by name.", metavar="MODEL...")],
    host: Annotated[str, typer.Option(help="The address to listen on.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535, metavar="N")] = 8000,
    workers: Annotated[int, typer.Option(help="Processes that answer.", min=1, metavar="N")] = 1,
    max_body: Annotated[int, typer.Option(help="The most bytes of a request.", min=1, metavar="N")] = 16 * 2**20,
    max_rows: Annotated[int, typer.Option(help="The most rows of a request.", min=1, metavar="N")] = 10_000,
    max_draws: Annotated[int, typer.Option(help="The most draws a request may ask for.", min=1, metavar="N")] = 1000,
    token_file: Annotated[
        str | None, typer.Option(help="A file with the token that requests must bear.", metavar="FILE")
    ] = None,
    allow_new: AllowNew = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name in the header Host to answer.", metavar="NAME")
    ] = None,
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"], typer.Option(help="What to log; info logs requests.")
    ] = "warning",
) -> None:
    """Serve models over HTTP (Open Inference Protocol V2).

    SIGTERM ends it after the requests under way; SIGHUP reloads the models from their folders.
    """
    from dropbayes.app.cli import serving

    serving.serve(
        models, host=host, port=port, workers=workers, max_body=max_body, max_rows=max_rows, max_draws=max_draws,
        token_file=token_file, allow_new=allow_new, allowed_hosts=allowed_host or (), log_level=log_level,
    )  # fmt: skip
