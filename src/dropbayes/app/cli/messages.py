"""What the command line says: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dropbayes.runtime.formatting import count
from dropbayes.runtime.formatting import plain_number as number
from dropbayes.runtime.progress import ProgressBar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dropbayes.app.tables import Source

__all__ = ["complain", "count", "note", "number", "one_line", "out", "print_json", "reading_bar", "table"]


def one_line(text: object) -> str:
    r"""The text on one line, without characters that would steer a terminal.

    Example:
        >>> one_line("a\n  b\x1b[31m")
        'a b�[31m'
    """
    joined = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in joined)


def complain(text: object, details: Sequence[str] = ()) -> None:
    """Prints an error on standard error, with the details on indented lines below."""
    _say("\n".join([f"dropbayes: error: {one_line(text)}", *(f"  {one_line(line)}" for line in details)]))


def note(text: object) -> None:
    """Prints a note on standard error."""
    _say(f"dropbayes: note: {one_line(text)}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        print(line, file=sys.stderr, flush=True)


def out() -> Console:
    """The console of standard output."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = max(console.width, 200)
    return console


def print_json(values: Mapping[str, Any]) -> None:
    """Prints one JSON document; numbers that JSON does not know become null."""
    print(json.dumps(_plain(values), indent=1, ensure_ascii=False), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> Table:
    """A table to print.

    Args:
        title: The title above it.
        heads: The names of its columns.
        rows: Its cells; never read as markup.
        numbers: The indices of the columns of numbers, which are right-aligned.
    """
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


def reading_bar(source: Source, title: str) -> ProgressBar:
    """A bar that follows the reading of a table."""
    return ProgressBar(title, source.size, unit=source.unit)
