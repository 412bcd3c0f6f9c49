"""The sections on features, on the training rows and on other models."""

from __future__ import annotations

import scipy.special

from dropbayes.app.report import comparison
from dropbayes.app.report.comparison import Baseline
from dropbayes.app.report.features import IMPORTANCE_ROWS, Importance, Segment, segments
from dropbayes.app.report.formatting import number, percent, score_text
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import Column, Section, Table
from dropbayes.app.report.measurements import Classification, Regression

SHOWN_FEATURES, SEGMENT_FEATURES = 12, 5
"""The most features in a table, and the number of important ones that are divided into segments."""


def baselines(inputs: ReportInputs, measured: Regression | Classification) -> list[Baseline]:
    """Our model and simple ones beside it; empty where the training rows are not known."""
    if inputs.training is None:
        return []
    n_classes = 0 if isinstance(measured, Regression) else len(inputs.model.classes_)
    return comparison.baselines(measured, inputs.x, inputs.y, inputs.training, n_classes=n_classes)


def baseline_table(inputs: ReportInputs, lines: list[Baseline], *, regression: bool) -> list[Table]:
    """The table of our model and simple ones; none without them."""
    if inputs.training is None:
        return []
    columns = [Column("model", number=False), Column("RMSE" if regression else "error rate")]
    columns += [] if regression else [Column("log-likelihood")]
    columns.append(Column("beside this model", number=False))
    rows = []
    for line in lines:
        error = score_text(line.error, line.error_se, percent=not regression)
        more = [] if line.log_likelihood is None else [number(line.log_likelihood)]
        rows.append([line.name, error, *more, _comparison(line.gap)])
    caption = (
        f"Simple models fitted to the same {len(inputs.training[0]):,} training rows. The last column compares errors "
        "row by row; two standard errors are beyond chance."
    )
    notable = frozenset(k for k, line in enumerate(lines) if line.is_better)
    return [Table("baselines", caption, columns, rows, notable)]


def _comparison(sigmas: float | None) -> str:
    if sigmas is None:
        return ""
    if abs(sigmas) <= comparison.BEYOND_CHANCE:
        return "no difference beyond chance"
    return f"{'worse' if sigmas > 0 else 'better'} by {abs(sigmas):.0f} standard errors"


# --- features ------------------------------------------------------------------------------------------------------


def features_section(inputs: ReportInputs, measured: Regression | Classification, ranked: list[Importance]) -> Section:
    """Which features matter, the greatest first in `ranked`, and where along them the model errs."""
    regression = isinstance(measured, Regression)
    order = {one.name: place for place, one in enumerate(ranked)}
    chosen = sorted(inputs.features, key=lambda feature: order[feature.name])[:SEGMENT_FEATURES]
    parts = segments(measured, chosen)
    tables = [_importance_table(ranked, len(inputs.x), regression)]
    tables += [_segment_table(parts, regression)] if parts else []
    intro = _features_intro(ranked, parts, regression)
    return Section("features", "What matters, and where it errs", intro, tables=tables)


def _importance_table(ranked: list[Importance], n_rows: int, regression: bool) -> Table:
    greatest = max((one.rise for one in ranked), default=0.0)
    loss = "mean absolute error" if regression else "negative log-likelihood (nats)"
    rows = [
        [
            one.name, score_text(one.rise, one.error),
            f"{100 * max(one.rise, 0.0) / greatest:.0f} %" if greatest > 0 else "0 %",
        ]
        for one in ranked[:SHOWN_FEATURES]
    ]  # fmt: skip
    left = len(ranked) - len(rows)
    more = f" {left:,} more {'matters' if left == 1 else 'matter'} less." if left else ""
    shuffled = min(n_rows, IMPORTANCE_ROWS)
    caption = f"The rise of the {loss} if a feature is shuffled among {shuffled:,} rows; ± one standard error.{more}"
    columns = [Column("feature", number=False), Column("rise"), Column("of the greatest", share=True)]
    return Table("importance", caption, columns, rows)


