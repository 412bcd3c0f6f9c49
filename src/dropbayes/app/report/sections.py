"""The sections that regressions and classifiers share: scores, the most uncertain rows, deferral, what was done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dropbayes import calibration
from dropbayes.app.report import figures, measurements, summary
from dropbayes.app.report.formatting import name, number, score_text, times
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import Chart, Column, Section, Table, csv_address
from dropbayes.app.report.measurements import Classification, Regression
from dropbayes.plots import percentile_text

UNCERTAIN_ROWS = 10
"""The most uncertain rows that are shown."""

SHOWN_COLUMNS = 4
"""The most of the data's own columns shown beside them."""


def scores_section(measured: Regression | Classification, tables: Sequence[Table] = ()) -> Section:
    """The table of scores, and others below it."""
    n = len(measured.uncertainty)
    lines = [(one, score_text(one.value, one.error, percent=one.score.percent)) for one in measured.scores.values()]
    return Section(
        "scores",
        "Scores",
        scores=lines,
        caption=f"Scores on {n:,} rows. After ± stands one standard error over the rows, taken as independent.",
        download=csv_address(
            ["score", "value", "standard error", "meaning"],
            [
                [one.score.label, f"{one.value:.8g}", "" if one.error is None else f"{one.error:.4g}", one.meaning]
                for one, _ in lines
            ],
        ),
        tables=tables,
    )


def deferral_section(measured: Regression | Classification, *, loss: str) -> Section:
    """The risk-coverage curve and what deferring would buy."""
    figure = figures.risk_coverage(measured.risk, loss=loss, percent=isinstance(measured, Classification))
    return Section(
        "deferral",
        "What deferring would buy",
        "If the most uncertain rows go to a person, how wrong is the model on the rest?",
        charts=[Chart(figure, summary.risk_caption(measured, loss=loss))],
    )


def provenance_section(inputs: ReportInputs, measured: Regression | Classification) -> Section:
    """What the caller did, and what the model is."""
    model = inputs.model
    kind = "regressor" if isinstance(measured, Regression) else "classifier"
    networks = times(len(model.population_), f"dropout {kind}")
    drops = ", ".join(f"{p:.3g}" for p in model.population_.drop_prob[0].tolist())
    facts = [
        ("Networks", f"{networks} with hidden layers {model.hidden_}", False),
        ("Drop probabilities", f"{drops} (before each weight layer)", False),
        ("Draws", f"{measured.n_draws:,} functions drawn from the networks, the same for every row", False),
        ("Rows judged", f"{len(measured.uncertainty):,}, features: {inputs.x.shape[1]:,}", False),
    ]
    if isinstance(measured, Regression) and model.noise == "constant":
        tau = float(model.precision_)
        facts.insert(2, ("Noise", f"standard deviation {number(tau**-0.5)} (precision τ = {number(tau)})", False))
    if isinstance(measured, Regression) and model.transform_.name != "none":
        facts.insert(2, ("Learned", f"{model.transform_.unit}; predictions are in its own units", False))
    given = {label.casefold() for label, _, _ in inputs.provenance}
    more = [fact for fact in facts if fact[0].casefold() not in given]
    return Section("done", "What was done, and how to repeat it", facts=[*inputs.provenance, *more])


# ---------------------------------------------------------------------------------------- the most uncertain rows


def _percentiles(inputs: ReportInputs, measured: Regression | Classification) -> tuple[Any, str]:
    """The percentile of each row's uncertainty, and among what."""
    if inputs.training is None:
        return calibration.empirical_percentile(
            measured.uncertainty, measured.uncertainty
        ), "among the rows of this report"
    if isinstance(measured, Regression):
        _, epistemic, aleatoric = measurements.mean_and_deviations(inputs.model, inputs.training[0])
        known = np.sqrt(epistemic**2 + aleatoric**2)
    else:
        known = measurements.entropies(inputs.model, inputs.training[0])
    try:
        fitted = calibration.uncertainty_reference(known)
        return fitted.percentile(measured.uncertainty), f"among the training rows ({fitted.family} fitted to theirs)"
    except ValueError:  # too few, or all alike
        return calibration.empirical_percentile(measured.uncertainty, known), "among the training rows"


def uncertain_section(
    inputs: ReportInputs,
    measured: Regression | Classification,
    model_columns: list[Column],
    cells: Callable[[int], list[str]],
    ranked: Sequence[str],
    unit: str,
) -> Section:
    """The table of the most uncertain rows.

    Args:
        inputs: What the report is about.
        measured: The measurements of the rows.
        model_columns: The columns of the model's results.
        cells: The texts under them for a row.
        ranked: The features, the most important first: those of the data's columns are shown.
        unit: What the uncertainty is a part of.
    """
    order = np.argsort(-measured.uncertainty, kind="stable")[:UNCERTAIN_ROWS]
    percentiles, among = _percentiles(inputs, measured)
    rank = {name: index for index, name in enumerate(ranked)}
    shown = sorted(inputs.columns, key=lambda column: rank.get(column[0], len(rank)))[:SHOWN_COLUMNS]
    columns = [Column("row")]
    columns += [Column(label, number=all(_is_number(values[row]) for row in order)) for label, values in shown]
    columns += [*model_columns, Column("epistemic share", share=True), Column("percentile")]
    rows = []
    for row in map(int, order):
        share = _share(measured, row)
        percentile = _percentile_cell(float(percentiles[row]))
        rows.append(
            [
                f"{row + 1:,}",
                *(_cell(values[row]) for _, values in shown),
                *cells(row),
                f"{100 * share:.0f} %",
                percentile,
            ]
        )
    left_out = len(inputs.columns) - len(shown)
    more = f" {left_out:,} more columns are not shown." if left_out > 0 else ""
    top = int(order[0])
    intro = (
        f"The row the model is least sure about is row {top + 1:,}; {100 * _share(measured, top):.0f} % of its {unit} "
        "is epistemic, which more data like it would shrink. The rest is noise."
    )
    caption = (
        f"The {len(rows)} most uncertain of {len(measured.uncertainty):,} rows. The percentile is that of the row's "
        f"total uncertainty {among}.{more}"
    )
    return Section("uncertain", "The most uncertain rows", intro, tables=[Table("uncertain", caption, columns, rows)])


def _share(measured: Regression | Classification, row: int) -> float:
    if isinstance(measured, Regression):
        return float(measured.epistemic_std[row] ** 2 / measured.std[row] ** 2)
    return float(np.clip(measured.epistemic[row] / max(measured.entropy[row], 1e-300), 0, 1))


def _percentile_cell(percentile: float) -> str:
    text = percentile_text(percentile).replace("percentile ", "")
    return text.replace("above ", "> ").replace("below ", "< ")


def _is_number(value: Any) -> bool:
    """Whether the value reads as a number, and is then right-aligned."""
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _cell(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None:
        return "(missing)"
    if isinstance(value, float):  # no thousands marks: it may be a year
        return "(missing)" if math.isnan(value) else f"{value:.6g}".replace("-", "−")
    return name(value, most=60)
