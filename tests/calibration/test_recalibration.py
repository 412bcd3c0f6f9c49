"""Recalibration undoes what it should."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import sklearn.calibration
import sklearn.isotonic
import torch
import uncertainty_toolbox.metrics_calibration as toolbox
import uncertainty_toolbox.recalibration as toolbox_recalibration

from dropbayes import calibration, scores
from tests.calibration.samples import generator, normal


def test_std_scale_minimises_the_negative_log_likelihood():
    mean, std, y = normal(300), 0.3 * normal(300, seed=1).exp(), normal(300, seed=2)

    def loss(log_scale):
        variance = (std * math.exp(log_scale)).square()
        return -scores.gaussian_log_likelihood(mean, variance, y).mean().item()

    best = scipy.optimize.minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-8})
    assert calibration.std_scale(mean, std, y).item() == pytest.approx(math.exp(best.x), rel=1e-5)


def test_std_scale_undoes_a_known_overconfidence():
    std = normal(50_000).exp()
    y = std * normal(50_000, seed=1)
    assert calibration.std_scale(torch.zeros_like(y), std / 3, y).item() == pytest.approx(3, rel=0.02)


def test_isotonic_recalibration_makes_skewed_claims_calibrated_on_new_data():
    # The truth is exponential; the model claims a Gaussian: wrong in shape, which no scale can mend.
    def pit(seed):
        y = torch.empty(20_000, dtype=torch.float64).exponential_(generator=generator(seed))
        return calibration.gaussian_pit(torch.ones_like(y), torch.ones_like(y), y)

    before = calibration.quantile_reliability(pit(1)).mean_gap
    recalibration = calibration.isotonic_recalibration(pit(0))
    after = calibration.quantile_reliability(recalibration.observed(pit(1))).mean_gap
    assert before > 0.05
    assert after < 0.008


def test_isotonic_recalibration_agrees_with_uncertainty_toolbox_and_scikit_learn():
    y = torch.empty(400, dtype=torch.float64).exponential_(generator=generator())
    one = torch.ones_like(y)
    recalibration = calibration.isotonic_recalibration(calibration.gaussian_pit(one, one, y))
    claimed, observed = toolbox.get_proportion_lists(
        one.numpy(),
        one.numpy(),
        (2 - y).numpy(),
        num_bins=400,
        prop_type="quantile",  # its residual is mean - y
    )
    theirs = toolbox_recalibration.iso_recal(np.asarray(claimed), np.asarray(observed))  # observed -> claimed
    levels = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(recalibration.claimed(levels), theirs.predict(levels), atol=0.01)
    pit = calibration.gaussian_pit(one, one, y).sort().values
    isotonic = sklearn.isotonic.IsotonicRegression().fit(pit, np.arange(1, 401) / 401)
    np.testing.assert_allclose(recalibration.observed(pit), isotonic.predict(pit), atol=1e-12)


def test_isotonic_recalibration_maps_there_and_back():
    recalibration = calibration.isotonic_recalibration(torch.rand(50, generator=generator(), dtype=torch.float64) ** 2)
    levels = torch.linspace(0, 1, 33, dtype=torch.float64)
    torch.testing.assert_close(recalibration.observed(recalibration.claimed(levels)), levels)


def test_temperature_recovers_the_factor_that_sharpened_the_logits():
    logits = 1.5 * normal(40_000, 5)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator(1)).squeeze(1)
    assert calibration.temperature(2.5 * logits[None], labels).item() == pytest.approx(2.5, rel=0.03)


def test_temperature_of_several_draws_is_a_minimum_of_the_mixture_loss():
    draws = 6 * normal(1, 200, 3) + 3 * normal(6, 200, 3, seed=1)
    labels = torch.multinomial((draws.mean(0) / 8).softmax(-1), 1, generator=generator(1)).squeeze(1)

    def loss(theta):
        return -scores.class_log_likelihood((draws / theta).softmax(-1).mean(0), labels).mean().item()

    theta = calibration.temperature(draws, labels).item()
    grid = np.exp(np.linspace(-3, 3, 400))
    assert 1 < theta < 15
    assert loss(theta) <= min(map(loss, grid)) + 1e-9


def test_weights_count_as_rows_in_recalibration():
    mean, std, y, weight = normal(40), normal(40, seed=1).exp(), normal(40, seed=2), torch.arange(40) % 3
    rows = torch.repeat_interleave(torch.arange(40), weight)
    torch.testing.assert_close(
        calibration.std_scale(mean, std, y, sample_weight=weight), calibration.std_scale(mean[rows], std[rows], y[rows])
    )
    pit = calibration.gaussian_pit(mean, std, y)
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    ours = calibration.isotonic_recalibration(pit, sample_weight=weight).claimed(levels)
    torch.testing.assert_close(ours, calibration.isotonic_recalibration(pit[rows]).claimed(levels))
    logits, labels = 3 * normal(2, 40, 3), torch.arange(40) % 3
    ours = calibration.temperature(logits, labels, sample_weight=weight)
    torch.testing.assert_close(ours, calibration.temperature(logits[:, rows], labels[rows]))


def test_saturated_transforms_are_not_called_calibrated():
    with pytest.raises(ValueError, match="all are 0 or 1: every target lies outside"):
        calibration.isotonic_recalibration(torch.tensor([0.0, 1.0, 1.0]))


def test_a_transform_that_underflows_in_single_precision_maps_zero_to_zero():
    recalibration = calibration.isotonic_recalibration(torch.tensor([1e-300, 0.5], dtype=torch.float64))
    assert recalibration.observed(torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]
    assert recalibration.claimed(torch.tensor([0.0, 1.0])).isfinite().all()


@pytest.mark.slow
def test_temperature_is_the_best_of_all_local_optima():
    grid = torch.linspace(-math.log(20), math.log(20), 400, dtype=torch.float64).exp()
    for seed in range(40):  # few rows and draws that disagree: the likelihood has several maxima
        logits, labels = 6 * normal(4, 6, 3, seed=seed), torch.randint(3, (6,), generator=generator(seed))

        def loss(theta, logits=logits, labels=labels):
            mixture = (logits / theta).softmax(-1).mean(0)
            return -scores.class_log_likelihood(mixture, labels).mean()

        best = min(loss(theta) for theta in grid)
        assert loss(calibration.temperature(logits, labels)) <= best + 1e-4


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.full((1, 2, 3), math.nan), torch.tensor([0, 1])),
        (torch.zeros(1, 2, 3), torch.tensor([0.0, 1.0])),
        (torch.zeros(1, 2, 3), torch.tensor([0, 3])),
        (torch.zeros(2, 3), torch.tensor([0, 1])),
    ],
)
def test_a_temperature_of_impossible_input_is_refused(logits, labels):
    with pytest.raises(ValueError, match=r"`(logit_draws|labels)` must"):
        calibration.temperature(logits, labels)
