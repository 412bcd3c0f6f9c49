"""The sections of the page, in order: those of a regression, those of a classifier, and those that both have."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import scipy.optimize
import torch
from markupsafe import Markup
from sklearn.metrics import precision_recall_fscore_support

from dropbayes import calibration
from dropbayes.app.report import comparison, figures, measurements, summary
from dropbayes.app.report.features import features_section, importances
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import Column, Section, Table, text_and_numbers
from dropbayes.app.report.measurements import Classification, Measured, Regression
from dropbayes.plots import percentile_text
from dropbayes.predictive import draw_mean
from dropbayes.predictive.agreement import MIN_ROWS
from dropbayes.predictive.verdict import Verdict, row_verdict
from dropbayes.runtime.arrays import Numbers, NumpyArray
from dropbayes.runtime.formatting import count, fixed_point, number, percent, printable_name
from dropbayes.scores import class_log_likelihood

MAX_CLASSES = 30
"""The maximum number of classes in the table of classes."""


def page_sections(inputs: ReportInputs) -> tuple[Markup, list[Section]]:
    model, x, y, training, features = inputs.model, inputs.x, inputs.y, inputs.training, inputs.features
    shifts = comparison.shifts(features, inputs.ranges)
    outside = {one.name for one in shifts if one.outside > 0.5}
    # A date of which most rows lie outside the training range, unless the model was fitted along it.
    dates = [one.name for one in features if one.is_date and inputs.band_feature not in one.columns]
    late = next((name for name in dates if name in outside), "")
    measured: Measured
    if hasattr(model, "classes_"):
        measured = measurements.classification(model, x, y)
        beside = comparison.baselines(measured, x, training)
        fit = summary.Fit(beside=beside, time=late)
        lede, opening, results = _class_opening(inputs, measured, fit)
        tables = [_class_table(measured)]
    else:
        in_series = inputs.band_feature is not None and bool((np.diff(x[:, inputs.band_feature]) >= 0).all())
        measured = measurements.regression(model, x, y, in_series=in_series)
        beside = comparison.baselines(measured, x, training)
        fit = summary.Fit(model.noise, model.transform_.name, beside, late)
        lede, opening, results = _regression_opening(inputs, measured, fit)
        tables = []
    if training:
        tables.append(comparison.baseline_table(beside, len(training[0])))
    ranked = importances(model, x, y, features)
    caption = f"Scores on {len(x):,} rows. After ± stands one standard error over the rows, taken as independent."
    scores = list(measured.scores.values())
    parts = [
        *opening,
        Section("scores", "Scores", scores=scores, caption=caption, tables=tables),
        features_section(measured, ranked),
    ]
    if training or inputs.ranges:
        parts.append(comparison.shift_section(shifts, only_ranges=training is None))
    deferral = "If the most uncertain rows go to a person, how wrong is the model on the rest?"
    parts += [
        _uncertain_section(inputs, measured, [one.feature.name for one in ranked], results),
        Section("deferral", "What deferring would buy", deferral, charts=[figures.risk_coverage(measured)]),
    ]
    if len(x) >= MIN_ROWS and bool((model.population_.drop_prob > 0).any()):
        parts.append(_dropout_section(inputs, measured))
    return lede, [*parts, _provenance_section(inputs, measured)]


Results = list[tuple[Column, list[str]]]  # columns of the most uncertain rows
Opening = tuple[Markup, list[Section], Results]  # the line below the title, the first sections


def _regression_opening(inputs: ReportInputs, measured: Regression, fit: summary.Fit) -> Opening:
    lede = Markup("Predictions of <b><bdi>{}</bdi></b> for {} rows with a known truth, each with its uncertainty.")
    intro = "An interval that claims 80 % should hold 80 % of the truths, at every level."
    unit, top = float(np.median(measured.uncertainty)), measured.most_uncertain
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
    charts = [figures.coverage(measured), figures.transforms(measured)]
    sections = [
        Section("summary", "In short", answers=answers),
        Section("predictions", "Predictions and truths", charts=[figures.predictions(inputs, measured)]),
        Section("reliability", "Are the intervals right?", intro, charts=charts),
    ]
    return lede.format(inputs.target, f"{len(inputs.y):,}"), sections, results


def _class_opening(inputs: ReportInputs, measured: Classification, fit: summary.Fit) -> Opening:
    lede = Markup("Predictions of <b><bdi>{}</bdi></b>, one of {} classes, for {} rows with a known truth.")
    intro = "Of the rows whose predicted class was given 80 %, 80 % should be right."
    classes, top = measured.classes, measured.most_uncertain
    results = [
        (Column("predicted", number=False), [classes[k] for k in measured.predicted[top]]),
        (Column("probability"), [percent(value) for value in measured.confidence[top]]),
        (Column("truth", number=False), [classes[k] for k in measured.labels[top]]),
        (Column("entropy"), [number(value) for value in measured.total[top]]),
        (Column("epistemic"), [number(value) for value in measured.epistemic[top]]),
        (Column("aleatoric"), [number(value) for value in measured.aleatoric[top]]),
    ]
    sections = [
        Section("summary", "In short", answers=summary.class_answers(measured, target=inputs.target, fit=fit)),
        Section("predictions", "The probabilities", charts=figures.probabilities(measured)),
        Section("reliability", "Are the probabilities right?", intro, charts=[figures.class_reliability(measured)]),
    ]
    return lede.format(inputs.target, len(classes), f"{len(inputs.y):,}"), sections, results


def _class_table(measured: Classification) -> Table:
    """Precision, recall and support of each class, the most frequent first."""
    classes = measured.classes
    precision, recall, f1, support = precision_recall_fscore_support(
        measured.labels, measured.predicted, labels=np.arange(len(classes)), zero_division=np.nan
    )
    predicted = measured.confusion.sum(0)
    order = np.argsort(-support, kind="stable")[:MAX_CLASSES]
    rows = [
        [classes[k], f"{support[k]:,}", f"{predicted[k]:,}", percent(precision[k]), percent(recall[k]), number(f1[k])]
        for k in order
    ]
    more = f" The {MAX_CLASSES} most frequent of {len(classes)} classes." if len(classes) > MAX_CLASSES else ""
    caption = (
        "Precision is the share of the rows predicted as a class that are of it, recall the share of its rows that are "
        f"recognised.{more}"
    )
    never = frozenset(place for place, k in enumerate(order) if support[k] and not predicted[k])
    heads = text_and_numbers("class", "rows", "predicted", "precision", "recall", "F1")
    return Table("classes", caption, heads, rows, never)


def _uncertain_section(inputs: ReportInputs, measured: Measured, ranked: list[str], results: Results) -> Section:
    """The most uncertain rows, with the columns that matter most: the features are `ranked`."""
    top = measured.most_uncertain.tolist()
    percentiles, among = _percentiles(inputs, measured.uncertainty)
    share = np.clip(measured.epistemic / np.maximum(measured.total, 1e-300), 0, 1)
    order = {name: place for place, name in enumerate(ranked)}
    shown = [
        (label, [values[k] for k in top])
        for label, values in sorted(inputs.columns, key=lambda column: order.get(column[0], len(order)))[:4]
    ]
    ranks = (percentile_text(percentiles[k]).replace("percentile ", "") for k in top)
    columns = [
        (Column("row"), [f"{k + 1:,}" for k in top]),
        *((Column(label, all(map(_is_number, values))), list(map(_cell, values))) for label, values in shown),
        *results,
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
        f"{measured.total_name} is epistemic, which more data like it would shrink. The rest is noise."
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
        return math.isfinite(float(str(value)))
    except ValueError:
        return False


def _cell(value: object) -> str:
    if str(value) in ("None", "nan", "NaT", "<NA>"):
        return "(missing)"
    if type(value) is float:  # no thousands marks: it may be a year
        return f"{value:.6g}".replace("-", "−")
    day = re.sub(r"(?<=\d{4}-\d\d-\d\d)[ T]00:00(:00)?$", "", str(value))  # the day alone, without midnight
    return printable_name(day, max_length=60)


def dropout_verdict(model: Any, x: Numbers, y: NumpyArray, measured: Measured) -> Verdict:
    """The verdict on the draws against the networks without dropout, whose noise is fitted to these rows."""
    plain, truth = model.without_dropout(), torch.from_numpy(y)
    if measured.has_classes:
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
    heads = [*text_and_numbers("what", "value"), Column("meaning", number=False)]
    table = Table("dropout", caption, heads, rows)
    return Section("dropout", "Is the dropout worth its draws?", advice, tables=[table])


def _provenance_section(inputs: ReportInputs, measured: Measured) -> Section:
    model = inputs.model
    given = {printable_name(key): printable_name(text, max_length=1000) for key, text in inputs.provenance.items()}
    given = {label[:1].upper() + label[1:]: text for label, text in given.items()}
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
    said = {label.casefold() for label in given}
    facts = given | {label: text for label, text in known.items() if label.casefold() not in said}
    return Section("done", "What was done, and how to repeat it", facts=facts)
