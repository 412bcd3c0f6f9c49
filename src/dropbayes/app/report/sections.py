"""The sections of the page, in order: those of a regression, those of a classifier, and those that both have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
import torch
from markupsafe import Markup
from sklearn.metrics import precision_recall_fscore_support

from dropbayes import calibration
from dropbayes.app.report import comparison, figures, measurements, summary, svg
from dropbayes.app.report.features import Feature, features_section, importances
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import Chart, Column, Section, Table
from dropbayes.app.report.measurements import Classification, Measured, Regression, most_uncertain, risk_after_deferring
from dropbayes.plots import percentile_text
from dropbayes.predictive import draw_mean
from dropbayes.predictive.agreement import MIN_ROWS
from dropbayes.predictive.verdict import Verdict, row_verdict
from dropbayes.runtime.arrays import Numbers, NumpyArray
from dropbayes.runtime.formatting import count, fixed_point, number, percent, printable_name
from dropbayes.scores import class_log_likelihood

MAX_CLASSES, MAX_CONFUSION = 30, 20
"""The maximum number of classes in the table of classes, and in a confusion matrix that can be read."""


class Opening(NamedTuple):
    """What a regression and a classifier each say in their own way."""

    lede: Markup  # the line below the title
    sections: list[Section]
    tables: list[Table]  # beside the scores
    results: list[tuple[Column, list[str]]]  # columns of the most uncertain rows
    unit: str  # of their uncertainty


def page_sections(inputs: ReportInputs) -> tuple[Markup, list[Section]]:
    """The line below the title, and the sections."""
    model, x, y = inputs.model, inputs.x, inputs.y
    classes = hasattr(model, "classes_")
    along = None if inputs.band_feature is None else x[:, inputs.band_feature]
    in_series = along is not None and bool((np.diff(along) >= 0).all())
    measured: Measured = (
        measurements.classification(model, x, y)
        if classes
        else measurements.regression(model, x, y, in_series=in_series)
    )
    beside = comparison.baselines(measured, inputs.x, inputs.training) if inputs.training else []
    shifts = comparison.shifts(inputs.features, inputs.training_features, inputs.ranges)
    noise, transform = ("student", "none") if classes else (model.noise, model.transform_.name)
    # A date of which most rows lie outside the training range, unless the model was fitted along it.
    outside = {one.name for one in shifts if one.outside > 0.5}
    dates = [one.name for one in inputs.features if one.is_date and inputs.band_feature not in one.columns]
    fit = summary.Fit(noise, transform, beside, next((name for name in dates if name in outside), ""))
    if isinstance(measured, Classification):
        opening = _class_opening(inputs, measured, fit)
    else:
        opening = _regression_opening(inputs, measured, fit)
    ranked = importances(model, x, y, inputs.features)
    simple = [comparison.baseline_table(beside, len(inputs.training[0]))] if inputs.training else []
    caption = f"Scores on {len(x):,} rows. After ± stands one standard error over the rows, taken as independent."
    scores = list(measured.scores.values())
    parts = [
        *opening.sections,
        Section("scores", "Scores", scores=scores, caption=caption, tables=[*opening.tables, *simple]),
        features_section(inputs.features, measured, ranked),
    ]
    if inputs.training or inputs.ranges:
        parts.append(comparison.shift_section(shifts, only_ranges=inputs.training is None))
    order = {one.name: place for place, one in enumerate(ranked)}
    shown = sorted(inputs.columns, key=lambda column: order.get(column[0], len(order)))[:4]
    parts += [_uncertain_section(inputs, measured, shown, opening), _deferral_section(measured)]
    if len(inputs.x) >= MIN_ROWS and bool((model.population_.drop_prob > 0).any()):
        parts.append(_dropout_section(inputs, measured))
    return opening.lede, [*parts, _provenance_section(inputs, measured)]


def _regression_opening(inputs: ReportInputs, measured: Regression, fit: summary.Fit) -> Opening:
    lede = Markup("Predictions of <b><bdi>{}</bdi></b> for {} rows with a known truth, each with its uncertainty.")
    intro = "An interval that claims 80 % should hold 80 % of the truths, at every level."
    unit, top = float(np.median(measured.uncertainty)), most_uncertain(measured)
    lower, upper, mean, truth = (
        [fixed_point(value, spread=unit) for value in values[top]]
        for values in (measured.lower, measured.upper, measured.mean, measured.y)
    )
    results = [
        (Column("predicted"), mean),
        (Column("95 % interval"), [f"{low} to {high}" for low, high in zip(lower, upper, strict=True)]),
        (Column("truth"), truth),
        (Column("σ"), [number(value) for value in measured.uncertainty[top]]),
        (Column("epistemic σ"), [number(value) for value in np.sqrt(measured.epistemic[top])]),
        (Column("aleatoric σ"), [number(value) for value in np.sqrt(measured.aleatoric[top])]),
    ]
    answers = summary.regression_answers(measured, target=inputs.target, fit=fit, features=inputs.features)
    judged = "the curve should follow the diagonal" if measured.agreement.kind == "few" else measured.agreement.text
    side, rank = measured.side, measured.scores["mean_pit"].value
    verdict = f"predictions run {side}" if side else "no bias beyond chance"
    ranks = f"Flat bars are ideal; the mean rank of the truth is {rank:.2f}: {verdict}."
    coverage, transforms = figures.coverage(measured.reliability), figures.transforms(measured.pit)
    charts = [
        Chart(coverage, f"{measured.held}: {judged}.", "Claimed and observed coverage", half=True),
        Chart(transforms, ranks, "Where in its prediction the truth falls", half=True),
    ]
    sections = [
        Section("summary", "In short", answers=answers),
        Section("predictions", "Predictions and truths", charts=[_band_chart(inputs, measured)]),
        Section("reliability", "Are the intervals right?", intro, charts=charts),
    ]
    return Opening(lede.format(inputs.target, f"{len(inputs.y):,}"), sections, [], results, "variance")


def _class_opening(inputs: ReportInputs, measured: Classification, fit: summary.Fit) -> Opening:
    classes = [printable_name(label, max_length=40) for label in inputs.model.classes_.tolist()]
    lede = Markup("Predictions of <b><bdi>{}</bdi></b>, one of {} classes, for {} rows with a known truth.")
    intro = "Of the rows whose predicted class was given 80 %, 80 % should be right."
    top = most_uncertain(measured)
    results = [
        (Column("predicted", number=False), [classes[k] for k in measured.predicted[top]]),
        (Column("probability"), [percent(value) for value in measured.confidence[top]]),
        (Column("truth", number=False), [classes[k] for k in measured.labels[top]]),
        (Column("entropy"), [number(value) for value in measured.total[top]]),
        (Column("epistemic"), [number(value) for value in measured.epistemic[top]]),
        (Column("aleatoric"), [number(value) for value in measured.aleatoric[top]]),
    ]
    curve, fullest = measured.reliability, int(measured.reliability.count.argmax())
    caption = (
        f"The fullest bin has {int(curve.count[fullest]):,} rows, claims {percent(float(curve.claimed[fullest]))} and "
        f"is right in {percent(float(curve.observed[fullest]))}. Overall: {measured.agreement.text}."
    )
    reliability = Chart(figures.class_reliability(curve), caption)
    sections = [
        Section("summary", "In short", answers=summary.class_answers(measured, target=inputs.target, fit=fit)),
        Section("predictions", "The probabilities", charts=_probability_charts(measured, classes)),
        Section("reliability", "Are the probabilities right?", intro, charts=[reliability]),
    ]
    line = lede.format(inputs.target, len(classes), f"{len(inputs.y):,}")
    return Opening(line, sections, [_class_table(measured, classes)], results, "entropy")


# --- predictions ---------------------------------------------------------------------------------------------------


def _band_chart(inputs: ReportInputs, measured: Regression) -> Chart:
    n, held, feature = len(measured.y), measured.inside, 0 if inputs.x.shape[1] == 1 else inputs.band_feature
    counted = f"{int(held.sum()):,} of {n:,} truths ({percent(float(held.mean()))}) lie inside their 95 % interval"
    if feature is None or np.ptp(inputs.all_rows[:, feature]) == 0:
        order = np.argsort(measured.mean, kind="stable")
        curves = (values[order] for values in (measured.mean, measured.y, measured.lower, measured.upper))
        rows = order[svg.thinned_indices(*curves, max_points=150)]
        inner = inputs.model.predict_interval(inputs.x[rows], coverage=0.5)
        some = f" ({len(rows):,} of the rows are drawn)" if len(rows) < n else ""
        narrow, wide = (number(float(end)) for end in np.sort(measured.upper - measured.lower)[[0, -1]])
        caption = f"{counted}{some}; the intervals are {narrow} to {wide} wide."
        return Chart(figures.sorted_intervals(measured, inner, rows, target=inputs.target), caption)
    x = inputs.all_rows
    if x.shape[1] == 1:  # nothing but this feature: an even grid shows the function between the rows
        x = np.linspace(x.min(), x.max(), 300)[:, None]
    x = x[np.argsort(x[:, feature], kind="stable")]
    x = x[svg.thinned_indices(x[:, feature], max_points=figures.MAX_POINTS)]
    ends = (inputs.model.predict_interval(x, coverage=level) for level in (0.5, 0.95))
    band = figures.Band(x[:, feature], inputs.model.predict(x), *ends)
    known = None if inputs.training is None else (inputs.training[0][:, feature], inputs.training[1])
    date = next((one for one in inputs.features if one.is_date and one.columns[0] == feature), None)
    labels = {"x_label": inputs.names[feature] if date is None else date.name, "target": inputs.target}
    figure = figures.band_along(band, inputs.x[:, feature], measured, known=known, date=date, **labels)
    return Chart(figure, f"{counted}. {_widening(band, None if known is None else known[0], date)}")


def _widening(band: figures.Band, known: Numbers | None, date: Feature | None) -> str:
    """How the width of the 95 % interval varies along a feature, in a sentence."""
    position, width = band.position, band.outer[1] - band.outer[0]

    def at(index: int) -> str:
        if date is not None:
            return date.text(position[index])
        return f"{position[index]:.6g}".replace("-", "−")  # no thousands marks: it may be a year

    if known is None:
        low, high = int(width.argmin()), int(width.argmax())
        narrowest, widest = f"{at(low)} ({number(width[low])})", f"{at(high)} ({number(width[high])})"
        return f"The 95 % interval is narrowest at {narrowest} and widest at {widest}."
    inside = (position >= known.min()) & (position <= known.max())
    if inside.all() or not inside.any():
        return f"The 95 % interval is {number(float(width.mean()))} wide on average."
    far = int(np.abs(position - np.median(known)).argmax())
    return (
        f"The 95 % interval is {number(float(width[inside].mean()))} wide on average over the rows trained on and "
        f"{number(float(width[far]))} at {at(far)}, farthest from them."
    )


def _probability_charts(measured: Classification, classes: Sequence[str]) -> list[Chart]:
    wrong, sure = measured.loss, measured.confidence > 0.9
    among = f", {percent(float(1 - wrong[sure].mean()))} of them rightly" if sure.any() else ""
    caption = (
        f"{int(sure.sum()):,} of {count(len(wrong), 'row')} are given more than 90 %{among}; in all, "
        f"{int(wrong.sum()):,} are wrong."
    )
    mistakes = measured.confusion * (1 - np.eye(len(classes), dtype=int))
    i, j = np.unravel_index(mistakes.argmax(), mistakes.shape)
    taken = f"{classes[i]} taken for {classes[j]} ({count(int(mistakes[i, j]), 'row')})"
    worst = f"The commonest mistake: {taken}." if mistakes.any() else "No row is predicted wrongly."
    if len(classes) > MAX_CONFUSION:
        return [Chart(figures.confidences(measured), f"{caption} {worst}")]
    return [
        Chart(figures.confidences(measured), caption, "Probability of the predicted class", half=True),
        Chart(figures.confusion(measured, classes), worst, "True and predicted classes", half=True),
    ]


def _class_table(measured: Classification, classes: Sequence[str]) -> Table:
    """Precision, recall and support of each class, the most frequent first."""
    every = np.arange(len(classes))
    precision, recall, f1, support = precision_recall_fscore_support(
        measured.labels, measured.predicted, labels=every, zero_division=np.nan
    )
    predicted = measured.confusion.sum(0)
    order = np.argsort(-support, kind="stable")[:MAX_CLASSES]
    rows = []
    for k in order:
        shares = percent(precision[k]), percent(recall[k]), number(f1[k])
        rows.append([classes[k], f"{support[k]:,}", f"{predicted[k]:,}", *shares])
    more = f" The {MAX_CLASSES} most frequent of {len(classes)} classes." if len(classes) > MAX_CLASSES else ""
    caption = (
        "Precision is the share of the rows predicted as a class that are of it, recall the share of its rows that are "
        f"recognised.{more}"
    )
    never = frozenset(place for place, k in enumerate(order) if support[k] and not predicted[k])
    return Table("classes", caption, ["class", "rows", "predicted", "precision", "recall", "F1"], rows, never)


# --- the most uncertain rows ---------------------------------------------------------------------------------------


def _uncertain_section(
    inputs: ReportInputs, measured: Measured, shown: Sequence[tuple[str, Sequence[object]]], opening: Opening
) -> Section:
    top = most_uncertain(measured).tolist()
    percentiles, among = _percentiles(inputs, measured.uncertainty)
    share = np.clip(measured.epistemic / np.maximum(measured.total, 1e-300), 0, 1)
    known = [(Column(label, number=all(_is_number(values[k]) for k in top)), values) for label, values in shown]
    ranks = (percentile_text(percentiles[k]).replace("percentile ", "") for k in top)
    columns = [
        (Column("row"), [f"{k + 1:,}" for k in top]),
        *((column, [_cell(values[k]) for k in top]) for column, values in known),
        *opening.results,
        (Column("epistemic share", share=True), [f"{100 * share[k]:.0f} %" for k in top]),
        (Column("percentile"), [rank.replace("above ", "> ").replace("below ", "< ") for rank in ranks]),
    ]
    heads, cells = zip(*columns, strict=True)
    left = len(inputs.columns) - len(shown)
    caption = (
        f"The {len(top)} most uncertain of {len(inputs.x):,} rows. The percentile is that of the row's total "
        f"uncertainty {among}." + (f" {left:,} more columns are not shown." if left > 0 else "")
    )
    table = Table("uncertain", caption, heads, list(zip(*cells, strict=True)))
    intro = (
        f"The row the model is least sure about is row {top[0] + 1:,}; {100 * share[top[0]]:.0f} % of its "
        f"{opening.unit} is epistemic, which more data like it would shrink. The rest is noise."
    )
    return Section("uncertain", "The most uncertain rows", intro, tables=[table])


def _percentiles(inputs: ReportInputs, uncertainty: Numbers) -> tuple[list[float], str]:
    """The percentile of each row's uncertainty, and the rows it is among."""
    if inputs.training is None:
        return calibration.empirical_percentile(uncertainty, uncertainty).tolist(), "among the rows of this report"
    model, x = inputs.model, inputs.training[0]
    known = model.predict_uncertainty(x)[0] if hasattr(model, "classes_") else model.predict(x, return_std=True)[1]
    try:
        fitted = calibration.uncertainty_reference(known)
    except ValueError:  # too few, or all alike
        return calibration.empirical_percentile(uncertainty, known).tolist(), "among the training rows"
    return fitted.percentile(uncertainty).tolist(), f"among the training rows ({fitted.family} fitted to theirs)"


