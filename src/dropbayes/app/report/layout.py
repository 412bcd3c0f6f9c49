"""The layout: sections of answers, charts, scores, tables and facts, and the template that makes them one page."""

from __future__ import annotations

import csv
import io
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from dropbayes.app.report import svg
from dropbayes.predictive.scoring import ScoreValue
from dropbayes.runtime import __version__
from dropbayes.runtime.formatting import score_text


@dataclass(frozen=True)
class Answer:
    """One answer of the summary: as a number, in words, and in the colour "good", "warn" or "plain"."""

    question: str
    figure: str
    text: Markup
    tone: str = "plain"


@dataclass(frozen=True)
class Column:
    """A column of a table; a share in percent is drawn as a bar."""

    label: str
    number: bool = True
    share: bool = False


def text_and_numbers(label: str, *labels: str) -> list[Column]:
    """A column of texts, and columns of numbers."""
    return [Column(label, number=False), *map(Column, labels)]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of texts under their columns, and the same as a CSV file to download."""

    key: str  # a name unique on the page, that of the file
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notable: frozenset[int] = frozenset()  # the rows to set in colour

    @property
    def download(self) -> str:
        return csv_address([column.label for column in self.columns], self.rows)


@dataclass(frozen=True, eq=False)
class Section:
    key: str
    heading: str
    intro: str | Markup = ""
    answers: Sequence[Answer] = ()
    charts: Sequence[svg.Figure] = ()
    scores: Sequence[ScoreValue] = ()
    caption: str = ""  # of the scores
    tables: Sequence[Table] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # texts by their labels

    @property
    def download(self) -> str:
        errors = ["" if one.error is None else f"{one.error:.4g}" for one in self.scores]
        cells = [[s.score.label, f"{s.value:.8g}", e, s.meaning] for s, e in zip(self.scores, errors, strict=True)]
        return csv_address(["score", "value", "standard error", "meaning"], cells)


def csv_address(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A CSV file as a `data:` address: a link to it downloads without a request.

    Example:
        >>> csv_address(["a"], [["=1"]])
        'data:text/csv;charset=utf-8,a%0D%0A%27%3D1%0D%0A'
    """
    out = io.StringIO(newline="")
    for row in (heads, *rows):  # a cell must not start a formula in a spreadsheet
        csv.writer(out).writerow([f"'{cell}" if cell[:1] in tuple("=+@\t\r") else cell for cell in row])
    return "data:text/csv;charset=utf-8," + urllib.parse.quote(out.getvalue())


def render(title: str, lede: Markup, parts: Sequence[Section]) -> str:
    folder = files("dropbayes.app.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    # Binds percent signs to their numbers.
    environment.filters["unbroken"] = lambda text: Markup(re.sub(r"(?<=\d) %", "\u00a0%", escape(text)))
    environment.tests["command"] = re.compile(r"(dropbayes|python) [a-z-]").match
    environment.globals.update(draw=svg.draw, swatch=svg.swatch, score_text=score_text, zip=zip, version=__version__)
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    style = Markup(folder.joinpath("style.css").read_text(encoding="utf-8").strip())
    return template.render(title=title, lede=lede, parts=parts, style=style) + "\n"
