"""Pictures of uncertainty: bands, reliability, risk against coverage, percentiles (needs the extra `plot`).

Every function draws on `ax` (by default, new axes) and returns it. Curves differ in line style and marker and fills in
lightness, so that each picture reads in black and white.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.calibration import ReliabilityCurve, UncertaintyReference
from dropbayes.runtime import validation
from dropbayes.runtime.validation import Array, NumpyArray
from dropbayes.scores import RiskCoverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = (
    {"color": "black", "linestyle": "-", "marker": "o"},
    {"color": "#0060a8", "linestyle": "--", "marker": "s"},
    {"color": "#c04a00", "linestyle": "-.", "marker": "^"},
    {"color": "#5b8c2a", "linestyle": (0, (1, 1)), "marker": "D"},
)


def predictive_band(
    x: Array,
    mean: Array,
    *,
    std: Array,
    draws: Array | None = None,
    observed: tuple[Array, Array] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The predictive mean with bands of one and two standard deviations, sample paths and the data.

    Args:
        x: One coordinate per row, `[row]`; rows are drawn in its order.
        mean: The predictive mean, `[row]`.
        std: The predictive standard deviation, `[row]`.
        draws: Sample paths `[draw, row]`; take them with `masks="shared"`, or they are not paths.
        observed: The data as (x, y).
        ax: The axes to draw on.
    """
    given = {"x": x, "mean": mean, "std": std}
    columns = validation.matching_tensors({name: _one_column(name, array) for name, array in given.items()})
    validation.check_values("std", columns[2])
    order = columns[0].argsort().cpu().numpy()
    position, centre, deviation = (_values(column[order]) for column in columns)
    ax = _axes(ax)
    for by, colour, name in ((2 * deviation, "#dbe6f2", "± 2 std"), (deviation, "#a3bfdd", "± 1 std")):
        ax.fill_between(position, centre - by, centre + by, color=colour, lw=0, label=name)
    if draws is not None:
        paths = _one_column("draws", draws, n_axes=2).detach().cpu().numpy()
        if paths.shape[1] != len(position):
            raise ValueError(f"`draws` must be [draw, row] with {len(position)} rows; got shape {paths.shape}.")
        for index, path in enumerate(paths[:, order]):
            ax.plot(position, path, color="#56789c", lw=0.7, ls=(0, (4, 1.5)), label=None if index else "draws")
    ax.plot(position, centre, color="black", lw=1.8, label="mean")
    if observed is not None:
        known, y = (_values(array) for array in observed)
        if len(known) != len(y):
            raise ValueError(f"`observed` must be x and y of one length; got {len(known)} and {len(y)}.")
        ax.plot(known, y, ls="none", marker="o", ms=4, mfc="white", mec="black", mew=1, label="data")
    ax.margins(x=0)
    ax.set(xlabel="x", ylabel="y")
    ax.legend(frameon=False)
    return ax


def class_bars(probabilities: Array, uncertainty: Array, *, ax: Axes | None = None) -> Axes:
    """The class probabilities of rows, `[row, class]`, as bars, the least uncertain row first.

    The `uncertainty`, `[row]`, is mostly the entropy; of many rows, 40 are drawn, evenly spaced in that order.
    """
    p = validation.class_probabilities("probabilities", probabilities)
    order = validation.row_values("uncertainty", uncertainty, n_rows=len(p)).argsort()
    shown = order[torch.linspace(0, len(p) - 1, min(40, len(p)), device="cpu").round().long()]
    ax = _axes(ax)
    bottom = np.zeros(len(shown))
    greys = np.linspace(0.2, 0.9, p.shape[1])
    for label, share in enumerate(p[shown].detach().cpu().double().numpy().T):
        name = f"class {label}" if p.shape[1] <= 10 else None  # a legend of more would hide the bars
        ax.bar(np.arange(len(shown)), share, bottom=bottom, width=0.9, color=str(greys[label]), label=name)
        bottom += share
    ax.set(xlabel="rows, the most uncertain last", ylabel="probability", xticks=[], ylim=(0, 1))
    return _with_legend(ax, loc="lower left") if p.shape[1] <= 10 else ax


