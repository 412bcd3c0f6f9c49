"""The page's layout: sections of text, charts and tables, and the template that makes them one document."""

from __future__ import annotations

import csv
import io
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from dropbayes.app.report import svg
from dropbayes.app.report.measurements import ScoreValue
from dropbayes.app.report.summary import Answer
from dropbayes.app.report.svg import Figure
from dropbayes.runtime.version import __version__

WHOLE, HALF, PHONE = (900, 400), (450, 400), (346, 300)
"""The sizes of charts: over the whole width, two side by side, and on a phone."""

_AREAS = ("outer", "inner", "chance", "haze", "bar", "faint-bar", "wrong-bar", "tile")
_DOTS = ("truth", "miss", "known", "bin")


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure with its caption, drawn for a laptop and for a phone."""

    figure: Figure
    caption: str | Markup
    size: tuple[int, int] = WHOLE
    heading: str = ""

    @property
    def layout(self) -> str:
        """Its place on a wide screen."""
        return "half" if self.size == HALF else "whole"

    @property
    def wide(self) -> Markup:
        """The chart for a laptop."""
        return svg.render(self.figure, width=self.size[0], height=self.size[1])

    @property
    def narrow(self) -> Markup:
        """The chart for a phone."""
        return svg.render(self.figure, width=PHONE[0], height=PHONE[1])

    @staticmethod
    def swatch(kind: str) -> str:
        """The path of a mark's example in the legend."""
        if kind in _AREAS:
            return "M0 1H26V13H0Z"
        return "M13 7h0" if kind in _DOTS else "M1 7H25"


@dataclass(frozen=True)
class Column:
    """A column of the table of rows; `share` is drawn as a bar."""

    label: str
    number: bool = True
    share: bool = False

    @staticmethod
    def pixels(cell: str) -> str:
        """The length of the bar of a share."""
        return f"{0.6 * float(cell.split()[0]):.1f}"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of texts under their columns, and the same as a CSV file to download.

    Args:
        key: A name unique on the page, that of the file.
        caption: What it shows.
        columns: Its columns.
        rows: Its cells.
        notable: The rows to set in colour.
    """

    key: str
    caption: str
    columns: list[Column]
    rows: list[list[str]]
    notable: frozenset[int] = frozenset()

    @property
    def download(self) -> str:
        """The table as a CSV file, in an address that holds all of it."""
        return csv_address([column.label for column in self.columns], self.rows)

    def columns_with(self, row: list[str]) -> list[tuple[Column, str]]:
        """Each cell of a row with its column."""
        return list(zip(self.columns, row, strict=True))


@dataclass(frozen=True, eq=False)
class Section:
    """A section of the page."""

    key: str
    heading: str
    intro: str | Markup = ""
    answers: Sequence[Answer] = ()
    charts: Sequence[Chart] = ()
    scores: Sequence[tuple[ScoreValue, str]] = ()
    caption: str = ""
    download: str = ""
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str, bool]] = ()


def csv_address(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A CSV file as a `data:` address: a link to it downloads without a request.

    Example:
        >>> csv_address(["a"], [["=1"]])
        'data:text/csv;charset=utf-8,a%0D%0A%27%3D1%0D%0A'
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for row in (heads, *rows):  # a cell must not start a formula in a spreadsheet
        writer.writerow([f"'{cell}" if cell[:1] in tuple("=+@\t\r") else cell for cell in row])
    return "data:text/csv;charset=utf-8," + urllib.parse.quote(out.getvalue())


def render(title: str, lede: str | Markup, parts: list[Section]) -> str:
    """The document."""
    folder = files("dropbayes.app.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["unbroken"] = _bind_percent_signs
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    style = Markup(folder.joinpath("style.css").read_text(encoding="utf-8").strip())
    return template.render(title=title, lede=lede, parts=parts, style=style, version=__version__) + "\n"


def _bind_percent_signs(text: str | Markup) -> Markup:
    """The text, escaped, with its percent signs bound to their numbers."""
    return Markup(re.sub(r"(?<=\d) %", "\u00a0%", escape(text)))
