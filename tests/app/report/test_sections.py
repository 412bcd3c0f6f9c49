"""Tests of the sections."""

import datetime
import re

import numpy as np
import pytest
import torch

from dropbayes import calibration, information
from dropbayes.app.report import figures, measurements, report, sections
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.predictive.mixtures import Mixture
from dropbayes.runtime import formatting
from tests.app.report.pages import QUICK, Page, class_rows, draws_of, regression_rows, scales_of, tables


def test_one_feature_has_a_band_on_an_even_grid_that_is_the_models(one_feature):
    x, y = regression_rows(50, 1, seed=2)
    text = report(one_feature, x, y, target="height")
    drawing = re.search(r'<svg class="chart"[^>]*aria-labelledby="band-900.*?</svg>', text, re.DOTALL)[0]
    horizontal, vertical = scales_of(drawing)
    path = re.search(r'class="mean" d="M([^"]*)"', drawing)[1]
    pixels = np.array([[float(v) for v in pair.split()] for pair in path.split("L")])
    grid = np.linspace(x.min(), x.max(), 300)
    np.testing.assert_allclose(horizontal.inverse(pixels[:, 0]), grid, atol=0.01)
    np.testing.assert_allclose(vertical.inverse(pixels[:, 1]), one_feature.predict(grid[:, None]), atol=0.02)
    outer = re.search(r'class="outer" d="M([^"]*)Z"', drawing)[1]
    edges = vertical.inverse(np.array([float(pair.split()[1]) for pair in outer.split("L")]))
    lower, upper = one_feature.predict_interval(grid[:, None])
    np.testing.assert_allclose(edges, np.concatenate([upper, lower[::-1]]), atol=0.03)
    measured = measurements.measure(one_feature, x, y)
    outside = int(((y < measured.lower) | (y > measured.upper)).sum())
    assert len(re.findall("h0", (re.search(r'class="miss" d="([^"]*)"', drawing) or ["", ""])[1])) == outside
    assert Page(report(one_feature, np.ones((4, 1)), y[:4], target="t")).scores  # one place: rows side by side


def test_heteroscedastic_noise_and_extreme_units_are_shown():
    x, y = regression_rows(60)
    for scale in (1e-9, 1e9):
        model = DropoutRegressor(**QUICK, noise="heteroscedastic", random_state=0).fit(x, scale * y)
        page = Page(report(model, x, scale * y, target="t"))
        assert float(page.scores["RMSE"][0]) < 3 * scale
        assert "Noise" not in page.text


@pytest.mark.parametrize("n_classes", [2, 12, 50])
def test_any_number_of_classes(n_classes):
    x, labels = class_rows(4 * n_classes, n_classes)
    model = DropoutClassifier(**QUICK | {"n_steps": 20}, random_state=0).fit(x, labels)
    text = report(model, x, labels, target="class")
    assert len(text) < 400_000
    page = Page(text)
    assert f"one of {n_classes} classes" in page.text
    assert ('id="figure-confusion"' in text) == (n_classes <= figures.MAX_CONFUSION)


def test_a_class_that_is_never_predicted_is_told(classifier):
    x, _ = class_rows(90, seed=4)
    predicted = classifier.predict(x)
    truth = np.where((predicted == "bee") & (np.arange(90) % 2 == 0), "cat", predicted)
    never = predicted != "cat"
    text = report(classifier, x[never], truth[never], target="animal")
    assert "1 class that occurs is never predicted" in Page(text).text
    measured = tables(text)["classes.csv"]
    assert {row["class"]: row["predicted"] for row in measured}["cat"] == "0"


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
    measured = measurements.measure(classifier, x, labels)
    kept = np.argsort(measured.uncertainty)[:72]
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


def best_of_many_scales(mixture, truth):
    factors = torch.linspace(-3, 3, 601).exp()
    scaled = [Mixture(mixture.location, mixture.scale * factor, mixture.freedom) for factor in factors]
    return max(float(one.log_density(truth).mean()) for one in scaled)


