"""The page's layout: sections of text, charts and tables, and the template that makes them one document."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from dropbayes.report import charts
from dropbayes.report.charts import Figure
from dropbayes.report.evidence import Score
from dropbayes.report.words import Answer
from dropbayes.runtime.version import __version__

WHOLE, HALF, TELEPHONE = (900, 400), (450, 400), (346, 300)
"""The sizes of charts: over the whole width, two side by side, and on a telephone."""

_AREAS = ("outer", "inner", "chance", "haze", "bar", "faint-bar", "wrong-bar", "tile")
_DOTS = ("truth", "miss", "known", "bin")


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure with its caption, drawn for a laptop and for a telephone."""

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
        return charts.drawn(self.figure, width=self.size[0], height=self.size[1])

    @property
    def narrow(self) -> Markup:
        """The chart for a telephone."""
        return charts.drawn(self.figure, width=TELEPHONE[0], height=TELEPHONE[1])

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
    """Rows of texts under their columns."""

    caption: str
    columns: list[Column]
    rows: list[list[str]]

    def columns_with(self, row: list[str]) -> list[tuple[Column, str]]:
        """Each cell of a row with its column."""
        return list(zip(self.columns, row, strict=True))


@dataclass(frozen=True, eq=False)
class Part:
    """A section of the page."""

    key: str
    heading: str
    intro: str | Markup = ""
    answers: Sequence[Answer] = ()
    charts: Sequence[Chart] = ()
    scores: Sequence[tuple[Score, str]] = ()
    caption: str = ""
    table: Table | None = None
    facts: Sequence[tuple[str, str, bool]] = ()


def rendered(title: str, lede: str | Markup, parts: list[Part]) -> str:
    """The document."""
    folder = files("dropbayes.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["unbroken"] = _unbroken
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    style = Markup(folder.joinpath("style.css").read_text(encoding="utf-8").strip())
    return template.render(title=title, lede=lede, parts=parts, style=style, version=__version__) + "\n"


def _unbroken(text: str | Markup) -> Markup:
    """The text, escaped, with its percent signs bound to their numbers."""
    return Markup(re.sub(r"(?<=\d) %", "\u00a0%", escape(text)))
