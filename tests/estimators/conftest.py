"""A regressor that has learned the toy rows, for every module that asks."""

import pytest

from dropbayes.estimators import DropoutRegressor
from tests.estimators.samples import QUICK, toy


@pytest.fixture(scope="session")
def regressor() -> DropoutRegressor:
    # With two inputs, dropping one costs much: the inputs are kept.
    settings = QUICK | {"n_steps": 1000, "n_draws": 200, "drop_prob": (0.0, 0.05), "noise": "constant"}
    return DropoutRegressor(**settings, random_state=0).fit(*toy(300))
