"""Charts as inline SVG: scales, round ticks, axes, and marks described once in the data's own units.

A `Figure` says what to draw; `render` draws it at a given size, so that a phone gets a chart of its own with text as
large as on a laptop. Colours are style-sheet classes of the page: a chart follows its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from dropbayes.runtime.arrays import Numbers

_LETTER = 6.7
"""The width of a character of the axis labels, in pixels, with a margin for wide ones."""


@dataclass(frozen=True)
class Scale:
    """The affine map from data in [`low`, `high`] to pixels in [`start`, `end`].

    Examples:
        >>> scale = Scale(0.0, 10.0, start=50, end=250)
        >>> scale(5.0), scale.inverse(150.0)
        (150.0, 5.0)
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: Any) -> Any:
        """The pixel of a data value (or of each in an array)."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def inverse(self, pixel: Any) -> Any:
        """The data value at a pixel."""
        return self.low + (pixel - self.start) / (self.end - self.start) * (self.high - self.low)


def round_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten, all inside [low, high].

    Examples:
        >>> round_ticks(1958.2, 2001.9), round_ticks(-0.04, 0.11, most=4)
        ([1960.0, 1970.0, 1980.0, 1990.0, 2000.0], [0.0, 0.05, 0.1])
    """
    power = math.floor(math.log10((high - low) / most))
    for step, exponent in ((f, power + p) for p in range(3) for f in (1, 2, 5)):
        unit = step * 10.0**exponent
        first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
        if last - first + 1 <= most:
            # Decimal rounding: 3 * 0.1 is to be 0.3.
            return [round(k * unit, max(0, -exponent)) for k in range(first, last + 1)]
    raise AssertionError("a thousandfold step leaves no tick")  # pragma: no cover


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks as text with as many digits as tell them apart.

    Examples:
        >>> tick_texts([0.0, 0.05, 0.1]), tick_texts([0.0, 2e6, 4e6]), tick_texts([1000.0, 1500.0])
        (['0.00', '0.05', '0.10'], ['0', '2e6', '4e6'], ['1000', '1500'])
    """
    largest = max((abs(t) for t in ticks), default=0.0)
    step = min((b - a for a, b in pairwise(ticks)), default=largest) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if largest < 1e6 and decimals <= 4:
        texts = [f"{t + 0.0:,.{decimals}f}" if largest >= 10_000 else f"{t + 0.0:.{decimals}f}" for t in ticks]
        return [text.replace("-", "−") for text in texts]
    digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
    parts = [f"{t:.{digits}e}".split("e") for t in ticks]
    return [f"{mantissa}e{int(power)}".replace("-", "−") if float(mantissa) else "0" for mantissa, power in parts]


def padded_range(*parts: Iterable[float] | Numbers, share: float = 0.04) -> tuple[float, float]:
    """The range of all finite values, widened on both sides by a share of itself; a constant gets a range too.

    Examples:
        >>> padded_range([0.0, 10.0], [5.0], share=0.1), padded_range([3.0])
        ((-1.0, 11.0), (2.7, 3.3))
    """
    values = np.concatenate([np.asarray(part, dtype=float).reshape(-1) for part in parts])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = share * (high - low)
    if not margin > 1e-12 * max(abs(low), abs(high)):
        margin = 0.1 * abs(low) or 1.0
    return low - margin, high + margin


def thinned_indices(x: Numbers, *ys: Numbers, most: int) -> npt.NDArray[np.intp]:
    """Rising indices of at most `most` points: evenly spread, with the first and last, and every array's extremes.

    Examples:
        >>> thinned_indices(np.arange(100.0), np.eye(100)[42], most=6).tolist()  # the spike at 42 stays
        [0, 42, 50, 99]
    """
    n = len(x)
    if n <= most:
        return np.arange(n)
    keep = {0, n - 1} | {int(find(values)) for values in (x, *ys) for find in (np.nanargmin, np.nanargmax)}
    spread = np.linspace(0, n - 1, max(2, most - len(keep))).round().astype(int)
    return np.array(sorted(keep | set(spread.tolist())), dtype=np.intp)


# ------------------------------------------------------------------------------------------------- marks

Mark = Callable[[Scale, Scale], str]
"""Draws itself on a horizontal and a vertical scale."""


def _path(points: str, kind: str) -> str:
    return f'<path class="{kind}" d="{points}"/>'


def _pairs(x: Scale, y: Scale, xs: Numbers, ys: Numbers) -> list[str]:
    low, high = sorted((y.start, y.end))
    heights = np.clip(y(ys), low - 1e4, high + 1e4)  # a pixel number a browser can draw, whatever the data
    return [f"{a:.1f} {b:.1f}" for a, b in zip(x(xs), heights, strict=True)]


def line(xs: Numbers, ys: Numbers, *, kind: str) -> Mark:
    """A line through the points in their order."""
    return lambda x, y: _path("M" + "L".join(_pairs(x, y, xs, ys)), kind)


def band(xs: Numbers, lower: Numbers, upper: Numbers, *, kind: str) -> Mark:
    """The area between two curves."""
    return lambda x, y: _path("M" + "L".join(_pairs(x, y, xs, upper) + _pairs(x, y, xs[::-1], lower[::-1])) + "Z", kind)


def dots(xs: Numbers, ys: Numbers, *, kind: str) -> Mark:
    """A dot at each point: one path whose strokes have no length and round ends."""
    return lambda x, y: _path("".join(f"M{pair}h0" for pair in _pairs(x, y, xs, ys)), kind) if len(xs) else ""


def stems(xs: Numbers, lower: Numbers, upper: Numbers, *, kind: str) -> Mark:
    """A vertical line from `lower` to `upper` at each position."""

    def render_stems(x: Scale, y: Scale) -> str:
        ends = zip(_pairs(x, y, xs, lower), _pairs(x, y, xs, upper), strict=True)
        return _path("".join(f"M{a}L{b}" for a, b in ends), kind)

    return render_stems


def bars(left: Numbers, right: Numbers, height: Numbers, *, floor: Numbers | float = 0.0, kind: str) -> Mark:
    """Bars from `floor` up to `height`."""

    def render_bars(x: Scale, y: Scale) -> str:
        floors = np.broadcast_to(np.asarray(floor, dtype=float), height.shape)
        corners = zip(x(left) + 0.5, x(right) - 0.5, y(floors), y(height), strict=True)
        return _path("".join(f"M{a:.1f} {c:.1f}V{d:.1f}H{b:.1f}V{c:.1f}Z" for a, b, c, d in corners if c != d), kind)

    return render_bars


def upright(position: float, *, kind: str, text: str = "") -> Mark:
    """A vertical line over the whole height, with a label at its top."""

    def render_rule(x: Scale, y: Scale) -> str:
        rule = _path(f"M{x(position):.1f} {y.start:.1f}V{y.end:.1f}", kind)
        room = x.end - x(position) > _LETTER * len(text)
        anchor, shift = ("start", 5) if room else ("end", -5)
        where = f'x="{x(position) + shift:.1f}" y="{y.end + 12:.1f}" text-anchor="{anchor}"'
        return rule + (f'<text class="note" {where}>{escape(text)}</text>' if text else "")

    return render_rule


def level(height: float, *, kind: str) -> Mark:
    """A horizontal line over the whole width."""
    return lambda x, y: _path(f"M{x.start:.1f} {y(height):.1f}H{x.end:.1f}", kind)


def words(xs: Numbers, ys: Numbers, texts: Sequence[str], *, kind: str) -> Mark:
    """A text centred over each position."""

    def render_words(x: Scale, y: Scale) -> str:
        places = zip(x(xs), y(ys), texts, strict=True)
        return "".join(
            f'<text class="{kind}" x="{a:.1f}" y="{b:.1f}" text-anchor="middle">{escape(text)}</text>'
            for a, b, text in places
        )

    return render_words


def tiles(values: Numbers, *, texts: Sequence[Sequence[str]], kind: str) -> Mark:
    """A square of each cell's share of 1 as its opacity, row 0 on top, with its text where there is room for it."""

    def render_tiles(x: Scale, y: Scale) -> str:
        wide, high = abs(x(1.0) - x(0.0)), abs(y(1.0) - y(0.0))
        parts = []
        for (i, j), value in np.ndenumerate(values):
            if not value:
                continue
            left, top = x(float(j)) + 1, y(float(i)) + 1
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{max(wide - 2, 1):.1f}" '
                f'height="{max(high - 2, 1):.1f}" fill-opacity="{value:.3f}"/>'
            )
            if texts[i][j] and _LETTER * len(texts[i][j]) < wide and high > 13:
                strong = " strong" if value > 0.5 else ""
                parts.append(
                    f'<text class="cell{strong}" x="{left + wide / 2 - 1:.1f}" y="{top + high / 2 + 3:.1f}" '
                    f'text-anchor="middle">{escape(texts[i][j])}</text>'
                )
        return "".join(parts)

    return render_tiles


