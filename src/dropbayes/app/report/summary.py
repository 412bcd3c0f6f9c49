"""What the summary says of a model: how simple models do beside it, what must be corrected first, who to defer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropbayes.app.models.fields import even_selection
from dropbayes.app.report.features import Feature
from dropbayes.app.report.measurements import Measured, risk_after_deferring
from dropbayes.predictive.agreement import uneven_width
from dropbayes.runtime.formatting import number, score_text
from dropbayes.runtime.validation import Numbers, NumpyArray


class Baseline(NamedTuple):
    name: str
    error: float  # RMSE, or error rate
    error_se: float  # the standard error of that
    gap: float  # the excess of its losses over ours, row by row, in standard errors
    log_likelihood: float | None = None  # of classes only

    @property
    def is_better(self) -> bool:
        """Whether it errs less than our model, beyond chance: by more than two standard errors."""
        return self.gap < -2


def baselines(measured: Measured, x: Numbers, training: tuple[Numbers, NumpyArray] | None) -> list[Baseline]:
    """Our model and simple ones fitted to the training rows (an even selection of many), scored on the same rows."""
    if training is None:
        return []
    rows = even_selection(len(training[0]), 20_000)
    known = training[0][rows], training[1][rows]
    lines = []
    if not measured.has_classes:
        regressors = {
            "mean of the training rows": DummyRegressor(),
            "linear regression": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 7))),
            "gradient boosting": HistGradientBoostingRegressor(random_state=0),
        }
        predicted = {name: model.fit(*known).predict(x) for name, model in regressors.items()}
        for name, values in {"this model": measured.mean, **predicted}.items():
            squares = (values - measured.y) ** 2
            rmse = math.sqrt(squares.mean())
            error = float(scipy.stats.sem(squares)) / (2 * rmse) if rmse else 0.0
            lines.append(Baseline(name, rmse, error, _gap(squares - measured.loss**2)))
        return lines
    classifiers = {
        "class shares of the training rows": DummyClassifier(),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
        "gradient boosting": HistGradientBoostingClassifier(random_state=0, early_stopping=False, max_iter=50),
    }
    if len(np.unique(known[1])) == 1:  # to which the others cannot be fitted
        classifiers = dict(list(classifiers.items())[:1])
    given = {"this model": measured.probabilities}
    for name, model in classifiers.items():
        given[name], fitted = np.zeros_like(measured.probabilities), model.fit(*known)
        given[name][:, fitted.classes_] = fitted.predict_proba(x)
    for name, values in given.items():
        wrong = (values.argmax(1) != measured.labels).astype(float)
        likelihood = np.log(np.maximum(values[np.arange(len(wrong)), measured.labels], 1e-12))
        compared = float(scipy.stats.sem(wrong)), _gap(wrong - measured.loss)
        lines.append(Baseline(name, float(wrong.mean()), *compared, float(likelihood.mean())))
    return lines


def _gap(excess: Numbers) -> float:
    """The mean of losses in excess of ours, in standard errors."""
    error = float(scipy.stats.sem(excess))
    return float(excess.mean()) / error if error else 0.0


def baseline_rows(lines: Sequence[Baseline]) -> tuple[list[list[str]], set[int]]:
    """The cells of the table of models, and the rows of those that err less than ours."""
    rows = []
    for place, line in enumerate(lines):
        more = [] if line.log_likelihood is None else [number(line.log_likelihood)]
        compared = "no difference beyond chance" if place else ""
        if abs(line.gap) > 2:
            compared = f"{'worse' if line.gap > 0 else 'better'} by {abs(line.gap):.0f} standard errors"
        rows.append([line.name, score_text(line.error, line.error_se, percent=bool(more)), *more, compared])
    return rows, {k for k, line in enumerate(lines) if line.is_better}


class Advice(NamedTuple):
    """What must be corrected before the certainty is relied on, with what is named; `summary.html` has the words."""

    fault: str  # none if it is empty
    feature: str  # with which the noise varies
    skewed: bool  # whether the target has a tail of large values, and was learned in its own scale
    time: str  # the date of which most rows are later than those trained on, though the model was not fitted so
    beside: Sequence[Baseline]  # our model and simple ones
    better: Baseline | None  # the best of those that err less than ours, beyond chance


def advice(
    measured: Measured,
    features: Sequence[Feature] = (),
    *,
    beside: Sequence[Baseline] = (),
    time: str = "",
    trained: bool = False,
    noise: str = "student",
    transform: str = "none",
) -> Advice:
    """The first fault in the order of correction: of the rows (perhaps those trained on), predictions, certainty."""
    kind, feature, skewed = measured.agreement.kind, "", False
    if not measured.has_classes and transform == "none":
        skewed = bool(measured.y.min() >= 0 and measured.spread > 0 and scipy.stats.skew(measured.y) > 1)
    better = min((one for one in beside if one.is_better), key=lambda one: one.error, default=None)
    late = time and kind != "calibrated"
    faults = {"trained": trained, "few": kind == "few", "better": better, "useless": measured.useless, "late": late}
    fault = next((fault for fault, is_found in faults.items() if is_found), "")
    if not fault and not measured.has_classes:
        numbers = {"the prediction": measured.mean} | {one.title: one.values for one in features if one.is_number}
        if feature := uneven_width(measured.pit, numbers):
            fault = "skew" if skewed else "constant noise" if noise == "constant" else "noise"
    if not fault and kind != "calibrated":
        if measured.has_classes:
            fault = "temperature"
        elif measured.side and not measured.side.startswith("slightly"):
            fault = "bias"
        else:
            fault = "shape" if kind == "uneven" else "scale"
    return Advice(fault, feature, skewed, time, beside, better)


class Deferral(NamedTuple):
    """What handing the most uncertain tenth of the rows to a person would buy."""

    n_rows: int
    risk: float  # the mean loss of all rows
    remains: float  # that of the others
    is_real: bool  # whether the gain is beyond chance


def deferral(measured: Measured) -> Deferral:
    risk, (n_rows, remains) = float(measured.risk.risk[-1]), risk_after_deferring(measured.risk, 0.1)
    return Deferral(n_rows, risk, remains, gain_is_real(measured.loss, n_rows, risk - remains))


def gain_is_real(loss: Numbers, deferred: int, gain: float) -> bool:
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
