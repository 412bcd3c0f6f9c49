"""The summary: how good, how sure, how well calibrated, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from dropbayes.app.report.comparison import Baseline
from dropbayes.app.report.features import Feature
from dropbayes.app.report.formatting import number, percent
from dropbayes.app.report.measurements import (
    ENOUGH_ROWS,
    Classification,
    Regression,
    never_predicted,
    risk_after_deferring,
)
from dropbayes.app.report.verdicts import (
    Verdict,
    bias_direction,
    class_verdict,
    dependent_feature,
    epistemic_share,
    gain_is_real,
    interval_factors,
    regression_verdict,
)


@dataclass(frozen=True)
class Answer:
    """One answer of the summary.

    Args:
        question: What a reader asks.
        figure: The answer as a number.
        text: The answer in words.
        tone: "good", "warn" or "plain": its colour.
    """

    question: str
    figure: str
    text: Markup
    tone: str = "plain"


def regression_answers(
    measured: Regression, *, target: str, features: Sequence[Feature] = (), beside: Sequence[Baseline] = ()
) -> list[Answer]:
    """How good, how sure, how well calibrated, and what to do."""
    return [
        _beside_others(_how_good(measured, target), beside, number),
        _how_sure(measured),
        _how_true(measured),
        Answer(
            "What to do with it?", *_advice(measured, measured.risk.risk[-1].item(), "mean absolute error", features)
        ),
    ]


def _how_good(measured: Regression, target: str) -> Answer:
    rmse, mae = measured.scores["rmse"].value, measured.scores["mae"].value
    spread = float(measured.y.std())
    start = Markup(
        "On {} rows the predicted <b><bdi>{}</bdi></b> is off by {} on average (root mean square {}). "
    ).format(f"{len(measured.y):,}", target, number(mae), number(rmse))
    if spread == 0:
        return Answer("How good is it?", f"± {number(mae)}", start + "The truth is the same in all rows.")
    if rmse + 2 * (measured.scores["rmse"].error or 0.0) < spread:
        text = Markup("Guessing their mean would be off by {} (RMS): the model explains {} of the variance.").format(
            number(spread), percent(1 - (rmse / spread) ** 2)
        )
        return Answer("How good is it?", f"± {number(mae)}", start + text, "good")
    worse = rmse - 2 * (measured.scores["rmse"].error or 0.0) > spread
    text = Markup("Guessing the mean of these rows would be off by {} (RMS): {}.").format(
        number(spread), "that is better" if worse else "no gain beyond chance"
    )
    return Answer("How good is it?", f"± {number(mae)}", start + text, "warn")


def _beside_others(answer: Answer, beside: Sequence[Baseline], show: Callable[[float], str]) -> Answer:
    """The answer, with a warning if a simple model errs less beyond chance."""
    better = [one for one in beside if one.is_better]
    if not better:
        return answer
    best = min(better, key=lambda one: one.error)
    text = Markup(" {} errs less: {} instead of {}.").format(
        best.name.capitalize(), show(best.error), show(beside[0].error)
    )
    return replace(answer, text=answer.text + text, tone="warn")


def _how_sure(measured: Regression) -> Answer:
    share, width = epistemic_share(measured), measured.scores["interval_width"].value
    text = Markup(
        "A typical prediction has a standard deviation of {}; the 95 % interval is {} wide on average. {} of the "
        "variance is <em>epistemic</em> (what the model has not learned; more data would shrink it), the rest "
        "<em>aleatoric</em> (noise that stays)."
    ).format(number(float(np.median(measured.std))), number(width), percent(share))
    return Answer("How sure is it?", f"σ ≈ {number(float(np.median(measured.std)))}", text)


def _how_true(measured: Regression) -> Answer:
    verdict = regression_verdict(measured)
    held = (percent(measured.scores[f"coverage_{level}"].value) for level in (50, 80, 95))
    text = Markup("Intervals that claim 50 %, 80 % and 95 % hold {}, {} and {} of the truths. {}").format(
        *held, _sentence(verdict)
    )
    bias = bias_direction(measured)
    if bias:
        text += Markup(" Predictions run {}: the truth's mean rank in its prediction is {}.").format(
            bias, f"{measured.scores['mean_pit'].value:.2f}"
        )
    level = verdict.level
    figure = f"{level} % → {percent(measured.scores[f'coverage_{level}'].value)}"
    return Answer("Can its certainty be trusted?", figure, text, verdict.tone)


def _sentence(verdict: Verdict) -> str:
    if verdict.kind in ("calibrated", "few"):
        return verdict.text[:1].upper() + verdict.text[1:] + "."
    return f"The model is {verdict.text}."


def class_answers(measured: Classification, *, target: str, beside: Sequence[Baseline] = ()) -> list[Answer]:
    """How good, how sure, how well calibrated, and what to do."""
    accuracy, confidence = measured.scores["accuracy"].value, measured.scores["mean_confidence"].value
    most_common = np.bincount(measured.labels).max() / len(measured.labels)
    good = Markup(
        "On {} rows the most probable <b><bdi>{}</bdi></b> is right in {}. Always guessing the commonest class would "
        "be right in {}."
    ).format(f"{len(measured.labels):,}", target, percent(accuracy), percent(float(most_common)))
    never = never_predicted(measured)
    if never:
        classes = "1 class that occurs is" if len(never) == 1 else f"{len(never)} classes that occur are"
        balanced = percent(measured.scores["balanced_accuracy"].value)
        good += Markup(" {} never predicted (balanced accuracy {}).").format(classes, balanced)
    fair = accuracy > most_common and not never
    verdict = class_verdict(measured)
    sure = Markup(
        "The predicted class has a probability of {} on average; {} of the rows are given more than 90 %. {} of the "
        "entropy is <em>epistemic</em> (draws disagree; more data would help), the rest <em>aleatoric</em> (classes "
        "that overlap)."
    ).format(
        percent(confidence), percent(float((measured.confidence > 0.9).mean())), percent(epistemic_share(measured))
    )
    return [
        _beside_others(Answer("How good is it?", percent(accuracy), good, "good" if fair else "warn"), beside, percent),
        Answer("How sure is it?", percent(confidence), sure),
        Answer(
            "Can its certainty be trusted?",
            f"{percent(confidence)} → {percent(accuracy)}",
            Markup("Claimed {}, observed {}. {}").format(percent(confidence), percent(accuracy), _sentence(verdict)),
            verdict.tone,
        ),
        Answer("What to do with it?", *_advice(measured, 1 - accuracy, "error rate", ())),
    ]


def _advice(
    measured: Regression | Classification, risk: float, loss: str, features: Sequence[Feature]
) -> tuple[str, Markup, str]:
    """The headline, the advice and its colour; a fault of the calibration comes before deferral."""
    deferred, remains = risk_after_deferring(measured.risk, 0.1)
    show = percent if isinstance(measured, Classification) else number
    if isinstance(measured, Regression):
        fault, use = interval_advice(measured, features)
    else:
        fault, use = probability_advice(measured)
    if len(measured.uncertainty) < ENOUGH_ROWS:
        return "Judge more rows", use, "plain"
    if risk == 0:
        return "Use it", use, "good"
    if gain_is_real(measured, deferred, risk - remains):
        text = Markup(
            "Handing the {} most uncertain rows (10 %) to a person lowers the {} of the rest from {} to {}."
        ).format(f"{deferred:,}", loss, show(risk), show(remains))
        return (
            fault or f"Defer 10 %: −{100 * (1 - remains / risk):.0f} % error",
            use + " " + text,
            ("warn" if fault else "good"),
        )
    text = Markup(
        "Deferring rows by their uncertainty shows no gain beyond chance here: without the most uncertain 10 % the {} "
        "is {} instead of {}."
    ).format(loss, show(remains), show(risk))
    return fault or "Keep all rows", use + " " + text, "warn" if fault else "plain"


def interval_advice(measured: Regression, features: Sequence[Feature] = ()) -> tuple[str, Markup]:
    """A headline if something must be corrected first, and how to use the intervals.

    Faults are looked for in the order in which they must be corrected: noise that varies with the row, a bias, a wrong
    shape, a wrong scale.
    """
    verdict, direction = regression_verdict(measured), bias_direction(measured)
    if verdict.kind == "few":
        return "", Markup("Judge the intervals on more rows before relying on them.")
    feature = dependent_feature(measured, features)
    if verdict.kind == "calibrated" and not feature:
        return "", Markup("Take the intervals as they are.")
    if feature:
        where = Markup("The noise varies with <bdi>{}</bdi>, the intervals too little: ").format(feature)
        if measured.noise == "constant":
            return "Let the noise vary", where + Markup(
                "fit again with <code>--noise student</code>, whose scale varies with the row."
            )
        return "Learn the noise longer", where + Markup("fit again with more rows or <code>--effort best</code>.")
    if direction and not direction.startswith("slightly"):
        text = "Predictions run {}: look for what changed since the training rows, and fit again with newer ones."
        return "Mend the bias first", Markup(text).format(direction)
    if verdict.kind == "uneven":
        return "Map the levels", Markup(
            "The noise has another shape than the model gives it. Map its levels on held-out rows: "
            "<code>dropbayes calibrate MODEL HELD_OUT --method isotonic</code>."
        )
    factor = interval_factors(measured).mean
    return f"Multiply σ by {number(factor)}", Markup(
        "Every standard deviation is off by the same factor, {} on these rows. Fit it on held-out rows and keep it: "
        "<code>dropbayes calibrate MODEL HELD_OUT</code>."
    ).format(number(factor))


def probability_advice(measured: Classification) -> tuple[str, Markup]:
    """A headline if something must be corrected first, and how to use the probabilities."""
    verdict = class_verdict(measured)
    if verdict.kind == "calibrated":
        return "", Markup("Take the probabilities as they are.")
    if verdict.kind == "few":
        return "", Markup("Judge the probabilities on more rows before relying on them.")
    factor = measured.scores["temperature"].value
    return f"Divide logits by {number(factor)}", Markup(
        "The logits are off by a factor of {} on these rows. Fit it on held-out rows and keep it: "
        "<code>dropbayes calibrate MODEL HELD_OUT</code>."
    ).format(number(factor))


def risk_caption(measured: Regression | Classification, *, loss: str) -> str:
    """What deferring a tenth and a fifth of the rows would buy."""
    show = percent if isinstance(measured, Classification) else number
    parts = []
    for share in (0.1, 0.2):
        deferred, remains = risk_after_deferring(measured.risk, share)
        if deferred:
            parts.append(f"{show(remains)} without the {100 * share:.0f} % most uncertain rows")
    bought = f"; it would be {' and '.join(parts)}" if parts else "; there are too few rows to defer a tenth of them"
    return (
        f"The {loss} of all rows is {show(measured.risk.risk[-1].item())}{bought}. "
        f"The area under the curve is {number(measured.scores['aurc'].value)}, of which "
        f"{number(measured.scores['excess_aurc'].value)} is above the best possible ranking."
    )
