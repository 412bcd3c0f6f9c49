"""The report's figures: bands, intervals, reliability, histograms, confusion, risk against coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dropbayes.app.report import svg
from dropbayes.app.report.measurements import Classification, Regression
from dropbayes.app.report.svg import Axis, Figure, Mark
from dropbayes.calibration import ReliabilityCurve
from dropbayes.runtime.arrays import Numbers
from dropbayes.scores import RiskCoverage

BAND_POINTS, SHOWN_POINTS, SHOWN_INTERVALS = 1200, 1500, 150
"""The most vertices of a band, points of a scatter, and intervals side by side."""

FEW_POINTS = 120
"""More points are drawn smaller."""

CONFUSION_CLASSES = 20
"""With more classes the confusion matrix would be unreadable."""


@dataclass(frozen=True, eq=False)
class Band:
    """A predictive distribution along one feature: rising positions with the mean and the 50 % and 95 % intervals."""

    position: Numbers
    mean: Numbers
    inner: tuple[Numbers, Numbers]
    outer: tuple[Numbers, Numbers]


def band_along(
    band: Band,
    *,
    feature: str,
    target: str,
    truths: tuple[Numbers, Numbers, npt.NDArray[np.bool_]],
    known: tuple[Numbers, Numbers] | None,
) -> Figure:
    """The band over a feature, with the truths (position, value, inside the interval or not) and the training rows."""
    position, value, inside = truths
    pieces = [band.outer[0], band.outer[1], value] + ([known[1]] if known else [])
    everywhere = [band.position, position] + ([known[0]] if known else [])
    few = svg.thinned_indices(position, value, most=SHOWN_POINTS)
    position, value, inside = position[few], value[few], inside[few]
    marks: list[Mark] = [
        svg.band(band.position, *band.outer, kind="outer"),
        svg.band(band.position, *band.inner, kind="inner"),
        svg.line(band.position, band.mean, kind="mean"),
    ]
    legend = [("mean", "predicted mean"), ("inner", "50 % interval"), ("outer", "95 % interval")]
    if known is not None:
        some = svg.thinned_indices(*known, most=SHOWN_POINTS)
        dense = "known" if len(some) <= FEW_POINTS else "known many"
        marks.append(svg.dots(known[0][some], known[1][some], kind=dense))
        legend.append(("known", "trained on"))
        if known[0].max() < position.min():
            marks.append(svg.upright(float(known[0].max()), kind="edge", text="new rows →"))
    size = "" if len(position) <= FEW_POINTS else " many"
    marks += [
        svg.dots(position[inside], value[inside], kind=f"truth{size}"),
        svg.dots(position[~inside], value[~inside], kind=f"miss{size}"),
    ]
    legend += [("truth", "truth, inside 95 %"), ("miss", "truth, outside")]
    return Figure(
        "band", f"Predictions of {target} along {feature}",
        "The predicted mean as a line, the central 50 % and 95 % intervals as bands around it, the truths as points.",
        Axis(*svg.padded_range(*everywhere, share=0.01), feature), Axis(*svg.padded_range(*pieces), target),
        tuple(marks), tuple(legend),
    )  # fmt: skip


def sorted_intervals(
    measured: Regression, inner: tuple[Numbers, Numbers], rows: npt.NDArray[np.intp], *, target: str
) -> Figure:
    """The intervals of some rows side by side, in the order of their predicted means; `inner` is of these rows."""
    rank = np.arange(1.0, len(rows) + 1)
    value, lower, upper = measured.y[rows], measured.lower[rows], measured.upper[rows]
    inside = (lower <= value) & (value <= upper)
    kind = "thick" if len(rows) <= 60 else "thin"
    marks = (
        svg.stems(rank, lower, upper, kind=f"outer-stem {kind}"),
        svg.stems(rank, *inner, kind=f"inner-stem {kind}"),
        svg.line(rank, measured.mean[rows], kind="mean"),
        svg.dots(rank[inside], value[inside], kind="truth"),
        svg.dots(rank[~inside], value[~inside], kind="miss"),
    )
    legend = (
        ("mean", "predicted mean"), ("inner", "50 % interval"), ("outer", "95 % interval"),
        ("truth", "truth, inside 95 %"), ("miss", "truth, outside"),
    )  # fmt: skip
    ticks = tuple((t, f"{t:.0f}") for t in svg.round_ticks(0, len(rows) + 1, most=6) if t == round(t) and t >= 1)
    x = Axis(0.0, len(rows) + 1.0, "rows, sorted by their prediction", ticks=ticks)
    return Figure(
        "band", f"Predictions of {target}, row by row",
        "Each row's central 95 % and 50 % interval as upright strokes, sorted by the predicted mean; truths as points.",
        x, Axis(*svg.padded_range(lower, upper, value), target), marks, legend,
    )  # fmt: skip


def coverage(curve: ReliabilityCurve) -> Figure:
    """Claimed against observed coverage of central intervals, with the scatter of a calibrated model."""
    claimed, observed, error = (
        tensor.double().numpy() for tensor in (curve.claimed, curve.observed, curve.standard_error)
    )
    marks = (
        svg.band(claimed, np.maximum(claimed - 2 * error, 0), np.minimum(claimed + 2 * error, 1), kind="chance"),
        svg.line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), kind="ideal"),
        svg.line(claimed, observed, kind="measured"),
    )
    legend = (("measured", "this model"), ("ideal", "calibrated"), ("chance", "± 2 standard errors of chance"))
    return Figure(
        "reliability", "Reliability of the intervals",
        "The share of truths inside central intervals of every level against the share claimed; the diagonal is ideal.",
        Axis(0.0, 1.0, "claimed coverage", percent=True), Axis(0.0, 1.0, "observed coverage", percent=True),
        marks, legend,
    )  # fmt: skip


def transforms(pit: Numbers, *, n_bins: int = 10) -> Figure:
    """The histogram of the truth's rank in its predictive distribution, flat if calibrated."""
    count = np.histogram(pit, bins=n_bins, range=(0, 1))[0].astype(float)
    edges, expected = np.linspace(0, 1, n_bins + 1), len(pit) / n_bins
    error = 2 * np.sqrt(expected * (1 - 1 / n_bins))
    whole = np.array([0.0, 1.0])
    marks = (
        svg.bars(edges[:-1], edges[1:], count, kind="bar"),
        svg.band(whole, np.full(2, max(expected - error, 0.0)), np.full(2, expected + error), kind="haze"),
        svg.level(expected, kind="ideal"),
    )
    top = 1.08 * max(float(count.max()), expected + error)
    return Figure(
        "pit", "Rank of the truth in its prediction",
        "A histogram of the probability the model gave to values below the truth; flat bars mean calibration.",
        Axis(0.0, 1.0, "rank of the truth in its prediction (PIT)"), Axis(0.0, top, "rows"),
        marks, (("bar", "rows"), ("ideal", "calibrated"), ("haze", "± 2 standard errors of chance")),
    )  # fmt: skip


