"""Options that several commands share, and texts of the command line read as numbers and characters."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

__all__ = [
    "AllowNew",
    "BlockRows",
    "Data",
    "Delimiter",
    "Draws",
    "Encoding",
    "Json",
    "ModelFolder",
    "Outcomes",
    "Seed",
    "check_one_output",
    "delimiter_character",
    "hidden_widths",
    "numbers",
    "search_space",
]

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document on standard output.")]
Delimiter = Annotated[
    str | None,
    typer.Option(help="The delimiter of a CSV file; detected from its first lines by default.", metavar="CHAR"),
]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of a CSV file, such as cp1252.", metavar="NAME"),
]
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A CSV (also compressed) or Parquet file; - reads CSV from standard input.",
    ),
]
Outcomes = Annotated[str, typer.Argument(metavar="DATA", help="A CSV or Parquet file that includes the target column.")]
ModelFolder = Annotated[str, typer.Argument(metavar="MODEL", help="The folder that `dropbayes fit` wrote.")]
Draws = Annotated[
    int | None,
    typer.Option(help="Draws per network; by default as many as the model was fitted with.", min=1, metavar="N"),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws; by default that of the fit.", min=0, metavar="N")]
AllowNew = Annotated[
    bool, typer.Option("--allow-new", metavar="", help="Encode unseen categories as all zeros instead of failing.")
]
BlockRows = Annotated[
    int | None, typer.Option(help="Rows read at a time; does not change the result.", min=1, metavar="N")
]


def numbers(text: str, option: str) -> list[float]:
    """The numbers in a text with commas."""
    try:
        values = [float(number) for number in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) for value in values):
        raise typer.BadParameter(f"must be a number, or several with commas; got {text!r}", param_hint=f"'{option}'")
    return values


def hidden_widths(text: str) -> tuple[int, ...] | str:
    if text == "auto":
        return text
    values = numbers(text, "--hidden")
    if not all(value >= 1 and value.is_integer() for value in values):
        raise typer.BadParameter(f"must be widths of layers such as 50,50; got {text!r}", param_hint="'--hidden'")
    return tuple(int(value) for value in values)


def search_space(text: str, option: str, *, probability: bool) -> Any:
    """The word "search", a number, or a list to try."""
    if text == "search":
        return text
    values = numbers(text, option)
    if not all(value >= 0 and (value < 1 or not probability) for value in values):
        rule = "must lie in [0, 1)" if probability else "must be 0 or more"
        raise typer.BadParameter(f"{rule}; got {text!r}", param_hint=f"'{option}'")
    return values[0] if len(values) == 1 else values


def delimiter_character(delimiter: str | None) -> str | None:
    if delimiter is None:
        return None
    delimiter = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter)
    if len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 127:
        raise typer.BadParameter(f"must be one plain character; got {delimiter!r}", param_hint="'--delimiter'")
    return delimiter


def check_one_output(output: str, as_json: bool) -> None:
    if output == "-" and as_json:
        raise typer.BadParameter("cannot go to standard output together with --json; name a file", param_hint="'-o'")
