"""Charts as inline SVG: scales, round ticks, axes, and marks described once in the data's own units.

A `Figure` is drawn by `render` at a given size, so that a phone gets a chart of its own with text as large as on a
laptop. Colours are style-sheet classes of the page: a chart follows its light or dark theme.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from dropbayes.runtime.validation import Numbers

_LETTER = 6.7  # the width of a character of the axis labels in pixels, with a margin for wide ones

Ticks = Sequence[tuple[float, str]]
_Data = TypeVar("_Data", float, Numbers)


class Scale(NamedTuple):
    """The affine map from data in [`low`, `high`] to pixels in [`start`, `end`]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: _Data) -> _Data:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, *, max_ticks: int = 6) -> list[float]:
    """At most `max_ticks` multiples of 1, 2 or 5 times a power of ten, all inside [low, high]."""
    power = math.floor(math.log10((high - low) / max_ticks))
    for step, exponent in ((f, power + p) for p in range(3) for f in (1, 2, 5)):
        unit = step * 10.0**exponent
        first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
        if last - first + 1 <= max_ticks:
            return [round(k * unit, max(0, -exponent)) for k in range(first, last + 1)]  # 3 * 0.1 is to be 0.3
    raise AssertionError("a thousandfold step leaves no tick")  # pragma: no cover


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks as text with as many digits as tell them apart."""
    largest = max((abs(t) for t in ticks), default=0.0)
    step = min((b - a for a, b in pairwise(ticks)), default=largest) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if largest < 1e6 and decimals <= 4:
        comma = "," if largest >= 10_000 else ""
        return [f"{t + 0.0:{comma}.{decimals}f}".replace("-", "−") for t in ticks]
    digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
    parts = [f"{t:.{digits}e}".split("e") for t in ticks]
    return [f"{mantissa}e{int(power)}".replace("-", "−") if float(mantissa) else "0" for mantissa, power in parts]


def padded_range(*parts: Iterable[float] | Numbers, share: float = 0.04) -> tuple[float, float]:
    """The range of all finite values, widened on both sides by a share of itself; a constant gets a range too."""
    values = np.concatenate([np.asarray(part, dtype=float).reshape(-1) for part in parts])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = share * (high - low)
    if not margin > 1e-12 * max(abs(low), abs(high)):
        margin = 0.1 * abs(low) or 1.0
    return low - margin, high + margin


def thinned_indices(*columns: Numbers, max_points: int) -> npt.NDArray[np.intp]:
    """Rising indices of at most so many points: evenly spread, with the first, the last and every column's extremes."""
    if (n := len(columns[0])) <= max_points:
        return np.arange(n)
    keep = {0, n - 1} | {int(find(values)) for values in columns for find in (np.nanargmin, np.nanargmax)}
    spread = np.linspace(0, n - 1, max(2, max_points - len(keep))).round().astype(int)
    return np.array(sorted(keep | set(spread.tolist())), dtype=np.intp)


Mark = Callable[[Scale, Scale], str]  #: Draws itself on a horizontal and a vertical scale.


def _path(points: str, kind: str) -> str:
    return f'<path class="{kind}" d="{points}"/>'


