"""The report's figures with their captions: bands, intervals, reliability, histograms, confusion, risk and coverage."""

from __future__ import annotations

import numpy as np

from dropbayes.app.report import svg
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.measurements import Classification, Measured, Regression, risk_after_deferring
from dropbayes.app.report.svg import Axis, Figure
from dropbayes.runtime.arrays import Numbers
from dropbayes.runtime.formatting import count, number, percent, printable_name

MAX_POINTS, MAX_CONFUSION = 1500, 20
"""The maximum number of points in a scatter or of vertices in a band, and of classes in a confusion matrix."""

_INTERVALS = {
    "mean": "predicted mean",
    "inner": "50 % interval",
    "outer": "95 % interval",
    "truth": "truth, inside 95 %",
    "miss": "truth, outside",
}
_DIAGONAL = np.array([0.0, 1.0])


def predictions(inputs: ReportInputs, measured: Regression) -> Figure:
    """The predictions, their intervals and the truths: along a feature if there is one to choose, else row by row."""
    held, feature = measured.inside, 0 if inputs.x.shape[1] == 1 else inputs.band_feature
    share = percent(float(held.mean()))
    inside = f"{int(held.sum()):,} of {len(held):,} truths ({share}) lie inside their 95 % interval"
    parts = inputs.x, inputs.training and inputs.training[0], inputs.unknown
    x = np.concatenate([part for part in parts if part is not None])
    if feature is None or np.ptp(x[:, feature]) == 0:
        return _sorted_intervals(inputs, measured, inside)
    return _band_along(x, feature, inputs, measured, inside)


def _sorted_intervals(inputs: ReportInputs, measured: Regression, inside: str) -> Figure:
    """The intervals of some rows side by side, in the order of their predicted means."""
    order = np.argsort(measured.mean, kind="stable")
    columns = [values[order] for values in (measured.mean, measured.y, measured.lower, measured.upper)]
    few = svg.thinned_indices(*columns, max_points=150)
    mean, value, lower, upper = (values[few] for values in columns)
    held, rank = measured.inside[order[few]], np.arange(1.0, len(few) + 1)
    kind = "thick" if len(few) <= 60 else "thin"
    marks = (
        svg.stems(rank, lower, upper, kind=f"outer-stem {kind}"),
        svg.stems(rank, *inputs.model.predict_interval(inputs.x[order[few]], coverage=0.5), kind=f"inner-stem {kind}"),
        svg.line(rank, mean, kind="mean"),
        svg.dots(rank[held], value[held], kind="truth"),
        svg.dots(rank[~held], value[~held], kind="miss"),
    )
    text = (
        "Each row's central 95 % and 50 % interval as upright strokes, sorted by the predicted mean; truths as points."
    )
    ticks = [(t, f"{t:.0f}") for t in svg.round_ticks(0, len(few) + 1) if t == round(t) and t >= 1]
    x = Axis(0.0, len(few) + 1.0, "rows, sorted by their prediction", ticks=ticks)
    y = Axis(*svg.padded_range(lower, upper, value), inputs.target)
    some = f" ({len(few):,} of the rows are drawn)" if len(few) < len(order) else ""
    narrow, wide = (number(float(end)) for end in np.sort(measured.upper - measured.lower)[[0, -1]])
    caption = f"{inside}{some}; the intervals are {narrow} to {wide} wide."
    return Figure("band", f"Predictions of {inputs.target}, row by row", text, x, y, marks, _INTERVALS, caption)


def _band_along(x: Numbers, feature: int, inputs: ReportInputs, measured: Regression, inside: str) -> Figure:
    """The band over a feature (or a date in decimal years), with the truths and, if known, the training rows."""
    if x.shape[1] == 1:  # nothing but this feature: an even grid shows the function between the rows
        x = np.linspace(x.min(), x.max(), 300)[:, None]
    x = x[np.argsort(x[:, feature], kind="stable")]
    x = x[svg.thinned_indices(x[:, feature], max_points=MAX_POINTS)]
    inner, outer = (inputs.model.predict_interval(x, coverage=level) for level in (0.5, 0.95))
    band, truths = x[:, feature], (inputs.x[:, feature], measured.y)
    known = [] if inputs.training is None else [(inputs.training[0][:, feature], inputs.training[1])]
    y_axis = Axis(*svg.padded_range(*outer, *(outcome for _, outcome in (truths, *known))), inputs.target)
    marks = [
        svg.band(band, *outer, kind="outer"),
        svg.band(band, *inner, kind="inner"),
        svg.line(band, inputs.model.predict(x), kind="mean"),
    ]
    for where, outcome in known:
        some = svg.thinned_indices(where, outcome, max_points=MAX_POINTS)
        marks.append(svg.dots(where[some], outcome[some], kind="known", among=len(some)))
        if where.max() < truths[0].min():
            edge = svg.line(np.full(2, where.max()), np.array([y_axis.low, y_axis.high]), kind="edge")
            marks += [edge, svg.note(where.max(), "new rows →")]
    few = svg.thinned_indices(*truths, max_points=MAX_POINTS)
    position, value, held = truths[0][few], truths[1][few], measured.inside[few]
    marks.append(svg.dots(position[held], value[held], kind="truth", among=len(few)))
    marks.append(svg.dots(position[~held], value[~held], kind="miss", among=len(few)))
    ends = svg.padded_range(band, *(where for where, _ in (truths, *known)), share=0.01)
    date = next((one for one in inputs.features if one.is_date and one.columns[0] == feature), None)
    years = svg.round_ticks(*ends)
    days = None if date is None or all(t == round(t) for t in years) else [(t, date.text(t)) for t in years]
    x_axis = Axis(*ends, inputs.names[feature] if date is None else date.name, ticks=days)
    legend = dict(list(_INTERVALS.items())[:3]) | ({"known": "trained on"} if known else {}) | _INTERVALS
    text = "The predicted mean as a line, the central 50 % and 95 % intervals as bands around it, the truths as points."
    title = f"Predictions of {inputs.target} along {x_axis.label}"
    # No thousands marks: a number may be a year.
    places = [date.text(p) if date else f"{p:.6g}".replace("-", "−") for p in band]
    caption = f"{inside}. {_widening(band, places, outer[1] - outer[0], *(where for where, _ in known))}"
    return Figure("band", title, text, x_axis, y_axis, marks, legend, caption)


