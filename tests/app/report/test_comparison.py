"""Tests of the model beside others, and of the rows judged beside those trained on."""

import numpy as np
import pytest
from scipy.stats import ks_2samp
from sklearn.metrics import log_loss

from dropbayes.app.report import measurements, report
from dropbayes.app.report.features import Feature, features_of, shifts
from dropbayes.app.report.summary import baselines
from tests.app.report.pages import Page, class_rows, regression_rows


def test_simple_models_are_fitted_to_the_training_rows_and_judged_on_the_others(regressor):
    training, (x, y) = regression_rows(300), regression_rows(200, seed=5)
    measured = measurements.measure(regressor, x, y)
    lines = {line.name: line for line in baselines(measured, x, training)}
    assert lines["mean of the training rows"].error == pytest.approx(np.sqrt(((y - training[1].mean()) ** 2).mean()))
    assert lines["this model"].error == pytest.approx(measured.scores["rmse"].value)
    assert lines["linear regression"].error == pytest.approx(0.3, rel=0.15)  # the noise of a linear truth
    assert lines["mean of the training rows"].gap > 4
    assert lines["this model"].gap == 0


def test_the_classes_of_simple_models_keep_their_numbers(classifier):
    (known, labels), (x, new) = class_rows(90), class_rows(60, seed=9)
    measured = measurements.measure(classifier, x, new)
    lines = {line.name: line for line in baselines(measured, x, (known, labels))}
    assert lines["this model"].log_likelihood == pytest.approx(-log_loss(new, measured.probabilities, labels=[0, 1, 2]))
    assert lines["logistic regression"].error < 0.3 < lines["class shares of the training rows"].error


def test_shifts_are_the_distances_of_kolmogorov_and_smirnov():
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(300, 2)), rng.normal(size=(200, 2)) + np.array([0.0, 1.0])
    first, second = shifts(features_of(after, ["a", "b"], training=before), {})
    assert (first.name, second.name) == ("b", "a")
    assert first.distance == pytest.approx(ks_2samp(before[:, 1], after[:, 1]).statistic)
    assert first.p_value < 1e-6 < second.p_value
    outside = (after[:, 1] > before[:, 1].max()) | (after[:, 1] < before[:, 1].min())
    assert first.outside == pytest.approx(outside.mean())


def test_new_categories_lie_outside():
    before, after = (np.array(list(letters), dtype=object) for letters in ("xy" * 50, "xyzz" * 10))
    [shift] = shifts([Feature("c", (0,), after, trained=before)], {})
    assert (shift.distance, shift.outside) == (0.5, 0.5)


def test_ranges_alone_tell_what_lies_outside():
    [shift] = shifts([Feature("a", (0,), np.array([0.0, 1.0, 2.0, 3.0]))], {"a": (0.5, 2.5)})
    assert (shift.outside, shift.distance) == (0.5, None)


def test_rows_far_from_the_training_rows_are_said_to_be(regressor):
    training, (x, y) = regression_rows(80), regression_rows(100, seed=7)
    page = Page(
        report(regressor, x + np.array([3.0, 0.0, 0.0]), y, target="t", names=["a", "b", "c"], training=training)
    )
    assert "Beyond chance, a differs from the training rows." in page.text
    same = Page(report(regressor, x, y, target="t", training=training))
    assert "The rows look like those trained on." in same.text
    ranged = Page(report(regressor, x, y, target="t", names=["a", "b", "c"], ranges={"a": (-1.0, 1.0)}))
    share = (np.abs(x[:, 0]) > 1).mean()
    assert f"{100 * share:.0f} % of the rows lie outside the training range of a." in ranged.text
