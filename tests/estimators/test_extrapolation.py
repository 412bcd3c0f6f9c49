"""Tests of the spread with distance: closed forms of its moments, what it leaves alone, what it recovers."""

import copy
import math

import numpy as np
import pytest
import torch

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.extrapolation import Extrapolation, find_gap, fit_extrapolation
from dropbayes.predictive.mixtures import Mixture

F64 = torch.float64
SPREAD = Extrapolation(torch.zeros(1, 2, dtype=F64), torch.tensor(0.5), torch.tensor([2.0], dtype=F64))


def test_the_deviation_is_zero_within_reach_and_saturates_beyond_it():
    x = torch.tensor([[0.5, 0.0], [0.0, 1.0], [3e3, 4e3]], dtype=F64)  # at distances 0.5, 1 and 5,000
    expected = torch.tensor([[0.0], [2 * (1 - math.exp(-1))], [2.0]], dtype=F64)
    torch.testing.assert_close(SPREAD.deviation(x), expected)


@pytest.mark.parametrize("n_draws", [1, 2, 60])
def test_distance_adds_its_variance_and_leaves_the_mean(n_draws):
    source = torch.Generator().manual_seed(0)
    mixture = Mixture(torch.randn(n_draws, 2, 1, dtype=F64, generator=source), torch.tensor(0.1))
    x = torch.tensor([[0.1, 0.1], [9.0, 9.0]], dtype=F64)
    wider = SPREAD.spread(mixture, x, y_scale=3.0)
    torch.testing.assert_close(wider.mean, mixture.mean)
    if n_draws == 60:  # of many draws, next to none is correlated with its score
        added = (wider.variance - mixture.variance).sqrt()
        torch.testing.assert_close(added, torch.tensor([[0.0], [6.0]], dtype=F64), rtol=0.2, atol=0)
        assert float(wider.epistemic_share[1]) > 0.9  # it is uncertainty about the function
    torch.testing.assert_close(wider.location[:, 0], mixture.location[:, 0])


def test_a_spread_normal_mixture_is_the_normal_of_the_summed_variances():
    mixture = Mixture(torch.zeros(400, 1, 1, dtype=F64), torch.tensor(0.3))
    wider = SPREAD.spread(mixture, torch.full((1, 2), 1e6, dtype=F64))
    levels = torch.linspace(0.02, 0.98, 25, dtype=F64)
    quantiles = torch.stack([wider.quantile(float(level)) for level in levels]).flatten()
    expected = math.sqrt(0.3**2 + 2.0**2) * torch.special.ndtri(levels)
    torch.testing.assert_close(quantiles, expected, rtol=0, atol=0.03)


def test_the_distance_of_a_row_does_not_depend_on_its_neighbours():
    source = torch.Generator().manual_seed(1)
    spread = Extrapolation(torch.randn(50, 7, generator=source), torch.tensor(0.2), torch.ones(1))
    x = torch.randn(33, 7, generator=source)
    assert torch.equal(spread.deviation(x), torch.cat([spread.deviation(row[None]) for row in x]))


def test_a_gap_is_the_middle_third_along_the_longest_axis():
    source = torch.Generator().manual_seed(0)
    levels = torch.arange(9).repeat_interleave(30).double()
    x = torch.stack([0.01 * torch.randn(270, dtype=F64, generator=source), levels - 4], 1)
    gap = find_gap(x, seed=0)
    assert gap is not None and set(levels[gap.rows].tolist()) == {3.0, 4.0, 5.0}


def test_no_gap_is_taken_where_every_row_is_near_the_others():
    x = torch.randn(2000, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert find_gap(x, seed=0) is None
    assert find_gap(x[:30], seed=0) is None and find_gap(torch.zeros(500, 2, dtype=F64), seed=0) is None


def test_the_fitted_growth_is_that_of_the_errors_in_the_gap():
    source = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(300, 1, dtype=F64, generator=source) * 0.01 + level for level in (-1, 0, 1)])
    gap = find_gap(x, seed=0)
    assert gap is not None
    rows = gap.rows.nonzero()[:, 0]
    mixture = Mixture(torch.zeros(40, len(rows), 1, dtype=F64), torch.tensor(0.05))
    y = 0.7 * torch.randn(len(rows), 1, dtype=F64, generator=source)
    spread = fit_extrapolation(gap, x, mixture, y, rows, torch.ones(len(rows)))
    assert spread is not None and 0.5 < float(spread.growth) < 1.0
    exact = fit_extrapolation(gap, x, mixture, 0.05 * y / 0.7, rows, torch.ones(len(rows)))
    assert exact is None or float(exact.growth) < 0.03


@pytest.mark.slow
def test_a_regressor_is_unsure_in_a_gap_and_keeps_its_predictions_near_the_rows(tmp_path):
    source = np.random.default_rng(0)
    level = source.permutation(np.repeat([-4.0, -3.0, -2.0, 2.0, 3.0, 4.0], 40))
    x = np.column_stack([level, source.normal(size=240)])
    y = np.sin(3 * level) + 0.3 * x[:, 1] + 0.05 * source.normal(size=240)
    settings = {"hidden": (20,), "n_steps": 150, "n_folds": 2, "random_state": 0, "device": "cpu"}
    model = DropoutRegressor(**settings).fit(x, y, groups=np.arange(240))  # groups have no process
    near, far = x[:20], np.column_stack([np.zeros(20), x[:20, 1]])
    plain = without_spread(model)
    np.testing.assert_array_equal(model.predict(near), plain.predict(near))
    wider, narrow = model.predict(far, return_std=True)[1], plain.predict(far, return_std=True)[1]
    assert (wider > 1.2 * narrow).all()
    model.save(tmp_path / "model.safetensors")
    again = DropoutRegressor.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again.predict(far, return_std=True)[1], wider)
    after_process = DropoutRegressor(**settings).fit(x, y)
    known, unknown = (after_process.predict(rows, return_std=True)[1].mean() for rows in (near, far))
    assert unknown > 5 * known


def without_spread(model):
    plain = copy.copy(model)
    assert model.extrapolation_ is not None
    plain.extrapolation_ = None
    return plain