def _text(x: float, y: float, text: str, *, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _pairs(x: Scale, y: Scale, xs: Numbers, ys: Numbers) -> list[str]:
    low, high = sorted((y.start, y.end))
    heights = np.clip(y(ys), low - 1e4, high + 1e4)  # a pixel number a browser can draw, whatever the data
    return [f"{a:.1f} {b:.1f}" for a, b in zip(x(xs), heights, strict=True)]


def line(xs: Numbers, ys: Numbers, *, kind: str, end: str = "") -> Mark:
    return lambda x, y: _path("M" + "L".join(_pairs(x, y, xs, ys)) + end, kind)


def band(xs: Numbers, lower: Numbers, upper: Numbers, *, kind: str) -> Mark:
    """The area between two curves."""
    return line(np.concatenate([xs, xs[::-1]]), np.concatenate([upper, lower[::-1]]), kind=kind, end="Z")


def dots(xs: Numbers, ys: Numbers, *, kind: str, among: int = 0) -> Mark:
    """A dot at each point: one path whose strokes have no length and round ends; smaller `among` many dots."""
    kind += " many" if among > 120 else ""
    return lambda x, y: _path("".join(f"M{pair}h0" for pair in _pairs(x, y, xs, ys)), kind) if len(xs) else ""


def stems(xs: Numbers, lower: Numbers, upper: Numbers, *, kind: str) -> Mark:
    """A vertical line from `lower` to `upper` at each position."""
    return lambda x, y: _path("".join(map("M{}L{}".format, _pairs(x, y, xs, lower), _pairs(x, y, xs, upper))), kind)


def bars(left: Numbers, right: Numbers, height: Numbers, *, floor: Numbers | float = 0.0, kind: str) -> Mark:
    def draw(x: Scale, y: Scale) -> str:
        corners = zip(x(left) + 0.5, x(right) - 0.5, y(np.broadcast_to(floor, height.shape)), y(height), strict=True)
        return _path("".join(f"M{a:.1f} {c:.1f}V{d:.1f}H{b:.1f}V{c:.1f}Z" for a, b, c, d in corners if c != d), kind)

    return draw


def note(position: float, text: str) -> Mark:
    """A text at the top, beside a position: on its right if there is room."""

    def draw(x: Scale, y: Scale) -> str:
        anchor, shift = ("start", 5) if x.end - x(position) > _LETTER * len(text) else ("end", -5)
        return _text(x(position) + shift, y.end + 12, text, kind="note", anchor=anchor)

    return draw


def words(xs: Numbers, ys: Numbers, texts: Sequence[str], *, kind: str) -> Mark:
    return lambda x, y: "".join(_text(a, b, text, kind=kind) for a, b, text in zip(x(xs), y(ys), texts, strict=True))


def tiles(shares: Numbers, *, texts: Sequence[Sequence[str]], kind: str) -> Mark:
    """A square for each share that is not 0, its opacity; row 0 on top; with its text where there is room for it."""

    def draw(x: Scale, y: Scale) -> str:
        wide, high = abs(x(1.0) - x(0.0)), abs(y(1.0) - y(0.0))
        size, parts = f'width="{max(wide - 2, 1):.1f}" height="{max(high - 2, 1):.1f}"', []
        for i, j in np.argwhere(shares):
            left, top, text, share = x(j) + 1, y(i) + 1, texts[i][j], shares[i, j]
            parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" {size} fill-opacity="{share:.3f}"/>')
            if _LETTER * len(text) < wide and high > 13:
                strength = "cell strong" if share > 0.5 else "cell"
                parts.append(_text(left + wide / 2 - 1, top + high / 2 + 3, text, kind=strength))
        return "".join(parts)

    return draw


@dataclass(frozen=True)
class Axis:
    """The range of one direction, the quantity it measures, and its ticks."""

    low: float
    high: float
    label: str
    ticks: Ticks | None = None  # round numbers by default
    percent: bool = False  # whether ticks read as percentages

    def tick_marks(self, max_ticks: int) -> Ticks:
        if self.ticks is not None:
            return self.ticks
        values = round_ticks(self.low, self.high, max_ticks=max_ticks)
        texts = [f"{t} %" for t in tick_texts([100 * v for v in values])] if self.percent else tick_texts(values)
        return list(zip(values, texts, strict=True))


@dataclass(frozen=True, eq=False)
class Figure:
    """A chart in the data's units."""

    key: str  # a name unique on the page
    x: Axis
    y: Axis  # `low` is at the bottom
    marks: Sequence[Mark]  # drawn in order, over the grid
    half: bool = False  # whether it takes half of the page's width
    grid: bool = True
    facts: Mapping[str, object] = field(default_factory=dict)  # what its caption says besides the measurements


def swatch(kind: str) -> str:
    """The path of a mark's example in the legend: an area, a dot or a line."""
    if kind in ("outer", "inner", "chance", "bar", "faint-bar", "wrong-bar"):
        return "M0 1H26V13H0Z"
    return "M13 7h0" if kind in ("truth", "miss", "known", "bin") else "M1 7H25"


def draw(figure: Figure, title: str = "", description: str = "", *, width: int, height: int) -> Markup:
    """The figure as an SVG element of the given size in its own pixels; its texts are for screen readers."""
    y_ticks = figure.y.tick_marks(max(3, height // 55))
    left = 12 + _LETTER * max((len(text) for _, text in y_ticks), default=1)
    x = Scale(figure.x.low, figure.x.high, start=left, end=width - 20)
    y = Scale(figure.y.low, figure.y.high, start=height - 42, end=30)
    x_ticks = figure.x.tick_marks(max(3, width // 85))
    for n in range(1, len(x_ticks) + 1):  # every n-th tick, such that no two labels touch
        if all(abs(x(b) - x(a)) > _LETTER * (len(s) + len(t)) / 2 + 6 for (a, s), (b, t) in pairwise(x_ticks[::n])):
            x_ticks = x_ticks[::n]
            break
    across = "".join(f"M{x.start:.1f} {y(v):.1f}H{x.end:.1f}" for v, _ in y_ticks)
    along = "".join(f"M{x(v):.1f} {y.start:.1f}v5" for v, _ in x_ticks) + f"M{x.start:.1f} {y.start:.1f}H{x.end:.1f}"
    inside = f'width="{x.end - x.start + 6:.1f}" height="{y.start - y.end + 6:.1f}"'
    key = f"{figure.key}-{width}"
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{key}-t {key}-d" '
        f'data-x="{x.low} {x.high} {x.start:.2f} {x.end:.2f}" '
        f'data-y="{y.low} {y.high} {y.start:.2f} {y.end:.2f}">',
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>',
        f'<defs><clipPath id="{key}-c"><rect x="{x.start - 3:.1f}" y="{y.end - 3:.1f}" {inside}/></clipPath></defs>',
        _path(across, "grid") + _path(along, "frame") if figure.grid else "",
        f'<g clip-path="url(#{key}-c)">',
        *(mark(x, y) for mark in figure.marks),
        "</g>",
        *(_text(float(x(v)), y.start + 18, text, kind="tick") for v, text in x_ticks),
        *(_text(x.start - 7, y(v) + 4, text, kind="tick", anchor="end") for v, text in y_ticks),
        _text(x.end, height - 6, figure.x.label, kind="axis", anchor="end"),
        _text(2, 14, figure.y.label, kind="axis", anchor="start"),
        "</svg>",
    ]
    return Markup("".join(parts))
