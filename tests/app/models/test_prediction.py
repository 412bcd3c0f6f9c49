"""Tests of the columns of a prediction."""

import numpy as np
import pytest

from dropbayes.app.models.prediction import column_names, prediction_columns
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.recalibration import Recalibration, with_recalibration

X = np.linspace(-1, 1, 30)[:, None]
SMALL = {
    "hidden": (4,),
    "n_steps": 5,
    "n_networks": 2,
    "n_draws": 5,
    "drop_prob": 0.2,
    "weight_decay": 1e-4,
    "random_state": 0,
}


def columns(estimator, coverage=0.9):
    values = prediction_columns(estimator, X, coverage=coverage)
    return dict(zip(column_names(estimator), values, strict=False))  # "outside" needs the table


def test_the_parts_of_the_deviation_add_up_in_squares():
    found = columns(DropoutRegressor(**SMALL).fit(X, X[:, 0]))
    np.testing.assert_allclose(found["epistemic_std"] ** 2 + found["aleatoric_std"] ** 2, found["std"] ** 2, rtol=1e-9)


def test_the_columns_of_classes_have_the_label_sets_of_a_conformal_calibration():
    estimator = DropoutClassifier(**SMALL).fit(X, np.where(X[:, 0] > 0, "b", "a"))
    assert column_names(estimator, "y_")[0] == "y_predicted"
    assert "labels" not in columns(estimator)
    sets = columns(with_recalibration(estimator, Recalibration("conformal", tuple(np.linspace(0.1, 0.9, 99)), 99)))[
        "labels"
    ]
    probabilities = estimator.predict_proba(X)
    for row, labels in zip(probabilities, sets, strict=True):
        inside = [label for label, p in zip("ab", row, strict=True) if 1 - p <= np.linspace(0.1, 0.9, 99)[89] + 1e-12]
        assert labels == "; ".join(inside)


def test_names_and_columns_agree():
    estimator = DropoutRegressor(**SMALL).fit(X, X[:, 0])
    assert len(prediction_columns(estimator, X, coverage=0.5)) == len(column_names(estimator)) - 1
    with pytest.raises(ValueError, match="coverage"):
        prediction_columns(estimator, X, coverage=1.0)
