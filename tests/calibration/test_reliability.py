"""Reliability against scikit-learn and uncertainty-toolbox."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import sklearn.calibration
import sklearn.isotonic
import torch
import uncertainty_toolbox.metrics_calibration as toolbox

from dropbayes import calibration, scores
from dropbayes.predictive import Mixture
from tests.calibration.samples import generator, normal


def test_class_reliability_agrees_with_scikit_learn():
    probability = normal(500).sigmoid()
    labels = (torch.rand(500, generator=generator(1)) < probability**2).long()
    confidence, correct = scores.confidence_and_correctness(torch.stack([1 - probability, probability], 1), labels)
    curve = calibration.class_reliability(torch.stack([1 - probability, probability], 1), labels, n_bins=10)
    observed, claimed = sklearn.calibration.calibration_curve(correct, confidence, n_bins=10)
    np.testing.assert_allclose(curve.observed, observed)
    np.testing.assert_allclose(curve.claimed, claimed)
    gaps = (curve.count / 500 * (curve.observed - curve.claimed).abs()).sum()
    both = torch.stack([1 - probability, probability], 1)
    torch.testing.assert_close(gaps, scores.expected_calibration_error(both, labels, n_bins=10))


@pytest.mark.parametrize(
    ("ours", "prop_type"),
    [(calibration.interval_reliability, "interval"), (calibration.quantile_reliability, "quantile")],
)
def test_regression_reliability_agrees_with_uncertainty_toolbox(ours, prop_type):
    mean, std, y = normal(200), 0.5 * normal(200, seed=1).exp(), normal(200, seed=2)
    curve = ours(calibration.gaussian_pit(mean, std, y), n_levels=99)
    # The toolbox counts residuals mean - y below the quantile: mirror y to ask it for y - mean.
    mirrored = 2 * mean - y if prop_type == "quantile" else y
    expected, observed = toolbox.get_proportion_lists(
        mean.numpy(), std.numpy(), mirrored.numpy(), num_bins=101, prop_type=prop_type
    )
    np.testing.assert_allclose(curve.claimed, expected[1:-1], atol=1e-12)
    np.testing.assert_allclose(curve.observed, observed[1:-1], atol=1e-12)


def test_pit_of_a_calibrated_mixture_is_uniform_and_its_curve_within_the_standard_error():
    draws = normal(30, 2000)
    component = draws.gather(0, torch.randint(30, (1, 2000), generator=generator(1)))[0]
    y = component + 0.5 * normal(2000, seed=2)
    pit = Mixture(draws, torch.tensor(0.5)).pit(y)
    assert scipy.stats.kstest(pit, "uniform").pvalue > 0.01
    curve = calibration.quantile_reliability(pit)
    assert ((curve.observed - curve.claimed).abs() < 4.5 * curve.standard_error).all()


def test_the_pit_of_one_draw_is_the_gaussian_pit():
    mean, std, y = normal(9), normal(9, seed=1).exp(), normal(9, seed=2)
    torch.testing.assert_close(Mixture(mean[None], std[None]).pit(y), calibration.gaussian_pit(mean, std, y))


def test_a_column_of_targets_is_refused_and_never_paired_with_every_row():
    mean, std, y = normal(20), normal(20, seed=1).exp(), normal(20, seed=2)
    with pytest.raises(ValueError, match="`mean` and `std` and `y` must have one shape"):
        calibration.gaussian_pit(mean, std, y[:, None])


@pytest.mark.parametrize("pit", [[math.nan, 0.5], [-0.1, 0.5], [1.1, 0.5], []])
def test_transforms_outside_the_unit_interval_are_refused(pit):
    for function in (
        calibration.quantile_reliability,
        calibration.interval_reliability,
        calibration.isotonic_recalibration,
    ):
        with pytest.raises(ValueError, match="`pit` must"):
            function(torch.tensor(pit))


def test_a_row_of_weight_two_counts_as_two_in_reliability():
    pit, weight = torch.rand(40, generator=generator(), dtype=torch.float64), torch.arange(40) % 3
    ours = calibration.quantile_reliability(pit, sample_weight=weight)
    torch.testing.assert_close(ours.observed, calibration.quantile_reliability(pit.repeat_interleave(weight)).observed)
    p, labels = normal(40, 3).softmax(-1), torch.arange(40) % 3
    ours = calibration.class_reliability(p, labels, sample_weight=weight)
    theirs = calibration.class_reliability(p.repeat_interleave(weight, 0), labels.repeat_interleave(weight))
    torch.testing.assert_close((ours.claimed, ours.observed), (theirs.claimed, theirs.observed))
    assert (ours.count <= theirs.count + 1e-9).all()  # repeats are no new evidence


@pytest.mark.parametrize("n_bins", [0, -1, 2.5])
def test_a_number_of_bins_is_a_count(n_bins):
    with pytest.raises(ValueError, match="`n_bins` must be a whole number"):
        calibration.class_reliability(torch.full((2, 2), 0.5), torch.tensor([0, 1]), n_bins=n_bins)


def claims(n, seed, sharpening=1.0):
    truth = normal(n, 3, seed=seed).softmax(-1)
    labels = torch.multinomial(truth, 1, generator=generator(seed + 9000)).squeeze(1)
    return (truth.log() * sharpening).softmax(-1), labels


@pytest.mark.slow
def test_p_values_of_calibrated_models_are_uniform():
    values = [
        calibration.calibration_test(*claims(150, seed), n_resamples=59, seed=seed).p_value for seed in range(150)
    ]
    assert scipy.stats.kstest(values, "uniform").pvalue > 0.001
    assert sum(value <= 0.05 for value in values) < 20  # 7 or 8 are expected


def test_the_p_value_is_that_of_the_binomial_where_the_claims_are_equal():
    # 71 or more, or 69 or fewer, of 100 rows claimed at 70 %: errors that tie with the observed one count.
    p = torch.tensor([[0.3, 0.7]], dtype=torch.float64).repeat(100, 1)
    right = np.arange(101)
    exact = scipy.stats.binom.pmf(right, 100, 0.7)[abs(right - 70) >= 1].sum()
    test = calibration.calibration_test(p, torch.tensor([1] * 71 + [0] * 29), n_resamples=2000)
    generator = torch.Generator().manual_seed(0)  # the same labels, counted in whole numbers
    draws = torch.stack([torch.rand(100, generator=generator, dtype=torch.float64) < 0.7 for _ in range(2000)])
    counted = ((draws.sum(1) - 70).abs() >= 1).sum()
    assert test.p_value == pytest.approx((1 + int(counted)) / 2001) and test.p_value == pytest.approx(exact, abs=0.02)


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
