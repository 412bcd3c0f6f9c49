"""The report's figures: bands, intervals, reliability, histograms, confusion, risk against coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dropbayes.app.report import svg
from dropbayes.app.report.features import Feature
from dropbayes.app.report.measurements import Classification, Regression
from dropbayes.app.report.svg import Axis, Figure
from dropbayes.calibration import ReliabilityCurve
from dropbayes.runtime.arrays import Numbers
from dropbayes.runtime.formatting import printable_name
from dropbayes.scores import RiskCoverage

MAX_POINTS = 1500
"""The maximum number of points in a scatter, and of vertices in a band."""

_INTERVALS = {
    "mean": "predicted mean",
    "inner": "50 % interval",
    "outer": "95 % interval",
    "truth": "truth, inside 95 %",
    "miss": "truth, outside",
}
_DIAGONAL = np.array([0.0, 1.0])


class Band(NamedTuple):
    """A predictive distribution along one feature: rising positions with the mean and the 50 % and 95 % intervals."""

    position: Numbers
    mean: Numbers
    inner: tuple[Numbers, Numbers]
    outer: tuple[Numbers, Numbers]


def band_along(
    band: Band,
    positions: Numbers,
    measured: Regression,
    *,
    x_label: str,
    target: str,
    known: tuple[Numbers, Numbers] | None,
    date: Feature | None = None,
) -> Figure:
    """The band over a feature (or a date in decimal years), with the outcomes and, where known, the training rows."""
    trained_on = [] if known is None else [known]
    y = Axis(*svg.padded_range(*band.outer, measured.y, *(outcome for _, outcome in trained_on)), target)
    few = svg.thinned_indices(positions, measured.y, max_points=MAX_POINTS)
    position, value, inside = positions[few], measured.y[few], measured.inside[few]
    marks = [
        svg.band(band.position, *band.outer, kind="outer"),
        svg.band(band.position, *band.inner, kind="inner"),
        svg.line(band.position, band.mean, kind="mean"),
    ]
    for where, outcome in trained_on:
        some = svg.thinned_indices(where, outcome, max_points=MAX_POINTS)
        marks.append(svg.dots(where[some], outcome[some], kind=_dot("known", len(some))))
        if where.max() < position.min():
            edge = svg.line(np.full(2, where.max()), np.array([y.low, y.high]), kind="edge")
            marks += [edge, svg.note(where.max(), "new rows →")]
    marks += [
        svg.dots(position[inside], value[inside], kind=_dot("truth", len(position))),
        svg.dots(position[~inside], value[~inside], kind=_dot("miss", len(position))),
    ]
    legend = dict(list(_INTERVALS.items())[:3]) | ({"known": "trained on"} if trained_on else {}) | _INTERVALS
    text = "The predicted mean as a line, the central 50 % and 95 % intervals as bands around it, the truths as points."
    ends = svg.padded_range(band.position, positions, *(where for where, _ in trained_on), share=0.01)
    years = svg.round_ticks(*ends)
    days = None if date is None or all(t == round(t) for t in years) else [(t, date.text(t)) for t in years]
    x = Axis(*ends, x_label, ticks=days)
    return Figure("band", f"Predictions of {target} along {x_label}", text, x, y, marks, legend)


def _dot(kind: str, n: int) -> str:
    """The class of a dot: many are drawn smaller."""
    return kind if n <= 120 else f"{kind} many"


def sorted_intervals(
    measured: Regression, inner: tuple[Numbers, Numbers], rows: npt.NDArray[np.intp], *, target: str
) -> Figure:
    """The intervals of some rows side by side, in the order of their predicted means; `inner` is of these rows."""
    rank = np.arange(1.0, len(rows) + 1)
    value, lower, upper = (values[rows] for values in (measured.y, measured.lower, measured.upper))
    inside = measured.inside[rows]
    kind = "thick" if len(rows) <= 60 else "thin"
    marks = (
        svg.stems(rank, lower, upper, kind=f"outer-stem {kind}"),
        svg.stems(rank, *inner, kind=f"inner-stem {kind}"),
        svg.line(rank, measured.mean[rows], kind="mean"),
        svg.dots(rank[inside], value[inside], kind="truth"),
        svg.dots(rank[~inside], value[~inside], kind="miss"),
    )
    text = (
        "Each row's central 95 % and 50 % interval as upright strokes, sorted by the predicted mean; truths as points."
    )
    ticks = [(t, f"{t:.0f}") for t in svg.round_ticks(0, len(rows) + 1) if t == round(t) and t >= 1]
    x = Axis(0.0, len(rows) + 1.0, "rows, sorted by their prediction", ticks=ticks)
    y = Axis(*svg.padded_range(lower, upper, value), target)
    return Figure("band", f"Predictions of {target}, row by row", text, x, y, marks, _INTERVALS)


def coverage(curve: ReliabilityCurve) -> Figure:
    """Claimed against observed coverage of central intervals, with the scatter of a calibrated model."""
    claimed, observed, error = (t.double().numpy() for t in (curve.claimed, curve.observed, curve.standard_error))
    marks = (
        svg.band(claimed, np.maximum(claimed - 2 * error, 0), np.minimum(claimed + 2 * error, 1), kind="chance"),
        svg.line(_DIAGONAL, _DIAGONAL, kind="ideal"),
        svg.line(claimed, observed, kind="measured"),
    )
    legend = {"measured": "this model", "ideal": "calibrated", "chance": "± 2 standard errors of chance"}
    text = (
        "The share of truths inside central intervals of every level against the share claimed; the diagonal is ideal."
    )
    x, y = (Axis(0.0, 1.0, f"{kind} coverage", percent=True) for kind in ("claimed", "observed"))
    return Figure("reliability", "Reliability of the intervals", text, x, y, marks, legend)


def transforms(pit: Numbers) -> Figure:
    """The histogram of the truth's rank in its predictive distribution, flat if calibrated."""
    count, edges = np.histogram(pit, bins=10, range=(0, 1))
    expected = len(pit) / 10
    error = 2 * np.sqrt(expected * 0.9)
    marks = (
        svg.bars(edges[:-1], edges[1:], count.astype(float), kind="bar"),
        svg.band(_DIAGONAL, np.full(2, max(expected - error, 0.0)), np.full(2, expected + error), kind="haze"),
        svg.line(_DIAGONAL, np.full(2, expected), kind="ideal"),
    )
    legend = {"bar": "rows", "ideal": "calibrated", "haze": "± 2 standard errors of chance"}
    text = "A histogram of the probability the model gave to values below the truth; flat bars mean calibration."
    x = Axis(0.0, 1.0, "rank of the truth in its prediction (PIT)")
    y = Axis(0.0, 1.08 * max(float(count.max()), expected + error), "rows")
    return Figure("pit", "Rank of the truth in its prediction", text, x, y, marks, legend)


