"""The sections on a classifier: its probabilities, their reliability, the entropy of its rows."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from dropbayes.app.report import analyses, figures, measurements, sections, summary, verdicts
from dropbayes.app.report.dropout import dropout_section
from dropbayes.app.report.features import importances
from dropbayes.app.report.formatting import name, number, percent, times
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import HALF, Chart, Column, Section, Table
from dropbayes.app.report.measurements import Classification

CLASSES = 30
"""The most classes in the table of classes."""


def class_sections(inputs: ReportInputs) -> tuple[Markup, list[Section]]:
    measured = measurements.classification(inputs.model, inputs.x, inputs.y)
    classes = [name(label, most=40) for label in inputs.model.classes_.tolist()]
    beside = analyses.baselines(inputs, measured)
    ranked = importances(inputs.model, inputs.x, inputs.y, inputs.features)
    lede = Markup("Predictions of <b><bdi>{}</bdi></b>, one of {} classes, for {} rows with a known truth.").format(
        inputs.target, len(classes), f"{len(measured.labels):,}"
    )
    model_columns = [
        Column("predicted", number=False), Column("probability"), Column("truth", number=False), Column("entropy"),
        Column("epistemic"), Column("aleatoric"),
    ]  # fmt: skip

    def cells(row: int) -> list[str]:
        parts = (number(values[row]) for values in (measured.entropy, measured.epistemic, measured.aleatoric))
        return [
            classes[measured.predicted[row]],
            percent(measured.confidence[row]),
            classes[measured.labels[row]],
            *parts,
        ]

    return lede, [
        Section("summary", "In short", answers=summary.class_answers(measured, target=inputs.target, beside=beside)),
        Section("predictions", "The probabilities", charts=_probability_charts(measured, classes)),
        Section(
            "reliability", "Are the probabilities right?",
            "Of the rows whose predicted class was given 80 %, 80 % should be right.",
            charts=[_class_reliability_chart(measured)],
        ),
        sections.scores_section(
            measured,
            [_class_table(measured, classes), *analyses.baseline_table(inputs, beside, regression=False)],
        ),
        analyses.features_section(inputs, measured, ranked),
        *analyses.shift_section(inputs),
        sections.uncertain_section(inputs, measured, model_columns, cells, [one.name for one in ranked], "entropy"),
        sections.deferral_section(measured, loss="error rate"),
        *dropout_section(inputs, measured),
        sections.provenance_section(inputs, measured),
    ]  # fmt: skip


def _class_table(measured: Classification, classes: list[str]) -> Table:
    """Precision, recall and support of each class, the most frequent first."""
    lines = measurements.per_class(measured.predicted, measured.labels, len(classes))
    order = sorted(range(len(lines)), key=lambda k: -lines[k].support)[:CLASSES]
    rows = [
        [
            classes[k], f"{lines[k].support:,}", f"{lines[k].predicted:,}", percent(lines[k].precision),
            percent(lines[k].recall), number(lines[k].f1),
        ]
        for k in order
    ]  # fmt: skip
    columns = [Column("class", number=False), *map(Column, ("rows", "predicted", "precision", "recall", "F1"))]
    more = f" The {CLASSES} most frequent of {len(lines)} classes." if len(lines) > CLASSES else ""
    caption = (
        "Precision is the share of the rows predicted as a class that are of it, recall the share of its rows that are "
        f"recognised.{more}"
    )
    never = frozenset(place for place, k in enumerate(order) if lines[k].support and not lines[k].predicted)
    return Table("classes", caption, columns, rows, never)


def _probability_charts(measured: Classification, classes: list[str]) -> list[Chart]:
    right = measured.predicted == measured.labels
    sure = measured.confidence > 0.9
    among = f", {percent(float(right[sure].mean()))} of them rightly" if sure.any() else ""
    caption = (
        f"{int(sure.sum()):,} of {times(len(right), 'row')} are given more than 90 %{among}; in all, "
        f"{int((~right).sum()):,} are wrong."
    )
    worst = _commonest_confusion(measured, classes)
    if len(classes) > figures.CONFUSION_CLASSES:
        return [Chart(figures.confidences(measured), f"{caption} {worst}")]
    return [
        Chart(figures.confidences(measured), caption, HALF, "Probability of the predicted class"),
        Chart(figures.confusion(measured, classes), worst, HALF, "True and predicted classes"),
    ]


def _commonest_confusion(measured: Classification, classes: list[str]) -> str:
    count = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(count, (measured.labels, measured.predicted), 1)
    np.fill_diagonal(count, 0)
    if not count.any():
        return "No row is predicted wrongly."
    i, j = np.unravel_index(count.argmax(), count.shape)
    return f"The commonest mistake: {classes[i]} taken for {classes[j]} ({times(int(count[i, j]), 'row')})."


def _class_reliability_chart(measured: Classification) -> Chart:
    curve, verdict = measured.reliability, verdicts.class_verdict(measured)
    most = int(curve.count.argmax())
    caption = (
        f"The fullest bin has {int(curve.count[most]):,} rows, claims {percent(float(curve.claimed[most]))} and is "
        f"right in {percent(float(curve.observed[most]))}. Overall: {verdict.text}."
    )
    return Chart(figures.class_reliability(curve), caption)
