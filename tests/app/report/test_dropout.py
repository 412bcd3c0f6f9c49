"""Tests of the verdict on the dropout: the draws against the same networks without dropout."""

import numpy as np
import pytest
import torch

from dropbayes.app.report import report
from dropbayes.app.report.dropout import dropout_verdict
from dropbayes.estimators import DropoutRegressor
from dropbayes.predictive.mixtures import Mixture
from tests.app.report.pages import QUICK, Page, class_rows, regression_rows


def best_of_many_scales(mixture, truth):
    factors = torch.linspace(-3, 3, 601).exp()
    scaled = [Mixture(mixture.location, mixture.scale * factor, mixture.freedom) for factor in factors]
    return max(float(one.log_density(truth).mean()) for one in scaled)


def test_the_verdict_compares_with_the_best_noise_of_the_plain_networks(regressor):
    x, y = regression_rows(60, seed=1)
    verdict = dropout_verdict(regressor, x, y, n_draws=20)
    assert verdict.log_likelihood == pytest.approx(regressor.log_likelihood(x, y))
    plain = regressor.without_dropout().predictive(x)
    assert verdict.plain_log_likelihood == pytest.approx(best_of_many_scales(plain, torch.from_numpy(y)), abs=1e-3)
    assert verdict.random_area == pytest.approx(np.abs(regressor.predict(x) - y).mean())
    lower, upper = regressor.predict_interval(x, 0.8)
    assert verdict.coverage[0.8] == pytest.approx(((lower <= y) & (y <= upper)).mean())


def test_the_verdict_on_classes_is_about_their_probabilities(classifier):
    x, labels = class_rows(60, seed=1)
    verdict = dropout_verdict(classifier, x, labels, n_draws=20)
    names = classifier.classes_[labels]
    assert verdict.log_likelihood == pytest.approx(classifier.log_likelihood(x, names))
    assert verdict.random_area == pytest.approx((classifier.predict(x) != names).mean())
    plain = classifier.without_dropout().predict_proba(x)[np.arange(60), labels]
    assert verdict.plain_log_likelihood >= np.log(plain).mean() - 1e-6  # its temperature may be chosen anew


def test_the_page_says_whether_the_dropout_is_worth_its_draws(regressor):
    x, y = regression_rows(60, seed=1)
    page = Page(report(regressor, x, y, target="height"))
    verdict = dropout_verdict(regressor, x, y, n_draws=20)
    assert "Is the dropout worth its draws?" in page.text
    assert verdict.advice[0].split(" (")[0].rstrip(".") in page.text
    assert f"{verdict.ranking:.2f}".replace("-", "−") in page.column("value")


def test_a_model_that_drops_nothing_has_no_such_section():
    x, y = regression_rows(60)
    model = DropoutRegressor(**QUICK | {"drop_prob": 0.0, "n_steps": 5}, random_state=0).fit(x, y)
    assert "worth its draws" not in report(model, x, y, target="height")


def test_hyphens_of_words_are_no_minus_signs(regressor):
    text = Page(report(regressor, *regression_rows(60, seed=1), target="t")).text
    assert "log-likelihood" in text and "log−likelihood" not in text
