"""The sections on a regression: the band, the reliability of its intervals, the spread of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from dropbayes.app.report import analyses, figures, measurements, sections, summary, svg, verdicts
from dropbayes.app.report.dropout import dropout_section
from dropbayes.app.report.features import importances
from dropbayes.app.report.formatting import fixed_point, number, percent
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import HALF, Chart, Column, Section
from dropbayes.app.report.measurements import Regression
from dropbayes.runtime.arrays import Numbers


def regression_sections(inputs: ReportInputs) -> tuple[Markup, list[Section]]:
    measured = measurements.regression(inputs.model, inputs.x, inputs.y)
    beside = analyses.baselines(inputs, measured)
    ranked = importances(inputs.model, inputs.x, inputs.y, inputs.features)
    lede = Markup(
        "Predictions of <b><bdi>{}</bdi></b> for {} rows with a known truth, each with its uncertainty."
    ).format(inputs.target, f"{len(measured.y):,}")
    unit = float(np.median(measured.std))
    model_columns = [
        Column(label) for label in ("predicted", "95 % interval", "truth", "σ", "epistemic σ", "aleatoric σ")
    ]

    def cells(row: int) -> list[str]:
        lower, upper, mean, truth = (
            fixed_point(values[row], spread=unit)
            for values in (measured.lower, measured.upper, measured.mean, measured.y)
        )
        spread = (number(values[row]) for values in (measured.std, measured.epistemic_std, measured.aleatoric_std))
        return [mean, f"{lower} to {upper}", truth, *spread]

    return lede, [
        Section(
            "summary", "In short",
            answers=summary.regression_answers(measured, target=inputs.target, features=inputs.features, beside=beside),
        ),
        Section("predictions", "Predictions and truths", charts=[_band_chart(inputs, measured)]),
        Section(
            "reliability", "Are the intervals right?",
            "An interval that claims 80 % should hold 80 % of the truths, at every level.",
            charts=_reliability_charts(measured),
        ),
        sections.scores_section(measured, analyses.baseline_table(inputs, beside, regression=True)),
        analyses.features_section(inputs, measured, ranked),
        *analyses.shift_section(inputs),
        sections.uncertain_section(inputs, measured, model_columns, cells, [one.name for one in ranked], "variance"),
        sections.deferral_section(measured, loss="mean absolute error"),
        *dropout_section(inputs, measured),
        sections.provenance_section(inputs, measured),
    ]  # fmt: skip


def _reliability_charts(measured: Regression) -> list[Chart]:
    held = {p: percent(measured.scores[f"coverage_{p}"].value) for p in (50, 80, 95)}
    verdict = verdicts.regression_verdict(measured)
    judged = "the curve should follow the diagonal" if verdict.kind == "few" else verdict.text
    caption = (
        f"Intervals that claim 50 %, 80 % and 95 % hold {held[50]}, {held[80]} and {held[95]} of the truths: {judged}."
    )
    score = measured.scores["mean_pit"]
    bias = (
        f"predictions run {verdicts.bias_direction(measured)}"
        if verdicts.bias_direction(measured)
        else "no bias beyond chance"
    )
    rank = f"Flat bars are ideal; the mean rank of the truth is {score.value:.2f}: {bias}."
    return [
        Chart(figures.coverage(measured.reliability), caption, HALF, "Claimed and observed coverage"),
        Chart(figures.transforms(measured.pit), rank, HALF, "Where in its prediction the truth falls"),
    ]


def _band_chart(inputs: ReportInputs, measured: Regression) -> Chart:
    n, held = len(measured.y), (measured.lower <= measured.y) & (measured.y <= measured.upper)
    counted = f"{int(held.sum()):,} of {n:,} truths ({percent(float(held.mean()))}) lie inside their 95 % interval"
    band_feature = 0 if inputs.x.shape[1] == 1 else inputs.band_feature
    if band_feature is None or np.ptp(_all_rows(inputs)[:, band_feature]) == 0:
        order = np.argsort(measured.mean, kind="stable")
        picked = svg.thinned_indices(
            measured.mean[order],
            measured.y[order],
            measured.lower[order],
            measured.upper[order],
            most=figures.SHOWN_INTERVALS,
        )
        rows = order[picked]
        inner = inputs.model.predict_interval(inputs.x[rows], coverage=0.5)
        some = f" ({len(rows):,} of the rows are drawn)" if len(rows) < n else ""
        widths = measured.upper - measured.lower
        caption = (
            f"{counted}{some}; the intervals are {number(float(widths.min()))} to {number(float(widths.max()))} wide."
        )
        return Chart(figures.sorted_intervals(measured, inner, rows, target=inputs.target), caption)
    band = _band(inputs, band_feature)
    known = None if inputs.training is None else (inputs.training[0][:, band_feature], inputs.training[1])
    figure = figures.band_along(
        band, feature=inputs.names[band_feature], target=inputs.target,
        truths=(inputs.x[:, band_feature], measured.y, held), known=known,
    )  # fmt: skip
    return Chart(figure, f"{counted}. {_widening(band, known)}")


def _widening(band: figures.Band, known: tuple[Numbers, Any] | None) -> str:
    width = band.outer[1] - band.outer[0]
    if known is None:
        narrow, wide = int(width.argmin()), int(width.argmax())
        return (
            f"The 95 % interval is narrowest at {_format_coordinate(band.position[narrow])} ({number(width[narrow])}) "
            f"and widest at {_format_coordinate(band.position[wide])} ({number(width[wide])})."
        )
    inside = (band.position >= known[0].min()) & (band.position <= known[0].max())
    if inside.all() or not inside.any():
        return f"The 95 % interval is {number(float(width.mean()))} wide on average."
    farthest = np.abs(band.position - np.median(known[0])).argmax()
    return (
        f"The 95 % interval is {number(float(width[inside].mean()))} wide on average over the rows trained on and "
        f"{number(float(width[farthest]))} at {_format_coordinate(band.position[farthest])}, farthest from them."
    )


def _format_coordinate(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")  # no thousands marks: it may be a year


def _all_rows(inputs: ReportInputs) -> Numbers:
    """The rows to draw a band over: judged, trained on and unknown."""
    more = [] if inputs.training is None else [inputs.training[0]]
    return np.concatenate([inputs.x, *more, *([] if inputs.unknown is None else [inputs.unknown])])


def _band(inputs: ReportInputs, band_feature: int) -> figures.Band:
    rows = _all_rows(inputs)
    if rows.shape[1] == 1:  # nothing but this feature: an even grid shows the function between the rows
        rows = np.linspace(rows.min(), rows.max(), 300)[:, None]
    rows = rows[np.argsort(rows[:, band_feature], kind="stable")]
    rows = rows[svg.thinned_indices(rows[:, band_feature], most=figures.BAND_POINTS)]
    mean = np.asarray(inputs.model.predict(rows), dtype=np.float64)
    inner, outer = (inputs.model.predict_interval(rows, coverage=level) for level in (0.5, measurements.LEVEL))
    return figures.Band(rows[:, band_feature], mean, inner, outer)
