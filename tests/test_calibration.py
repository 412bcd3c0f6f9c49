"""Calibration: the paper's example, closed forms, simulated coverage; MAPIE, scikit-learn, uncertainty-toolbox."""

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
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from dropbayes import calibration, scores


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------- the paper's percentiles


def test_the_papers_example_is_in_the_top_percentile_of_one_model_and_the_lowest_of_the_other():
    # [GG16, section Model Calibration]: std 5 where almost all others have 0.2 to 2, and where they have 10 to 15.
    five = torch.tensor(5.0, dtype=torch.float64)
    narrow = 0.2 + 1.8 * torch.rand(300, generator=generator(), dtype=torch.float64)
    wide = 10 + 5 * torch.rand(300, generator=generator(1), dtype=torch.float64)
    assert calibration.uncertainty_reference(narrow).percentile(five) > 99
    assert calibration.uncertainty_reference(wide).percentile(five) < 1
    assert calibration.empirical_percentile(five, narrow) == 100
    assert calibration.empirical_percentile(five, wide) == 0


@pytest.mark.parametrize("family", list(calibration.FAMILIES))
def test_the_family_the_uncertainties_came_from_is_chosen_and_its_parameters_recovered(family):
    source = getattr(scipy.stats, calibration.FAMILIES[family])
    shape = {"lognormal": 0.5}.get(family, 3.0)
    values = source.rvs(shape, scale=0.02, size=20_000, random_state=np.random.default_rng(0))
    reference = calibration.uncertainty_reference(values)
    assert reference.family == family
    assert (reference.shape, reference.scale) == pytest.approx((shape, 0.02), rel=0.05)
    assert reference.log_likelihoods[family] == max(reference.log_likelihoods.values())
    expected = 100 * source.cdf([0.01, 0.05], shape, scale=0.02)
    np.testing.assert_allclose(reference.percentile(np.array([0.01, 0.05])), expected, atol=1.0)


def test_the_likelihoods_reported_are_those_of_the_data_in_their_own_units():
    values = np.random.default_rng(0).gamma(2.0, 50.0, size=500)
    reference = calibration.uncertainty_reference(values, families=["gamma"])
    expected = scipy.stats.gamma.logpdf(values, reference.shape, scale=reference.scale).mean()
    assert reference.log_likelihoods["gamma"] == pytest.approx(expected)


def test_percentiles_and_relative_uncertainty_do_not_change_with_the_units():
    training, new = normal(200).exp(), normal(10, seed=1).exp()
    percentile = calibration.uncertainty_reference(training).percentile(new)
    in_millimetres = calibration.uncertainty_reference(1000 * training).percentile(1000 * new)
    torch.testing.assert_close(in_millimetres, percentile, rtol=1e-6, atol=1e-6)
    relative = calibration.relative_uncertainty(new, training)
    torch.testing.assert_close(calibration.relative_uncertainty(1000 * new, 1000 * training), relative)
    assert calibration.relative_uncertainty(training.median(), training) == 1


def test_empirical_percentile_agrees_with_scipy():
    training, new = normal(50).round(decimals=1), normal(20, seed=1).round(decimals=1)
    expected = scipy.stats.percentileofscore(training, new, kind="mean")
    np.testing.assert_allclose(calibration.empirical_percentile(new, training), expected)


@pytest.mark.parametrize("bad", [[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [1.0, 2.0]])
def test_uncertainties_without_a_distribution_are_refused(bad):
    with pytest.raises(ValueError, match=r"`training_uncertainty` must hold.*empirical_percentile"):
        calibration.uncertainty_reference(torch.tensor(bad))


# ------------------------------------------------------------------------------------------- reliability


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
    pit = calibration.mixture_pit(draws, y, noise_variance=0.25)
    assert scipy.stats.kstest(pit, "uniform").pvalue > 0.01
    curve = calibration.quantile_reliability(pit)
    assert ((curve.observed - curve.claimed).abs() < 4.5 * curve.standard_error).all()


def test_mixture_pit_of_one_draw_is_the_gaussian_pit():
    mean, std, y = normal(9), normal(9, seed=1).exp(), normal(9, seed=2)
    torch.testing.assert_close(
        calibration.mixture_pit(mean[None], y, noise_variance=std.square()), calibration.gaussian_pit(mean, std, y)
    )


# ----------------------------------------------------------------------------------------- recalibration


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


# --------------------------------------------------------------------------------------------- conformal


class _Given(BaseEstimator):
    """A fitted estimator whose prediction is its input: MAPIE then works on our numbers."""

    is_fitted = True

    def fit(self, x, y):
        return self

    def __sklearn_is_fitted__(self):
        return True


class GivenMean(RegressorMixin, _Given):
    n_features_in_ = 1

    def predict(self, x):
        return x[:, 0]


class GivenProbabilities(ClassifierMixin, _Given):
    classes_ = np.arange(4)
    n_features_in_ = 4

    def predict_proba(self, x):
        return x

    def predict(self, x):
        return x.argmax(1)


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_conformal_interval_equals_mapie(level):
    mapie = pytest.importorskip("mapie.regression")
    mean, y, new = normal(97), normal(97, seed=1), normal(20, seed=2)
    theirs = mapie.SplitConformalRegressor(GivenMean(), confidence_level=level, prefit=True)
    theirs.conformalize(mean[:, None].numpy(), y.numpy())
    interval = theirs.predict_interval(new[:, None].numpy())[1][:, :, 0]
    residuals = calibration.standardised_residuals(mean, 1.0, y)
    lower, upper = calibration.conformal_interval(new, 1.0, calibration_scores=residuals, level=level)
    np.testing.assert_allclose(np.stack([lower, upper], 1), interval, rtol=1e-12)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_conformal_sets_equal_mapie(level):
    mapie = pytest.importorskip("mapie.classification")
    held_out, new = normal(150, 4).softmax(-1), normal(40, 4, seed=1).softmax(-1)
    labels = torch.multinomial(held_out, 1, generator=generator()).squeeze(1)
    theirs = mapie.SplitConformalClassifier(GivenProbabilities(), confidence_level=level, prefit=True)
    theirs.conformalize(held_out.numpy(), labels.numpy())
    sets = theirs.predict_set(new.numpy())[1][:, :, 0]
    label_scores = calibration.label_scores(held_out, labels)
    ours = calibration.conformal_sets(new, calibration_scores=label_scores, level=level)
    np.testing.assert_array_equal(ours, sets)


def test_conformal_coverage_is_exactly_its_rank_over_n_plus_one():
    # Exchangeable scores: P(covered) = ⌈(n+1) level⌉ / (n+1) for any law; here n = 19, level 0.85 -> 17/20.
    runs = 40_000
    values = torch.rand(runs, 20, generator=generator(), dtype=torch.float64)
    thresholds = values[:, :19].kthvalue(17).values
    torch.testing.assert_close(calibration.conformal_threshold(values[0, :19], level=0.85), thresholds[0])
    covered = (values[:, 19] <= thresholds).double().mean().item()
    assert covered == pytest.approx(0.85, abs=4 * math.sqrt(0.85 * 0.15 / runs))


def test_conformal_threshold_with_too_few_rows_is_infinite():
    assert calibration.conformal_threshold(torch.arange(8.0), level=0.9) == math.inf
    assert calibration.conformal_threshold(torch.arange(9.0), level=0.9) == 8


def test_residuals_of_a_column_against_a_vector_are_refused():
    with pytest.raises(ValueError, match="must have one shape"):
        calibration.standardised_residuals(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3))