# ------------------------------------------------------------------------------------------------ figures


@dataclass(frozen=True)
class Axis:
    """The range of one direction, what it measures, and its ticks (by default, round numbers).

    Args:
        low: The least value shown.
        high: The greatest value shown.
        label: What is measured.
        ticks: Values and their texts.
        percent: Whether ticks read as percentages.
    """

    low: float
    high: float
    label: str
    ticks: tuple[tuple[float, str], ...] | None = None
    percent: bool = False

    def tick_marks(self, most: int) -> list[tuple[float, str]]:
        """The ticks and their texts."""
        if self.ticks is not None:
            return list(self.ticks)
        values = round_ticks(self.low, self.high, most=most)
        if self.percent:
            return [(v, f"{t} %") for v, t in zip(values, tick_texts([100 * v for v in values]), strict=True)]
        return list(zip(values, tick_texts(values), strict=True))


@dataclass(frozen=True)
class Figure:
    """What a chart shows, in the data's units.

    Args:
        key: A name unique on the page.
        title: The chart in a phrase, for screen readers.
        description: What is drawn, in a sentence, for screen readers.
        x: The horizontal axis.
        y: The vertical axis; `low` is at the bottom (exchange the ends to have it on top).
        marks: Drawn in order, over the grid.
        legend: The class of each kind of mark and what it stands for.
        grid: Whether ticks have lines across.
    """

    key: str
    title: str
    description: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    legend: tuple[tuple[str, str], ...] = ()
    grid: bool = True


