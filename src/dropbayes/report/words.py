"""Numbers, names and findings in words: what the report says about what it measured."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

import numpy as np
import torch
from markupsafe import Markup

from dropbayes.report.evidence import ENOUGH_ROWS, Classification, Regression, Score, chance_error, risk_after_deferring

_JOINT_SIGMAS = 2.394
"""Standard errors that the worst of three coverages exceeds with a probability of at most 5 % (Bonferroni)."""

_JOINERS = "\u200c\u200d"  # part of emoji and of some scripts


def name(text: object, *, most: int = 80) -> str:
    r"""A name from the data as harmless text: no character that steers the text around it, not empty, not endless.

    Control characters, line breaks and marks that turn the direction of writing are written out. Escaping for HTML is
    the page's own work.

    Examples:
        >>> name("a\u202eb"), name(""), name("x" * 100, most=5)
        ('a\\u202eb', '(empty)', 'xxxx…')
    """
    plain = "".join(map(_visible, str(text)[: 4 * most])).strip() or "(empty)"
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _visible(character: str) -> str:
    if character in "\t\n\r":
        return " "
    steers = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    return f"\\u{ord(character):04x}" if steers else character


def number(value: float, *, digits: int = 3) -> str:
    """The number with so many significant digits, at least those before the point.

    Examples:
        >>> number(1234.56), number(0.012345), number(-0.0), number(3.2e-9), number(float("-inf"))
        ('1,235', '0.0123', '0', '3.2e−9', '−∞')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded == 0:
        return "0"
    power = math.floor(math.log10(abs(rounded)))
    if not -4 <= power < 9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:,.{max(0, digits - 1 - power)}f}".replace("-", "−")


def fixed(value: float, *, spread: float) -> str:
    """The number to a hundredth of the first digit of a spread, so that all in a column have as many decimals.

    Examples:
        >>> fixed(135.57, spread=61.8), fixed(0.1234567, spread=0.02), fixed(-3, spread=1e-9)
        ('135.6', '0.1235', '−3')
    """
    if not (math.isfinite(spread) and spread > 0 and math.isfinite(value)):
        return number(value, digits=4)
    decimals = max(0, 2 - math.floor(math.log10(spread)))
    if decimals > 6 or abs(value) >= 1e9:
        return number(value, digits=5).rstrip("0").rstrip(".")
    return f"{value:,.{decimals}f}".replace("-", "−")


