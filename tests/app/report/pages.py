"""What the tests of the report share: small data, and a reader of pages."""

import csv
import io
import re
import urllib.parse
from html.parser import HTMLParser

import numpy as np

from dropbayes.app.report import svg

QUICK = {
    "hidden": (8,),
    "drop_prob": 0.1,
    "weight_decay": 1e-4,
    "n_steps": 60,
    "n_networks": 2,
    "n_folds": 1,
    "n_draws": 10,
}
NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "</style><script>alert(2)</script>",
    "'; alert(3); //",
    "\u202eright to left\u202c",
    "\u05e9\u05dc\u05d5\u05dd",
    "{{7*7}}",
    "{% raw %}",
    "&amp;&lt;",
    "😀👩‍👩‍👧",
    "",
    "   ",
    "x" * 5000,
    "a\x00b\x1b[31m",
    "\ud800",
    "line\nbreak",
    "100 %",
]


def regression_rows(n, n_features=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_features))
    return x, x.sum(1) + 0.3 * rng.normal(size=n)


def class_rows(n, n_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % n_classes
    centres = np.random.default_rng(1).normal(size=(n_classes, 4)) * 2
    return centres[labels] + rng.normal(size=(n, 4)), labels


class PixelScale(svg.Scale):
    """A scale that is read backwards too."""

    def inverse(self, pixel):
        """The data value at a pixel."""
        return self.low + (pixel - self.start) / (self.end - self.start) * (self.high - self.low)


def scales_of(drawing):
    measured = [re.search(rf'data-{axis}="([^"]+)"', drawing)[1].split() for axis in "xy"]
    return [PixelScale(*map(float, numbers)) for numbers in measured]


def draws_of(model, x):
    mixture = model.predictive(x)
    return mixture.location, mixture.scale.square()


class Page(HTMLParser):
    """The parts of a page that tests ask for."""

    VOID = frozenset({"meta", "link", "rect", "path", "br", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.scores, self.cells, self.open, self.texts, self.headings, self.ids = [], {}, [], [], [], [], []
        self.row, self.figures = None, {}
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        if "data-score" in attributes:
            self.scores[attributes["data-score"]] = [attributes["data-value"], attributes["data-error"], ""]
            self.row = attributes["data-score"]
        if tag == "td" and "data-label" in attributes:
            self.cells.append([attributes["data-label"], ""])
        if tag not in self.VOID:
            self.open.append((tag, attributes))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        inside = [tag for tag, _ in self.open]
        if not self.open or inside[-1] == "style":
            return
        self.texts.append(data)
        if inside[-1] == "td" and self.open[-1][1].get("class") == "numeric" and self.row:
            self.scores[self.row][2] += data
        if "td" in inside and self.cells:
            self.cells[-1][1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace("\u00a0", " ").split())

    def column(self, label):
        return [text.strip() for name, text in self.cells if name == label]


def tables(text):
    """Every table of a page, as the link below its caption downloads it."""
    links = {a["download"]: a["href"] for tag, a in Page(text).tags if "download" in a}
    return {
        name: list(csv.DictReader(io.StringIO(urllib.parse.unquote(href.partition(",")[2]), newline="")))
        for name, href in links.items()
    }
