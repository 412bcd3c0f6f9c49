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
from sklearn.linear_model import LogisticRegression

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


def test_a_temperature_of_logits_that_say_nothing_is_one():
    labels = torch.tensor([0, 1, 2, 0])
    assert calibration.temperature(torch.zeros(1, 4, 3), labels) == 1.0
    assert calibration.temperature(torch.full((5, 4, 3), 7.0), labels) == 1.0


def test_a_temperature_is_not_fitted_to_probabilities_in_the_place_of_logits():
    p, labels = sample(2000)
    with pytest.raises(ValueError, match="must be logits; got what sums to 1, as probabilities do"):
        calibration.temperature(p[None], labels)
    assert 0.5 < calibration.temperature(p.log()[None], labels) < 2


def sample(n, seed=0):
    """True probabilities of three classes, and labels drawn from them."""
    truth = (1.5 * normal(n, 3, seed=seed)).softmax(-1)
    return truth, torch.multinomial(truth, 1, generator=generator(seed + 100)).squeeze(1)


def test_a_dirichlet_map_is_the_logistic_regression_on_log_probabilities():
    truth, labels = sample(400)
    ours = calibration.dirichlet_calibration(truth, labels, penalty=0.0)(truth)
    theirs = LogisticRegression(C=1e9, max_iter=5000, tol=1e-10).fit(truth.log().numpy(), labels)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.predict_proba(truth.log().numpy())), atol=2e-3, rtol=0)


def test_vector_scaling_undoes_factors_and_biases_per_class_that_no_temperature_can():
    truth, labels = sample(20_000)
    claimed = (truth.log() * torch.tensor([2.0, 0.7, 1.2]) + torch.tensor([0.5, -0.5, 0.0])).softmax(-1)
    calibrated = calibration.vector_scaling(claimed, labels)(claimed)
    assert (calibrated - truth).abs().mean() < 0.01
    theta = calibration.temperature(claimed.log()[None], labels)
    assert ((claimed.log() / theta).softmax(-1) - truth).abs().mean() > 0.03


def test_the_dirichlet_map_separates_confused_classes():
    truth, labels = sample(20_000)
    confusion = torch.tensor([[0.6, 0.4, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    claimed = (truth.log() @ confusion.T).softmax(-1)
    calibrated = calibration.dirichlet_calibration(claimed, labels, penalty=0.0)(claimed)
    assert (calibrated - truth).abs().mean() < 0.01
    penalised = calibration.dirichlet_calibration(claimed, labels, penalty=1e6)
    assert (penalised.weight - torch.diag(penalised.weight.diag())).abs().max() < 1e-3


@pytest.mark.slow
def test_more_parameters_cost_on_few_rows():
    # Calibrated claims, 25 rows of six classes: the full matrix fits noise, the temperature does not.
    truth = normal(3000, 6).softmax(-1)
    labels = torch.multinomial(truth, 1, generator=generator()).squeeze(1)
    full = calibration.dirichlet_calibration(truth[:25], labels[:25], penalty=1e-6)
    theta = calibration.temperature(truth[:25].log()[None], labels[:25])
    new, new_labels = truth[1000:], labels[1000:]
    one = scores.class_log_likelihood((new.log() / theta).softmax(-1), new_labels).mean()
    assert scores.class_log_likelihood(full(new), new_labels).mean() < one - 0.1


def test_a_beta_map_recovers_its_own_parameters_and_leaves_calibrated_claims_alone():
    p = torch.rand(40_000, generator=generator(), dtype=torch.float64)
    shifted = calibration.BetaMap(0.5, 2.0, 0.3)(p)
    event = torch.rand(40_000, generator=generator(1), dtype=torch.float64) < shifted
    fitted = calibration.beta_calibration(p, event)
    assert (fitted.a, fitted.b, fitted.c) == pytest.approx((0.5, 2.0, 0.3), abs=0.1)
    honest = calibration.beta_calibration(p, torch.rand(40_000, generator=generator(2), dtype=torch.float64) < p)
    assert (honest.a, honest.b, honest.c) == pytest.approx((1, 1, 0), abs=0.1)


def test_weights_count_as_rows_in_maps():
    truth, labels = sample(60)
    weight = torch.arange(60) % 3
    rows = torch.repeat_interleave(torch.arange(60), weight)
    ours = calibration.vector_scaling(truth, labels, sample_weight=weight)
    theirs = calibration.vector_scaling(truth[rows], labels[rows])
    torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-4, rtol=1e-4)
    event = labels == 0
    beta = calibration.beta_calibration(truth[:, 0], event, sample_weight=weight)
    repeated = calibration.beta_calibration(truth[rows, 0], event[rows])
    assert (beta.a, beta.b, beta.c) == pytest.approx((repeated.a, repeated.b, repeated.c), rel=1e-3, abs=1e-3)


def test_impossible_maps_are_refused():
    truth, labels = sample(20)
    with pytest.raises(ValueError, match="`probabilities` must have 3 classes; got 2"):
        calibration.vector_scaling(truth, labels)(torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="`event` must be true for some rows"):
        calibration.beta_calibration(truth[:, 0], torch.ones(20))
    with pytest.raises(ValueError, match="`probability` must lie between 0 and 1"):
        calibration.beta_calibration(3 * truth[:, 0] + 1, labels == 0)


@pytest.mark.parametrize("fit", [calibration.vector_scaling, calibration.dirichlet_calibration])
def test_a_class_that_never_occurs_is_refused_as_an_event_is(fit):
    p = torch.full((6, 3), 1 / 3)
    with pytest.raises(ValueError, match=r"`labels` must hold every class; \[2\] never occur"):
        fit(p, torch.tensor([0, 1] * 3))
    with pytest.raises(ValueError, match=r"\[0, 2\] never occur"):  # nor with a weight of zero
        fit(p, torch.tensor([0, 1] * 3), sample_weight=torch.tensor([0.0, 1.0] * 3))