def render(figure: Figure, *, width: int, height: int) -> Markup:
    """The figure as an SVG element of the given size in its own pixels."""
    y_ticks = figure.y.tick_marks(max(3, height // 55))
    left = 12 + _LETTER * max((len(text) for _, text in y_ticks), default=1)
    x = Scale(figure.x.low, figure.x.high, start=left, end=width - 20)
    y = Scale(figure.y.low, figure.y.high, start=height - 42, end=30)
    x_ticks = _spread_ticks(figure.x.tick_marks(max(3, width // 85)), x)
    key = f"{figure.key}-{width}"
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{key}-t {key}-d" '
        f'data-x="{x.low!r} {x.high!r} {x.start:.2f} {x.end:.2f}" '
        f'data-y="{y.low!r} {y.high!r} {y.start:.2f} {y.end:.2f}">',
        f'<title id="{key}-t">{escape(figure.title)}</title><desc id="{key}-d">{escape(figure.description)}</desc>',
        f'<defs><clipPath id="{key}-c"><rect x="{x.start - 3:.1f}" y="{y.end - 3:.1f}" '
        f'width="{x.end - x.start + 6:.1f}" height="{y.start - y.end + 6:.1f}"/></clipPath></defs>',
        *(_grid(x, y, x_ticks, y_ticks) if figure.grid else ()),
        f'<g clip-path="url(#{key}-c)">',
        *(mark(x, y) for mark in figure.marks),
        "</g>",
        *_labels(x, y, x_ticks, y_ticks),
        f'<text class="axis" x="{x.end:.1f}" y="{height - 6}" text-anchor="end">{escape(figure.x.label)}</text>',
        f'<text class="axis" x="2" y="14">{escape(figure.y.label)}</text>',
        "</svg>",
    ]
    return Markup("".join(parts))


def _spread_ticks(ticks: list[tuple[float, str]], x: Scale) -> list[tuple[float, str]]:
    """Every n-th tick, such that no two labels touch."""
    for n in range(1, len(ticks) + 1):
        some = ticks[::n]
        near = pairwise(some)
        if all(abs(x(b) - x(a)) > _LETTER * (len(s) + len(t)) / 2 + 6 for (a, s), (b, t) in near):
            return some
    return ticks[:1]


def _grid(x: Scale, y: Scale, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]]) -> list[str]:
    across = "".join(f"M{x.start:.1f} {y(v):.1f}H{x.end:.1f}" for v, _ in y_ticks)
    up = "".join(f"M{x(v):.1f} {y.start:.1f}v5" for v, _ in x_ticks)
    return [_path(across, "grid"), _path(up + f"M{x.start:.1f} {y.start:.1f}H{x.end:.1f}", "frame")]


def _labels(x: Scale, y: Scale, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]]) -> list[str]:
    below = [
        f'<text class="tick" x="{x(v):.1f}" y="{y.start + 18:.1f}" text-anchor="middle">{escape(text)}</text>'
        for v, text in x_ticks
    ]
    beside = [
        f'<text class="tick" x="{x.start - 7:.1f}" y="{y(v) + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        for v, text in y_ticks
    ]
    return below + beside
