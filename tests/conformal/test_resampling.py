"""Jackknife+ and CV+ against MAPIE, and their coverage."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold

from dropbayes.conformal import cross_conformal_interval
from tests.calibration.samples import normal


def fold_models(x, y, n_folds):
    """The models that each left a fold out, and the fold of each row."""
    folds, models = np.zeros(len(y), dtype=int), []
    for number, (train, test) in enumerate(KFold(n_folds).split(x)):
        models.append(LinearRegression().fit(x[train], y[train]))
        folds[test] = number
    return models, folds


def interval(x, y, new, n_folds, level):
    models, folds = fold_models(x, y, n_folds)
    own = np.stack([model.predict(x) for model in models])[folds, np.arange(len(y))]
    predictions = np.stack([model.predict(new) for model in models])
    return cross_conformal_interval(predictions, residuals=np.abs(y - own), folds=folds, level=level)


@pytest.mark.parametrize("n_folds", [5, 40])
def test_cross_conformal_interval_equals_mapie(n_folds):
    mapie = pytest.importorskip("mapie.regression")
    x, new = normal(40, 2).numpy(), normal(15, 2, seed=1).numpy()
    y = x[:, 0] + normal(40, seed=2).numpy()
    theirs = mapie.CrossConformalRegressor(LinearRegression(), confidence_level=0.9, method="plus", cv=KFold(n_folds))
    theirs.fit_conformalize(x, y)
    expected = theirs.predict_interval(new)[1][:, :, 0]
    np.testing.assert_allclose(np.stack(interval(x, y, new, n_folds, 0.9), 1), expected, rtol=1e-9)


@pytest.mark.slow
def test_coverage_is_near_the_level_with_few_rows_where_in_sample_residuals_fail():
    covered, naive, runs = 0, 0, 300
    for run in range(runs):
        x = normal(21, 10, seed=run).numpy()
        y = x[:, 0] + normal(21, seed=run + runs).numpy()
        lower, upper = interval(x[:20], y[:20], x[20:], 10, 0.8)
        covered += bool(lower <= y[20] <= upper)
        model = LinearRegression().fit(x[:20], y[:20])
        half = np.quantile(np.abs(y[:20] - model.predict(x[:20])), 0.8)
        naive += abs(y[20] - model.predict(x[20:])[0]) <= half
    standard_error = math.sqrt(0.16 / runs)
    assert covered / runs > 0.8 - 4 * standard_error  # the promise alone is 0.6
    assert naive / runs < 0.6


def test_too_few_rows_give_everything_and_wrong_folds_are_refused():
    lower, upper = cross_conformal_interval(torch.zeros(3, 2), residuals=torch.ones(3), level=0.9)
    assert (lower == -math.inf).all() and (upper == math.inf).all()
    with pytest.raises(ValueError, match="`folds` must lie between 0 and 2"):
        cross_conformal_interval(torch.zeros(3, 2), residuals=torch.ones(5), folds=[0, 1, 2, 3, 0], level=0.5)
    with pytest.raises(ValueError, match="`residuals` must be absolute"):
        cross_conformal_interval(torch.zeros(3, 2), residuals=-torch.ones(3), level=0.5)
