"""The columns of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dropbayes import information
from dropbayes.estimators.ensembles import RegressionEnsemble
from dropbayes.predictive.mixtures import draw_mean
from dropbayes.runtime.arrays import NumpyArray, round_digits

__all__ = ["column_names", "label_sets", "prediction_columns"]

NUMBERS = ("mean", "std", "epistemic_std", "aleatoric_std", "lower", "upper")


def has_label_sets(estimator: Any) -> bool:
    """Whether the calibration of a classifier gives each row a set of labels."""
    recalibration = getattr(estimator, "recalibration", None)
    conformal = recalibration is not None and recalibration.method == "conformal"
    return conformal and not isinstance(estimator, RegressionEnsemble)


def column_names(estimator: Any, prefix: str = "") -> list[str]:
    """The names of the columns a prediction adds."""
    if isinstance(estimator, RegressionEnsemble):
        names: tuple[str, ...] = NUMBERS
    else:
        classes = [f"probability_{label}" for label in estimator.classes_.tolist()]
        sets = ("labels",) if has_label_sets(estimator) else ()
        names = ("predicted", *classes, "entropy", "mutual_information", *sets)
    return [prefix + name for name in (*names, "outside")]


def prediction_columns(estimator: Any, x: NumpyArray, *, coverage: float) -> list[NumpyArray]:
    r"""The columns of a prediction for rows of inputs, except the last, "outside", which needs the table.

    For regression: the mean, the standard deviation with its epistemic and aleatoric parts ($\sigma^2$ is the sum of
    their squares [GG16, prop:var]), and the ends of the central interval of the predictive distribution. For classes:
    the most probable one, all probabilities, entropy and mutual information in nats, and, after conformal calibration,
    the set of labels that contains the true class with the given probability.
    """
    if isinstance(estimator, RegressionEnsemble):
        mixture = estimator.predictive(x)
        deviations = [np.sqrt(round_digits(variance)) for variance in (mixture.epistemic, mixture.aleatoric)]
        columns: list[Any] = [mixture.mean, mixture.std, *deviations, *mixture.interval(coverage)]
        return [round_digits(column) for column in columns]
    probabilities = estimator.draws(x)
    mean = draw_mean(probabilities)
    uncertainty = information.entropy(mean), information.mutual_information(probabilities)
    columns = [
        estimator.classes_[mean.argmax(1).numpy()],
        *(round_digits(column) for column in (*mean.T, *uncertainty)),
    ]
    return columns + label_sets(estimator, {"probabilities": mean}, coverage=coverage)


def label_sets(estimator: Any, prediction: Mapping[str, Any], *, coverage: float) -> list[NumpyArray]:
    """The column of label sets with the given coverage, if the calibration is conformal."""
    if not has_label_sets(estimator):
        return []
    inside = estimator.recalibration.label_sets(prediction["probabilities"], coverage).numpy()
    labels = np.array([str(label) for label in estimator.classes_.tolist()])
    return [np.array(["; ".join(labels[row]) for row in inside])]
