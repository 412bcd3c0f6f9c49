"""One self-contained page on how good, how sure and how well calibrated a model is."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dropbayes.app.report import inputs
from dropbayes.app.report.features import features_of
from dropbayes.app.report.layout import environment
from dropbayes.app.report.measurements import measure
from dropbayes.app.report.sections import page_context
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.runtime.formatting import printable_name
from dropbayes.runtime.validation import Array, check_count, row_values

__all__ = ["report"]


def report(
    model: DropoutRegressor | DropoutClassifier,
    x: Any,
    y: Any,
    *,
    target: str,
    columns: Mapping[str, Sequence[object]] | None = None,
    title: str = "How sure is the model?",
    provenance: Mapping[str, str] | None = None,
    names: Sequence[str] | None = None,
    band_feature: int | None = None,
    training: tuple[Any, Any] | None = None,
    unknown: Any = None,
    features: Mapping[str, Sequence[int]] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    numbers: Array | None = None,
) -> str:
    """A self-contained HTML document on a fitted model's predictions for rows whose truth is known.

    It has no script and loads nothing. It shows a summary in plain words, the predictive band or the probabilities,
    reliability, scores with standard errors beside those of simple models, which features matter and where the model
    errs, how the rows differ from the training rows, the most uncertain rows, what deferring them would buy, and what
    was done. Every table can be downloaded from the page itself.

    Args:
        model: A fitted `DropoutRegressor` (of one output) or `DropoutClassifier`, or the `ensemble` of a model; the
            page is of the very draws of its `predict`, or of others by its `with_draws`.
        x: The inputs `[row, feature]`, at least 2 rows the model was not fitted to.
        y: The truths `[row]`; for a classifier, labels among `model.classes_`.
        target: The name of what is predicted.
        columns: Columns (name to values of all rows) to show beside the most uncertain rows; by default, the features.
        title: The title of the document.
        provenance: What was done and how to repeat it, label to text, in order.
        names: The names of the columns of `x`.
        band_feature: The column of `x` over which to draw a regression's band; by default the only one, or, with
            several, the rows are drawn sorted by their prediction.
        training: Inputs and truths the model was fitted to. They are the reference of the percentiles of uncertainty
            [GG16, section Model Calibration] and are drawn with the band.
        unknown: Inputs without a known outcome: drawn with the band, not scored.
        features: The columns of `x` that belong to one feature, such as those of a category, by its name; by default
            every column is a feature.
        ranges: The least and greatest value of a feature in the training rows, where `training` is not given.
        numbers: The number of each row in its table, where some of those are left out; by default 1, 2, 3 ...

    Example:
        >>> import numpy as np
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=20, n_networks=1, random_state=0)
        >>> page = report(model.fit(x, np.sin(x[:, 0])), x, np.sin(x[:, 0]), target="height")
        >>> page.startswith("<!doctype html>")
        True
    """
    view = inputs.fitted_model(model)
    rows = inputs.input_rows(view, x, "x", at_least=2)
    labels = inputs.input_names(model, names, rows.shape[1])
    if band_feature is not None:
        check_count("band_feature", band_feature, at_least=0, at_most=rows.shape[1] - 1)
    shown = inputs.shown_columns(columns or {}, len(rows))
    known = None
    if training is not None:
        trained = inputs.input_rows(view, training[0], "training", at_least=2)
        known = trained, inputs.outcomes(view, training[1], len(trained), "training")
    arguments = inputs.ReportInputs(
        model=view,
        x=rows,
        y=inputs.outcomes(view, y, len(rows), "y"),
        target=printable_name(target),
        columns=list(zip(labels, rows.T.tolist(), strict=True)) if columns is None else shown,
        provenance=provenance or {},
        names=list(map(printable_name, labels)),
        band_feature=band_feature,
        training=known,
        unknown=None if unknown is None else inputs.input_rows(view, unknown, "unknown"),
        features=[one.with_labels(dict(shown)) for one in features_of(rows, labels, features, known and known[0])],
        ranges=ranges or {},
        numbers=None if numbers is None else row_values("numbers", numbers, n_rows=len(rows)).numpy(),
    )
    in_series = band_feature is not None and bool((np.diff(rows[:, band_feature]) >= 0).all())
    measured = measure(view, rows, arguments.y, in_series=in_series)
    with warnings.catch_warnings():  # what follows predicts these rows again, and some that nobody has
        warnings.filterwarnings("ignore", ".* predicted beyond the targets")
        page = page_context(arguments, measured)
        return environment.get_template("page.html").render(page, title=printable_name(title, max_length=160)) + "\n"
