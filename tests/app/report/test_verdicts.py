"""Tests of what the measurements mean."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from dropbayes import calibration, scores
from dropbayes.app.report import measurements, summary, verdicts
from dropbayes.app.report.features import Feature
from dropbayes.predictive import outcomes, scoring


def calibrated_regression(scale, n=2000):
    """Evidence on a model whose stated spread is `scale` times too small, without any network."""
    rng = np.random.default_rng(0)
    residual = rng.normal(size=n)
    std = np.full(n, 1 / scale)
    pit = calibration.gaussian_pit(np.zeros(n), std, residual)
    return measurements.Regression(
        residual, np.zeros(n), std, std / 2, std * 0.75**0.5, -1.96 * std, 1.96 * std, pit.numpy(),
        calibration.interval_reliability(pit), scores.risk_coverage(std, np.abs(residual)), {}, 10,
    )  # fmt: skip


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "calibrated"), (1.3, "over"), (0.8, "under")])
def test_the_verdict_on_intervals_follows_the_truth(scale, verdict):
    assert verdicts.regression_verdict(calibrated_regression(scale)).kind == verdict
    assert verdicts.regression_verdict(calibrated_regression(scale, n=20)).kind == "few"


def test_the_verdict_is_rarely_wrong_about_a_calibrated_model():
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        curve = calibration.interval_reliability(rng.uniform(size=200))
        measured = measurements.Regression(*[np.zeros(200)] * 7, np.full(200, 0.5), curve, None, {}, 1)  # type: ignore[call-arg]
        wrong += verdicts.regression_verdict(measured).kind != "calibrated"
    assert wrong <= 32  # 5 % of 400 and three standard deviations


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "calibrated"), (3.0, "over"), (0.5, "under")])
def test_the_verdict_on_probabilities_follows_the_truth(power, verdict):
    rng = np.random.default_rng(0)
    p = rng.uniform(0.02, 0.98, size=3000)
    labels = (rng.uniform(size=3000) < p).astype(np.int64)
    claimed = p**power / (p**power + (1 - p) ** power)
    both = np.stack([1 - claimed, claimed], 1)
    rows = outcomes.ClassOutcomes(labels, both)
    values = {name: scoring.CLASS_SCORES[name] for name in ("accuracy", "calibration_error")}
    measured = measurements.score_values(values, rows)
    measured = measurements.Classification(labels, both, *[np.zeros(3000)] * 3, None, None, measured, 1)  # type: ignore[call-arg]
    assert verdicts.class_verdict(measured).kind == verdict


def test_a_gain_of_deferring_is_called_real_where_random_rows_would_rarely_bring_it():
    measured = calibrated_regression(1.0, n=100)
    rng, loss = np.random.default_rng(0), np.abs(measured.y)
    scatter = np.std([rng.permutation(loss)[10:].mean() for _ in range(4000)])
    assert verdicts.gain_is_real(measured, 10, 2.2 * scatter) and not verdicts.gain_is_real(measured, 10, 1.8 * scatter)


@pytest.mark.parametrize(("n_wrong", "caught", "real"), [(1, 1, False), (2, 2, True), (10, 4, True), (10, 2, False)])
def test_the_errors_caught_by_deferring_are_weighed_against_a_random_choice(n_wrong, caught, real):
    uncertainty = np.arange(100.0)
    wrong = np.zeros(100, dtype=np.int64)
    wrong[[*range(n_wrong - caught), *range(100 - caught, 100)]] = 1  # the most uncertain rows come last
    measured = measurements.Classification(  # type: ignore[call-arg]
        wrong, np.eye(2)[np.zeros(100, dtype=int)], *[uncertainty] * 3, None,
        scores.risk_coverage(uncertainty, wrong.astype(float)), {}, 1,
    )  # fmt: skip
    assert verdicts.gain_is_real(measured, 10, math.nan) == real
    chosen = [np.random.default_rng(k).permutation(wrong)[:10].sum() >= caught for k in range(2000)]
    assert (np.mean(chosen) <= 0.025) == real


def noisy_regression(residual, std):
    """Measurements of a model that gives every row a Gaussian of the given deviation about 0."""
    pit = calibration.gaussian_pit(np.zeros(len(residual)), std, residual)
    rows = outcomes.RegressionOutcomes(residual, np.zeros(len(residual)), std, pit, np.zeros(len(residual)))
    mean_rank = measurements.score_values({"mean_pit": scoring.REGRESSION_SCORES["mean_pit"]}, rows)
    return measurements.Regression(
        residual, np.zeros(len(residual)), std, std / 2, std * 0.75**0.5, -1.96 * std, 1.96 * std, pit.numpy(),
        calibration.interval_reliability(pit), scores.risk_coverage(std, np.abs(residual)), mean_rank, 10,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [0.8, 1.0, 1.3])
def test_a_wrong_scale_is_one_factor_for_all_levels(scale):
    factors = verdicts.interval_factors(calibrated_regression(scale, n=5000))
    assert factors.agree
    assert factors.mean == pytest.approx(scale, rel=0.03)


def test_a_wrong_shape_names_the_levels_that_are_too_narrow_and_too_wide():
    residual = np.concatenate([np.linspace(0.8, 1.2, 4500), np.linspace(30, 40, 500)])  # a ring, and far outliers
    verdict = verdicts.regression_verdict(noisy_regression(residual, np.ones(5000)))
    assert verdict.kind == "uneven"
    assert "too narrow at 50 % and 95 %, too wide at 80 %" in verdict.text


def test_a_wrong_shape_is_not_called_too_cautious():
    rng = np.random.default_rng(0)
    residual = rng.standard_t(3, size=5000)
    measured = noisy_regression(residual, np.full(5000, residual.std()))
    verdict = verdicts.regression_verdict(measured)
    assert verdict.kind == "uneven"
    assert "its intervals are too wide at every level, by different factors" in verdict.text
    assert verdict.level == 50
    assert summary.interval_advice(measured)[0] == "Map the levels"


def test_noise_that_varies_with_a_feature_is_found_and_constant_noise_is_not():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.2, 3, size=2000)
    feature = Feature("age", (0,), x)
    varying = noisy_regression(x * rng.normal(size=2000), np.full(2000, np.sqrt((x**2).mean())))
    assert verdicts.dependent_feature(varying, [feature]) == "age"
    assert summary.interval_advice(varying, [feature])[0] == "Let the noise vary"
    learned = replace(varying, noise="student")  # advice that was taken already would be none
    assert summary.interval_advice(learned, [feature])[0] == "Learn the noise longer"
    steady = noisy_regression(rng.normal(size=2000), np.ones(2000))
    assert verdicts.dependent_feature(steady, [feature]) == ""


def test_the_advice_on_a_wrong_scale_is_the_factor():
    rng = np.random.default_rng(0)
    headline, text = summary.interval_advice(noisy_regression(2 * rng.normal(size=3000), np.ones(3000)))
    assert re.fullmatch(r"Multiply σ by (1\.9\d|2\.0\d)", headline)
    assert "dropbayes calibrate" in text


def test_a_bias_is_mended_before_the_scale():
    rng = np.random.default_rng(0)
    headline, text = summary.interval_advice(noisy_regression(1 + rng.normal(size=3000), np.ones(3000)))
    assert headline == "Mend the bias first"
    assert "run low" in text
