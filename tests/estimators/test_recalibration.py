"""Tests of recalibrated estimators: what the held-out rows ask for is what a prediction then says."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from dropbayes import conformal
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.recalibration import (
    Recalibration,
    best_factor,
    fit_recalibration,
    tempered,
    with_recalibration,
)

SMALL = {
    "hidden": (8,),
    "n_steps": 60,
    "n_networks": 2,
    "n_draws": 10,
    "drop_prob": 0.2,
    "weight_decay": 1e-4,
    "random_state": 0,
}
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(400, 2))
Y = X[:, 0] + 0.5 * GENERATOR.standard_t(3, size=400)
LABELS = np.where(X[:, 0] + GENERATOR.normal(size=400) > 0, "b", "a")


@pytest.fixture(scope="module")
def regressor():
    return DropoutRegressor(**SMALL).fit(X[:100], Y[:100])


@pytest.fixture(scope="module")
def classifier():
    return DropoutClassifier(**SMALL).fit(X[:100], LABELS[:100])


def fitted(estimator, y, method):
    return with_recalibration(estimator, fit_recalibration(estimator, X[100:], y[100:], method=method))


def test_a_scaled_deviation_maximises_the_likelihood_of_its_rows_shrunk_towards_one(regressor):
    factor = fit_recalibration(regressor, X[100:], Y[100:]).factor

    def likelihood(value):
        view = with_recalibration(regressor, Recalibration("scale", (value,), 300))
        return 300 * view.log_likelihood(X[100:], Y[100:])

    assert likelihood(factor) >= likelihood(1.0)
    best = minimize_scalar(lambda log: 5 * log**2 - likelihood(np.exp(log)), bounds=(-2, 2), method="bounded")
    assert factor == pytest.approx(np.exp(best.x), rel=1e-3)


def test_a_factor_of_two_doubles_the_deviation(regressor):
    wider = with_recalibration(regressor, Recalibration("scale", (2.0,), n_rows=40))
    np.testing.assert_allclose(wider.predict(X, return_std=True)[1], 2 * regressor.predict(X, return_std=True)[1])


def test_the_factor_of_a_gaussian_is_its_residual_deviation_with_one_for_the_prior_rows():
    residual = np.random.default_rng(1).normal(scale=3, size=4000)
    found = best_factor(lambda factor: float(-0.5 * (residual**2).sum() / factor**2 - 4000 * np.log(factor)))
    assert found == pytest.approx(residual.std(), rel=0.01)
    assert (
        best_factor(lambda factor: float(-0.5 * 9 / factor**2 - np.log(factor))) < 1.5
    )  # one row, three deviations off


def test_no_method_makes_the_rows_it_was_fitted_to_less_likely(regressor, classifier):
    for rows in (slice(100, 120), slice(100, 140), slice(100, 400)):
        for method in ("scale", "isotonic", "conformal"):
            view = with_recalibration(regressor, fit_recalibration(regressor, X[rows], Y[rows], method=method))
            assert view.log_likelihood(X[rows], Y[rows]) >= regressor.log_likelihood(X[rows], Y[rows]) - 1e-9
        view = with_recalibration(classifier, fit_recalibration(classifier, X[rows], LABELS[rows]))
        assert view.log_likelihood(X[rows], LABELS[rows]) >= classifier.log_likelihood(X[rows], LABELS[rows]) - 1e-9


def test_a_high_temperature_gives_the_class_shares_and_temperature_one_the_softmax():
    logits, shares = torch.randn(5, 3, dtype=torch.float64), np.array([0.7, 0.2, 0.1])
    torch.testing.assert_close(tempered(logits, 1e9, shares).exp(), torch.from_numpy(shares).expand(5, 3))
    torch.testing.assert_close(tempered(logits, 1.0, shares), logits.log_softmax(-1))


def test_a_scaled_distribution_is_the_same_one_in_wider_units(regressor):
    wide = with_recalibration(regressor, Recalibration("scale", (2.0,), 20))
    mixture, wider = regressor.predictive(X[:5]), wide.predictive(X[:5])
    torch.testing.assert_close(wider.quantile(0.9) - wider.mean, 2 * (mixture.quantile(0.9) - mixture.mean))
    torch.testing.assert_close(wider.pit(wider.quantile(0.3)), torch.full((5,), 0.3, dtype=wider.mean.dtype))
    torch.testing.assert_close(wider.epistemic, 4 * mixture.epistemic)


@pytest.mark.parametrize("method", ["isotonic", "conformal"])
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_intervals_hold_what_they_claim_on_the_rows_they_were_fitted_to(regressor, method, coverage):
    lower, upper = fitted(regressor, Y, method).predict_interval(X[100:], coverage)
    held = ((lower <= Y[100:]) & (Y[100:] <= upper)).mean()
    assert abs(held - coverage) <= 2 / 300


def test_conformal_intervals_are_those_of_the_calibration_module(regressor):
    mean, std = regressor.predict(X[100:], return_std=True)
    scores = conformal.standardised_residuals(mean, std, Y[100:])
    expected = conformal.conformal_interval(mean, std, threshold=conformal.conformal_threshold(scores, level=0.9))
    found = fitted(regressor, Y, "conformal").predict_interval(X[100:], 0.9)
    for end, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(end, other, rtol=1e-6)


@pytest.mark.parametrize("method", ["scale", "isotonic", "conformal"])
def test_the_transform_of_an_outcome_agrees_with_the_intervals(regressor, method):
    view = fitted(regressor, Y, method)
    pit = view.predictive(X[100:]).pit(torch.from_numpy(Y[100:])).numpy()
    lower, upper = view.predict_interval(X[100:], 0.8)
    inside = (lower <= Y[100:]) & (Y[100:] <= upper)
    assert (inside == (np.abs(2 * pit - 1) <= 0.8)).mean() > 0.99  # equal but at the very ends


def test_blocks_are_the_whole(regressor, monkeypatch):
    view = fitted(regressor, Y, "isotonic")
    monkeypatch.setattr(type(view), "block_rows", 7)
    blocks = torch.cat([mixture.quantile(0.7) for _, mixture in view.predictive_blocks(X[:50])])
    torch.testing.assert_close(blocks, view.predictive(X[:50]).quantile(0.7))


def test_a_temperature_lowers_the_loss_of_the_classes(classifier):
    view = fitted(classifier, LABELS, "scale")
    assert view.log_likelihood(X[100:], LABELS[100:]) >= classifier.log_likelihood(X[100:], LABELS[100:])
    assert (view.predict(X[100:]) == classifier.predict(X[100:])).mean() > 0.97


def test_label_sets_hold_the_truth(classifier):
    view = fitted(classifier, LABELS, "conformal")
    inside = view.recalibration.label_sets(view.predict_proba(X[100:]), 0.9).numpy()
    codes = np.searchsorted(classifier.classes_, LABELS[100:])
    assert inside[np.arange(300), codes].mean() >= 0.9


@pytest.mark.parametrize("y", [LABELS, np.round(2 * Y) / 3], ids=["classes", "numbers"])
def test_conformal_sets_and_intervals_hold_their_share_where_many_rows_are_the_same(y):
    x = np.round(X[:, :1]).clip(-1, 1)  # three different rows, so that most scores are those of many
    estimator = (DropoutClassifier if y.dtype.kind == "U" else DropoutRegressor)(**SMALL).fit(x[:100], y[:100])
    view = with_recalibration(estimator, fit_recalibration(estimator, x[100:], y[100:], method="conformal"))
    for coverage in np.linspace(0.05, 0.95, 19):
        if y.dtype.kind == "U":
            sets = view.recalibration.label_sets(view.predict_proba(x[100:]), coverage).numpy()
            held = sets[np.arange(300), np.searchsorted(view.classes_, y[100:])]
        else:
            lower, upper = view.predict_interval(x[100:], coverage)
            held = (lower <= y[100:]) & (y[100:] <= upper)
        assert held.mean() >= coverage


def test_a_view_leaves_the_estimator_as_it_was(regressor):
    before = regressor.predict(X[:5], return_std=True)
    view = with_recalibration(regressor, Recalibration("scale", (3.0,), 20))
    np.testing.assert_array_equal(regressor.predict(X[:5], return_std=True), before)
    np.testing.assert_array_equal(with_recalibration(view, None).predict(X[:5], return_std=True), before)
    assert view.with_draws(n_draws=3).predictive(X[:5]).n_draws == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magic"}, "`method` must be one of"),
        ({"values": ()}, "at least one finite number"),
        ({"values": (float("nan"),)}, "at least one finite number"),
    ],
)
def test_impossible_maps_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Recalibration(**{"method": "scale", "values": (1.0,), "n_rows": 20, **change})


def test_too_few_rows_and_classes_without_levels_are_refused(regressor, classifier):
    with pytest.raises(ValueError, match="at least 20 held-out rows"):
        fit_recalibration(regressor, X[:5], Y[:5])
    with pytest.raises(ValueError, match="isotonic maps the levels of numbers"):
        fit_recalibration(classifier, X[100:], LABELS[100:], method="isotonic")
    few = with_recalibration(regressor, Recalibration("conformal", tuple(np.linspace(0.1, 3, 20)), 20))
    with pytest.raises(ValueError, match="needs more than the 20 rows"):
        few.predict_interval(X[:2], 0.99)
