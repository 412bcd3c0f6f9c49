"""Options that several commands share, and how the texts of options are read."""

import functools
import math
import os
from collections.abc import Callable
from typing import Annotated, Literal

import typer

column = functools.partial(typer.Option, rich_help_panel="Columns", metavar="COLUMN")
training = functools.partial(typer.Option, rich_help_panel="Model and training", metavar="N")
searched = functools.partial(training, metavar="NUMBERS")
count = functools.partial(typer.Option, min=1, metavar="N")
port = functools.partial(typer.Option, min=0, max=65535, metavar="N")
file = functools.partial(typer.Option, metavar="FILE")
output = functools.partial(file, "--out", "--output", "-o")
flag = functools.partial(typer.Option, metavar="")
data = functools.partial(typer.Argument, metavar="DATA")


def numbers(
    text: str, rule: str = "must be a number, or several with commas", accepts: Callable[[float], bool] = math.isfinite
) -> list[float]:
    """The numbers in a text with commas, each of which must be accepted."""
    try:
        values = [float(number) for number in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(map(accepts, values)):
        raise typer.BadParameter(f"{rule}; got {text!r}")
    return values


def numbers_or(
    word: str, rule: str, accepts: Callable[[float], bool], made: Callable[[list[float]], object]
) -> Callable[[str], object]:
    """Reads a word as it is, and any other text as what is made of its numbers."""

    def read(text: str) -> object:
        return text if text == word else made(numbers(text, rule, accepts))

    return read


def one_or_several(values: list[float]) -> object:
    return values[0] if len(values) == 1 else values


def delimiter_character(text: str | None) -> str | None:
    """The one character that a text stands for: itself, or a tab."""
    if text is None:
        return None
    character = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(character) != 1 or character in '"\r\n' or ord(character) > 127:
        raise typer.BadParameter(f"must be one plain character; got {text!r}")
    return character


def proportion(value: float | None) -> float | None:
    if value is not None and not 0 < value < 1:
        raise typer.BadParameter(f"must lie between 0 and 1; got {value:g}")
    return value


def check_destination(output: str, as_json: bool, *tables: str | None) -> None:
    """Raises BadParameter for a table that is read, or if a JSON document would go to standard output as well."""
    if os.path.isfile(output) and os.path.realpath(output) in [os.path.realpath(table) for table in tables if table]:
        raise typer.BadParameter("is a table that is read; name another", param_hint="'-o'")
    if output == "-" and as_json:
        raise typer.BadParameter("cannot go to standard output together with --json; name a file", param_hint="'-o'")


Json = Annotated[bool, flag("--json", help="Print one JSON document on standard output.")]
mark = functools.partial(typer.Option, metavar="CHAR", callback=delimiter_character)
Delimiter = Annotated[str | None, mark(help="The delimiter of a CSV file; detected from its first lines by default.")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of a CSV file, such as cp1252.", metavar="NAME")]
Data = Annotated[str, data(help="A CSV (also compressed) or Parquet file; - reads CSV from standard input.")]
Outcomes = Annotated[str, data(help="A CSV or Parquet file that includes the target column.")]
ModelFolder = Annotated[str, typer.Argument(metavar="MODEL", help="The folder that `dropbayes fit` wrote.")]
Draws = Annotated[int | None, count(help="Draws per network; by default as many as the model was fitted with.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws; by default that of the fit.", min=0, metavar="N")]
Method = Annotated[Literal["sampling", "linear", "moments"], typer.Option(help="Draws, or one pass without any.")]
AllowNew = Annotated[bool, flag("--allow-new", help="Encode unseen categories as all zeros instead of failing.")]
BlockRows = Annotated[int | None, count(help="Rows of a Parquet file read at a time; does not change the result.")]
Coverage = Annotated[
    float | None, typer.Option(help="How often an interval holds the outcome (0.95).", metavar="X", callback=proportion)
]
Decimal = Annotated[Literal[".", ","] | None, column(help="Decimal mark, . or , (else detected).", metavar="CHAR")]
hidden_widths = numbers_or(
    "auto", "must be widths of layers such as 50,50", lambda n: n >= 1 and n.is_integer(), lambda n: (*map(int, n),)
)
Hidden = Annotated[str, training(help="Widths of the hidden layers.", metavar="WIDTHS", callback=hidden_widths)]
drop_probabilities = numbers_or("search", "must lie in [0, 1)", lambda share: 0 <= share < 1, one_or_several)
weight_decays = numbers_or("search", "must be 0 or more", lambda decay: 0 <= decay < math.inf, one_or_several)
DropProb = Annotated[str, searched(help="Drop probability, or several to try.", callback=drop_probabilities)]
WeightDecay = Annotated[str, searched(help="Weight decay λ, or several to try.", callback=weight_decays)]