def _is_number(value: object) -> bool:
    """Whether the value reads as a number, and is then right-aligned."""
    try:
        return not isinstance(value, bool) and math.isfinite(float(str(value)))
    except ValueError:
        return False


def _cell(value: object) -> str:
    if str(value) in ("None", "nan", "NaT", "<NA>"):
        return "(missing)"
    if isinstance(value, float):  # no thousands marks: it may be a year
        return f"{value:.6g}".replace("-", "−")
    day = re.sub(r"(?<=\d{4}-\d\d-\d\d)[ T]00:00(:00)?$", "", str(value))  # the day alone, without midnight
    return printable_name(day, max_length=60)


# --- the dropout, deferral, provenance -----------------------------------------------------------------------------


def dropout_verdict(model: Any, x: Numbers, y: NumpyArray, measured: Measured) -> Verdict:
    """The verdict on the draws against the networks without dropout, whose noise is fitted to these rows."""
    plain, truth = model.without_dropout(), torch.from_numpy(y)
    if isinstance(measured, Classification):
        logits = plain.draws(x).clamp_min(1e-30).log()
        tempered = draw_mean((logits / calibration.temperature(logits, truth)).softmax(-1))
        plain_densities = class_log_likelihood(tempered, truth)
    else:
        mixture = plain.predictive(x)

        def densities(log_factor: float) -> torch.Tensor:
            return mixture.with_noise(math.exp(log_factor)).log_density(truth)

        best = scipy.optimize.minimize_scalar(lambda f: -float(densities(f).mean()), bounds=(-3, 3), method="bounded")
        plain_densities = densities(float(best.x))
    values = {name: score.value for name, score in measured.scores.items()}
    return row_verdict(
        torch.from_numpy(measured.log_likelihood),
        plain_densities,
        torch.from_numpy(measured.uncertainty),
        torch.from_numpy(measured.loss),
        sites=[(f"layer {k + 1}", p) for k, p in enumerate(model.drop_prob_) if p > 0],
        n_draws=measured.n_draws,
        coverage={p / 100: values[f"coverage_{p}"] for p in (50, 80, 95) if f"coverage_{p}" in values},
        calibration_error=values.get("calibration_error"),
    )


