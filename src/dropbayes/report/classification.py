"""The sections on a classifier: its probabilities, their reliability, the entropy of its rows."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from dropbayes.report import evidence, pictures, sections, words
from dropbayes.report.evidence import Classification
from dropbayes.report.layout import HALF, Chart, Column, Part
from dropbayes.report.subject import Subject
from dropbayes.report.words import name, number, percent, times


def class_parts(subject: Subject) -> tuple[Markup, list[Part]]:
    found = evidence.classification(subject.model, subject.x, subject.y)
    classes = [name(label, most=40) for label in subject.model.classes_.tolist()]
    lede = Markup("Predictions of <b><bdi>{}</bdi></b>, one of {} classes, for {} rows with a known truth.").format(
        subject.target, len(classes), f"{len(found.labels):,}"
    )
    own = [
        Column("predicted", number=False), Column("probability"), Column("truth", number=False), Column("entropy"),
        Column("epistemic"), Column("aleatoric"),
    ]  # fmt: skip

    def cells(row: int) -> list[str]:
        parts = (number(part[row]) for part in (found.entropy, found.epistemic, found.aleatoric))
        return [classes[found.predicted[row]], percent(found.confidence[row]), classes[found.labels[row]], *parts]

    return lede, [
        Part("summary", "In short", answers=words.class_answers(found, target=subject.target)),
        Part("predictions", "The probabilities", charts=_probability_charts(found, classes)),
        Part(
            "reliability", "Are the probabilities right?",
            "Of the rows whose predicted class was given 80 %, 80 % should be right.",
            charts=[_class_reliability_chart(found)],
        ),
        sections.scores_part(found),
        sections.uncertain_part(subject, found, own, cells, "entropy"),
        sections.deferral_part(found, loss="error rate"),
        sections.done_part(subject, found),
    ]  # fmt: skip


def _probability_charts(found: Classification, classes: list[str]) -> list[Chart]:
    right = found.predicted == found.labels
    sure = found.confidence > 0.9
    among = f", {percent(float(right[sure].mean()))} of them rightly" if sure.any() else ""
    caption = (
        f"{int(sure.sum()):,} of {times(len(right), 'row')} are given more than 90 %{among}; in all, "
        f"{int((~right).sum()):,} are wrong."
    )
    worst = _most_confused(found, classes)
    if len(classes) > pictures.CONFUSION_CLASSES:
        return [Chart(pictures.confidences(found), f"{caption} {worst}")]
    return [
        Chart(pictures.confidences(found), caption, HALF, "Probability of the predicted class"),
        Chart(pictures.confusion(found, classes), worst, HALF, "True and predicted classes"),
    ]


def _most_confused(found: Classification, classes: list[str]) -> str:
    count = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(count, (found.labels, found.predicted), 1)
    np.fill_diagonal(count, 0)
    if not count.any():
        return "No row is predicted wrongly."
    i, j = np.unravel_index(count.argmax(), count.shape)
    return f"The commonest mistake: {classes[i]} taken for {classes[j]} ({times(int(count[i, j]), 'row')})."


def _class_reliability_chart(found: Classification) -> Chart:
    curve, verdict = found.reliability, words.class_verdict(found)
    most = int(curve.count.argmax())
    caption = (
        f"The fullest bin has {int(curve.count[most]):,} rows, claims {percent(float(curve.claimed[most]))} and is "
        f"right in {percent(float(curve.observed[most]))}. Overall: {verdict.text}."
    )
    return Chart(pictures.class_reliability(curve), caption)
