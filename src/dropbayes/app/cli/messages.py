"""Results on standard output, as text or as one JSON document; notes and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


def one_line(text: object) -> str:
    """The text on one line, without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(text).split()))


def complain(text: object, details: Iterable[str] = (), *, kind: str = "error") -> None:
    """Prints an error on standard error, with the details on indented lines below."""
    lines = [f"dropbayes: {kind}: {one_line(text)}", *(f"  {one_line(line)}" for line in details)]
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        print("\n".join(lines), file=sys.stderr, flush=True)


def note(text: object) -> None:
    complain(text, kind="note")


def escaped(text: object) -> str:
    """Markup that stands for the text itself."""
    from rich.markup import escape

    return escape(str(text))


def bold(text: object) -> str:
    """Markup that stands for the text in bold."""
    return f"[bold]{escaped(text)}[/bold]"


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    result = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not result.is_terminal:  # a file or a pipe has no width to fit
        result.width = max(result.width, 200)
    return result


def print_result(values: Mapping[str, object], text: Iterable[RenderableType], *, as_json: bool) -> None:
    """Prints the result of a command: for people the text, for machines one JSON document of the values."""
    if as_json:  # in which numbers that JSON does not know become null
        known = json.loads(json.dumps(values, default=lambda array: array.tolist()), parse_constant=lambda _: None)
        print(json.dumps(known, indent=1, ensure_ascii=False), flush=True)
    else:
        print_text(text)


def print_text(lines: Iterable[RenderableType]) -> None:
    """Prints lines of markup, and tables, on standard output."""
    terminal = console()
    for line in lines:
        terminal.print(line)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Table:
    """A table to print, its cells never read as markup; `numbers` are the columns that are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, title_justify="left", header_style="bold cyan", pad_edge=False, show_edge=False)
    if title:
        grid.title = Text(title, style="bold not italic")
    for index, head in enumerate(heads):
        grid.add_column(Text(head), justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(one_line(cell)) for cell in row))
    return grid
