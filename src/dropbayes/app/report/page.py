"""The report: a model judged on rows whose truth is known, as one HTML document that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropbayes.app.report.classification import class_sections
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import render
from dropbayes.app.report.regression import regression_sections
from dropbayes.estimators import DropoutClassifier, DropoutRegressor


def report(
    model: DropoutRegressor | DropoutClassifier,
    x: Any,
    y: Any,
    *,
    target: str,
    columns: Mapping[str, Sequence[object]] | None = None,
    title: str = "How sure is the model?",
    provenance: Mapping[str, str] | None = None,
    n_draws: int | None = None,
    seed: int | None = None,
    names: Sequence[str] | None = None,
    band_feature: int | None = None,
    training: tuple[Any, Any] | None = None,
    unknown: Any = None,
    features: Mapping[str, Sequence[int]] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """A self-contained HTML document on a fitted model's predictions for rows whose truth is known.

    It has no script and loads nothing. It shows a summary in plain words, the predictive band or the probabilities,
    reliability, scores with standard errors beside those of simple models, which features matter and where the model
    errs, how the rows differ from the training rows, the most uncertain rows, what deferring them would buy, and what
    was done. Every table can be downloaded from the page itself.

    Args:
        model: A fitted `DropoutRegressor` (of one output) or `DropoutClassifier`.
        x: The inputs `[row, feature]`, at least 2 rows the model was not fitted to.
        y: The truths `[row]`; for a classifier, labels among `model.classes_`.
        target: The name of what is predicted.
        columns: Columns (name to values of all rows) to show beside the most uncertain rows; by default, the features.
        title: The title of the document.
        provenance: What was done and how to repeat it, label to text, in order.
        n_draws: Draws per network; by default the model's own.
        seed: Fixes the masks of the draws; by default they are the very draws of `model.predict`.
        names: The names of the columns of `x`.
        band_feature: The column of `x` over which to draw a regression's band; by default the only one, or, with
            several, the rows are drawn sorted by their prediction.
        training: Inputs and truths the model was fitted to. They are the reference of the percentiles of uncertainty
            [GG16, section Model Calibration] and are drawn with the band.
        unknown: Inputs without a known outcome: drawn with the band, not scored.
        features: The columns of `x` that belong to one feature, such as those of a category, by its name; by default
            every column is a feature.
        ranges: The least and greatest value of a feature in the training rows, where `training` is not given.

    Returns:
        The document.

    Example:
        >>> import numpy as np
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=20, n_networks=1, random_state=0)
        >>> page = report(model.fit(x, np.sin(x[:, 0])), x, np.sin(x[:, 0]), target="height")
        >>> page.startswith("<!doctype html>")
        True
    """
    inputs = ReportInputs.of(
        model, x, y, target=target, columns=columns, title=title, provenance=provenance, n_draws=n_draws, seed=seed,
        names=names, band_feature=band_feature, training=training, unknown=unknown, features=features, ranges=ranges,
    )  # fmt: skip
    make = regression_sections if isinstance(model, DropoutRegressor) else class_sections
    lede, sections = make(inputs)
    return render(inputs.title, lede, sections)
