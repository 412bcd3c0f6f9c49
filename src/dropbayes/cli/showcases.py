"""The commands that show what the library does: experiments, demonstration, interactive page and benchmark."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from dropbayes.cli.application import app
from dropbayes.cli.options import Json
from dropbayes.cli.reproducing import NAMES


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=f"{', '.join(NAMES)}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", metavar="", help="A small version, minutes on two cores.")] = False,
    out: Annotated[str | None, typer.Option(help="The folder for results; out by default.", metavar="FOLDER")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...", metavar="NAME")] = "auto",
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    figures_only: Annotated[
        bool, typer.Option("--figures-only", metavar="", help="Draw from what an earlier run saved.")
    ] = False,
    as_json: Json = False,
    asked: Annotated[
        bool, typer.Option("--help", "-h", metavar="", help="Show this message; with NAME, that experiment's options.")
    ] = False,
) -> None:
    """Run an experiment of the paper.

    `reproduce NAME --help` shows its settings.
    """
    from dropbayes.cli import reproducing

    if asked and name is None:
        print(context.get_help())
        return
    if name is None:
        raise typer.BadParameter(f"must be one of {', '.join(NAMES)}", param_hint="NAME")
    if name not in NAMES:
        raise typer.BadParameter(f"must be one of {', '.join(NAMES)}; got {name!r}", param_hint="NAME")
    if asked:
        reproducing.describe(name)
        return
    if name == "uci":
        if change or figures_only:
            raise typer.BadParameter("uci has options of its own, not --set and --figures-only", param_hint="NAME")
        options = [*(["--quick"] if quick else []), "--device", device, *context.args]
        folder = out or ("out/uci-quick" if quick else "out/uci")
        raise typer.Exit(reproducing.reproduce_uci(options, folder=folder, as_json=as_json))
    if context.args:
        raise typer.BadParameter(f"only uci takes further arguments; got {' '.join(context.args)}", param_hint="NAME")
    reproducing.reproduce(
        name, quick=quick, folder=out or "out", device=device, changes=change or [], figures_only=figures_only,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def demo(
    out: Annotated[str, typer.Option(help="The folder for results.", metavar="FOLDER")] = "out",
    as_json: Json = False,
) -> None:
    """Fit, predict and report on atmospheric CO2, in under a minute."""
    from rich.console import Console

    from dropbayes.cli import messages
    from dropbayes.cli.demo import demo as run

    written = run(out=pathlib.Path(out), console=Console(stderr=True) if as_json else messages.out())
    if as_json:
        messages.print_json({"report": str(written)})


@app.command()
def page(
    out: Annotated[str | None, typer.Option(help="Write the page to this file instead.", metavar="FILE")] = None,
    port: Annotated[
        int, typer.Option(help="The port on 127.0.0.1; 0 takes a free one.", min=0, max=65535, metavar="N")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", metavar="", help="Do not open a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Draw points and watch what a network does not know.

    One page for a browser that needs no server and no network connection; it is served on 127.0.0.1, or written as one
    HTML file.
    """
    from dropbayes.cli import page as page_command

    if out is not None:
        page_command.write_page(out, as_json=as_json)
    else:
        page_command.serve_page(port=port, open_browser=not no_browser, as_json=as_json)


@app.command()
def bench(
    n_draws: Annotated[int, typer.Option(help="Draws of each prediction.", min=1, metavar="N")] = 100,
    repeats: Annotated[int, typer.Option(help="Repetitions; the median is reported.", min=1, metavar="N")] = 7,
    as_json: Json = False,
) -> None:
    """Measure how fast predictions are here.

    Against a loop of forward passes and against one pass over a repeated batch, in turns in one process.
    """
    from dropbayes.cli import bench as measuring

    measuring.bench(n_draws=n_draws, repeats=repeats, as_json=as_json)
