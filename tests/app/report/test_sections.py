"""Tests of the sections that both kinds of models share."""

import re

import numpy as np
import pytest

from dropbayes import calibration, information
from dropbayes.app.report import formatting, measurements, report
from tests.app.report.pages import Page, class_rows, draws_of, regression_rows


def test_what_is_read_is_what_was_measured_rounded(regressor):
    x, y = regression_rows(70, seed=5)
    page = Page(report(regressor, x, y, target="height"))
    for name, (value, error, text) in page.scores.items():
        shown = re.match(r"([−\d.,]+)(?: ± ([\d.]+))?(\s%)?", text)
        scale = 100 if shown[3] else 1
        read = float(shown[1].replace("−", "-").replace(",", ""))
        slack = scale * float(error) / 10 if shown[2] else 0.006 * abs(read)
        assert read == pytest.approx(scale * float(value), abs=slack), name
        assert (error != "None") == bool(shown[2]), name
    mean = regressor.predict(x)
    assert f"off by {formatting.number(float(np.abs(mean - y).mean()))} on average" in page.text
    lower, upper = regressor.predict_interval(x)
    held = int(((lower <= y) & (y <= upper)).sum())
    assert f"{held} of 70 truths" in page.text


def test_the_most_uncertain_rows_are_those_of_largest_spread_and_its_parts_add_up(regressor):
    x, y = regression_rows(70, seed=5)
    page = Page(report(regressor, x, y, target="height", columns={"town": [f"t{k}" for k in range(70)]}))
    std = regressor.predict(x, return_std=True)[1]
    order = np.argsort(-std)[:10]
    assert page.column("row") == [str(k + 1) for k in order]
    assert page.column("town") == [f"t{k}" for k in order]
    drawn = draws_of(regressor, x)[0]
    total, epistemic, aleatoric = (
        np.array([float(t) for t in page.column(c)]) for c in ("σ", "epistemic σ", "aleatoric σ")
    )
    np.testing.assert_allclose(total, std[order], rtol=6e-3)
    np.testing.assert_allclose(epistemic, drawn.std(0, unbiased=False)[order.copy()], rtol=6e-3)
    np.testing.assert_allclose(total**2, epistemic**2 + aleatoric**2, rtol=2e-2)
    np.testing.assert_allclose(
        [float(t.split()[0]) for t in page.column("epistemic share")], 100 * epistemic**2 / total**2, atol=1.5
    )
    ranks = [float(t.replace("> ", "")) for t in page.column("percentile")]
    np.testing.assert_allclose(ranks, calibration.empirical_percentile(std, std)[order.copy()], atol=0.06)


def test_percentiles_are_among_the_training_rows_where_those_are_given(regressor):
    training, (x, y) = regression_rows(80), regression_rows(40, seed=7)
    page = Page(report(regressor, 3 * x, y, target="height", training=training))
    reference = calibration.uncertainty_reference(regressor.predict(training[0], return_std=True)[1])
    std = np.sort(regressor.predict(3 * x, return_std=True)[1])[::-1]
    for text, percentile in zip(page.column("percentile"), reference.percentile(std[:10].copy()).tolist(), strict=True):
        assert text == "> 99.9" if percentile > 99.9 else float(text) == pytest.approx(percentile, abs=0.06)
    assert f"among the training rows ({reference.family} fitted" in page.text


def test_a_classifiers_percentiles_are_of_its_entropy_among_the_training_rows(classifier):
    (known, labels), (x, new) = class_rows(90), class_rows(40, seed=9)
    names = np.array(["ant", "bee", "cat"])
    page = Page(report(classifier, x, names[new], target="animal", training=(known, names[labels])))
    entropy, training = (information.predictive_entropy(classifier.draws(rows)) for rows in (x, known))
    expected = calibration.uncertainty_reference(training).percentile(entropy.sort(descending=True).values[:10])
    for text, percentile in zip(page.column("percentile"), expected.tolist(), strict=True):
        assert text == "> 99.9" if percentile > 99.9 else float(text) == pytest.approx(percentile, abs=0.06)


def test_deferring_is_told_as_the_risk_curve_has_it(classifier):
    x, labels = class_rows(80, seed=4)
    names = np.array(["ant", "bee", "cat"])[labels]
    page = Page(report(classifier, x, names, target="animal"))
    measured = measurements.classification(classifier, x, labels)
    kept = np.argsort(measured.entropy)[:72]
    risk = float((measured.predicted != measured.labels)[kept].mean())
    assert measurements.risk_after_deferring(measured.risk, 0.1) == (8, pytest.approx(risk))
    assert f"{formatting.percent(risk)} without the 10 % most uncertain rows" in page.text


def test_what_was_done_is_not_said_twice_and_commands_look_like_commands(regressor):
    x, y = regression_rows(10)
    done = {"draws": "as many as needed", "versions": "dropbayes 9.9, torch", "command": "dropbayes report m t.csv"}
    text = report(regressor, x, y, target="t", provenance=done)
    assert text.count("<bdi>Draws</bdi>") == 1 and "functions drawn" not in text
    assert "<code>dropbayes report m t.csv</code>" in text and "<code>dropbayes 9.9" not in text


def test_columns_beyond_a_few_are_counted_not_shown(regressor):
    x, y = regression_rows(20)
    page = Page(report(regressor, x, y, target="t", columns={f"c{k}": list(range(20)) for k in range(30)}))
    assert len(page.column("c0")) == 10 and not page.column("c29")
    assert f"{30 - 4} more columns are not shown" in page.text