def _widening(band: Numbers, places: list[str], width: Numbers, known: Numbers | None = None) -> str:
    """How the width of the 95 % interval varies along the band, in a sentence."""
    if known is None:
        ends = (f"{places[k]} ({number(width[k])})" for k in (width.argmin(), width.argmax()))
        return "The 95 % interval is narrowest at {} and widest at {}.".format(*ends)
    inside = (band >= known.min()) & (band <= known.max())
    if inside.all() or not inside.any():
        return f"The 95 % interval is {number(float(width.mean()))} wide on average."
    far = np.abs(band - np.median(known)).argmax()
    return (
        f"The 95 % interval is {number(float(width[inside].mean()))} wide on average over the rows trained on and "
        f"{number(float(width[far]))} at {places[far]}, farthest from them."
    )


def coverage(measured: Regression) -> Figure:
    """Claimed against observed coverage of central intervals, with the scatter of a calibrated model."""
    curve = measured.reliability
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
    judged = "the curve should follow the diagonal" if measured.agreement.kind == "few" else measured.agreement.text
    words = f"{measured.held}: {judged}.", "Claimed and observed coverage"
    return Figure("reliability", "Reliability of the intervals", text, x, y, marks, legend, *words, half=True)


def transforms(measured: Regression) -> Figure:
    """The histogram of the truth's rank in its predictive distribution, flat if calibrated."""
    tally, edges = np.histogram(measured.pit, bins=10, range=(0, 1))
    expected = len(measured.pit) / 10
    error = 2 * np.sqrt(expected * 0.9)
    marks = (
        svg.bars(edges[:-1], edges[1:], tally.astype(float), kind="bar"),
        svg.band(_DIAGONAL, np.full(2, max(expected - error, 0.0)), np.full(2, expected + error), kind="haze"),
        svg.line(_DIAGONAL, np.full(2, expected), kind="ideal"),
    )
    legend = {"bar": "rows", "ideal": "calibrated", "haze": "± 2 standard errors of chance"}
    text = "A histogram of the probability the model gave to values below the truth; flat bars mean calibration."
    x = Axis(0.0, 1.0, "rank of the truth in its prediction (PIT)")
    y = Axis(0.0, 1.08 * max(float(tally.max()), expected + error), "rows")
    side, rank = measured.side, measured.scores["mean_pit"].value
    verdict = f"predictions run {side}" if side else "no bias beyond chance"
    caption = f"Flat bars are ideal; the mean rank of the truth is {rank:.2f}: {verdict}."
    words = caption, "Where in its prediction the truth falls"
    return Figure("pit", "Rank of the truth in its prediction", text, x, y, marks, legend, *words, half=True)