def _dropout_section(inputs: ReportInputs, measured: Measured) -> Section:
    verdict = dropout_verdict(inputs.model, inputs.x, inputs.y, measured)

    def typeset(text: str) -> str:
        return re.sub(r"-(?=[\d.∞])", "−", text).replace("%", " %")

    rows = [[typeset(what), typeset(value), meaning] for what, value, meaning in verdict.rows()[1:]]
    caption = (
        f"{verdict.n_draws:,} draws against one pass through each of {len(inputs.model.population_)} networks without "
        f"dropout, on {verdict.n_rows:,} rows. Without dropout the noise was fitted anew to these very rows, in its "
        "favour."
    )
    advice = " ".join(re.sub(r" \([a-z_.]+\)", "", sentence) for sentence in verdict.advice)
    table = Table("dropout", caption, ["what", "value", Column("meaning", number=False)], rows)
    return Section("dropout", "Is the dropout worth its draws?", advice, tables=[table])


def _deferral_section(measured: Measured) -> Section:
    show, loss = measured.show, measured.loss_name
    kept = {share: risk_after_deferring(measured.risk, share) for share in (0.1, 0.2)}
    without = "{} without the {:.0f} % most uncertain rows"
    bought = [without.format(show(remains), 100 * share) for share, (deferred, remains) in kept.items() if deferred]
    gain = f"it would be {' and '.join(bought)}" if bought else "there are too few rows to defer a tenth of them"
    caption = (
        f"The {loss} of all rows is {show(float(measured.risk.risk[-1]))}; {gain}. The area under the curve is "
        f"{number(measured.scores['aurc'].value)}, of which {number(measured.scores['excess_aurc'].value)} is above "
        "the best possible ranking."
    )
    figure = figures.risk_coverage(measured.risk, loss=loss, percent=measured.show is percent)
    intro = "If the most uncertain rows go to a person, how wrong is the model on the rest?"
    return Section("deferral", "What deferring would buy", intro, charts=[Chart(figure, caption)])


def _provenance_section(inputs: ReportInputs, measured: Measured) -> Section:
    model = inputs.model
    drops = ", ".join(f"{p:.3g}" for p in model.population_.drop_prob[0].tolist())
    kind = type(model).__name__.removeprefix("Dropout").lower()
    known = {
        "Networks": f"{count(len(model.population_), f'dropout {kind}')} with hidden layers {model.hidden_}",
        "Drop probabilities": f"{drops} (before each weight layer)",
    }
    if not hasattr(model, "classes_") and model.transform_.name != "none":
        known["Learned"] = f"{model.transform_.unit}; predictions are in its own units"
    if not hasattr(model, "classes_") and model.noise == "constant":
        tau = float(model.precision_)
        known["Noise"] = f"standard deviation {number(tau**-0.5)} (precision τ = {number(tau)})"
    known["Draws"] = f"{measured.n_draws:,} functions drawn from the networks, the same for every row"
    known["Rows judged"] = f"{len(inputs.x):,}, features: {inputs.x.shape[1]:,}"
    given = {label.casefold() for label, _, _ in inputs.provenance}
    more = [(label, text, False) for label, text in known.items() if label.casefold() not in given]
    return Section("done", "What was done, and how to repeat it", facts=[*inputs.provenance, *more])
