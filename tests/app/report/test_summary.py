"""Tests of the answers in short."""

import numpy as np
import pytest

from dropbayes.app.report import measurements, report, summary, verdicts
from dropbayes.app.report.comparison import Baseline
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from tests.app.report.pages import QUICK, Page, class_rows, regression_rows


@pytest.mark.parametrize(("shift", "word"), [(-2.0, "low"), (2.0, "high"), (0.0, "")])
def test_predictions_below_the_truth_are_said_to_run_low(regressor, shift, word):
    x, _ = regression_rows(60, seed=5)
    measured = measurements.regression(regressor, x, regressor.predict(x) - shift)
    assert verdicts.bias_direction(measured) == word
    if word:
        assert f"Predictions run {word}" in summary.regression_answers(measured, target="t")[2].text


@pytest.mark.parametrize(("gap", "tone"), [(-3.0, "warn"), (-1.0, "good"), (3.0, "good")])
def test_a_simple_model_that_is_better_beyond_chance_is_named(regressor, gap, tone):
    measured = measurements.regression(regressor, *regression_rows(120, seed=5))
    beside = [Baseline("this model", 0.5, 0.1, None), Baseline("linear regression", 0.3, 0.1, gap)]
    good = summary.regression_answers(measured, target="t", beside=beside)[0]
    assert good.tone == tone
    assert ("Linear regression errs less: 0.300 instead of 0.500." in good.text) == (tone == "warn")


def test_a_constant_truth_and_a_perfect_classifier_are_described():
    x, _ = regression_rows(40)
    model = DropoutRegressor(**QUICK, random_state=0).fit(x, np.full(40, 7.0))
    assert "The truth is the same in all rows" in Page(report(model, x, np.full(40, 7.0), target="t")).text
    x, labels = class_rows(60, 2)
    x[:, 0] += 50 * labels
    sharp = DropoutClassifier(**QUICK | {"n_steps": 300}, random_state=0).fit(x, labels == 1)
    page = Page(report(sharp, x, labels == 1, target="t"))
    assert page.scores["Accuracy"][0] == "1.0" and "AUROC of errors" not in page.scores
    assert "No row is predicted wrongly" in page.text
