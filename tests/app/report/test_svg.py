"""Tests of the charts' mathematics."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropbayes.app.report import svg
from tests.app.report.pages import PixelScale, scales_of


@given(
    st.floats(-1e9, 1e9), st.floats(1e-3, 1e9), st.floats(0, 1),
    st.tuples(st.floats(0, 500), st.floats(10, 900)), st.booleans(),
)  # fmt: skip
def test_the_inverse_of_a_scale_gives_the_value_back(low, extent, share, pixels, downwards):
    start, end = pixels[0], pixels[0] + pixels[1]
    scale = PixelScale(low, low + extent, *((end, start) if downwards else (start, end)))
    value = low + share * extent
    assert scale.inverse(scale(value)) == pytest.approx(value, abs=1e-9 * (abs(low) + extent))
    assert scale(low) == scale.start and scale(low + extent) == pytest.approx(scale.end)


@given(st.floats(-1e8, 1e8), st.floats(1e-6, 1e8), st.integers(3, 12))
def test_ticks_are_round_inside_and_neither_too_many_nor_missing(low, extent, most):
    high = low + extent
    if extent < 1e-7 * abs(low):
        return  # no float can tell such ticks apart
    ticks = svg.round_ticks(low, high, max_ticks=most)
    assert 1 <= len(ticks) <= most
    assert all(low - 1e-6 * extent <= tick <= high + 1e-6 * extent for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        power = 10.0 ** math.floor(math.log10(step * 1.0001))
        exact = min((m * power for m in (1, 2, 5, 10)), key=lambda candidate: abs(candidate - step))
        assert step == pytest.approx(exact, abs=1e-12 * max(abs(low), abs(high)))  # 1, 2 or 5 times a power of ten
        assert all(abs(tick / exact - round(tick / exact)) < 1e-6 for tick in ticks)
        texts = svg.tick_texts(ticks)
        assert len(set(texts)) == len(ticks), texts
        shown = [float(text.replace(",", "").replace("−", "-")) for text in texts]
        np.testing.assert_allclose(shown, ticks, atol=0.01 * step)


def test_ticks_say_what_they_are():
    assert svg.tick_texts(svg.round_ticks(0, 1, max_ticks=6)) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert svg.tick_texts([-0.0, 50_000.0]) == ["0", "50,000"]
    assert svg.tick_texts(svg.round_ticks(1958.2, 2001.9)) == ["1960", "1970", "1980", "1990", "2000"]
    assert svg.tick_texts(svg.round_ticks(-0.04, 0.11, max_ticks=4)) == ["0.00", "0.05", "0.10"]
    assert svg.tick_texts([-2e-6, 0.0, 2e-6]) == ["−2e−6", "0", "2e−6"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(12, 60))
def test_thinning_keeps_ends_and_extremes_and_the_order(values, most):
    y = np.array(values)
    x = np.arange(len(y), dtype=float)
    kept = svg.thinned_indices(x, y, -2 * y, max_points=most)
    assert len(kept) <= max(most, 2) and (np.diff(kept) > 0).all()
    assert y[kept].min() == y.min() and y[kept].max() == y.max()
    assert kept[0] == 0 and kept[-1] == len(y) - 1


def test_a_range_holds_its_values_even_when_they_are_all_one():
    for values in ([3.0], [0.0, 0.0], [1e12, 1e12], [-1e-12], [2.0, 5.0], [math.nan, 1.0, math.inf]):
        low, high = svg.padded_range(values)
        finite = [v for v in values if math.isfinite(v)]
        assert low < min(finite) and max(finite) < high
    assert svg.padded_range([math.nan]) == (-0.04, 1.04)


@pytest.mark.parametrize("size", [(900, 400), (346, 300)])
def test_every_mark_is_drawn_where_its_data_are(size):
    xs, ys = np.array([1.0, 2.0, 4.0]), np.array([10.0, 30.0, 20.0])
    figure = svg.Figure(
        "k", svg.Axis(0.0, 5.0, "x"), svg.Axis(0.0, 40.0, "y"),
        (
            svg.dots(xs, ys, kind="truth"), svg.line(xs, ys, kind="mean"),
            svg.band(xs, ys - 5, ys + 5, kind="outer"), svg.stems(xs, ys - 5, ys + 5, kind="stem"),
            svg.bars(xs - 0.5, xs + 0.5, ys, kind="bar"),
        ),
    )  # fmt: skip
    drawing = svg.draw(figure, width=size[0], height=size[1])
    x, y = scales_of(drawing)

    def points(kind):
        path = re.search(rf'class="{kind}" d="([^"]*)"', drawing)[1]
        return np.array([[float(a), float(b)] for a, b in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)])

    def data(kind):
        return np.stack([x.inverse(points(kind)[:, 0]), y.inverse(points(kind)[:, 1])], 1)

    np.testing.assert_allclose(data("truth"), np.stack([xs, ys], 1), atol=0.02)
    np.testing.assert_allclose(data("mean"), np.stack([xs, ys], 1), atol=0.02)
    np.testing.assert_allclose(data("outer")[:3], np.stack([xs, ys + 5], 1), atol=0.02)
    np.testing.assert_allclose(data("outer")[3:], np.stack([xs, ys - 5], 1)[::-1], atol=0.02)
    np.testing.assert_allclose(data("stem")[::2, 1], ys - 5, atol=0.02)
    tops = [float(v) for v in re.findall(r"V([\d.]+)H", re.search(r'class="bar" d="([^"]*)"', drawing)[1])]
    np.testing.assert_allclose(y.inverse(np.array(tops)), ys, atol=0.02)
    assert x.start < x.end and y.end < y.start  # up is up


def test_texts_along_an_axis_do_not_touch():
    ticks = tuple((k + 0.5, f"a long class name {k}") for k in range(20))
    figure = svg.Figure("k", svg.Axis(0.0, 20.0, "x", ticks=ticks), svg.Axis(np.float64(0), np.float64(1), "y"), ())
    drawing = svg.draw(figure, width=346, height=300)
    assert 'data-y="0.0 1.0 ' in drawing, "plain numbers, whatever they come as"
    below = re.findall(r'class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)', drawing)
    places = [(float(position), len(text)) for position, text in below]
    assert places and all(b[0] - a[0] > 6 * (a[1] + b[1]) / 2 for a, b in pairwise(places))
