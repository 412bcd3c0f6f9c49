"""Tests of the verdicts on calibration."""

import numpy as np
import pytest
import scipy.special
import torch

from dropbayes import calibration
from dropbayes.predictive.agreement import (
    bias,
    class_agreement,
    independent_rows,
    interval_agreement,
    interval_factors,
    uneven_width,
)


def gaussian_transforms(residual, std):
    """The transforms of outcomes about 0 under Gaussians of the given deviation."""
    return calibration.gaussian_pit(np.zeros(len(residual)), np.broadcast_to(std, len(residual)).copy(), residual)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "calibrated"), (1.3, "over"), (0.8, "under")])
def test_the_verdict_on_intervals_follows_the_truth(scale, verdict):
    residual = np.random.default_rng(0).normal(size=2000)
    assert interval_agreement(gaussian_transforms(residual, 1 / scale)).kind == verdict
    assert interval_agreement(gaussian_transforms(residual[:20], 1 / scale)).kind == "few"


def test_the_verdict_is_rarely_wrong_about_a_calibrated_model():
    rng = np.random.default_rng(3)
    wrong = sum(interval_agreement(rng.uniform(size=200)).kind != "calibrated" for _ in range(400))
    assert wrong <= 32  # 5 % of 400 and three standard deviations


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "calibrated"), (3.0, "over"), (0.5, "under")])
def test_the_verdict_on_probabilities_follows_the_truth(power, verdict):
    rng = np.random.default_rng(0)
    p = rng.uniform(0.02, 0.98, size=3000)
    labels = (rng.uniform(size=3000) < p).astype(np.int64)
    claimed = p**power / (p**power + (1 - p) ** power)
    both = np.stack([1 - claimed, claimed], 1)
    assert class_agreement(both, labels).kind == verdict
    assert class_agreement(both[:29], labels[:29]).kind == "few"


def test_probabilities_right_on_the_whole_only_are_uneven():
    claimed = torch.tensor([0.6, 0.9]).repeat_interleave(500)
    labels = torch.cat([torch.arange(500) % 20 < 17, torch.arange(500) % 20 < 13]).long()  # 85 % and 65 % right
    verdict = class_agreement(torch.stack([1 - claimed, claimed], 1), labels)
    assert verdict.kind == "uneven" and "ECE 25 %" in verdict.text


@pytest.mark.parametrize("scale", [0.8, 1.0, 1.3])
def test_a_wrong_scale_is_one_factor_for_all_levels(scale):
    residual = np.random.default_rng(0).normal(size=5000)
    pit = gaussian_transforms(residual, 1 / scale)
    factors, errors = interval_factors(pit)
    assert (abs(factors - scale) < 3 * errors).all()
    assert interval_agreement(pit).factor == pytest.approx(scale, rel=0.03)


def test_a_wrong_shape_names_the_levels_that_are_too_narrow_and_too_wide():
    residual = np.concatenate([np.linspace(0.8, 1.2, 4500), np.linspace(30, 40, 500)])  # a ring, and far outliers
    verdict = interval_agreement(gaussian_transforms(residual, 1.0))
    assert verdict.kind == "uneven"
    assert "too narrow at 50 % and 95 %, too wide at 80 %" in verdict.text


def test_a_wrong_shape_is_not_called_too_cautious():
    residual = np.random.default_rng(0).standard_t(3, size=5000)
    verdict = interval_agreement(gaussian_transforms(residual, residual.std()))
    assert (verdict.kind, verdict.level) == ("uneven", 0.5)
    assert "its intervals are too wide at every level, by different factors" in verdict.text


@pytest.mark.parametrize(("shift", "side"), [(-1.0, "high"), (-0.1, "slightly high"), (0.0, ""), (1.0, "low")])
def test_outcomes_above_their_predictions_make_them_low(shift, side):
    residual = scipy.special.ndtri((np.arange(3000) + 0.5) / 3000)
    assert bias(gaussian_transforms(residual + shift, 1.0)) == side
    assert bias(gaussian_transforms(residual[:29] + shift, 1.0)) == ""


def test_noise_that_varies_with_a_column_is_found_and_constant_noise_is_not():
    rng = np.random.default_rng(0)
    x, noise = rng.uniform(0.2, 3, size=2000), rng.normal(size=2000)
    columns = {"other": rng.normal(size=2000), "age": np.where(np.arange(2000) % 9 == 0, np.nan, x)}
    assert uneven_width(gaussian_transforms(x * noise, np.sqrt((x**2).mean())), columns) == "age"
    assert uneven_width(gaussian_transforms(noise, 1.0), columns) == ""


def series(rng, n, correlation):
    """Standard normal residuals, each correlated with the one before."""
    noise = rng.normal(size=n) * np.sqrt(1 - correlation**2)
    noise[0] = rng.normal()
    for row in range(1, n):
        noise[row] += correlation * noise[row - 1]
    return noise


def test_alternating_rows_are_independent_and_rows_in_a_line_are_not():
    assert round(independent_rows(torch.tensor([0.1, 0.9] * 50))) == 100
    assert round(independent_rows(torch.linspace(0, 1, 100))) == 2


def test_rows_that_err_together_are_judged_as_fewer():
    rng = np.random.default_rng(0)
    residuals = [series(rng, 1000, 0.9) for _ in range(100)]
    transforms = [gaussian_transforms(residual, 1.0) for residual in residuals]
    wrong = [interval_agreement(pit).kind != "calibrated" for pit in transforms]
    assert sum(wrong) > 20  # taken as independent, right intervals are often found wrong
    wrong = [interval_agreement(pit, in_series=True).kind != "calibrated" for pit in transforms]
    assert sum(wrong) <= 10
    assert sum(bool(bias(pit, in_series=True)) for pit in transforms) <= 12 < sum(bool(bias(pit)) for pit in transforms)
    assert 30 < independent_rows(transforms[0]) < 120
    narrow = gaussian_transforms(series(rng, 4000, 0.9), 0.5)
    assert interval_agreement(narrow, in_series=True).kind == "over"
    assert interval_agreement(narrow[:100], in_series=True).kind == "few"
