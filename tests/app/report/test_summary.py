"""Tests of the answers in short, and of the simple models that the model is compared with."""

import re
from typing import NamedTuple

import numpy as np
import pytest
from sklearn.metrics import log_loss

from dropbayes import calibration, scores
from dropbayes.app.report import measurements, report, summary
from dropbayes.app.report.features import Feature
from dropbayes.app.report.layout import environment
from dropbayes.app.report.summary import Baseline, baselines
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from tests.app.report.pages import QUICK, Page, class_rows, regression_rows


def noisy_regression(residual, std, rise=1000.0):
    """Measurements of a model that gives every row a Gaussian about a mean that rises, without any network."""
    mean, std = np.linspace(0, rise, len(residual)), np.broadcast_to(std, len(residual)).copy()
    pit = calibration.gaussian_pit(np.zeros(len(residual)), std, residual).numpy()
    variances, ends = (std**2 / 4, 3 * std**2 / 4), (mean - 1.96 * std, mean + 1.96 * std)
    return measurements.Regression(10, mean + residual, mean, std, *variances, *ends, pit, mean, mean)


class Answer(NamedTuple):
    tone: str
    figure: str
    text: str


def answers(measured, features=(), **fit):
    """The answers of the summary, as the page words them."""
    known = {"advice": summary.advice(measured, features, **fit), "deferral": summary.deferral(measured)}
    page = environment.get_template("summary.html").render(known, m=measured, target="t")
    pattern = r'<article class="answer (\w+)">.*?<p class="number">(.*?)</p>\s*<p>(.*?)</p>'
    return [Answer(*found) for found in re.findall(pattern, page.replace("\N{NO-BREAK SPACE}", " "), re.DOTALL)]


def headline_and_text(measured, features=(), **fit):
    return answers(measured, features, **fit)[3][1:]


@pytest.mark.parametrize(("shift", "word"), [(-2.0, "low"), (2.0, "high"), (0.0, "")])
def test_predictions_below_the_truth_are_said_to_run_low(regressor, shift, word):
    x, _ = regression_rows(60, seed=5)
    measured = measurements.measure(regressor, x, regressor.predict(x) - shift)
    text = answers(measured, noise="constant")[2].text
    assert (f"Predictions run {word}:" if word else "Intervals") in text
    assert ("Predictions run" in text) == bool(word)


@pytest.mark.parametrize(("gap", "tone"), [(-3.0, "warn"), (-1.0, "good"), (3.0, "good")])
def test_a_simple_model_that_is_better_beyond_chance_is_named(regressor, gap, tone):
    measured = measurements.measure(regressor, *regression_rows(120, seed=5))
    beside = [Baseline("this model", 0.5, 0.1, 0.0), Baseline("linear regression", 0.3, 0.1, gap)]
    good = answers(measured, beside=beside, noise="constant")[0]
    assert good.tone == tone
    assert ("Linear regression errs less: 0.300 instead of 0.500." in good.text) == (tone == "warn")


def test_the_rows_of_the_training_are_no_ground_for_a_correction(regressor, classifier):
    inputs, codes = class_rows(120)
    for model, (x, y) in (
        (regressor, regression_rows(120, seed=5)),
        (classifier, (inputs, classifier.classes_[codes])),
    ):
        page = Page(report(model, x, y, target="t", training=(x, y)))
        assert "Judge held-out rows" in page.text and "These are the rows it was fitted to" in page.text
        for other in (
            "calibrate MODEL",
            "Simple models fitted",
            "Is the dropout worth",
            "Handing the",
            "shows no gain",
        ):
            assert other not in page.text
        other = Page(report(model, x, y, target="t", training=(x[::-1], y[::-1]))).text
        assert "Judge held-out rows" not in other and "Simple models fitted" in other


def test_a_constant_truth_and_a_perfect_classifier_are_described():
    x, _ = regression_rows(40)
    model = DropoutRegressor(**QUICK, noise="constant", random_state=0).fit(x, np.full(40, 7.0))
    assert "The truth is the same in all rows" in Page(report(model, x, np.full(40, 7.0), target="t")).text
    x, labels = class_rows(60, 2)
    x[:, 0] += 50 * labels
    sharp = DropoutClassifier(**QUICK | {"n_steps": 300}, random_state=0).fit(x, labels == 1)
    page = Page(report(sharp, x, labels == 1, target="t"))
    assert page.scores["Accuracy"][0] == "1.0" and "AUROC of errors" not in page.scores
    assert "No row is predicted wrongly" in page.text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("constant", [0.5, 0.1257])
def test_a_constant_truth_has_no_spread_whatever_its_mean_rounds_to(constant):
    measured = noisy_regression(np.full(60, constant), 1.0, rise=0.0)
    assert measured.spread == 0 and not measured.useless
    assert not summary.advice(measured).skewed


def test_a_gain_of_deferring_is_called_real_where_random_rows_would_rarely_bring_it():
    rng = np.random.default_rng(0)
    loss = np.abs(rng.normal(size=100))
    scatter = np.std([rng.permutation(loss)[10:].mean() for _ in range(4000)])
    assert summary.gain_is_real(loss, 10, 2.2 * scatter) and not summary.gain_is_real(loss, 10, 1.8 * scatter)


