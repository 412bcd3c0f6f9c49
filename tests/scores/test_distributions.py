"""CRPS, energy and variogram scores against quadrature, torchmetrics and scoringrules."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import scoringrules
import torch
import torchmetrics.functional.regression as torchmetrics_regression
import uncertainty_toolbox.metrics as toolbox

from dropbayes import scores
from tests.scores.samples import normal


def test_crps_of_bare_draws_agrees_with_torchmetrics():
    draws, y = normal(9, 30), normal(30, seed=1)
    ours = scores.crps(draws, y).mean()
    theirs = torchmetrics_regression.continuous_ranked_probability_score(draws.T.contiguous(), y)
    torch.testing.assert_close(ours, theirs)


def test_crps_of_one_noisy_draw_agrees_with_the_gaussian_of_uncertainty_toolbox():
    mean, std, y = normal(30), normal(30, seed=1).exp(), normal(30, seed=2)
    ours = scores.crps(mean[None], y, noise_variance=std.square())
    theirs = toolbox.crps_gaussian(mean.numpy(), std.numpy(), y.numpy())
    assert ours.mean().item() == pytest.approx(theirs, rel=1e-10)


def test_crps_of_the_mixture_is_the_integral_of_its_definition():
    draws, y, variance = normal(4, 1), 0.3, np.array([[0.2], [0.5], [1.0], [0.1]])

    def squared_gap(z):
        cdf = scipy.stats.norm.cdf(z, draws[:, 0].numpy(), np.sqrt(variance[:, 0])).mean()
        return (cdf - (y <= z)) ** 2

    expected = sum(scipy.integrate.quad(squared_gap, *ends, limit=200)[0] for ends in ((-15, y), (y, 15)))
    ours = scores.crps(draws, torch.tensor([y], dtype=torch.float64), noise_variance=variance)
    assert ours.item() == pytest.approx(expected, rel=1e-7)


def test_crps_is_continuous_as_the_noise_vanishes():
    draws, y = normal(5, 8), normal(8, seed=1)
    torch.testing.assert_close(scores.crps(draws, y, noise_variance=1e-16), scores.crps(draws, y), atol=1e-7, rtol=0.0)


def test_crps_and_fair_crps_of_bare_draws_agree_with_scoringrules():
    draws, y = normal(9, 30), normal(30, seed=1)
    for ours, estimator in ((scores.crps, "nrg"), (scores.fair_crps, "fair")):
        theirs = scoringrules.crps_ensemble(y.numpy(), draws.T.numpy(), estimator=estimator)
        np.testing.assert_allclose(ours(draws, y).numpy(), theirs, atol=1e-12)


def test_fair_crps_estimates_the_score_of_infinitely_many_draws_without_bias():
    # Draws N(0, 1) with noise 1 are N(0, 2); the plain score of 3 draws is too large by more than 20 standard errors.
    y = torch.zeros(40_000, dtype=torch.float64) + 0.4
    draws = normal(3, 40_000)
    truth = scores.crps(torch.zeros(1, 1, dtype=torch.float64), y[:1], noise_variance=2.0).item()
    fair, plain = scores.fair_crps(draws, y, noise_variance=1.0), scores.crps(draws, y, noise_variance=1.0)
    standard_error = fair.std().item() / 200
    assert abs(fair.mean().item() - truth) < 4 * standard_error
    assert plain.mean().item() - truth > 20 * standard_error


def test_energy_and_variogram_scores_agree_with_scoringrules():
    draws, y = normal(11, 20, 3), normal(20, 3, seed=1)
    by_row = draws.movedim(0, 1).numpy()
    theirs = scoringrules.es_ensemble(y.numpy(), by_row)
    np.testing.assert_allclose(scores.energy_score(draws, y).numpy(), theirs, atol=1e-12)
    for order in (0.5, 1.0):
        theirs = scoringrules.vs_ensemble(y.numpy(), by_row, p=order)
        np.testing.assert_allclose(scores.variogram_score(draws, y, order=order).numpy(), theirs, atol=1e-12)


def test_energy_score_of_one_output_is_the_crps():
    draws, y = normal(7, 10), normal(10, seed=1)
    torch.testing.assert_close(scores.energy_score(draws[..., None], y[:, None]), scores.crps(draws, y))


def test_variogram_score_prefers_the_right_correlation_and_energy_score_the_right_mean():
    shared = normal(4000, 1, seed=2)
    y = (shared + 0.3 * normal(4000, 2, seed=3))[None].expand(50, -1, -1)[0]
    right = normal(50, 4000, 1, seed=4) + 0.3 * normal(50, 4000, 2, seed=5)
    independent = math.sqrt(1.09) * normal(50, 4000, 2, seed=6)
    assert scores.variogram_score(right, y).mean() < 0.7 * scores.variogram_score(independent, y).mean()
    assert scores.energy_score(right, y).mean() < scores.energy_score(right + 1, y).mean()


def test_noise_per_draw_is_not_mistaken_for_noise_per_row():
    draws, y = normal(4, 4), normal(4, seed=1)
    per_draw = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    torch.testing.assert_close(
        scores.crps(draws, y, noise_variance=per_draw[:, None]),
        scores.crps(draws, y, noise_variance=per_draw[:, None].expand(4, 4)),
    )
    with pytest.raises(ValueError, match=r"`noise_variance` must be a number, \[row\]"):
        scores.crps(draws[:3], y, noise_variance=per_draw[:3])


def test_crps_has_finite_gradients_without_noise():
    draws = normal(3, 2).requires_grad_()
    scores.crps(draws, torch.zeros(2)).sum().backward()
    assert draws.grad.isfinite().all() and draws.grad.abs().sum() > 0
