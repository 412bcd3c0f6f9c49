"""Tests of the distribution between quantiles: it has them, it integrates to one, its moments and samples agree."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.likelihoods import Quantiles
from dropbayes.training import Optimization

DTYPE = torch.float64
LEVELS = (0.05, 0.25, 0.5, 0.9)
OUTPUT = torch.tensor([[-1.0, 0.5, 1.0, 4.0]], dtype=DTYPE)


def density_on(grid):
    return Quantiles(LEVELS).log_density(OUTPUT.expand(len(grid), 4), grid).exp()


def test_the_density_integrates_to_one_and_puts_each_level_below_its_quantile():
    grid = torch.linspace(-60.0, 60.0, 600_001, dtype=DTYPE)
    density = density_on(grid)
    below = torch.cumulative_trapezoid(density, grid)
    assert below[-1].item() == pytest.approx(1.0, abs=1e-4)
    for level, quantile in zip(LEVELS, OUTPUT[0].tolist(), strict=True):
        assert below[torch.searchsorted(grid, quantile) - 1].item() == pytest.approx(level, abs=1e-3)


def test_the_moments_are_those_of_the_density():
    grid = torch.linspace(-60.0, 60.0, 600_001, dtype=DTYPE)
    density = density_on(grid)
    mean = torch.trapezoid(grid * density, grid)
    variance = torch.trapezoid((grid - mean).square() * density, grid)
    torch.testing.assert_close(Quantiles(LEVELS).mean(OUTPUT)[0], mean, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(Quantiles(LEVELS).variance(OUTPUT)[0], variance, atol=1e-3, rtol=1e-3)


def test_samples_have_the_quantiles():
    n = 100_000
    sample = Quantiles(LEVELS).sample(OUTPUT.expand(n, 4), generator=torch.Generator().manual_seed(0))
    for level, quantile in zip(LEVELS, OUTPUT[0].tolist(), strict=True):
        share = (sample <= quantile).double().mean().item()
        assert abs(share - level) < 4 * np.sqrt(level * (1 - level) / n)


def test_quantiles_that_cross_or_coincide_are_put_in_order():
    crossed = OUTPUT[:, [1, 0, 3, 2]]
    torch.testing.assert_close(Quantiles(LEVELS).mean(crossed), Quantiles(LEVELS).mean(OUTPUT))
    assert Quantiles(LEVELS).log_density(torch.zeros(1, 4, dtype=DTYPE), torch.zeros(1, dtype=DTYPE)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distribution_does_not_depend_on_the_unit(dtype):
    output = OUTPUT.to(dtype)
    small, y = 1e-9 * output, torch.tensor([0.7], dtype=dtype)
    torch.testing.assert_close(1e9 * Quantiles(LEVELS).mean(small), Quantiles(LEVELS).mean(output))
    torch.testing.assert_close(1e18 * Quantiles(LEVELS).variance(small), Quantiles(LEVELS).variance(output))
    expected = Quantiles(LEVELS).log_density(output, y) + 9 * np.log(10)
    torch.testing.assert_close(Quantiles(LEVELS).log_density(small, 1e-9 * y), expected)


def test_the_pinball_loss_is_least_at_the_quantiles():
    y = torch.randn(2001, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    best = y.quantile(torch.tensor(LEVELS, dtype=DTYPE))
    losses = [Quantiles(LEVELS).pinball_loss((best + shift).expand(2001, 4), y).mean() for shift in (-0.1, 0.0, 0.1)]
    assert losses[1] < losses[0]
    assert losses[1] < losses[2]


def test_the_pinball_loss_of_a_row_is_that_of_its_own_target():
    output, y = torch.randn(5, 4, dtype=DTYPE), torch.randn(5, dtype=DTYPE)
    for shape, wrong in (((5, 4), y[:, None]), ((5, 1), y), ((5, 3), y), ((5, 4), y[:1])):
        with pytest.raises(ValueError, match="without its axis of levels"):  # not rows x rows, or one for all
            Quantiles(LEVELS).pinball_loss(output[:, :1].expand(shape), wrong)
    draws = torch.stack([output, output + 1])
    expected = [
        [sum(max(a * (t - q), (a - 1) * (t - q)) for a, q in zip(LEVELS, row, strict=True)) for row, t in pairs]
        for pairs in (list(zip(one.tolist(), y.tolist(), strict=True)) for one in draws)
    ]
    torch.testing.assert_close(Quantiles(LEVELS).pinball_loss(draws, y), torch.tensor(expected, dtype=DTYPE))


def test_a_network_trained_by_fit_has_the_quantiles_of_its_targets_in_order():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Dropout(0.02), nn.Linear(20, 3))
    x = torch.rand(400, 1)
    y, likelihood = 10 * x[:, 0] + torch.randn(400), Quantiles((0.1, 0.5, 0.9))
    db.fit(net, x, y, likelihood=likelihood, epochs=60, optimization=Optimization(learning_rate=2e-2), device="cpu")
    with torch.no_grad():
        below = (y[:, None] <= net.eval()(x)).double().mean(0)
    torch.testing.assert_close(below, torch.tensor([0.1, 0.5, 0.9], dtype=DTYPE), atol=0.08, rtol=0)


def test_a_network_of_quantiles_is_predicted_and_judged():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    x, y = torch.randn(20, 3), torch.randn(20)
    prediction = db.predict(net, x, likelihood=Quantiles(LEVELS))
    assert prediction.mean.shape == prediction.aleatoric.shape == (20,)
    assert bool((prediction.aleatoric > 0).all())
    assert np.isfinite(db.evaluate(net, x, y, likelihood=Quantiles(LEVELS)).log_likelihood)


@pytest.mark.parametrize("levels", [(0.5,), (0.9, 0.1), (0.0, 0.5), (0.5, 1.0)])
def test_impossible_levels_are_refused(levels):
    with pytest.raises(ValueError, match="`levels` must hold at least two rising numbers"):
        Quantiles(levels)


def test_outputs_of_another_width_and_targets_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="a last axis of 4 outputs"):
        Quantiles(LEVELS).mean(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="without its axis of levels"):
        Quantiles(LEVELS).log_density(torch.zeros(2, 4), torch.zeros(2, 1))


def test_levels_are_numbers_whatever_holds_them():
    for levels in (LEVELS, list(LEVELS), np.array(LEVELS), torch.tensor(LEVELS, dtype=DTYPE)):
        assert Quantiles(levels) == Quantiles(LEVELS) and hash(Quantiles(levels)) == hash(Quantiles(LEVELS))
        assert repr(Quantiles(levels)) == f"Quantiles(levels={LEVELS})"
    for wrong in (0.5, torch.tensor([0.5])):
        with pytest.raises(ValueError, match="`levels` must hold at least two rising numbers"):
            Quantiles(wrong)
    with pytest.raises(TypeError, match="`levels` must be a tensor or an array of numbers"):
        Quantiles("median")