@pytest.mark.parametrize(("n_wrong", "caught", "real"), [(1, 1, False), (2, 2, True), (10, 4, True), (10, 2, False)])
def test_the_errors_caught_by_deferring_are_weighed_against_a_random_choice(n_wrong, caught, real):
    wrong = np.zeros(100)
    wrong[[*range(n_wrong - caught), *range(100 - caught, 100)]] = 1  # the most uncertain rows come last
    curve = scores.risk_coverage(np.arange(100.0), wrong)
    deferred, remains = measurements.risk_after_deferring(curve, 0.1)
    assert summary.gain_is_real(wrong, deferred, wrong.mean() - remains) == real
    chosen = [np.random.default_rng(k).permutation(wrong)[:10].sum() >= caught for k in range(2000)]
    assert (np.mean(chosen) <= 0.025) == real


def test_the_advice_on_noise_that_varies_with_a_feature_is_to_let_it_vary():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.2, 3, size=2000)
    varying, feature = noisy_regression(x * rng.normal(size=2000), np.sqrt((x**2).mean())), Feature("age", (0,), x)
    assert headline_and_text(varying, [feature], noise="constant")[0] == "Let the noise vary"
    # Advice that was taken already would be none.
    assert headline_and_text(varying, [feature])[0] == "Learn the noise longer"
    steady = noisy_regression(rng.normal(size=2000), 1.0)
    assert headline_and_text(steady, [feature], noise="constant")[1].startswith("Take the intervals as they are.")


def test_the_advice_on_a_wrong_shape_is_to_map_the_levels():
    residual = np.random.default_rng(0).standard_t(3, size=5000)
    assert headline_and_text(noisy_regression(residual, residual.std()))[0] == "Map the levels"


def test_the_advice_on_a_wrong_scale_is_the_factor():
    rng = np.random.default_rng(0)
    headline, text = headline_and_text(noisy_regression(2 * rng.normal(size=3000), 1.0))
    assert re.fullmatch(r"Multiply σ by (1\.9\d|2\.0\d)", headline)
    assert "dropbayes calibrate" in text


def test_a_bias_is_mended_before_the_scale():
    rng = np.random.default_rng(0)
    headline, text = headline_and_text(noisy_regression(1 + rng.normal(size=3000), 1.0))
    assert headline == "Mend the bias first"
    assert "run low" in text


BETTER = [Baseline("this model", 0.5, 0.1, 0.0), Baseline("linear regression", 0.3, 0.1, -5.0)]


def test_the_last_answer_names_the_better_simple_model_of_the_first(regressor):
    measured = measurements.measure(regressor, *regression_rows(120, seed=5))
    good, sure, _, todo = answers(measured, beside=BETTER)
    assert (good.tone, todo.tone, todo.figure) == ("warn", "warn", "Prefer linear regression")
    assert "Linear regression errs less on these rows: use it, or fit again with more rows" in todo.text
    assert "noise, as far as the model can tell" in sure.text


def test_the_last_answer_on_classes_names_the_better_simple_model_too(classifier):
    measured = measurements.measure(classifier, *class_rows(90, seed=4))
    good, *_, todo = answers(measured, beside=BETTER)
    assert good.tone == todo.tone == "warn"
    assert todo.figure == "Prefer linear regression"


def test_the_advice_on_confidence_names_no_factor_other_than_the_one_that_calibrate_fits(classifier, monkeypatch):
    measured = measurements.measure(classifier, *class_rows(90, seed=4))
    known = summary.advice(measured)._replace(fault="temperature")
    monkeypatch.setattr(summary, "advice", lambda *_, **__: known)
    headline, text = headline_and_text(measured)
    assert headline == "Correct the confidence"
    assert "relative to those of the class shares" in text and "dropbayes calibrate" in text


def test_predictions_no_better_than_a_guess_are_not_to_be_used_as_they_are():
    rng = np.random.default_rng(0)
    good, _, trusted, todo = answers(noisy_regression(rng.normal(size=500), 1.0, rise=0.0))
    assert (good.tone, trusted.tone, todo.tone) == ("warn", "good", "warn")  # calibrated, and no use
    assert todo.figure == "Improve it first"


def test_a_skewed_target_is_to_be_transformed_unless_it_was():
    rng = np.random.default_rng(0)
    mean = np.exp(rng.normal(size=2000))
    zero, level = np.zeros(2000), mean.std() / 2
    y = mean * np.exp(0.3 * rng.normal(size=2000))
    pit = calibration.gaussian_pit(mean, np.full(2000, level), y).numpy()
    std, ends = zero + level, (mean - level, mean + level)
    measured = measurements.Regression(10, y, mean, std, zero, std**2, *ends, pit, zero, zero)
    headline, text = headline_and_text(measured)
    assert headline == "Transform the target" and "<code>--target-transform auto</code>" in text
    assert headline_and_text(measured, transform="log")[0] == "Learn the noise longer"
    assert "--target-transform auto" in headline_and_text(measured, beside=BETTER)[1]


def test_rows_later_than_those_trained_on_call_for_a_fit_along_the_time():
    measured = noisy_regression(5 + 0.1 * np.random.default_rng(0).normal(size=300), 1.0)
    headline, text = headline_and_text(measured, time="the date")
    assert headline == "Fit along the time" and "<code>--time &#39;the date&#39;</code>" in text
    assert headline_and_text(measured)[0] == "Mend the bias first"


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


def test_training_rows_of_one_class_are_compared_with_their_share_alone(classifier):
    x, labels = class_rows(60, seed=3)
    measured = measurements.measure(classifier, x, labels)
    lines = baselines(measured, x, (x[:9], np.zeros(9, dtype=np.int64)))
    assert [line.name for line in lines] == ["this model", "class shares of the training rows"]
    assert lines[1].error == (labels != 0).mean()