def confidences(measured: Classification) -> Figure:
    """The histogram of the predicted class's probability, right rows and wrong rows stacked."""
    low = 1 / measured.probabilities.shape[1]
    edges = np.linspace(low, 1, 21)
    confidence = np.clip(measured.confidence, low, 1)
    right, wrong = (np.histogram(confidence[measured.loss == k], edges)[0].astype(float) for k in (0, 1))
    marks = (
        svg.bars(edges[:-1], edges[1:], right, kind="bar"),
        svg.bars(edges[:-1], edges[1:], right + wrong, floor=right, kind="wrong-bar"),
    )
    text = (
        "A histogram of the probability each row's predicted class was given, split into right and wrong predictions."
    )
    x = Axis(low, 1.0, "probability of the predicted class", percent=True)
    y = Axis(0.0, 1.08 * float((right + wrong).max()), "rows")
    legend = {"bar": "right", "wrong-bar": "wrong"}
    return Figure("probabilities", "Probability of the predicted class", text, x, y, marks, legend)


def confusion(measured: Classification, names: Sequence[str]) -> Figure:
    """The share of each true class's rows predicted as each class."""
    n, count = float(len(names)), measured.confusion
    tiles = svg.tiles(count / np.maximum(count.sum(1, keepdims=True), 1), texts=count.astype(str).tolist(), kind="tile")
    ticks = [(k + 0.5, printable_name(name, max_length=12)) for k, name in enumerate(names)]
    text = "A table of squares: rows are true classes, columns predicted ones; darker is a larger share of the row."
    x, y = Axis(0.0, n, "predicted class", ticks=ticks), Axis(n, 0.0, "true class", ticks=ticks)
    return Figure("confusion", "True against predicted class", text, x, y, [tiles], grid=False)


