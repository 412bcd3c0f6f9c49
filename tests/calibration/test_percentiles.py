"""The paper's percentiles."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from dropbayes import calibration
from tests.calibration.samples import generator, normal


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


def test_an_uncertainty_that_is_nan_has_no_percentile():
    with pytest.raises(ValueError, match="`uncertainty` must not contain NaN"):
        calibration.empirical_percentile(torch.tensor([math.nan]), torch.ones(3))


def test_training_points_of_weight_two_count_as_two_in_percentiles():
    known, weight, new = normal(30).abs(), torch.arange(30) % 3, normal(10, seed=1).abs()
    ours = calibration.empirical_percentile(new, known, sample_weight=weight)
    torch.testing.assert_close(ours, calibration.empirical_percentile(new, known.repeat_interleave(weight)))


@pytest.mark.parametrize("family", calibration.FAMILIES)
@pytest.mark.parametrize("spread", [0.01, 0.4, 2.0])
def test_the_fit_of_each_family_is_at_least_as_likely_as_scipys(family, spread):
    values = np.exp(spread * np.random.default_rng(3).normal(size=200))
    reference = calibration.uncertainty_reference(values, families=[family])
    distribution = getattr(scipy.stats, calibration.FAMILIES[family])
    shape, _, scale = distribution.fit(values, floc=0)
    assert reference.log_likelihoods[family] >= distribution.logpdf(values, shape, scale=scale).mean() - 1e-9
    assert reference.shape == pytest.approx(shape, rel=1e-2)
