"""The report's figures: bands, intervals, reliability, histograms, confusion, risk and coverage; not their words."""

import numpy as np

from dropbayes.app.report import svg
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.measurements import Classification, Measured, Regression, risk_after_deferring
from dropbayes.app.report.svg import Axis, Figure
from dropbayes.runtime.formatting import percent, printable_name
from dropbayes.runtime.validation import Numbers

MAX_POINTS, MAX_CONFUSION = 1500, 20  #: Of points in a scatter or vertices in a band; of classes in a confusion matrix.

_DIAGONAL = np.array([0.0, 1.0])


def predictions(inputs: ReportInputs, measured: Regression) -> Figure:
    """The predictions, their intervals and the truths: along a feature if there is one to choose, else row by row."""
    feature = 0 if inputs.x.shape[1] == 1 else inputs.band_feature
    parts = inputs.x, inputs.training and inputs.training[0], inputs.unknown
    x = np.concatenate([part for part in parts if part is not None])
    if feature is None or np.ptp(x[:, feature]) == 0:
        return _sorted_intervals(inputs, measured)
    return _band_along(x, feature, inputs, measured)


def _sorted_intervals(inputs: ReportInputs, measured: Regression) -> Figure:
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
    ticks = [(t, f"{t:.0f}") for t in svg.round_ticks(0, len(few) + 1) if t == round(t) and t >= 1]
    x = Axis(0.0, len(few) + 1.0, "rows, sorted by their prediction", ticks=ticks)
    y = Axis(*svg.padded_range(lower, upper, value), inputs.target)
    narrow, wide = np.sort(measured.upper - measured.lower)[[0, -1]]
    return Figure("band", x, y, marks, facts={"n_drawn": len(few), "narrow": narrow, "wide": wide})


def _band_along(x: Numbers, feature: int, inputs: ReportInputs, measured: Regression) -> Figure:
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
    x_axis = Axis(*ends, inputs.names[feature] if date is None else date.title, ticks=days)
    places = [date.text(p) if date else f"{p:.6g}".replace("-", "−") for p in band]  # no thousands marks: a year?
    facts = _widening(band, places, outer[1] - outer[0], *(where for where, _ in known))
    return Figure("band", x_axis, y_axis, marks, facts={"along": x_axis.label, "known": bool(known), **facts})


def _widening(band: Numbers, places: list[str], width: Numbers, known: Numbers | None = None) -> dict[str, object]:
    """How the width of the 95 % interval varies along the band: places and widths."""
    if known is None:
        return {"ends": [(places[k], width[k]) for k in (width.argmin(), width.argmax())]}
    inside = (band >= known.min()) & (band <= known.max())
    if inside.all() or not inside.any():
        return {"mean": width.mean()}
    far = np.abs(band - np.median(known)).argmax()
    return {"mean_inside": width[inside].mean(), "far": (places[far], width[far])}


def coverage(measured: Regression) -> Figure:
    """Claimed against observed coverage of central intervals, with the scatter of a calibrated model."""
    curve = measured.reliability
    claimed, observed, error = (t.double().numpy() for t in (curve.claimed, curve.observed, curve.standard_error))
    marks = (
        svg.band(claimed, np.maximum(claimed - 2 * error, 0), np.minimum(claimed + 2 * error, 1), kind="chance"),
        svg.line(_DIAGONAL, _DIAGONAL, kind="ideal"),
        svg.line(claimed, observed, kind="measured"),
    )
    x, y = (Axis(0.0, 1.0, f"{kind} coverage", percent=True) for kind in ("claimed", "observed"))
    return Figure("reliability", x, y, marks, half=True)


def transforms(measured: Regression) -> Figure:
    """The histogram of the truth's rank in its predictive distribution, flat if calibrated."""
    tally, edges = np.histogram(measured.pit, bins=10, range=(0, 1))
    expected = len(measured.pit) / 10
    low, high = (np.full(2, max(0.0, expected + side * np.sqrt(expected * 0.9))) for side in (-2, 2))
    marks = (
        svg.band(_DIAGONAL, low, high, kind="chance"),
        svg.bars(edges[:-1], edges[1:], tally.astype(float), kind="bar"),
        *(svg.line(_DIAGONAL, end, kind="edge") for end in (low, high)),  # seen over the bars as well
        svg.line(_DIAGONAL, np.full(2, expected), kind="ideal"),
    )
    y = Axis(0.0, 1.08 * max(float(tally.max()), high[0]), "rows")
    return Figure("pit", Axis(0.0, 1.0, "rank of the truth in its prediction (PIT)"), y, marks, half=True)


def probabilities(measured: Classification) -> Figure:
    """The probability of the predicted class; on half of the width where a confusion stands beside it."""
    low = 1 / measured.probabilities.shape[1]
    edges = np.linspace(low, 1, 21)
    confidence = np.clip(measured.confidence, low, 1)
    right, wrong = (np.histogram(confidence[measured.loss == k], edges)[0].astype(float) for k in (0, 1))
    marks = (
        svg.bars(edges[:-1], edges[1:], right, kind="bar"),
        svg.bars(edges[:-1], edges[1:], right + wrong, floor=right, kind="wrong-bar"),
    )
    x = Axis(low, 1.0, "probability of the predicted class", percent=True)
    y = Axis(0.0, 1.08 * float((right + wrong).max()), "rows")
    return Figure("probabilities", x, y, marks, half=len(measured.classes) <= MAX_CONFUSION)


def confusion(measured: Classification) -> Figure:
    """The share of each true class's rows predicted as each class."""
    n, tally = float(len(measured.classes)), measured.confusion
    tiles = svg.tiles(tally / np.maximum(tally.sum(1, keepdims=True), 1), texts=tally.astype(str).tolist(), kind="tile")
    ticks = [(k + 0.5, printable_name(name, max_length=12)) for k, name in enumerate(measured.classes)]
    x, y = Axis(0.0, n, "predicted class", ticks=ticks), Axis(n, 0.0, "true class", ticks=ticks)
    return Figure("confusion", x, y, [tiles], half=True, grid=False)


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
    x, y = Axis(start, 1.02, "claimed probability", percent=True), Axis(0.0, 1.02, "observed frequency", percent=True)
    fullest = tally.argmax()
    facts = {"rows": int(tally[fullest]), "claimed": claimed[fullest], "observed": observed[fullest]}
    return Figure("reliability", x, y, marks, facts=facts)


def risk_coverage(measured: Measured) -> Figure:
    """The mean loss of the rows kept against the share kept."""
    curve = measured.risk
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
    y = Axis(0.0, top, f"{measured.loss_name} of the rows kept", percent=measured.show is percent)
    kept = {round(100 * share): risk_after_deferring(curve, share) for share in (0.1, 0.2)}
    bought = {share: remains for share, (deferred, remains) in kept.items() if deferred}
    return Figure("risk", Axis(0.0, 1.0, "share of rows kept", percent=True), y, marks, facts={"bought": bought})
