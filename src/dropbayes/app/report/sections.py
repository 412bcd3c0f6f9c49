"""What the sections of the page show: numbers, charts and the cells of tables; `page.html` has the words."""

import math
import re
from typing import Any

import numpy as np
import scipy.optimize
import torch
from sklearn.metrics import precision_recall_fscore_support

from dropbayes import calibration
from dropbayes.app.report import figures, summary
from dropbayes.app.report.features import SHUFFLED_ROWS, importances, ranking_table, segment_table, shift_table, shifts
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import Column
from dropbayes.app.report.measurements import Classification, Measured
from dropbayes.plots import percentile_text
from dropbayes.predictive import draw_mean
from dropbayes.predictive.agreement import MIN_ROWS
from dropbayes.predictive.verdict import Verdict, row_verdict
from dropbayes.runtime.formatting import count, fixed_point, number, percent, printable_name
from dropbayes.runtime.validation import Numbers, NumpyArray
from dropbayes.scores import class_log_likelihood


def page_context(inputs: ReportInputs, measured: Measured) -> dict[str, object]:
    """What the template of the page reads: the measurements, and what is made of them."""
    model, x, y, training, features = inputs.model, inputs.x, inputs.y, inputs.training, inputs.features
    moved = shifts(features, inputs.ranges)
    outside = {one.name for one in moved if one.outside > 0.5}
    # A date of which most rows lie outside the training range, unless the model was fitted along it.
    dates = [one.title for one in features if one.is_date and inputs.band_feature not in one.columns]
    late = next((name for name in dates if name in outside), "")
    learned = {} if measured.has_classes else {"noise": model.noise, "transform": model.transform_.name}
    trained = training is not None and all(map(np.array_equal, training, (x, y)))  # which says little of other rows
    beside = [] if trained else summary.baselines(measured, x, training)
    ranked = importances(model, x, y, features)
    is_dropped = not trained and len(x) >= MIN_ROWS and bool((model.population_.drop_prob > 0).any())
    return {
        "inputs": inputs,
        "n_rows": len(x),
        "n_training": training and len(training[0]),
        "m": measured,
        "advice": summary.advice(measured, features, beside=beside, time=late, trained=trained, **learned),
        "class_rows": _class_rows(measured) if measured.has_classes else None,
        "deferral": summary.deferral(measured),
        "baseline_rows": summary.baseline_rows(beside),
        "importance": ranking_table(ranked),
        "segments": segment_table(measured, [one.feature for one in ranked[:5]]),
        "shifts": shift_table(moved) if training or inputs.ranges else None,
        "uncertain": _uncertain(inputs, measured, [one.feature.name for one in ranked]),
        "dropout": _dropout(inputs, measured) if is_dropped else None,
        "facts": _provenance(inputs, measured),
        "figures": figures,
        "SHUFFLED_ROWS": SHUFFLED_ROWS,
    }


def _class_rows(measured: Classification) -> tuple[list[list[str]], set[int]]:
    """Precision, recall and support of the 30 most frequent classes, and which of them are never predicted."""
    classes = measured.classes
    judged, every = (measured.labels, measured.predicted), np.arange(len(classes))
    precision, recall, f1, support = precision_recall_fscore_support(*judged, labels=every, zero_division=np.nan)
    predicted = measured.confusion.sum(0)
    order = np.argsort(-support, kind="stable")[:30]
    rows = [
        [classes[k], f"{support[k]:,}", f"{predicted[k]:,}", percent(precision[k]), percent(recall[k]), number(f1[k])]
        for k in order
    ]
    return rows, {place for place, k in enumerate(order) if support[k] and not predicted[k]}


