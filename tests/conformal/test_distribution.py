"""Conformal predictive distributions: uniform transforms and exact quantiles."""

import math

import pytest
import scipy.stats
import torch

from dropbayes.conformal import conformal_distribution
from tests.calibration.samples import generator, normal


def exponential(n, seed):
    return -torch.rand(n, generator=generator(seed), dtype=torch.float64).log() - 1


def test_transforms_of_new_rows_are_uniform_and_quantiles_met_under_skewed_noise():
    transforms, below, runs = [], 0, 3000
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
    covered, runs = 0, 2000
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
