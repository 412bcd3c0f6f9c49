"""Calibration maps of classes: they undo what they can express, and are optima."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dropbayes import calibration, scores
from tests.calibration.samples import generator, normal


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


def test_more_parameters_cost_on_few_rows():
    # Calibrated claims, 40 rows of ten classes: the full matrix fits noise, the temperature does not.
    truth = normal(3000, 10).softmax(-1)
    labels = torch.multinomial(truth, 1, generator=generator()).squeeze(1)
    full = calibration.dirichlet_calibration(truth[:40], labels[:40], penalty=1e-6)
    theta = calibration.temperature(truth[:40].log()[None], labels[:40])
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