def _uncertain(inputs: ReportInputs, measured: Measured, ranked: list[str]) -> dict[str, object]:
    """The most uncertain rows, with the columns that matter most: the features are `ranked`."""
    top = np.argsort(-measured.uncertainty, kind="stable")[:10].tolist()
    percentiles, among = _percentiles(inputs, measured.uncertainty)
    parts = np.clip(measured.epistemic / np.maximum(measured.total, 1e-300), 0, 1)
    share = [f"{100 * part:.0f} %" for part in parts[top]]
    order = {name: place for place, name in enumerate(ranked)}
    first = sorted(inputs.columns, key=lambda column: order.get(column[0], len(order)))[:4]
    shown = [(printable_name(label, max_length=40), [values[k] for k in top]) for label, values in first]
    ranks = (percentile_text(percentiles[k]).replace("percentile ", "") for k in top)
    described = [
        (Column("row"), [f"{k + 1 if inputs.numbers is None else inputs.numbers[k]:,.0f}" for k in top]),
        *((Column(label, all(map(_is_number, values))), list(map(_cell, values))) for label, values in shown),
        *_results(measured, top),
        (Column("epistemic share", share=True), share),
        (Column("percentile"), [rank.replace("above ", "> ").replace("below ", "< ") for rank in ranks]),
    ]
    columns, cells = zip(*described, strict=True)
    rows, n_left = list(zip(*cells, strict=True)), len(inputs.columns) - len(shown)
    return {"columns": columns, "rows": rows, "among": among, "share": share[0], "n_left": n_left}


def _results(measured: Measured, top: list[int]) -> list[tuple[Column, list[str]]]:
    """The predictions, the truths and the uncertainty of the most uncertain rows, as columns."""
    if measured.has_classes:
        predicted, truth = ([measured.classes[k] for k in some[top]] for some in (measured.predicted, measured.labels))
        stated = [
            (Column("predicted", number=False), predicted),
            (Column("probability"), [percent(value) for value in measured.confidence[top]]),
            (Column("truth", number=False), truth),
        ]
        parts = {"entropy": measured.total, "epistemic": measured.epistemic, "aleatoric": measured.aleatoric}
    else:
        known = measured.lower, measured.upper, measured.mean, measured.y
        lower, upper, mean, truth = ([fixed_point(v, spread=measured.typical) for v in some[top]] for some in known)
        intervals = [f"{low} to {high}" for low, high in zip(lower, upper, strict=True)]
        stated = [(Column("predicted"), mean), (Column("95 % interval"), intervals), (Column("truth"), truth)]
        parts = {"σ": measured.std, "epistemic σ": measured.epistemic**0.5, "aleatoric σ": measured.aleatoric**0.5}
    return stated + [(Column(label), list(map(number, values[top]))) for label, values in parts.items()]


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
    sites = [(f"layer {k + 1}", p) for k, p in enumerate(model.drop_prob_) if p > 0]
    drawn = torch.from_numpy(measured.log_likelihood)
    return row_verdict(measured.outcomes, drawn, plain_densities, sites=sites, n_draws=measured.n_draws)


def _dropout(inputs: ReportInputs, measured: Measured) -> dict[str, object]:
    verdict = dropout_verdict(inputs.model, inputs.x, inputs.y, measured)

    def typeset(text: str) -> str:
        return re.sub(r"-(?=[\d.∞])", "−", text).replace("%", " %")

    rows = [[typeset(what), typeset(value), meaning] for what, value, meaning in verdict.rows()[1:]]
    advice = " ".join(re.sub(r" \([a-z_.]+\)", "", sentence) for sentence in verdict.advice)
    return {"verdict": verdict, "rows": rows, "advice": advice}


def _provenance(inputs: ReportInputs, measured: Measured) -> dict[str, str]:
    model = inputs.model
    given = {printable_name(key): printable_name(text, max_length=1000) for key, text in inputs.provenance.items()}
    given = {label[:1].upper() + label[1:]: text for label, text in given.items()}
    drops = ", ".join(f"{p:.3g}" for p in model.population_.drop_prob[0].tolist())
    kind = model.saved_as.removeprefix("Dropout").lower()
    networks = f"{count(len(model.population_), f'dropout {kind}')} with hidden layers {model.hidden_}"
    known = {"Networks": networks, "Drop probabilities": f"{drops} (before each weight layer)"}
    if not hasattr(model, "classes_") and model.transform_.name != "none":
        known["Learned"] = f"{model.transform_.unit}; predictions are in its own units"
    if not hasattr(model, "classes_") and model.noise == "constant":
        tau = float(model.precision_)
        known["Noise"] = f"standard deviation {number(tau**-0.5)} (precision τ = {number(tau)})"
    known["Draws"] = f"{measured.n_draws:,} functions drawn from the networks, the same for every row"
    known["Rows judged"] = f"{len(inputs.x):,}, features: {inputs.x.shape[1]:,}"
    said = {label.casefold() for label in given}
    return given | {label: text for label, text in known.items() if label.casefold() not in said}