def times(count: int, what: str) -> str:
    """The count with its noun, in the plural where it is one.

    Examples:
        >>> times(1, "row"), times(1200, "row")
        ('1 row', '1,200 rows')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """The share in percent, with a digit after the point only where it matters.

    Examples:
        >>> percent(0.5), percent(0.034), percent(0.9991), percent(1.0), percent(0.0)
        ('50 %', '3.4 %', '99.9 %', '100 %', '0 %')
    """
    if math.isnan(share):
        return "–"
    coarse = share in (0, 1) or 0.1 <= share <= 0.985 or share > 1
    return f"{100 * share:.{0 if coarse else 1}f} %"


def score_text(score: Score) -> str:
    """The value of a score and its standard error, to the digits that the error leaves.

    Examples:
        >>> score_text(Score("RMSE", 1.23456, 0.0312)), score_text(Score("ECE", 0.0345, percent=True))
        ('1.235 ± 0.031', '3.45 %')
    """
    scale, unit = (100.0, " %") if score.percent else (1.0, "")
    value = scale * score.value
    if score.error is None or not math.isfinite(score.value) or not math.isfinite(score.error) or not score.error:
        return number(value, digits=3 if score.percent else 4) + unit
    error = scale * score.error
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals > 6 or abs(value) >= 1e7:
        return f"{number(value, digits=4)} ± {number(error, digits=2)}{unit}"
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}{unit}".replace("-", "−")


@dataclass(frozen=True)
class Answer:
    """One answer of the summary.

    Args:
        question: What a reader asks.
        figure: The answer as a number.
        text: The answer in words.
        mood: "good", "warn" or "plain": its colour.
    """

    question: str
    figure: str
    text: Markup
    mood: str = "plain"


@dataclass(frozen=True)
class Verdict:
    """Whether stated certainty and observed truth agree: "calibrated", "over", "under", "uneven" or "few" (rows)."""

    kind: str
    text: str

    @property
    def mood(self) -> str:
        """The colour of the verdict."""
        return {"calibrated": "good", "few": "plain"}.get(self.kind, "warn")


# ------------------------------------------------------------------------------------------------ regression


def regression_verdict(found: Regression) -> Verdict:
    """The judgement of the 50 %, 80 % and 95 % intervals: their coverage against that of chance, jointly at 5 %."""
    n = len(found.y)
    if n < ENOUGH_ROWS:
        return Verdict("few", f"{n} rows are too few to judge calibration")
    claims = [level - 1 for level in (50, 80, 95)]
    gap = (found.reliability.observed - found.reliability.claimed)[claims].numpy()
    sigmas = gap / found.reliability.standard_error[claims].numpy()
    if np.abs(sigmas).max() <= _JOINT_SIGMAS:
        return Verdict("calibrated", f"as far as {n:,} rows can tell, it is calibrated")
    if sigmas.min() < -_JOINT_SIGMAS and sigmas.max() > _JOINT_SIGMAS:
        return Verdict("uneven", "uneven: its intervals are too wide at some levels and too narrow at others")
    worst = int(np.abs(sigmas).argmax())
    kind, word = ("over", "over-confident: its intervals are too narrow") if gap[worst] < 0 else (
        "under", "too cautious: its intervals are wider than needed")  # fmt: skip
    slight = "slightly " if abs(gap[worst]) < 0.03 else ""
    chance = f"{abs(sigmas[worst]):.0f} standard errors off at {(50, 80, 95)[worst]} %"
    return Verdict(kind, f"{slight}{word} ({chance})")


def regression_answers(found: Regression, *, target: str) -> list[Answer]:
    """How good, how sure, how true to its word, and what to do."""
    return [
        _how_good(found, target),
        _how_sure(found),
        _how_true(found),
        Answer("What to do with it?", *_advice(found, found.risk.risk[-1].item(), "mean absolute error")),
    ]


def _how_good(found: Regression, target: str) -> Answer:
    rmse, mae = found.scores["RMSE"].value, found.scores["MAE"].value
    spread = float(found.y.std())
    start = Markup(
        "On {} rows the predicted <b><bdi>{}</bdi></b> is off by {} on average (root mean square {}). "
    ).format(f"{len(found.y):,}", target, number(mae), number(rmse))
    if spread == 0:
        return Answer("How good is it?", f"± {number(mae)}", start + "The truth is the same in all rows.")
    if rmse + 2 * (found.scores["RMSE"].error or 0.0) < spread:
        text = Markup("Guessing their mean would be off by {} (RMS): the model explains {} of the variance.").format(
            number(spread), percent(1 - (rmse / spread) ** 2)
        )
        return Answer("How good is it?", f"± {number(mae)}", start + text, "good")
    worse = rmse - 2 * (found.scores["RMSE"].error or 0.0) > spread
    text = Markup("Guessing the mean of these rows would be off by {} (RMS): {}.").format(
        number(spread), "that is better" if worse else "no gain beyond chance"
    )
    return Answer("How good is it?", f"± {number(mae)}", start + text, "warn")


def epistemic_share(found: Regression | Classification) -> float:
    """The epistemic part of the mean uncertainty: of the variance, or of the entropy."""
    if isinstance(found, Regression):
        return float((found.epistemic**2).mean() / (found.std**2).mean())
    return float(found.epistemic.mean() / max(found.entropy.mean(), 1e-300))


def _how_sure(found: Regression) -> Answer:
    share, width = epistemic_share(found), found.scores["95 % interval width"].value
    text = Markup(
        "A typical prediction has a standard deviation of {}; the 95 % interval is {} wide on average. {} of the "
        "variance is <em>epistemic</em> (what the model has not learned; more data would shrink it), the rest "
        "<em>aleatoric</em> (noise that stays)."
    ).format(number(float(np.median(found.std))), number(width), percent(share))
    return Answer("How sure is it?", f"σ ≈ {number(float(np.median(found.std)))}", text)


def _how_true(found: Regression) -> Answer:
    verdict = regression_verdict(found)
    text = Markup("The 95 % intervals hold {} of the truths, the 50 % intervals {}. {}").format(
        percent(found.scores["95 % interval holds"].value), percent(found.scores["50 % interval holds"].value),
        _sentence(verdict),
    )  # fmt: skip
    bias = lean(found)
    if bias:
        text += Markup(" Predictions run {}: the truth's mean rank in its prediction is {}.").format(
            bias, f"{found.scores['Mean PIT'].value:.2f}"
        )
    return Answer(
        "Can its certainty be trusted?",
        f"95 % → {percent(found.scores['95 % interval holds'].value)}",
        text,
        verdict.mood,
    )


def lean(found: Regression) -> str:
    """Whether predictions run "low" or "high", beyond two standard errors of the mean rank of the truth; else ""."""
    score = found.scores["Mean PIT"]
    if len(found.y) < ENOUGH_ROWS or abs(score.value - 0.5) <= 2 * (score.error or math.inf):
        return ""
    slightly = "slightly " if abs(score.value - 0.5) < 0.05 else ""
    return slightly + ("low" if score.value > 0.5 else "high")


def _sentence(verdict: Verdict) -> str:
    if verdict.kind in ("calibrated", "few"):
        return verdict.text[:1].upper() + verdict.text[1:] + "."
    return f"The model is {verdict.text}."


# -------------------------------------------------------------------------------------------- classification


def class_verdict(found: Classification) -> Verdict:
    """The judgement of the probabilities: mean confidence against accuracy, then the gap in bins against chance."""
    n = len(found.labels)
    if n < ENOUGH_ROWS:
        return Verdict("few", f"{n} rows are too few to judge calibration")
    confidence = found.confidence
    error = math.sqrt(float((confidence * (1 - confidence)).sum())) / n
    gap = found.scores["Accuracy"].value - float(confidence.mean())
    if abs(gap) > 2 * error:
        kind, word = ("over", "over-confident") if gap < 0 else ("under", "too cautious")
        slight = "slightly " if abs(gap) < 0.03 else ""
        return Verdict(
            kind,
            f"{slight}{word}: it claims {percent(float(confidence.mean()))} and is right in "
            f"{percent(found.scores['Accuracy'].value)} of the rows",
        )
    chance, seen = chance_error(torch.from_numpy(confidence)), found.scores["ECE"].value
    if seen > 2 * chance:
        return Verdict(
            "uneven", f"right on the whole but not at every level: ECE {percent(seen)}, chance {percent(chance)}"
        )
    return Verdict(
        "calibrated",
        f"as far as {n:,} rows can tell, it is calibrated (ECE {percent(seen)}, chance {percent(chance)})",
    )


def class_answers(found: Classification, *, target: str) -> list[Answer]:
    """How good, how sure, how true to its word, and what to do."""
    accuracy, confidence = found.scores["Accuracy"].value, found.scores["Mean confidence"].value
    most_common = np.bincount(found.labels).max() / len(found.labels)
    good = Markup(
        "On {} rows the most probable <b><bdi>{}</bdi></b> is right in {}. Always guessing the commonest class would "
        "be right in {}."
    ).format(f"{len(found.labels):,}", target, percent(accuracy), percent(float(most_common)))
    verdict = class_verdict(found)
    sure = Markup(
        "The predicted class has a probability of {} on average; {} of the rows are given more than 90 %. {} of the "
        "entropy is <em>epistemic</em> (draws disagree; more data would help), the rest <em>aleatoric</em> (classes "
        "that overlap)."
    ).format(percent(confidence), percent(float((found.confidence > 0.9).mean())), percent(epistemic_share(found)))
    return [
        Answer("How good is it?", percent(accuracy), good, "good" if accuracy > most_common else "warn"),
        Answer("How sure is it?", percent(confidence), sure),
        Answer(
            "Can its certainty be trusted?",
            f"{percent(confidence)} → {percent(accuracy)}",
            Markup("Claimed {}, observed {}. {}").format(percent(confidence), percent(accuracy), _sentence(verdict)),
            verdict.mood,
        ),
        Answer("What to do with it?", *_advice(found, 1 - accuracy, "error rate")),
    ]


# ------------------------------------------------------------------------------------------------------ both


def _advice(found: Regression | Classification, risk: float, loss: str) -> tuple[str, Markup, str]:
    """The headline, the advice and its colour."""
    deferred, remains = risk_after_deferring(found.risk, 0.1)
    show = percent if isinstance(found, Classification) else number
    use = _use(found)
    if len(found.uncertainty) < ENOUGH_ROWS:
        return "Judge more rows", use, "plain"
    if risk == 0:
        return "Use it", use, "good"
    if _gain_is_real(found, deferred, risk - remains):
        text = Markup(
            "Handing the {} most uncertain rows (10 %) to a person lowers the {} of the rest from {} to {}."
        ).format(f"{deferred:,}", loss, show(risk), show(remains))
        return f"Defer 10 %: −{100 * (1 - remains / risk):.0f} % error", use + " " + text, "good"
    text = Markup(
        "Deferring rows by their uncertainty shows no gain beyond chance here: without the most uncertain 10 % the {} "
        "is {} instead of {}."
    ).format(loss, show(remains), show(risk))
    return "Keep all rows", use + " " + text, "plain"


def _gain_is_real(found: Regression | Classification, deferred: int, gain: float) -> bool:
    r"""Whether deferring the $d$ most uncertain of $N$ rows lowers the mean loss more than $d$ rows at random would.

    For errors, the number among $d$ random rows is hypergeometric; it must reach the number deferred with a probability
    of at most 2.5 %. For losses of standard deviation $s$ the gain must exceed $2 s \sqrt{d / (N (N - d))}$, twice the
    standard error of a mean of $N - d$ rows drawn without replacement.
    """
    if isinstance(found, Regression):
        loss = np.abs(found.y - found.mean)
        n = len(loss)
        return gain > 2 * float(np.std(loss, ddof=1)) * math.sqrt(deferred / n / (n - deferred))
    import scipy.stats

    n, wrong = len(found.labels), int((found.predicted != found.labels).sum())
    caught = round(wrong - (n - deferred) * float(found.risk.risk[n - 1 - deferred]))
    return bool(scipy.stats.hypergeom.sf(caught - 1, n, wrong, deferred) <= 0.025)


def _use(found: Regression | Classification) -> Markup:
    regression = isinstance(found, Regression)
    verdict = regression_verdict(found) if isinstance(found, Regression) else class_verdict(found)
    what = "intervals" if regression else "probabilities"
    if verdict.kind == "calibrated":
        return Markup("Take the {} as they are.").format(what)
    if verdict.kind == "few":
        return Markup("Judge the {} on more rows before relying on them.").format(what)
    if verdict.kind == "uneven":
        return Markup("Read the {} off the reliability curve, or refit them on held-out rows before use.").format(what)
    if regression:
        factor = found.scores["Best factor on std"].value
        return Markup("Multiply the standard deviation by {} (fitted on these rows: check it on others).").format(
            number(factor)
        )
    factor = found.scores["Best temperature"].value
    return Markup("Divide the logits by {} (fitted on these rows: check it on others).").format(number(factor))


def risk_caption(found: Regression | Classification, *, loss: str) -> str:
    """What deferring a tenth and a fifth of the rows would buy."""
    show = percent if isinstance(found, Classification) else number
    parts = []
    for share in (0.1, 0.2):
        deferred, remains = risk_after_deferring(found.risk, share)
        if deferred:
            parts.append(f"{show(remains)} without the {100 * share:.0f} % most uncertain rows")
    bought = f"; it would be {' and '.join(parts)}" if parts else "; there are too few rows to defer a tenth of them"
    return (
        f"The {loss} of all rows is {show(found.risk.risk[-1].item())}{bought}. "
        f"The area under the curve is {number(found.scores['AURC'].value)}, of which "
        f"{number(found.scores['Excess AURC'].value)} is above the best possible ranking."
    )
