"""The summary: how good, how sure, how well calibrated, and what to do."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.stats
from markupsafe import Markup

from dropbayes.app.report.comparison import Baseline
from dropbayes.app.report.features import Feature
from dropbayes.app.report.layout import Answer
from dropbayes.app.report.measurements import Classification, Measured, Regression, risk_after_deferring
from dropbayes.predictive.agreement import uneven_width
from dropbayes.runtime.formatting import number, percent


@dataclass(frozen=True)
class Fit:
    """The facts about a fit on which the advice on another fit depends."""

    noise: str = "student"
    transform: str = "none"
    beside: Sequence[Baseline] = ()  # our model and simple ones
    time: str = ""  # the date of which most rows are later than those trained on, though the model was not fitted so

    @property
    def better(self) -> Baseline | None:
        """The best of the simple models that err less than ours beyond chance."""
        return min((one for one in self.beside if one.is_better), key=lambda one: one.error, default=None)

    def again(self, *, skewed: bool = False) -> Markup:
        """How to fit again with a chance of a better model; `skewed` is the target, with a tail of large values."""
        options = ["more rows", Markup("<code>--effort best</code>")]
        if skewed and self.transform == "none":
            options = [Markup("<code>--target-transform auto</code> (the target is skewed)"), "more rows"]
        if self.time:
            options = [Markup("<code>--time {}</code>").format(shlex.quote(self.time)), *options]
        return Markup("fit again with {} or {}").format(Markup(", ").join(options[:-1]), options[-1])


def regression_answers(
    measured: Regression, *, target: str, fit: Fit, features: Sequence[Feature] = ()
) -> list[Answer]:
    """How good, how sure, how well calibrated, and what to do."""
    width, typical = measured.scores["interval_width"].value, number(float(np.median(measured.uncertainty)))
    sure = Markup(
        "A typical prediction has a standard deviation of {}; the 95 % interval is {} wide on average. {} of the "
        "variance is <em>epistemic</em> (what the model has not learned; more data would shrink it), the rest "
        "<em>aleatoric</em> (noise, as far as the model can tell)."
    ).format(typical, number(width), percent(measured.epistemic_share))
    agreement, side = measured.agreement, measured.side
    true = Markup("{}. {}").format(measured.held, agreement.sentence)
    if side:
        rank = f"{measured.scores['mean_pit'].value:.2f}"
        true += Markup(" Predictions run {}: the truth's mean rank in its prediction is {}.").format(side, rank)
    level = round(100 * agreement.level)
    held = percent(measured.scores[f"coverage_{level}"].value)
    return [
        _beside_others(_how_good(measured, target), measured, fit),
        Answer("How sure is it?", f"σ ≈ {typical}", sure),
        _trusted(f"{level} % → {held}", true, agreement.kind),
        _what_to_do(measured, fit, *interval_advice(measured, fit, features)),
    ]


def _how_good(measured: Regression, target: str) -> Answer:
    rmse, mae, spread = measured.scores["rmse"], number(measured.scores["mae"].value), measured.spread
    text = Markup("On {} rows the predicted <b><bdi>{}</bdi></b> is off by {} on average (root mean square {}). ")
    start = text.format(f"{len(measured.y):,}", target, mae, number(rmse.value))
    guess = f"off by {number(spread)} (RMS)"
    if measured.useless:
        better = "that is better" if rmse.value - 2 * (rmse.error or 0.0) > spread else "no gain beyond chance"
        tone, beside = "warn", f"Guessing the mean of these rows would be {guess}: {better}."
    elif spread > 0:
        explained = percent(1 - (rmse.value / spread) ** 2)
        tone, beside = "good", f"Guessing their mean would be {guess}: the model explains {explained} of the variance."
    else:
        tone, beside = "plain", "The truth is the same in all rows."
    return Answer("How good is it?", f"± {mae}", start + beside, tone)


def class_answers(measured: Classification, *, target: str, fit: Fit) -> list[Answer]:
    values, agreement = measured.scores, measured.agreement
    accuracy, confidence = (percent(values[name].value) for name in ("accuracy", "mean_confidence"))
    commonest = float(measured.confusion.sum(1).max() / len(measured.labels))
    good = Markup(
        "On {} rows the most probable <b><bdi>{}</bdi></b> is right in {}. Always guessing the commonest class would "
        "be right in {}."
    ).format(f"{len(measured.labels):,}", target, accuracy, percent(commonest))
    never = int(((measured.confusion.sum(1) > 0) & (measured.confusion.sum(0) == 0)).sum())
    if never:
        classes = "1 class that occurs is" if never == 1 else f"{never} classes that occur are"
        balanced = percent(values["balanced_accuracy"].value)
        good += Markup(" {} never predicted (balanced accuracy {}).").format(classes, balanced)
    tone = "good" if values["accuracy"].value > commonest and not never else "warn"
    sure = Markup(
        "The predicted class has a probability of {} on average; {} of the rows are given more than 90 %. {} of the "
        "entropy is <em>epistemic</em> (draws disagree; more data would help), the rest <em>aleatoric</em> (classes "
        "that overlap, as far as the model can tell)."
    ).format(confidence, percent(float((measured.confidence > 0.9).mean())), percent(measured.epistemic_share))
    true = Markup("Claimed {}, observed {}. {}").format(confidence, accuracy, agreement.sentence)
    return [
        _beside_others(Answer("How good is it?", accuracy, good, tone), measured, fit),
        Answer("How sure is it?", confidence, sure),
        _trusted(f"{confidence} → {accuracy}", true, agreement.kind),
        _what_to_do(measured, fit, *probability_advice(measured, fit)),
    ]


def _trusted(claim: str, text: Markup, kind: str) -> Answer:
    tone = {"calibrated": "good", "few": "plain"}.get(kind, "warn")
    return Answer("Can its certainty be trusted?", claim, text, tone)


def _beside_others(answer: Answer, measured: Measured, fit: Fit) -> Answer:
    """The answer, with a warning if a simple model errs less beyond chance."""
    if (best := fit.better) is None:
        return answer
    text, show = Markup(" {} errs less: {} instead of {}."), measured.show
    compared = text.format(best.name.capitalize(), show(best.error), show(fit.beside[0].error))
    return replace(answer, text=answer.text + compared, tone="warn")


def first_fault(measured: Measured, fit: Fit, *, skewed: bool = False) -> tuple[str, Markup] | None:
    """What comes before a fault of the certainty: too few rows, or a fault of the predictions with its headline."""
    again = fit.again(skewed=skewed)
    if measured.agreement.kind == "few":
        return "", Markup(f"Judge the {measured.claims.lower()} on more rows before relying on them.")
    if best := fit.better:
        use = Markup("{} errs less on these rows: use it, or {}.")
        return f"Prefer {best.name}", use.format(best.name.capitalize(), again)
    if measured.useless:
        guess = Markup("It is no better than a guess: {}, or with columns that say more.")
        return "Improve it first", guess.format(again)
    if fit.time and measured.agreement.kind != "calibrated":
        late = Markup("Most rows are later than any it was fitted to, and rows held out at random hide the cost: {}.")
        return "Fit along the time", late.format(again)
    return None


def _what_to_do(measured: Measured, fit: Fit, fault: str, use: Markup) -> Answer:
    """The last answer, from a fault to be corrected first (if any) and how to use the certainty."""
    question, show, loss = "What to do with it?", measured.show, measured.loss_name
    risk, (deferred, remains) = float(measured.risk.risk[-1]), risk_after_deferring(measured.risk, 0.1)
    if measured.agreement.kind == "few":
        return Answer(question, "Judge more rows", use)
    if risk == 0:
        return Answer(question, "Use it", use, "good")
    if fit.better:
        return Answer(question, fault, use, "warn")
    if gain_is_real(measured.loss, deferred, risk - remains):
        lowers = f"to a person lowers the {loss} of the rest from {show(risk)} to {show(remains)}."
        use += f" Handing the {deferred:,} most uncertain rows (10 %) {lowers}"
        headline = fault or f"Defer 10 %: −{100 * (1 - remains / risk):.0f} % error"
        return Answer(question, headline, use, "warn" if fault else "good")
    text = "Deferring rows by their uncertainty shows no gain beyond chance here: without the most uncertain 10 % the"
    use += f" {text} {loss} is {show(remains)} instead of {show(risk)}."
    return Answer(question, fault or "Keep all rows", use, "warn" if fault else "plain")


def gain_is_real(loss: np.ndarray, deferred: int, gain: float) -> bool:
    r"""Whether deferring the $d$ most uncertain of $N$ rows lowers the mean loss more than $d$ rows at random would.

    For errors, the number among $d$ random rows is hypergeometric; it must reach the number deferred with a probability
    of at most 2.5 %. For losses of standard deviation $s$ the gain must exceed $2 s \sqrt{d / (N (N - d))}$, twice the
    standard error of a mean of $N - d$ rows drawn without replacement.
    """
    n = len(loss)
    if not np.isin(loss, (0.0, 1.0)).all():
        return gain > 2 * float(np.std(loss, ddof=1)) * math.sqrt(deferred / n / (n - deferred))
    caught = round(loss.sum() - (n - deferred) * (float(loss.mean()) - gain))
    return bool(scipy.stats.hypergeom.sf(caught - 1, n, loss.sum(), deferred) <= 0.025)


def _calibrate(fault: str, how: str = "Fit it on held-out rows and keep it", option: str = "") -> Markup:
    return Markup("{} {}: <code>dropbayes calibrate MODEL HELD_OUT{}</code>.").format(fault, how, option)


def interval_advice(measured: Regression, fit: Fit, features: Sequence[Feature] = ()) -> tuple[str, Markup]:
    """A headline if something must be corrected first, and how to use the intervals."""
    # Faults are looked for in the order in which they must be corrected.
    agreement, side = measured.agreement, measured.side
    skewed = bool(measured.y.min() >= 0 and measured.spread > 0 and scipy.stats.skew(measured.y) > 1)
    if first := first_fault(measured, fit, skewed=skewed):
        return first
    numbers = {"the prediction": measured.mean} | {one.name: one.values for one in features if one.is_number}
    if feature := uneven_width(measured.pit, numbers):
        where = Markup("The noise varies with <bdi>{}</bdi>, the intervals too little: ").format(feature)
        if skewed and fit.transform == "none":
            return "Transform the target", where + fit.again(skewed=True) + "."
        if fit.noise == "constant":
            remedy = Markup("fit again with <code>--noise student</code>, whose scale varies with the row.")
            return "Let the noise vary", where + remedy
        return "Learn the noise longer", where + fit.again() + "."
    if agreement.kind == "calibrated":
        return "", Markup("Take the intervals as they are.")
    if side and not side.startswith("slightly"):
        text = "Predictions run {}: look for what changed since the training rows, and fit again with newer ones."
        return "Mend the bias first", Markup(text).format(side)
    if agreement.kind == "uneven":
        text = "The noise has another shape than the model gives it."
        return "Map the levels", _calibrate(text, "Map its levels on held-out rows", " --method isotonic")
    factor = number(agreement.factor)
    text = f"Every standard deviation is off by the same factor, {factor} on these rows."
    return f"Multiply σ by {factor}", _calibrate(text)


def probability_advice(measured: Classification, fit: Fit) -> tuple[str, Markup]:
    """A headline if something must be corrected first, and how to use the probabilities."""
    if first := first_fault(measured, fit):
        return first
    if measured.agreement.kind == "calibrated":
        return "", Markup("Take the probabilities as they are.")
    factor = number(measured.scores["temperature"].value)
    return f"Divide logits by {factor}", _calibrate(f"The logits are off by a factor of {factor} on these rows.")
