"""Conformal intervals: equal to MAPIE's, with the coverage they promise."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold

from dropbayes import conformal, scores
from dropbayes.conformal import conformal_distribution, cross_conformal_interval
from tests.calibration.samples import generator, normal
from tests.conformal.given import GivenColumn


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_conformal_interval_equals_mapie(level):
    mapie = pytest.importorskip("mapie.regression")
    mean, y, new = normal(97), normal(97, seed=1), normal(20, seed=2)
    theirs = mapie.SplitConformalRegressor(GivenColumn(), confidence_level=level, prefit=True)
    theirs.conformalize(mean[:, None].numpy(), y.numpy())
    interval = theirs.predict_interval(new[:, None].numpy())[1][:, :, 0]
    residuals = conformal.standardised_residuals(mean, 1.0, y)
    lower, upper = conformal.conformal_interval(
        new, 1.0, threshold=conformal.conformal_threshold(residuals, level=level)
    )
    np.testing.assert_allclose(np.stack([lower, upper], 1), interval, rtol=1e-12)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_conformal_quantile_interval_equals_mapie(level):
    mapie = pytest.importorskip("mapie.regression")
    y = normal(120, seed=1)
    ends = torch.stack([y - 1 + 0.3 * normal(120), y + 0.7 + 0.3 * normal(120, seed=2), y], 1)
    new = torch.stack([normal(15, seed=3) - 2, normal(15, seed=4) + 2, normal(15)], 1)
    theirs = mapie.ConformalizedQuantileRegressor(
        [GivenColumn(0), GivenColumn(1), GivenColumn(2)], confidence_level=level, prefit=True
    )
    theirs.conformalize(ends.numpy(), y.numpy())
    interval = theirs.predict_interval(new.numpy(), symmetric_correction=True)[1][:, :, 0]
    residuals = conformal.quantile_residuals(ends[:, 0], ends[:, 1], y)
    ours = conformal.conformal_quantile_interval(
        new[:, 0], new[:, 1], threshold=conformal.conformal_threshold(residuals, level=level)
    )
    np.testing.assert_allclose(torch.stack(ours, 1), interval, rtol=1e-12)


def skewed(n, seed):
    """Inputs, and targets whose noise is one-sided and grows with the input."""
    x = torch.rand(n, generator=generator(seed), dtype=torch.float64)
    noise = -torch.rand(n, generator=generator(seed + 1), dtype=torch.float64).log()
    return x, x + (0.1 + x) * noise


def test_quantile_intervals_cover_and_are_narrower_than_symmetric_ones_under_skewed_noise():
    def upper(x):  # of the right shape, a tenth too low
        return x + 0.9 * (0.1 + x) * -math.log(0.1)

    covered, widths = [], []
    for run in range(300):
        (x, y), (new_x, new_y) = skewed(99, 10 * run), skewed(20, 10 * run + 5)
        residuals = conformal.quantile_residuals(x, upper(x), y)
        ends = conformal.conformal_quantile_interval(
            new_x, upper(new_x), threshold=conformal.conformal_threshold(residuals, level=0.9)
        )
        symmetric = conformal.conformal_interval(
            new_x + 0.1 + new_x, 1.0, threshold=conformal.conformal_threshold((y - x - 0.1 - x).abs(), level=0.9)
        )
        covered.append(scores.coverage(*ends, new_y))
        widths.append(torch.stack([ends[1] - ends[0], symmetric[1] - symmetric[0]]).mean(1))
    assert torch.stack(covered).mean().item() == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 6000) + 0.01)
    ours, theirs = torch.stack(widths).mean(0)
    assert ours < theirs


def test_an_interval_narrowed_beyond_nothing_is_a_point():
    lower, upper = conformal.conformal_quantile_interval(torch.zeros(1), torch.ones(1), threshold=-3.0)
    assert lower == upper == 0.5


def test_thresholds_per_row_follow_their_rows():
    lower, upper = conformal.conformal_interval(torch.zeros(2, 1), torch.ones(2, 1), threshold=torch.tensor([1.0, 2.0]))
    assert lower.flatten().tolist() == [-1, -2] and upper.flatten().tolist() == [1, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: conformal.conformal_interval(torch.zeros(3), torch.ones(3, 1), threshold=1.0),
        lambda: conformal.conformal_interval(torch.zeros(3), -torch.ones(3), threshold=1.0),
        lambda: conformal.conformal_interval(torch.zeros(3), torch.ones(3), threshold=math.nan),
        lambda: conformal.conformal_interval(torch.zeros(3), torch.ones(3), threshold=torch.ones(2)),
        lambda: conformal.standardised_residuals(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3)),
        lambda: conformal.quantile_residuals(torch.zeros(3), torch.ones(3), torch.zeros(3, 1)),
        lambda: conformal.conformal_quantile_interval(torch.ones(3), torch.zeros(3), threshold=1.0),
    ],
)
def test_impossible_intervals_are_refused(call):
    with pytest.raises(ValueError, match=r"must"):
        call()


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
    with pytest.raises(ValueError, match="`residuals` must be at least 0"):
        cross_conformal_interval(torch.zeros(3, 2), residuals=-torch.ones(3), level=0.5)


def exponential(n, seed):
    return -torch.rand(n, generator=generator(seed), dtype=torch.float64).log() - 1


def test_transforms_of_new_rows_are_uniform_and_quantiles_met_under_skewed_noise():
    transforms, below, runs = [], 0, 1200
    for run in range(runs):
        residuals = exponential(100, run)
        mean, std = normal(1, seed=run), normal(1, seed=run + 1).exp()
        new = conformal_distribution(mean, std, calibration_residuals=residuals[:99])
        y = mean + std * residuals[99]
        transforms.append(float(new.distribution(y)))
        below += bool(y <= new.quantile(0.7))
    assert scipy.stats.kstest(transforms, "uniform").pvalue > 0.001
    assert below / runs == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / runs))


def test_the_interval_lies_askew_where_residuals_do_and_covers():
    covered, runs = 0, 800
    for run in range(runs):
        residuals = exponential(60, run)
        new = conformal_distribution(torch.zeros(1), torch.ones(1), calibration_residuals=residuals[:59])
        lower, upper = new.interval(0.8)
        covered += bool(lower <= residuals[59] <= upper)
    assert covered / runs == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / runs))
    assert upper - 0 > 0 - lower


def test_quantile_and_distribution_are_inverse():
    new = conformal_distribution(torch.zeros(1), torch.ones(1), calibration_residuals=normal(49))
    for level in (0.1, 0.5, 0.9):
        assert new.distribution(new.quantile(level)).item() == pytest.approx(level, abs=0.021)


def test_too_few_rows_give_infinite_quantiles_and_intervals():
    new = conformal_distribution(torch.zeros(1), torch.ones(1), calibration_residuals=torch.zeros(3))
    assert new.quantile(0.9) == math.inf and new.interval(0.9) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="`std` positive"):
        conformal_distribution(torch.zeros(1), torch.zeros(1), calibration_residuals=torch.zeros(3))