def confidences(measured: Classification, *, n_bins: int = 20) -> Figure:
    """The histogram of the predicted class's probability, right rows and wrong rows stacked."""
    low = 1 / measured.probabilities.shape[1]
    edges = np.linspace(low, 1, n_bins + 1)
    right = measured.predicted == measured.labels
    counts = [
        np.histogram(np.clip(measured.confidence[some], low, 1), edges)[0].astype(float) for some in (right, ~right)
    ]
    marks = (
        svg.bars(edges[:-1], edges[1:], counts[0], kind="bar"),
        svg.bars(edges[:-1], edges[1:], counts[0] + counts[1], floor=counts[0], kind="wrong-bar"),
    )
    return Figure(
        "probabilities", "Probability of the predicted class",
        "A histogram of the probability each row's predicted class was given, split into right and wrong predictions.",
        Axis(low, 1.0, "probability of the predicted class", percent=True),
        Axis(0.0, 1.08 * float((counts[0] + counts[1]).max()), "rows"),
        marks, (("bar", "right"), ("wrong-bar", "wrong")),
    )  # fmt: skip


def confusion(measured: Classification, names: Sequence[str]) -> Figure:
    """The share of each true class's rows predicted as each class."""
    n = len(names)
    count = np.zeros((n, n))
    np.add.at(count, (measured.labels, measured.predicted), 1)
    share = count / np.maximum(count.sum(1, keepdims=True), 1)
    texts = [[f"{value:.0f}" if value else "" for value in row] for row in count]
    ticks = tuple((k + 0.5, _truncate(name, 12)) for k, name in enumerate(names))
    return Figure(
        "confusion", "True against predicted class",
        "A table of squares: rows are true classes, columns predicted ones; darker is a larger share of the row.",
        Axis(0.0, float(n), "predicted class", ticks=ticks), Axis(float(n), 0.0, "true class", ticks=ticks),
        (svg.tiles(share, texts=texts, kind="tile"),), grid=False,
    )  # fmt: skip


