"""The report: a model judged on rows whose truth is known, as one HTML document that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.report.classification import class_parts
from dropbayes.report.layout import rendered
from dropbayes.report.regression import regression_parts
from dropbayes.report.subject import Subject


def report(
    model: DropoutRegressor | DropoutClassifier,
    x: Any,
    y: Any,
    *,
    target: str,
    shown: Mapping[str, Sequence[object]] | None = None,
    title: str = "How sure is the model?",
    done: Mapping[str, str] | None = None,
    n_draws: int | None = None,
    seed: int | None = None,
    names: Sequence[str] | None = None,
    along: int | None = None,
    training: tuple[Any, Any] | None = None,
    unknown: Any = None,
) -> str:
    """A self-contained HTML document on a fitted model's predictions for rows whose truth is known.

    It has no script and loads nothing. It shows a summary in plain words, the predictive band or the probabilities,
    reliability, scores with standard errors, the most uncertain rows, what deferring them would buy, and what was done.

    Args:
        model: A fitted `DropoutRegressor` (of one output) or `DropoutClassifier`.
        x: The inputs `[row, feature]`, at least 2 rows the model was not fitted to.
        y: The truths `[row]`; for a classifier, labels among `model.classes_`.
        target: The name of what is predicted.
        shown: Columns (name to values of all rows) to show beside the most uncertain rows; by default, the features.
        title: The document's title.
        done: What was done and how to repeat it, label to text, in order.
        n_draws: Draws per network; by default the model's own.
        seed: Fixes the masks of the draws; by default they are the very draws of `model.predict`.
        names: The names of the columns of `x`.
        along: The column of `x` over which to draw a regression's band; by default the only one, or, with several, the
            rows are drawn sorted by their prediction.
        training: Inputs and truths the model was fitted to. They are the reference of the percentiles of uncertainty
            [GG16, section Model Calibration] and are drawn with the band.
        unknown: Inputs whose truth nobody knows: drawn with the band, not scored.

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
    subject = Subject.checked(model, x, y, target, shown, title, done, n_draws, seed, names, along, training, unknown)
    make = regression_parts if isinstance(model, DropoutRegressor) else class_parts
    lede, parts = make(subject)
    return rendered(subject.title, lede, parts)