def class_reliability(curve: ReliabilityCurve) -> Figure:
    """Claimed confidence against observed accuracy in bins, with the scatter of a calibrated model and the counts."""
    tensors = curve.claimed, curve.observed, curve.standard_error, curve.count
    claimed, observed, error, count = (tensor.double().numpy() for tensor in tensors)
    low, high = (np.clip(claimed + side * error, 0, 1) for side in (-2, 2))
    start = float(max(0.0, np.floor(10 * min(claimed.min(), 0.5)) / 10))
    share = 0.16 * count / count.max()  # the counts as a low histogram along the bottom
    half = 0.5 * min(0.05, (1 - start) / 12)
    marks = (
        svg.bars(claimed - half, claimed + half, share, kind="faint-bar"),
        svg.stems(claimed, low, high, kind="chance-stem"),
        svg.line(_DIAGONAL, _DIAGONAL, kind="ideal"),
        svg.line(claimed, observed, kind="measured"),
        svg.dots(claimed, observed, kind="bin"),
        svg.words(claimed, share + 0.015, [f"{c:,.0f}" for c in count], kind="count"),
    )
    legend = {
        "bin": "this model, per bin",
        "ideal": "calibrated",
        "chance-stem": "± 2 standard errors of chance",
        "faint-bar": "rows in the bin",
    }
    text = "The accuracy of rows in bins of confidence against their mean confidence; the diagonal is ideal."
    x, y = Axis(start, 1.02, "claimed probability", percent=True), Axis(0.0, 1.02, "observed frequency", percent=True)
    return Figure("reliability", "Reliability of the probabilities", text, x, y, marks, legend)


def risk_coverage(curve: RiskCoverage, *, loss: str, percent: bool) -> Figure:
    """The mean loss of the rows kept against the share kept."""
    share, risk, oracle = (tensor.double().numpy() for tensor in (curve.coverage, curve.risk, curve.oracle_risk))
    some = svg.thinned_indices(share, risk, oracle, max_points=400)
    share, risk, oracle = share[some], risk[some], oracle[some]
    settled = risk[share >= min(0.05, float(share[-1]))]  # the first few rows alone would set the scale
    top = 1.1 * float(max(settled.max(), 1e-12))
    marks = (
        svg.band(share, np.zeros_like(oracle), oracle, kind="chance"),
        svg.line(_DIAGONAL, np.full(2, risk[-1]), kind="ideal"),
        svg.line(share, risk, kind="measured"),
        svg.stems(np.array([0.9, 0.8]), np.zeros(2), np.full(2, top), kind="edge"),
    )
    legend = {
        "measured": "most certain rows first",
        "ideal": "no ranking",
        "chance": "best possible ranking",
        "edge": "10 % and 20 % deferred",
    }
    text = f"The {loss} of the rows kept against the share of rows kept, the most certain first."
    x = Axis(0.0, 1.0, "share of rows kept", percent=True)
    y = Axis(0.0, top, f"{loss} of the rows kept", percent=percent)
    return Figure("risk", "Risk against coverage", text, x, y, marks, legend)