def reliability_diagram(curve: ReliabilityCurve, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Claimed probability against observed frequency, with the scatter a calibrated model would show.

    The curve is that of `calibration.class_reliability`, `quantile_reliability` or `interval_reliability`, the label
    the model's name in the legend. The bars at each point span two standard errors of a frequency whose claim is true:
    a point whose bar misses the diagonal is evidence, not chance. Call again with the same `ax` to compare models.
    """
    ax, style, is_first = _next_curve(ax)
    if is_first:
        ax.plot([0, 1], [0, 1], color="0.45", lw=1, ls=":", label="calibrated")
    claimed, seen, error = (_values(array) for array in (curve.claimed, curve.observed, curve.standard_error))
    few = len(claimed) <= 20  # on a dense curve, markers and bars would only smear
    marker = style["marker"] if few else ""
    ax.plot(claimed, seen, gid="curve", ms=5, mfc="white", lw=1.5, label=label, **style | {"marker": marker})
    if few:
        ax.errorbar(claimed, seen, yerr=2 * error, fmt="none", ecolor=style["color"], elinewidth=0.8, capsize=2)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="claimed probability", ylabel="observed frequency", aspect="equal")
    return _with_legend(ax, loc="upper left")


def risk_coverage_diagram(curve: RiskCoverage, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """The risk of the rows kept against the share kept (`scores.risk_coverage`), and the least risk of any ranking.

    The label names the ranking in the legend, with its area (AURC). Call again with the same `ax` to compare rankings.
    """
    ax, style, is_first = _next_curve(ax)
    coverage, risk, oracle = (_values(array) for array in (curve.coverage, curve.risk, curve.oracle_risk))
    if is_first:
        ax.axhline(risk[-1], color="0.45", lw=1, ls=":", label="no ranking")
        ax.fill_between(coverage, 0, oracle, color="0.88", lw=0, label="ranked by the true loss")
    name = f"{label or 'uncertainty'} (area {curve.area.item():.3g})"
    ax.plot(coverage, risk, gid="curve", lw=1.5, ms=4, markevery=0.125, mfc="white", label=name, **style)
    ax.set(xlim=(0, 1), xlabel="coverage: share of rows kept", ylabel="risk: mean loss of the rows kept")
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.7 * risk.max()))  # room for the legend above the curves
    return _with_legend(ax, loc="upper left")


def rejection_diagram(
    curve: RiskCoverage, *, label: str | None = None, deferred: float | None = None, ax: Axes | None = None
) -> Axes:
    """The share of the total loss that remains against the share of rows deferred to a person.

    Deferring at random removes loss in proportion (the dotted diagonal); a good uncertainty removes it sooner. The
    curve and the label are those of `risk_coverage_diagram`; `deferred` is a share of rows to read off, marked with
    what remains. Call again with the same `ax` to compare rankings.
    """
    if deferred is not None:
        validation.check_probability("deferred", deferred, closed=True)
    total = curve.risk[-1]
    if not total > 0:
        raise ValueError("`curve` must have a positive total loss to share out; no row has any.")
    ax, style, is_first = _next_curve(ax)
    rejected = _values(1 - curve.coverage)
    remaining, oracle = (_values(risk * curve.coverage / total) for risk in (curve.risk, curve.oracle_risk))
    if is_first:
        ax.plot([0, 1], [1, 0], color="0.45", lw=1, ls=":", label="at random")
        ax.fill_between(rejected, 0, oracle, color="0.88", lw=0, label="by the true loss")
    ax.plot(rejected, remaining, gid="curve", lw=1.5, ms=4, markevery=0.125, mfc="white", label=label, **style)
    if deferred is not None:
        left = float(remaining[abs(rejected - deferred).argmin()])
        ax.plot([deferred, deferred, 0], [0, left, left], color=style["color"], lw=0.8, ls="-")
        text = f"defer {deferred:.0%}: {left:.0%} remains"
        ax.annotate(text, (deferred, left), xytext=(10, 14), textcoords="offset points")
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share of rows deferred", ylabel="share of the loss that remains")
    return _with_legend(ax, loc="upper right")


def uncertainty_histogram(
    training_uncertainty: Array, *, reference: UncertaintyReference, new: Array | None = None, ax: Axes | None = None
) -> Axes:
    """The training points' uncertainty, the distribution fitted to it, and the percentile of a few `new` points.

    [GG16, section Model Calibration]; the `reference` is that of `calibration.uncertainty_reference`.
    """
    ax = _axes(ax)
    training = _values(validation.finite_tensor("training_uncertainty", training_uncertainty))
    points = training[:0] if new is None else _values(validation.finite_tensor("new", new))
    ax.hist(training, bins="auto", density=True, color="0.85", edgecolor="0.55", lw=0.6, label="training points")
    end = 1.05 * max(training.max(), *points.tolist(), 0.0)
    grid = torch.linspace(end / 2000, end, 1000, dtype=torch.float64, device="cpu")
    ax.plot(grid, reference.density(grid), color="black", lw=1.5, label=f"fitted {reference.family}")
    for index, point in enumerate(points):
        percentile = reference.percentile(torch.tensor(point, dtype=torch.float64)).item()
        style = _CURVES[1 + index % (len(_CURVES) - 1)]
        name = f"new point {point:.3g}: {percentile_text(percentile)}"
        ax.axvline(point, color=style["color"], ls=style["linestyle"], lw=1.5, label=name)
    top = (1.3 + 0.1 * len(points)) * ax.get_ylim()[1]  # room for the legend above the bars
    ax.set(xlim=(0, end), ylim=(0, top), xlabel="uncertainty", ylabel="density")
    return _with_legend(ax, loc="upper right")


def percentile_text(percentile: float) -> str:
    """The percentile in words, without a claim of digits no fit can have."""
    validation.check_probability("percentile / 100", percentile / 100, closed=True)
    if percentile > 99.9:
        return "above percentile 99.9"
    return f"percentile {percentile:.1f}" if percentile >= 0.1 else "below percentile 0.1"


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    with validation.needed_for("a picture"):
        import matplotlib.pyplot as plt
    return plt.subplots(layout="constrained")[1]


def _one_column(name: str, array: Array, *, n_axes: int = 1) -> Tensor:
    """The array as `[row]` (`[draw, row]`), without the last axis of a network with one output."""
    values = validation.finite_tensor(name, array)
    values = values.squeeze(-1) if values.dim() == n_axes + 1 and values.shape[-1] == 1 else values
    if values.dim() != n_axes:
        expected = "[row]" if n_axes == 1 else "[draw, row]"
        raise ValueError(f"`{name}` must be {expected}, of one output; got shape {tuple(values.shape)}.")
    return values


def _values(array: Array) -> NumpyArray:
    return validation.float_tensor(array).detach().cpu().double().flatten().numpy()


def _next_curve(ax: Axes | None) -> tuple[Axes, dict[str, Any], bool]:
    """The axes, the style of the next curve on them, and whether it is the first."""
    ax = _axes(ax)
    n_curves = sum(line.get_gid() == "curve" for line in ax.lines)
    return ax, _CURVES[n_curves % len(_CURVES)], not n_curves


def _with_legend(ax: Axes, *, loc: str) -> Axes:
    ax.legend(loc=loc, facecolor="white", edgecolor="none", framealpha=0.9)
    return ax