def probabilities(measured: Classification) -> list[Figure]:
    """The probability of the predicted class, and the confusion of the classes where that can be read."""
    low = 1 / measured.probabilities.shape[1]
    edges = np.linspace(low, 1, 21)
    confidence = np.clip(measured.confidence, low, 1)
    right, wrong = (np.histogram(confidence[measured.loss == k], edges)[0].astype(float) for k in (0, 1))
    marks = (
        svg.bars(edges[:-1], edges[1:], right, kind="bar"),
        svg.bars(edges[:-1], edges[1:], right + wrong, floor=right, kind="wrong-bar"),
    )
    title, legend = "Probability of the predicted class", {"bar": "right", "wrong-bar": "wrong"}
    text = (
        "A histogram of the probability each row's predicted class was given, split into right and wrong predictions."
    )
    x = Axis(low, 1.0, "probability of the predicted class", percent=True)
    y = Axis(0.0, 1.08 * float((right + wrong).max()), "rows")
    sure = measured.confidence > 0.9
    among = f", {percent(float(1 - measured.loss[sure].mean()))} of them rightly" if sure.any() else ""
    caption = (
        f"{int(sure.sum()):,} of {count(len(sure), 'row')} are given more than 90 %{among}; in all, "
        f"{int(measured.loss.sum()):,} are wrong."
    )
    mistakes = measured.confusion - np.diag(measured.confusion.diagonal())
    i, j = map(int, np.unravel_index(mistakes.argmax(), mistakes.shape))
    taken = f"{measured.classes[i]} taken for {measured.classes[j]} ({count(int(mistakes[i, j]), 'row')})"
    worst = f"The commonest mistake: {taken}." if mistakes.any() else "No row is predicted wrongly."
    if len(measured.classes) > MAX_CONFUSION:
        return [Figure("probabilities", title, text, x, y, marks, legend, f"{caption} {worst}")]
    histogram = Figure("probabilities", title, text, x, y, marks, legend, caption, title, half=True)
    return [histogram, confusion(measured, worst)]


def confusion(measured: Classification, caption: str) -> Figure:
    """The share of each true class's rows predicted as each class."""
    n, tally = float(len(measured.classes)), measured.confusion
    tiles = svg.tiles(tally / np.maximum(tally.sum(1, keepdims=True), 1), texts=tally.astype(str).tolist(), kind="tile")
    ticks = [(k + 0.5, printable_name(name, max_length=12)) for k, name in enumerate(measured.classes)]
    text = "A table of squares: rows are true classes, columns predicted ones; darker is a larger share of the row."
    x, y = Axis(0.0, n, "predicted class", ticks=ticks), Axis(n, 0.0, "true class", ticks=ticks)
    title, words = "True against predicted class", (caption, "True and predicted classes")
    return Figure("confusion", title, text, x, y, [tiles], {}, *words, half=True, grid=False)


def class_reliability(measured: Classification) -> Figure:
    """Claimed confidence against observed accuracy in bins, with the scatter of a calibrated model and the counts."""
    curve = measured.reliability
    tensors = curve.claimed, curve.observed, curve.standard_error, curve.count
    claimed, observed, error, tally = (tensor.double().numpy() for tensor in tensors)
    low, high = (np.clip(claimed + side * error, 0, 1) for side in (-2, 2))
    start = float(max(0.0, np.floor(10 * min(claimed.min(), 0.5)) / 10))
    share = 0.16 * tally / tally.max()  # the counts as a low histogram along the bottom
    half = 0.5 * min(0.05, (1 - start) / 12)
    marks = (
        svg.bars(claimed - half, claimed + half, share, kind="faint-bar"),
        svg.stems(claimed, low, high, kind="chance-stem"),
        svg.line(_DIAGONAL, _DIAGONAL, kind="ideal"),
        svg.line(claimed, observed, kind="measured"),
        svg.dots(claimed, observed, kind="bin"),
        svg.words(claimed, share + 0.015, [f"{n:,.0f}" for n in tally], kind="count"),
    )
    legend = {
        "bin": "this model, per bin",
        "ideal": "calibrated",
        "chance-stem": "± 2 standard errors of chance",
        "faint-bar": "rows in the bin",
    }
    text = "The accuracy of rows in bins of confidence against their mean confidence; the diagonal is ideal."
    x, y = Axis(start, 1.02, "claimed probability", percent=True), Axis(0.0, 1.02, "observed frequency", percent=True)
    fullest = tally.argmax()
    caption = (
        f"The fullest bin has {tally[fullest]:,.0f} rows, claims {percent(claimed[fullest])} and "
        f"is right in {percent(observed[fullest])}. Overall: {measured.agreement.text}."
    )
    return Figure("reliability", "Reliability of the probabilities", text, x, y, marks, legend, caption)


def risk_coverage(measured: Measured) -> Figure:
    """The mean loss of the rows kept against the share kept."""
    curve, loss, show = measured.risk, measured.loss_name, measured.show
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
    y = Axis(0.0, top, f"{loss} of the rows kept", percent=show is percent)
    kept = {share: risk_after_deferring(curve, share) for share in (0.1, 0.2)}
    without = "{} without the {:.0f} % most uncertain rows"
    bought = [without.format(show(remains), 100 * share) for share, (deferred, remains) in kept.items() if deferred]
    gain = f"it would be {' and '.join(bought)}" if bought else "there are too few rows to defer a tenth of them"
    area, excess = (number(measured.scores[name].value) for name in ("aurc", "excess_aurc"))
    caption = (
        f"The {loss} of all rows is {show(float(curve.risk[-1]))}; {gain}. The area under the curve is {area}, of "
        f"which {excess} is above the best possible ranking."
    )
    return Figure("risk", "Risk against coverage", text, x, y, marks, legend, caption)
