"""What the summary says of a model: whether something must be corrected first, and what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.stats

from dropbayes.app.report.comparison import Baseline
from dropbayes.app.report.features import Feature
from dropbayes.app.report.measurements import Measured, risk_after_deferring
from dropbayes.predictive.agreement import uneven_width
from dropbayes.runtime.arrays import Numbers


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


class Advice(NamedTuple):
    """What must be corrected before the certainty is relied on; `summary.html` says it in words."""

    fault: str = ""  # none if it is empty
    feature: str = ""  # with which the noise varies
    skewed: bool = False  # whether the target has a tail of large values, and was learned in its own scale


def advice(measured: Measured, fit: Fit, features: Sequence[Feature] = ()) -> Advice:
    """The first fault in the order of correction: of the rows, of the predictions, then of the certainty."""
    kind, skewed = measured.agreement.kind, False
    if not measured.has_classes and fit.transform == "none":
        skewed = bool(measured.y.min() >= 0 and measured.spread > 0 and scipy.stats.skew(measured.y) > 1)
    late = fit.time and kind != "calibrated"
    faults = {"few": kind == "few", "better": fit.better, "useless": measured.useless, "late": late}
    if fault := next((fault for fault, is_found in faults.items() if is_found), ""):
        return Advice(fault, skewed=skewed)
    if measured.has_classes:
        return Advice("" if kind == "calibrated" else "temperature")
    numbers = {"the prediction": measured.mean} | {one.name: one.values for one in features if one.is_number}
    if feature := uneven_width(measured.pit, numbers):
        learned = "constant noise" if fit.noise == "constant" else "noise"
        return Advice("skew" if skewed else learned, feature, skewed)
    if kind == "calibrated":
        return Advice()
    if measured.side and not measured.side.startswith("slightly"):
        return Advice("bias")
    return Advice("shape" if kind == "uneven" else "scale")


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
