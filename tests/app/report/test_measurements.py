"""Tests of what the report measures."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from dropbayes import calibration, information, scores
from dropbayes.app.report import measurements, report
from dropbayes.predictive.mixtures import Mixture
from dropbayes.predictive.scoring import REGRESSION_SCORES, RegressionOutcomes
from tests.app.report.pages import Page, class_rows, draws_of, regression_rows


def test_the_scores_of_a_regression_are_those_of_the_library(regressor):
    x, y = regression_rows(70, seed=5)
    page = Page(report(regressor, x, y, target="height"))
    mean, std = regressor.predict(x, return_std=True)
    lower, upper = regressor.predict_interval(x)
    drawn, noise = draws_of(regressor, x)
    pit = Mixture(drawn, noise.sqrt()).pit(y)
    curve = scores.risk_coverage(std, np.abs(mean - y))
    expected = {
        "RMSE": scores.rmse(mean, y),
        "MAE": scores.mae(mean, y),
        "Log-likelihood": regressor.log_likelihood(x, y),
        "CRPS": scores.crps(drawn, y, noise_variance=noise).mean(),
        "95 % interval holds": scores.coverage(lower, upper, y),
        "50 % interval holds": scores.coverage(*regressor.predict_interval(x, coverage=0.5), y),
        "95 % interval width": (upper - lower).mean(),
        "95 % interval score": scores.interval_score(lower, upper, y, level=0.95).mean(),
        "Sharpness": scores.sharpness(std),
        "Calibration gap": calibration.interval_reliability(pit).mean_gap,
        "Mean PIT": pit.mean(),
        "Best factor on std": calibration.std_scale(mean, std, y),
        "AURC": curve.area,
        "Excess AURC": curve.excess_area,
    }
    for name, value in expected.items():
        assert float(page.scores[name][0]) == pytest.approx(float(value), rel=1e-6, abs=1e-9), name
    assert set(page.scores) - set(expected) == {"80 % interval holds"}
    density = torch.distributions.Normal(drawn, noise.sqrt()).log_prob(torch.tensor(y)).logsumexp(0) - math.log(20)
    assert float(page.scores["Log-likelihood"][1]) == pytest.approx(float(density.std() / math.sqrt(70)))
    assert float(page.scores["95 % interval holds"][1]) == pytest.approx(math.sqrt(0.95 * 0.05 / 70))


def test_the_scores_of_a_classifier_are_those_of_the_library(classifier):
    x, labels = class_rows(80, seed=4)
    names = np.array(["ant", "bee", "cat"])[labels]
    page = Page(report(classifier, x, names, target="animal"))
    drawn = classifier.draws(x)
    p, truth = drawn.mean(0), torch.tensor(labels)
    np.testing.assert_allclose(p, classifier.predict_proba(x), rtol=1e-6)
    entropy, correct = information.predictive_entropy(drawn), scores.confidence_and_correctness(p, truth)[1]
    curve = scores.risk_coverage(entropy, 1 - correct)
    expected = {
        "Accuracy": classifier.score(x, names),
        "Balanced accuracy": balanced_accuracy_score(names, classifier.predict(x)),
        "AUROC of classes": roc_auc_score(labels, p.numpy(), multi_class="ovr"),
        "Mean confidence": p.max(1).values.mean(),
        "Log-likelihood": classifier.log_likelihood(x, names),
        "Brier score": scores.brier_score(p, truth).mean(),
        "ECE": scores.expected_calibration_error(p, truth),
        "Adaptive ECE": scores.adaptive_calibration_error(p, truth),
        "Best temperature": calibration.temperature(p.log()[None], truth),
        "Entropy": entropy.mean(),
        "Mutual information": information.mutual_information(drawn).mean(),
        "AUROC of errors": scores.auroc(entropy, 1 - correct),
        "AURC": curve.area,
        "Excess AURC": curve.excess_area,
    }
    for name, value in expected.items():
        assert float(page.scores[name][0]) == pytest.approx(float(value), rel=1e-5, abs=1e-9), name
    assert set(page.scores) == set(expected)


def test_standard_errors_are_those_of_resampled_rows():
    rng = np.random.default_rng(0)
    mean, y = np.zeros(300), rng.standard_t(8, size=300)
    rows = RegressionOutcomes(y, mean, np.ones(300), np.full(300, 0.5), np.zeros(300))
    rmse, mae = (REGRESSION_SCORES[name].error(rows).item() for name in ("rmse", "mae"))
    again = [rng.choice(y, 300) for _ in range(2000)]
    assert rmse == pytest.approx(np.std([np.sqrt((a**2).mean()) for a in again]), rel=0.1)
    assert mae == pytest.approx(np.std([np.abs(a).mean() for a in again]), rel=0.1)


def test_the_error_of_the_mean_rank_is_that_of_uniform_ranks(regressor):
    x, y = regression_rows(40, seed=5)
    error = measurements.measure(regressor, x, y).scores["mean_pit"].error
    ranks = np.random.default_rng(0).uniform(size=(20_000, 40)).mean(1)
    assert error == pytest.approx(ranks.std(), rel=0.02)


def test_the_draws_are_the_models_own(regressor):
    x, y = regression_rows(30, seed=8)
    rmse = [float(Page(report(regressor.with_draws(seed=s, n_draws=n), x, y, target="t")).scores["RMSE"][0])
            for s, n in ((None, None), (regressor.seed_, 10), (1, None), (None, 200))]  # fmt: skip
    assert rmse[0] == rmse[1] == pytest.approx(float(scores.rmse(regressor.predict(x), y)))
    assert rmse[2] != rmse[0] and rmse[3] != rmse[0]
    assert regressor.n_draws == 10
