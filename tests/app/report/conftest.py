"""The small models that the tests of the report share."""

import numpy as np
import pytest
import torch

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from tests.app.report.pages import QUICK, class_rows, regression_rows


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def regressor():
    torch.set_num_threads(1)
    return DropoutRegressor(**QUICK, noise="constant", random_state=0).fit(*regression_rows(80))


@pytest.fixture(scope="session")
def one_feature():
    x, y = regression_rows(60, 1)
    return DropoutRegressor(**QUICK, random_state=0).fit(x, y)


@pytest.fixture(scope="session")
def classifier():
    x, labels = class_rows(90)
    return DropoutClassifier(**QUICK, random_state=0).fit(x, np.array(["ant", "bee", "cat"])[labels])