def class_reliability(curve: ReliabilityCurve) -> Figure:
    """Claimed confidence against observed accuracy in bins, with the scatter of a calibrated model and the counts."""
    claimed, observed, error, count = (
        tensor.double().numpy() for tensor in (curve.claimed, curve.observed, curve.standard_error, curve.count)
    )
    low, high = (np.clip(claimed + side * error, 0, 1) for side in (-2, 2))
    start = max(0.0, np.floor(10 * min(claimed.min(), 0.5)) / 10)
    share = 0.16 * count / count.max()  # the counts as a low histogram along the bottom
    half = 0.5 * min(0.05, (1 - start) / 12)
    marks = (
        svg.bars(claimed - half, claimed + half, share, kind="faint-bar"),
        svg.stems(claimed, low, high, kind="chance-stem"),
        svg.line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), kind="ideal"),
        svg.line(claimed, observed, kind="measured"),
        svg.dots(claimed, observed, kind="bin"),
        svg.words(claimed, share + 0.015, [f"{c:,.0f}" for c in count], kind="count"),
    )
    legend = (
        ("bin", "this model, per bin"), ("ideal", "calibrated"), ("chance-stem", "± 2 standard errors of chance"),
        ("faint-bar", "rows in the bin"),
    )  # fmt: skip
    return Figure(
        "reliability", "Reliability of the probabilities",
        "The accuracy of rows in bins of confidence against their mean confidence; the diagonal is ideal.",
        Axis(float(start), 1.02, "claimed probability", percent=True),
        Axis(0.0, 1.02, "observed frequency", percent=True),
        marks, legend,
    )  # fmt: skip


def risk_coverage(curve: RiskCoverage, *, loss: str, percent: bool) -> Figure:
    """The mean loss of the rows kept against the share kept."""
    share, risk, oracle = (tensor.double().numpy() for tensor in (curve.coverage, curve.risk, curve.oracle_risk))
    some = svg.thinned_indices(share, risk, oracle, most=400)
    share, risk, oracle = share[some], risk[some], oracle[some]
    settled = risk[share >= min(0.05, float(share[-1]))]  # the first few rows alone would set the scale
    top = 1.1 * float(max(settled.max(), 1e-12))
    marks = (
        svg.band(share, np.zeros_like(oracle), oracle, kind="chance"),
        svg.level(float(risk[-1]), kind="ideal"),
        svg.line(share, risk, kind="measured"),
        *(svg.upright(1 - deferred, kind="edge") for deferred in (0.1, 0.2)),
    )
    legend = (
        ("measured", "most certain rows first"), ("ideal", "no ranking"), ("chance", "best possible ranking"),
        ("edge", "10 % and 20 % deferred"),
    )  # fmt: skip
    return Figure(
        "risk", "Risk against coverage",
        f"The {loss} of the rows kept against the share of rows kept, the most certain first.",
        Axis(0.0, 1.0, "share of rows kept", percent=True), Axis(0.0, top, f"{loss} of the rows kept", percent=percent),
        marks, legend,
    )  # fmt: skip


def _truncate(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
