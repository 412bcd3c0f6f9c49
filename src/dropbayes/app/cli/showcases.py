"""The commands that show what the library does: the demonstration and the interactive page."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from dropbayes.app.cli.application import app
from dropbayes.app.cli.options import Json


@app.command()
def demo(
    out: Annotated[str, typer.Option(help="The folder for results.", metavar="FOLDER")] = "out",
    as_json: Json = False,
) -> None:
    """Fit, predict and report on atmospheric CO2, in under a minute."""
    from rich.console import Console

    from dropbayes.app.cli import messages
    from dropbayes.app.cli.demo import demo as run

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
    from dropbayes.app.cli import page as page_command

    if out is not None:
        page_command.write_page(out, as_json=as_json)
    else:
        page_command.serve_page(port=port, open_browser=not no_browser, as_json=as_json)