def _features_intro(ranked: list[Importance], parts: list[Segment], regression: bool) -> str:
    real = [one for one in ranked if one.rise > 2 * one.error]
    text = f"{real[0].name} matters most. " if real else "No feature matters beyond chance. "
    limit = _bonferroni(2 * len(parts))
    worst = max(parts, key=lambda part: part.sigmas, default=None)
    if worst is not None and worst.sigmas > limit:
        text += f"Errors are largest where {worst.feature} is {worst.values}. "
    off = min(parts, key=lambda part: part.coverage_sigmas, default=None)
    if off is not None and off.coverage_sigmas < -limit:
        if regression:
            text += f"Intervals hold only {percent(off.coverage)} where {off.feature} is {off.values}."
        else:
            text += f"Accuracy stays {percent(-off.coverage)} below confidence where {off.feature} is {off.values}."
    elif parts:
        what = "Intervals" if regression else "Probabilities"
        text += f"{what} are not too sure of themselves in any of the parts below, as far as can be told."
    return text.strip()


def _bonferroni(n_tests: int) -> float:
    """The standard errors that the greatest of so many exceeds with a probability of at most 5 %."""
    return float(scipy.special.ndtri(1 - 0.025 / max(1, n_tests)))


def _segment_table(parts: list[Segment], regression: bool) -> Table:
    limit = _bonferroni(2 * len(parts))
    heads = ("mean absolute error", "95 % interval holds") if regression else ("error rate", "accuracy − confidence")
    rows = [
        [
            part.feature, part.values, f"{part.n_rows:,}", number(part.loss) if regression else percent(part.loss),
            percent(part.coverage) if regression else f"{100 * part.coverage:+.1f} %".replace("-", "−"),
        ]
        for part in parts
    ]  # fmt: skip
    notable = frozenset(k for k, part in enumerate(parts) if part.sigmas > limit or abs(part.coverage_sigmas) > limit)
    columns = [Column("feature", number=False), Column("values", number=False), Column("rows"), *map(Column, heads)]
    caption = "The most important features in parts; in colour what is beyond chance among so many parts."
    return Table("segments", caption, columns, rows, notable)


# --- the training rows ---------------------------------------------------------------------------------------------


def shift_section(inputs: ReportInputs) -> list[Section]:
    """How the evaluated rows differ from the training rows, as far as those are known."""
    if inputs.training is None and not inputs.ranges:
        return []
    measured = comparison.shifts(inputs.features, inputs.training_features, inputs.ranges)
    moved = [one for one in measured if one.p_value is not None and one.p_value < 0.01 / len(measured)]
    outside = [one for one in measured if one.outside > 0]
    names = {one.name for one in (*moved, *outside)}
    shown = measured[:SHOWN_FEATURES]
    heads = ("in training", "here", "distance", "outside the training range")
    caption = (
        "Medians, or the commonest value; the distance is the greatest difference of the two distribution functions "
        "(for categories, of their shares), 0 to 1."
    )
    rows = [
        [
            one.name, one.before or "–", one.after, "–" if one.distance is None else f"{one.distance:.2f}",
            percent(one.outside),
        ]
        for one in shown
    ]  # fmt: skip
    notable = frozenset(k for k, one in enumerate(shown) if one.name in names)
    table = Table("training", caption, [Column("feature", number=False), *map(Column, heads)], rows, notable)
    intro = _shift_intro(moved, outside, only_ranges=inputs.training is None)
    return [Section("training", "Are these rows like those trained on?", intro, tables=[table])]


def _shift_intro(moved: list[comparison.Shift], outside: list[comparison.Shift], *, only_ranges: bool) -> str:
    text = "Only the ranges of the training rows are known." if only_ranges else "The rows look like those trained on."
    if moved:
        names = ", ".join(one.name for one in moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
        text = f"Beyond chance, {names} {'differs' if len(moved) == 1 else 'differ'} from the training rows."
    if not outside:
        return f"{text} No row lies outside the training ranges."
    most = max(outside, key=lambda one: one.outside)
    return f"{text} {percent(most.outside)} of the rows lie outside the training range of {most.name}."
