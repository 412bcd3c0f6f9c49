"""The application that the commands are added to: its name, its help and the options of every command."""

from __future__ import annotations

import functools
import os
import sys
from typing import Annotated, Any

import typer

__all__ = ["app", "command", "debugging"]

app = typer.Typer(
    name="dropbayes",
    help="How sure is my network? Fit dropout networks to tables, and predict with honest uncertainty.",
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_debug = False


def command() -> Any:
    """The command with all subcommands."""
    global _debug
    _debug = False
    # Rich takes longer to import than all of this; in a pipe its frames only get in the way.
    return _command(sys.stdout.isatty())


@functools.cache
def _command(framed: bool) -> Any:
    app.rich_markup_mode = "rich" if framed else None
    return typer.main.get_command(app)


def debugging() -> bool:
    """Whether errors show their traceback."""
    return _debug or os.environ.get("DROPBAYES_DEBUG", "") not in ("", "0")


def _version(asked: bool) -> None:
    if asked:
        from dropbayes.runtime.version import __version__

        print(f"dropbayes {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    global _debug
    _debug = debug
