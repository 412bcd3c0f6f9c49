"""Decompositions of proper scores: the parts sum to the score, and each measures what it says."""

import numpy as np
import pytest
import torch

from dropbayes import scores
from tests.scores.samples import generator, normal


def total(parts):
    return parts.reliability - parts.resolution + parts.uncertainty


def calibrated(n=20_000):
    probabilities = (1.5 * normal(n, 3)).softmax(-1)
    return probabilities, torch.multinomial(probabilities, 1, generator=generator(1)).squeeze(1)


def test_the_parts_of_the_brier_score_sum_to_it():
    probabilities, labels = calibrated(300)
    parts = scores.brier_decomposition(probabilities, labels)
    assert parts.score == pytest.approx(scores.brier_score(probabilities, labels).mean().item())
    assert total(parts) == pytest.approx(parts.score, rel=1e-12)
    frequency = torch.bincount(labels, minlength=3) / 300
    assert parts.uncertainty == pytest.approx((frequency * (1 - frequency)).sum().item())


def test_sharpening_costs_reliability_and_leaves_resolution():
    probabilities, labels = calibrated()
    sharp = (probabilities.log() * 2).softmax(-1)
    honest, overconfident = (scores.brier_decomposition(p, labels) for p in (probabilities, sharp))
    assert honest.reliability < 0.005 < 0.02 < overconfident.reliability
    assert overconfident.resolution == pytest.approx(honest.resolution, rel=0.1)


def test_a_constant_prediction_resolves_nothing():
    _, labels = calibrated(500)
    frequency = torch.bincount(labels, minlength=3).double() / 500
    parts = scores.brier_decomposition(frequency.expand(500, 3), labels)
    assert parts.resolution == pytest.approx(0, abs=1e-12) and parts.reliability == pytest.approx(0, abs=1e-12)


def test_a_binary_decomposition_of_two_levels_is_murphys():
    claimed = np.repeat([0.2, 0.8], 50)
    labels = np.concatenate([np.arange(50) < 20, np.arange(50) < 30]).astype(int)
    parts = scores.brier_decomposition(np.stack([1 - claimed, claimed], 1), labels)
    seen = np.repeat([0.4, 0.6], 50)
    assert parts.reliability == pytest.approx(2 * ((claimed - seen) ** 2).mean())
    assert parts.resolution == pytest.approx(2 * ((seen - 0.5) ** 2).mean())


def test_the_parts_of_the_crps_sum_to_it_and_equal_a_loop():
    draws, y = normal(5, 40), 1.5 * normal(40, seed=1)
    parts = scores.crps_decomposition(draws, y)
    assert parts.score == pytest.approx(scores.crps(draws, y).mean().item(), rel=1e-12)
    assert total(parts) == pytest.approx(parts.score, rel=1e-12)
    assert parts.uncertainty == pytest.approx((y - y[:, None]).abs().mean().item() / 2)


def test_crps_reliability_vanishes_for_draws_of_the_truth_and_not_for_narrow_ones():
    centre = normal(4000)
    y, draws = centre + normal(4000, seed=1), centre + normal(200, 4000, seed=2)
    honest, narrow = (scores.crps_decomposition(centre + width * (draws - centre), y) for width in (1.0, 0.3))
    assert honest.reliability < 0.01 * honest.score < 0.1 * narrow.score < narrow.reliability * 2
    assert honest.resolution > 0.2


def test_a_row_of_weight_two_counts_as_two_in_decompositions():
    probabilities, labels = calibrated(40)
    weight = torch.arange(40) % 3
    repeated = torch.repeat_interleave(torch.arange(40), weight)
    ours = scores.brier_decomposition(probabilities, labels, sample_weight=weight)
    assert vars(ours) == pytest.approx(vars(scores.brier_decomposition(probabilities[repeated], labels[repeated])))
    draws, y = normal(6, 40), normal(40, seed=1)
    ours = scores.crps_decomposition(draws, y, sample_weight=weight)
    assert vars(ours) == pytest.approx(vars(scores.crps_decomposition(draws[:, repeated], y[repeated])))
