"""Tests of calibration keep their size and have power."""

import pytest
import scipy.stats
import torch

from dropbayes import calibration, scores
from tests.calibration.samples import generator, normal


def claims(n, seed, sharpening=1.0):
    truth = normal(n, 3, seed=seed).softmax(-1)
    labels = torch.multinomial(truth, 1, generator=generator(seed + 9000)).squeeze(1)
    return (truth.log() * sharpening).softmax(-1), labels


def test_p_values_of_calibrated_models_are_uniform():
    values = [
        calibration.calibration_test(*claims(150, seed), n_resamples=99, seed=seed).p_value for seed in range(200)
    ]
    assert scipy.stats.kstest(values, "uniform").pvalue > 0.001
    assert sum(value <= 0.05 for value in values) < 25  # 10 are expected


def test_overconfidence_is_found_and_the_bias_taken_off():
    sharp = calibration.calibration_test(*claims(1000, 0, sharpening=2.0))
    assert sharp.p_value < 0.01 and sharp.error > sharp.upper > sharp.expected
    honest = calibration.calibration_test(*claims(1000, 0))
    assert honest.error == pytest.approx(scores.expected_calibration_error(*claims(1000, 0)).item())
    assert honest.excess < 0.5 * honest.error


def test_the_band_holds_a_calibrated_curve_and_not_a_sharp_one():
    inside = []
    for sharpening in (1.0, 2.0):
        curve = calibration.class_reliability(*claims(4000, 1, sharpening))
        lower, upper = calibration.reliability_band(curve, level=0.99)
        inside.append(((lower <= curve.observed) & (curve.observed <= upper)).double().mean())
    assert inside[0] >= 0.85 and inside[1] <= 0.5


def test_uniformity_is_that_of_scipy():
    pit = torch.rand(200, generator=generator(), dtype=torch.float64)
    assert calibration.uniformity_test(pit) == scipy.stats.kstest(pit, "uniform").pvalue
