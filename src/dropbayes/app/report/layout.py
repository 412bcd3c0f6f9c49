"""The layout: the columns of a table, files to download, and the template that has the words of the page."""

import csv
import functools
import io
import re
import shlex
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from dropbayes.app.report import svg
from dropbayes.predictive.scoring import ScoreValue
from dropbayes.runtime import __version__
from dropbayes.runtime.formatting import count, number, percent, score_text


@dataclass(frozen=True)
class Column:
    """A column of a table; a share in percent is drawn as a bar."""

    label: str
    number: bool = True
    share: bool = False


def csv_address(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A CSV file as a `data:` address: a link to it downloads without a request."""
    out = io.StringIO(newline="")
    for row in (heads, *rows):  # a cell must not start a formula in a spreadsheet
        csv.writer(out).writerow([f"'{cell}" if cell[:1] in tuple("=+@\t\r") else cell for cell in row])
    return "data:text/csv;charset=utf-8," + urllib.parse.quote(out.getvalue())


def scores_csv(scores: Iterable[ScoreValue]) -> str:
    cells = [[s.score.label, f"{s.value:.8g}", "" if s.error is None else f"{s.error:.4g}", s.meaning] for s in scores]
    return csv_address(["score", "value", "standard error", "meaning"], cells)


_folder = files("dropbayes.app.report")
environment = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    loader=jinja2.FunctionLoader(lambda name: _folder.joinpath(name).read_text(encoding="utf-8")),
)
"""The templates of this folder, with what they know of numbers, tables and charts."""
environment.filters.update(number=number, percent=percent, commas="{:,}".format, shell=shlex.quote)
environment.filters["unbroken"] = lambda text: Markup(re.sub(r"(?<=\d) %", "\u00a0%", escape(text)))
environment.tests["command"] = re.compile(r"(dropbayes|python) [a-z-]").match
environment.globals.update(
    columns=lambda label, *labels: [Column(label, number=False), *map(Column, labels)],  # of texts, and of numbers
    share=functools.partial(Column, share=True),
    csv_address=csv_address,
    scores_csv=scores_csv,
    score_text=score_text,
    count=count,
    zip=zip,
    draw=svg.draw,
    swatch=svg.swatch,
    style=Markup(_folder.joinpath("style.css").read_text(encoding="utf-8").strip()),
    version=__version__,
)