def test_the_verdict_compares_with_the_best_noise_of_the_plain_networks(regressor):
    x, y = regression_rows(60, seed=1)
    verdict = sections.dropout_verdict(regressor, x, y, measurements.measure(regressor, x, y))
    assert verdict.log_likelihood == pytest.approx(regressor.log_likelihood(x, y))
    plain = regressor.without_dropout().predictive(x)
    assert verdict.plain_log_likelihood == pytest.approx(best_of_many_scales(plain, torch.from_numpy(y)), abs=1e-3)
    assert verdict.random_area == pytest.approx(np.abs(regressor.predict(x) - y).mean())
    lower, upper = regressor.predict_interval(x, 0.8)
    assert verdict.coverage[0.8] == pytest.approx(((lower <= y) & (y <= upper)).mean())


def test_the_verdict_on_classes_is_about_their_probabilities(classifier):
    x, labels = class_rows(60, seed=1)
    measured = measurements.measure(classifier, x, labels)
    verdict = sections.dropout_verdict(classifier, x, labels, measured)
    names = classifier.classes_[labels]
    assert verdict.log_likelihood == pytest.approx(classifier.log_likelihood(x, names))
    assert verdict.random_area == pytest.approx((classifier.predict(x) != names).mean())
    plain = classifier.without_dropout().predict_proba(x)[np.arange(60), labels]
    assert verdict.plain_log_likelihood >= np.log(plain).mean() - 1e-6  # its temperature may be chosen anew


def test_the_page_says_whether_the_dropout_is_worth_its_draws(regressor):
    x, y = regression_rows(60, seed=1)
    page = Page(report(regressor, x, y, target="height"))
    verdict = sections.dropout_verdict(regressor, x, y, measurements.measure(regressor, x, y))
    assert "Is the dropout worth its draws?" in page.text
    assert verdict.advice[0].split(" (")[0].rstrip(".") in page.text
    assert f"{verdict.ranking:.2f}".replace("-", "−") in page.column("value")


def test_a_model_that_drops_nothing_has_no_such_section():
    x, y = regression_rows(60)
    model = DropoutRegressor(**QUICK | {"drop_prob": 0.0, "n_steps": 5}, noise="constant", random_state=0).fit(x, y)
    assert "worth its draws" not in report(model, x, y, target="height")


def test_hyphens_of_words_are_no_minus_signs(regressor):
    text = Page(report(regressor, *regression_rows(60, seed=1), target="t")).text
    assert "log-likelihood" in text and "log−likelihood" not in text


def test_a_day_is_written_without_midnight(regressor):
    x, y = regression_rows(12)
    instant = datetime.datetime(2015, 8, 12, 7, 30)
    days = {"day": [datetime.datetime(2015, 8, 12)] * 12, "text": ["2015-08-12T00:00"] * 12, "instant": [instant] * 12}
    page = Page(report(regressor, x, y, target="t", columns=days))
    assert set(page.column("day")) == set(page.column("text")) == {"2015-08-12"}
    assert set(page.column("instant")) == {"2015-08-12 07:30:00"}


def test_a_band_along_a_date_is_labelled_by_the_date(regressor):
    x, y = regression_rows(40)
    x[:, 0] = 2000 + np.arange(40) / 12
    groups = {"sold": [0, 1], "size": [2]}
    names = ["sold: year", "sold: season sin", "size"]
    text = report(regressor, x, y, target="price", names=names, features=groups, band_feature=0)
    assert "Predictions of price along sold<" in text
    assert re.search(r'class="tick"[^>]*>2001<', text)
    assert re.search(r"narrowest at 200\d-\d\d-\d\d \(", text)
    x[:, 0] = 2000 + np.arange(40) / 400  # five weeks: days, not fractions of a year
    text = report(regressor, x, y, target="price", names=names, features=groups, band_feature=0)
    assert re.search(r'class="tick"[^>]*>2000-0\d-\d\d<', text)


@pytest.mark.parametrize(("band_feature", "proposed"), [(None, True), (0, False)])
def test_a_fit_along_the_time_is_proposed_to_models_that_were_not_fitted_so(regressor, band_feature, proposed):
    x, y = regression_rows(60)
    x[:, 0] += 2000
    text = report(
        regressor,
        x,
        y,
        target="price",
        names=["sold: year", "sold: season sin", "size"],
        features={"sold": [0, 1], "size": [2]},
        ranges={"sold": (1990.0, 1995.0)},
        band_feature=band_feature,
    )
    assert ("<code>--time sold</code>" in text) == proposed
