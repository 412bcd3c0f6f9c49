"""The report: what it shows is what the library measured, safely, in a real browser, whatever the data."""

import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes import calibration, information, scores
from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.report import charts, evidence, pictures, report, words

QUICK = {"drop_prob": 0.1, "weight_decay": 1e-4, "n_steps": 60, "n_networks": 2, "n_folds": 1, "n_draws": 10}
NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "</style><script>alert(2)</script>",
    "'; alert(3); //",
    "\u202eright to left\u202c",
    "\u05e9\u05dc\u05d5\u05dd",
    "{{7*7}}",
    "{% raw %}",
    "&amp;&lt;",
    "😀👩‍👩‍👧",
    "",
    "   ",
    "x" * 5000,
    "a\x00b\x1b[31m",
    "\ud800",
    "line\nbreak",
    "100 %",
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def regression_rows(n, n_features=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_features))
    return x, x.sum(1) + 0.3 * rng.normal(size=n)


def class_rows(n, n_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % n_classes
    centres = np.random.default_rng(1).normal(size=(n_classes, 4)) * 2
    return centres[labels] + rng.normal(size=(n, 4)), labels


@pytest.fixture(scope="module")
def regressor():
    torch.set_num_threads(1)
    return DropoutRegressor(**QUICK, noise="constant", random_state=0).fit(*regression_rows(80))


@pytest.fixture(scope="module")
def one_feature():
    x, y = regression_rows(60, 1)
    return DropoutRegressor(**QUICK, random_state=0).fit(x, y)


@pytest.fixture(scope="module")
def classifier():
    x, labels = class_rows(90)
    return DropoutClassifier(**QUICK, random_state=0).fit(x, np.array(["ant", "bee", "cat"])[labels])


class Page(HTMLParser):
    """The parts of a page that tests ask for."""

    VOID = frozenset({"meta", "link", "rect", "path", "br", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.scores, self.cells, self.open, self.texts, self.headings, self.ids = [], {}, [], [], [], [], []
        self.row, self.figures = None, {}
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        if "data-score" in attributes:
            self.scores[attributes["data-score"]] = [attributes["data-value"], attributes["data-error"], ""]
            self.row = attributes["data-score"]
        if tag == "td" and "data-label" in attributes:
            self.cells.append([attributes["data-label"], ""])
        if tag not in self.VOID:
            self.open.append((tag, attributes))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        inside = [tag for tag, _ in self.open]
        if not self.open or inside[-1] == "style":
            return
        self.texts.append(data)
        if inside[-1] == "td" and self.open[-1][1].get("class") == "numeric" and self.row:
            self.scores[self.row][2] += data
        if "td" in inside and self.cells:
            self.cells[-1][1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace("\u00a0", " ").split())

    def column(self, label):
        return [text.strip() for name, text in self.cells if name == label]


# ------------------------------------------------------------------------------------------ charts' mathematics


@given(
    st.floats(-1e9, 1e9), st.floats(1e-3, 1e9), st.floats(0, 1),
    st.tuples(st.floats(0, 500), st.floats(10, 900)), st.booleans(),
)  # fmt: skip
def test_the_inverse_of_a_scale_gives_the_value_back(low, extent, share, pixels, downwards):
    start, end = pixels[0], pixels[0] + pixels[1]
    scale = charts.Scale(low, low + extent, *((end, start) if downwards else (start, end)))
    value = low + share * extent
    assert scale.inverse(scale(value)) == pytest.approx(value, abs=1e-9 * (abs(low) + extent))
    assert scale(low) == scale.start and scale(low + extent) == pytest.approx(scale.end)


@given(st.floats(-1e8, 1e8), st.floats(1e-6, 1e8), st.integers(3, 12))
def test_ticks_are_round_inside_and_neither_too_many_nor_missing(low, extent, most):
    high = low + extent
    if extent < 1e-7 * abs(low):
        return  # no float can tell such ticks apart
    ticks = charts.round_ticks(low, high, most=most)
    assert 1 <= len(ticks) <= most
    assert all(low - 1e-6 * extent <= tick <= high + 1e-6 * extent for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        power = 10.0 ** math.floor(math.log10(step * 1.0001))
        exact = min((m * power for m in (1, 2, 5, 10)), key=lambda candidate: abs(candidate - step))
        assert step == pytest.approx(exact, abs=1e-12 * max(abs(low), abs(high)))  # 1, 2 or 5 times a power of ten
        assert all(abs(tick / exact - round(tick / exact)) < 1e-6 for tick in ticks)
        texts = charts.tick_texts(ticks)
        assert len(set(texts)) == len(ticks), texts
        shown = [float(text.replace(",", "").replace("−", "-")) for text in texts]
        np.testing.assert_allclose(shown, ticks, atol=0.01 * step)


def test_ticks_say_what_they_are():
    assert charts.tick_texts(charts.round_ticks(0, 1, most=6)) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert charts.tick_texts([-0.0, 50_000.0]) == ["0", "50,000"]
    assert charts.tick_texts([-2e-6, 0.0, 2e-6]) == ["−2e−6", "0", "2e−6"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(12, 60))
def test_thinning_keeps_ends_and_extremes_and_the_order(values, most):
    y = np.array(values)
    x = np.arange(len(y), dtype=float)
    kept = charts.thinned(x, y, -2 * y, most=most)
    assert len(kept) <= max(most, 2) and (np.diff(kept) > 0).all()
    assert y[kept].min() == y.min() and y[kept].max() == y.max()
    assert kept[0] == 0 and kept[-1] == len(y) - 1


def test_a_range_holds_its_values_even_when_they_are_all_one():
    for values in ([3.0], [0.0, 0.0], [1e12, 1e12], [-1e-12], [2.0, 5.0], [math.nan, 1.0, math.inf]):
        low, high = charts.padded_range(values)
        finite = [v for v in values if math.isfinite(v)]
        assert low < min(finite) and max(finite) < high
    assert charts.padded_range([math.nan]) == (-0.04, 1.04)


def scales_of(svg):
    found = [re.search(rf'data-{axis}="([^"]+)"', svg)[1].split() for axis in "xy"]
    return [charts.Scale(*map(float, numbers)) for numbers in found]


@pytest.mark.parametrize("size", [(900, 400), (346, 300)])
def test_every_mark_is_drawn_where_its_data_are(size):
    xs, ys = np.array([1.0, 2.0, 4.0]), np.array([10.0, 30.0, 20.0])
    figure = charts.Figure(
        "k", "t", "d", charts.Axis(0.0, 5.0, "x"), charts.Axis(0.0, 40.0, "y"),
        (
            charts.dots(xs, ys, kind="truth"), charts.line(xs, ys, kind="mean"),
            charts.band(xs, ys - 5, ys + 5, kind="outer"), charts.stems(xs, ys - 5, ys + 5, kind="stem"),
            charts.bars(xs - 0.5, xs + 0.5, ys, kind="bar"), charts.level(15.0, kind="level"),
        ),
    )  # fmt: skip
    svg = charts.drawn(figure, width=size[0], height=size[1])
    x, y = scales_of(svg)

    def points(kind):
        path = re.search(rf'class="{kind}" d="([^"]*)"', svg)[1]
        return np.array([[float(a), float(b)] for a, b in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)])

    def data(kind):
        return np.stack([x.inverse(points(kind)[:, 0]), y.inverse(points(kind)[:, 1])], 1)

    np.testing.assert_allclose(data("truth"), np.stack([xs, ys], 1), atol=0.02)
    np.testing.assert_allclose(data("mean"), np.stack([xs, ys], 1), atol=0.02)
    np.testing.assert_allclose(data("outer")[:3], np.stack([xs, ys + 5], 1), atol=0.02)
    np.testing.assert_allclose(data("outer")[3:], np.stack([xs, ys - 5], 1)[::-1], atol=0.02)
    np.testing.assert_allclose(data("stem")[::2, 1], ys - 5, atol=0.02)
    tops = [float(v) for v in re.findall(r"V([\d.]+)H", re.search(r'class="bar" d="([^"]*)"', svg)[1])]
    np.testing.assert_allclose(y.inverse(np.array(tops)), ys, atol=0.02)
    assert y.inverse(float(re.search(r'class="level" d="M[\d.]+ ([\d.]+)H', svg)[1])) == pytest.approx(15, abs=0.05)
    assert x.start < x.end and y.end < y.start  # up is up


def test_texts_along_an_axis_do_not_touch():
    ticks = tuple((k + 0.5, f"a long class name {k}") for k in range(20))
    figure = charts.Figure("k", "t", "d", charts.Axis(0.0, 20.0, "x", ticks=ticks), charts.Axis(0.0, 1.0, "y"), ())
    svg = charts.drawn(figure, width=346, height=300)
    below = re.findall(r'class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)', svg)
    places = [(float(place), len(text)) for place, text in below]
    assert places and all(b[0] - a[0] > 6 * (a[1] + b[1]) / 2 for a, b in pairwise(places))


# ------------------------------------------------------------------------------------------------------- numbers


def draws_of(model, x):
    mixture = model.predictive(x)
    return mixture.location, mixture.scale.square()


def test_the_scores_of_a_regression_are_those_of_the_library(regressor):
    x, y = regression_rows(70, seed=5)
    page = Page(report(regressor, x, y, target="height"))
    mean, std = regressor.predict(x, return_std=True)
    lower, upper = regressor.predict_interval(x)
    drawn, noise = draws_of(regressor, x)
    pit = calibration.mixture_pit(drawn, y, noise_variance=noise)
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
    assert f"off by {words.number(float(np.abs(mean - y).mean()))} on average" in page.text
    lower, upper = regressor.predict_interval(x)
    held = int(((lower <= y) & (y <= upper)).sum())
    assert f"{held} of 70 truths" in page.text


def test_the_most_uncertain_rows_are_those_of_largest_spread_and_its_parts_add_up(regressor):
    x, y = regression_rows(70, seed=5)
    page = Page(report(regressor, x, y, target="height", shown={"town": [f"t{k}" for k in range(70)]}))
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
    found = evidence.classification(classifier, x, labels)
    kept = np.argsort(found.entropy)[:72]
    risk = float((found.predicted != found.labels)[kept].mean())
    assert evidence.risk_after_deferring(found.risk, 0.1) == (8, pytest.approx(risk))
    assert f"{words.percent(risk)} without the 10 % most uncertain rows" in page.text


def test_without_a_seed_the_draws_are_the_models_own(regressor):
    x, y = regression_rows(30, seed=8)
    rmse = [float(Page(report(regressor, x, y, target="t", seed=s, n_draws=n)).scores["RMSE"][0])
            for s, n in ((None, None), (regressor.seed_, 10), (1, None), (None, 200))]  # fmt: skip
    assert rmse[0] == rmse[1] == pytest.approx(float(scores.rmse(regressor.predict(x), y)))
    assert rmse[2] != rmse[0] and rmse[3] != rmse[0]
    assert regressor.n_draws == 10


def test_the_same_arguments_give_the_same_bytes(classifier):
    x, labels = class_rows(30)
    names = np.array(["ant", "bee", "cat"])[labels]
    assert report(classifier, x, names, target="t") == report(classifier, x, names, target="t")


def calibrated_regression(scale, n=2000):
    """Evidence on a model whose stated spread is `scale` times too small, without any network."""
    rng = np.random.default_rng(0)
    residual = rng.normal(size=n)
    std = np.full(n, 1 / scale)
    pit = calibration.gaussian_pit(np.zeros(n), std, residual)
    return evidence.Regression(
        residual, np.zeros(n), std, std / 2, std * 0.75**0.5, -1.96 * std, 1.96 * std, pit.numpy(),
        calibration.interval_reliability(pit), scores.risk_coverage(std, np.abs(residual)), {}, 10,
    )  # fmt: skip


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "calibrated"), (1.3, "over"), (0.8, "under")])
def test_the_verdict_on_intervals_follows_the_truth(scale, verdict):
    assert words.regression_verdict(calibrated_regression(scale)).kind == verdict
    assert words.regression_verdict(calibrated_regression(scale, n=20)).kind == "few"


def test_the_verdict_is_rarely_wrong_about_a_calibrated_model():
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        curve = calibration.interval_reliability(rng.uniform(size=200))
        found = evidence.Regression(*[np.zeros(200)] * 8, curve, None, {}, 1)  # type: ignore[call-arg]
        wrong += words.regression_verdict(found).kind != "calibrated"
    assert wrong <= 32  # 5 % of 400 and three standard deviations


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "calibrated"), (3.0, "over"), (0.5, "under")])
def test_the_verdict_on_probabilities_follows_the_truth(power, verdict):
    rng = np.random.default_rng(0)
    p = rng.uniform(0.02, 0.98, size=3000)
    labels = (rng.uniform(size=3000) < p).astype(np.int64)
    claimed = p**power / (p**power + (1 - p) ** power)
    both = np.stack([1 - claimed, claimed], 1)
    found = evidence.Classification(labels, both, *[np.zeros(3000)] * 3, None, None, {  # type: ignore[call-arg]
        "Accuracy": evidence.Score("Accuracy", float(scores.accuracy(both, labels))),
        "ECE": evidence.Score("ECE", float(scores.expected_calibration_error(both, labels))),
    }, 1)  # fmt: skip
    assert words.class_verdict(found).kind == verdict


def test_the_calibration_error_of_chance_is_what_calibrated_models_show():
    rng = np.random.default_rng(0)
    seen = []
    p = rng.uniform(0.5, 1, size=500)
    for _ in range(200):
        labels = (rng.uniform(size=500) > p).astype(np.int64)
        seen.append(float(scores.expected_calibration_error(np.stack([p, 1 - p], 1), labels)))
    assert evidence.chance_error(torch.tensor(p)) == pytest.approx(np.mean(seen), rel=0.05)


def test_a_gain_of_deferring_is_called_real_where_random_rows_would_rarely_bring_it():
    found = calibrated_regression(1.0, n=100)
    rng, loss = np.random.default_rng(0), np.abs(found.y)
    scatter = np.std([rng.permutation(loss)[10:].mean() for _ in range(4000)])
    assert words._gain_is_real(found, 10, 2.2 * scatter) and not words._gain_is_real(found, 10, 1.8 * scatter)


@pytest.mark.parametrize(("n_wrong", "caught", "real"), [(1, 1, False), (2, 2, True), (10, 4, True), (10, 2, False)])
def test_the_errors_caught_by_deferring_are_weighed_against_a_random_choice(n_wrong, caught, real):
    uncertainty = np.arange(100.0)
    wrong = np.zeros(100, dtype=np.int64)
    wrong[[*range(n_wrong - caught), *range(100 - caught, 100)]] = 1  # the most uncertain rows come last
    found = evidence.Classification(  # type: ignore[call-arg]
        wrong, np.eye(2)[np.zeros(100, dtype=int)], *[uncertainty] * 3, None,
        scores.risk_coverage(uncertainty, wrong.astype(float)), {}, 1,
    )  # fmt: skip
    assert words._gain_is_real(found, 10, math.nan) == real
    chosen = [np.random.default_rng(k).permutation(wrong)[:10].sum() >= caught for k in range(2000)]
    assert (np.mean(chosen) <= 0.025) == real


def test_what_was_done_is_not_said_twice_and_commands_look_like_commands(regressor):
    x, y = regression_rows(10)
    done = {"draws": "as many as needed", "versions": "dropbayes 9.9, torch", "command": "dropbayes report m t.csv"}
    text = report(regressor, x, y, target="t", done=done)
    assert text.count("<bdi>Draws</bdi>") == 1 and "functions drawn" not in text
    assert "<code>dropbayes report m t.csv</code>" in text and "<code>dropbayes 9.9" not in text


def test_standard_errors_are_those_of_resampled_rows():
    rng = np.random.default_rng(0)
    mean, y = np.zeros(300), rng.standard_t(8, size=300)
    rmse, mae = evidence._errors(mean, y)
    again = [rng.choice(y, 300) for _ in range(2000)]
    assert rmse.error == pytest.approx(np.std([np.sqrt((a**2).mean()) for a in again]), rel=0.1)
    assert mae.error == pytest.approx(np.std([np.abs(a).mean() for a in again]), rel=0.1)


def test_the_error_of_the_mean_rank_is_that_of_uniform_ranks(regressor):
    x, y = regression_rows(40, seed=5)
    error = evidence.regression(regressor, x, y).scores["Mean PIT"].error
    ranks = np.random.default_rng(0).uniform(size=(20_000, 40)).mean(1)
    assert error == pytest.approx(ranks.std(), rel=0.02)


@pytest.mark.parametrize(("shift", "word"), [(-2.0, "low"), (2.0, "high"), (0.0, "")])
def test_predictions_below_the_truth_are_said_to_run_low(regressor, shift, word):
    x, _ = regression_rows(60, seed=5)
    found = evidence.regression(regressor, x, regressor.predict(x) - shift)
    assert words.lean(found) == word
    if word:
        assert f"Predictions run {word}" in words.regression_answers(found, target="t")[2].text


def test_the_curves_drawn_are_the_librarys(classifier, regressor):
    x, y = regression_rows(150, seed=5)
    found = evidence.regression(regressor, x, y)
    for figure, expected in (
        (pictures.coverage(found.reliability), (found.reliability.claimed, found.reliability.observed)),
        (pictures.risk_coverage(found.risk, loss="l", percent=False), (found.risk.coverage, found.risk.risk)),
    ):
        svg = charts.drawn(figure, width=900, height=400)
        horizontal, vertical = scales_of(svg)
        path = re.search(r'class="measured" d="M([^"]*)"', svg)[1]
        pixels = np.array([[float(v) for v in pair.split()] for pair in path.split("L")])
        np.testing.assert_allclose(horizontal.inverse(pixels[:, 0]), expected[0], atol=2e-4)
        np.testing.assert_allclose(vertical.inverse(pixels[:, 1]), expected[1], atol=2e-3)


def test_a_square_of_the_confusion_is_the_share_of_its_true_class():
    labels = np.array([0, 0, 0, 0, 1, 1])
    predicted = np.array([0, 0, 0, 1, 1, 0])
    found = evidence.Classification(labels, np.eye(2)[predicted], *[np.zeros(6)] * 3, None, None, {}, 1)  # type: ignore[call-arg]
    svg = charts.drawn(pictures.confusion(found, ["a", "b"]), width=450, height=400)
    x, y = scales_of(svg)
    squares = {
        (int(y.inverse(float(top) + 5)), int(x.inverse(float(left) + 5))): float(opacity)
        for left, top, opacity in re.findall(r'class="tile" x="([\d.]+)" y="([\d.]+)".*?fill-opacity="([\d.]+)"', svg)
    }
    assert squares == {(0, 0): 0.75, (0, 1): 0.25, (1, 0): 0.5, (1, 1): 0.5}  # (true, predicted), row 0 on top
    assert re.findall(r'class="cell[^>]*>(\d)<', svg) == ["3", "1", "1", "1"]


# -------------------------------------------------------------------------------------------------------- safety


def test_a_page_is_whole_ordered_and_closed_to_the_world(regressor, classifier):
    x, y = regression_rows(40)
    labels = np.array(["ant", "bee", "cat"])[class_rows(40)[1]]
    for text in (report(regressor, x, y, target="a"), report(classifier, class_rows(40)[0], labels, target="b")):
        page = Page(text)
        tags = [tag for tag, _ in page.tags]
        assert not {"script", "iframe", "object", "embed", "img", "form"} & set(tags)
        policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
        assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'none'; img-src data:")
        assert len(page.ids) == len(set(page.ids))
        assert page.headings[0] == "h1" and page.headings.count("h1") == 1
        assert all(b <= f"h{int(a[1]) + 1}" for a, b in zip(page.headings, page.headings[1:], strict=False))
        assert all(
            {"title", "desc"} <= set(tags[k : k + 3]) for k, (t, a) in enumerate(page.tags) if a.get("class") == "chart"
        )
        assert tags.count("caption") == tags.count("table") == 2
        assert tags.count("figcaption") == tags.count("figure") and text.count("<figcaption></figcaption>") == 0
        assert not re.search(r"(https?:)?//", text), "an address"
        assert not re.search(r"url\((?!#)", text)
        anchors = [a["href"] for t, a in page.tags if t == "a"]
        assert anchors and all(href[0] == "#" and href[1:] in page.ids for href in anchors)
        assert re.search(r"\bnan\b", page.text, re.I) is None
        text.encode("utf-8")


def assert_harmless(text):
    page = Page(text)
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(a["href"][0] == "#" or a["href"] == "data:," for _, a in page.tags if "href" in a)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00\x1b]", text)
    assert text.count("<style>") == text.count("</style>") == 1
    text.encode("utf-8")
    return page


@pytest.mark.parametrize("nasty", NASTY, ids=lambda text: repr(text)[:24])
def test_every_name_of_a_regression_is_shown_as_text_only(regressor, nasty):
    x, y = regression_rows(12)
    page = assert_harmless(report(
        regressor, x, y, target=nasty, title=nasty, shown={nasty: [nasty] * 12}, done={nasty: nasty, "b": nasty},
        names=[nasty, nasty, "c"], along=0, training=(x, y),
    ))  # fmt: skip
    assert "49" not in nasty or "{{7*7}}" in page.text
    shown = words.name(nasty, most=40)
    assert " ".join(shown.split()) in page.text
    if nasty == "{{7*7}}":
        assert "{{7*7}}" in page.text


def test_every_class_name_is_shown_as_text_only():
    names = np.array(
        [text for text in NASTY if "\ud800" not in text and "\x00" not in text and text.strip()], dtype=object
    )
    x, labels = class_rows(60, len(names))
    model = DropoutClassifier(**QUICK, random_state=0)
    model.fit(x, names[labels].astype(str))
    page = assert_harmless(report(model, x, names[labels].astype(str), target="<b>bold</b>"))
    assert "<b>bold</b>" in page.text  # as text
    assert "<script>alert(1)</script>"[:11] in page.text


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_a_name_is_never_empty_never_steers_and_never_breaks_a_line(text):
    shown = words.name(text, most=30)
    assert 0 < len(shown) <= 30 and not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", shown)
    shown.encode("utf-8")
    assert words.name("plain name") == "plain name"


@given(st.floats(-1e300, 1e300), st.integers(1, 6))
def test_a_number_reads_back_to_its_digits(value, digits):
    text = words.number(value, digits=digits).replace("−", "-").replace(",", "")
    assert float(text) == pytest.approx(value, rel=0.51 * 10.0 ** (1 - digits), abs=1e-300)


# -------------------------------------------------------------------------------------------------- sizes and shapes


@pytest.mark.parametrize("n_rows", [2, 3, 9, 29, 31])
def test_few_rows_are_enough_for_a_page(regressor, classifier, n_rows):
    x, y = regression_rows(n_rows)
    page = Page(report(regressor, x, y, target="t"))
    assert len(page.column("row")) == min(10, n_rows)
    assert ("too few to judge" in page.text) == (n_rows < 30)
    x, labels = class_rows(n_rows)
    assert Page(report(classifier, x, np.array(["ant", "bee", "cat"])[labels], target="t")).scores["Accuracy"]


def test_one_feature_has_a_band_on_an_even_grid_that_is_the_models(one_feature):
    x, y = regression_rows(50, 1, seed=2)
    text = report(one_feature, x, y, target="height")
    svg = re.search(r'<svg class="chart"[^>]*aria-labelledby="band-900.*?</svg>', text, re.DOTALL)[0]
    horizontal, vertical = scales_of(svg)
    path = re.search(r'class="mean" d="M([^"]*)"', svg)[1]
    pixels = np.array([[float(v) for v in pair.split()] for pair in path.split("L")])
    grid = np.linspace(x.min(), x.max(), 300)
    np.testing.assert_allclose(horizontal.inverse(pixels[:, 0]), grid, atol=0.01)
    np.testing.assert_allclose(vertical.inverse(pixels[:, 1]), one_feature.predict(grid[:, None]), atol=0.02)
    outer = re.search(r'class="outer" d="M([^"]*)Z"', svg)[1]
    edges = vertical.inverse(np.array([float(pair.split()[1]) for pair in outer.split("L")]))
    lower, upper = one_feature.predict_interval(grid[:, None])
    np.testing.assert_allclose(edges, np.concatenate([upper, lower[::-1]]), atol=0.03)
    found = evidence.regression(one_feature, x, y)
    outside = int(((y < found.lower) | (y > found.upper)).sum())
    assert len(re.findall("h0", (re.search(r'class="miss" d="([^"]*)"', svg) or ["", ""])[1])) == outside
    assert Page(report(one_feature, np.ones((4, 1)), y[:4], target="t")).scores  # one place: rows side by side


def test_ten_thousand_rows_make_a_small_file_with_every_outlier_row(regressor):
    x, y = regression_rows(10_000, seed=3)
    y[1234] = 50.0
    text = report(regressor, x, y, target="height")
    assert len(text.encode()) < 300_000
    page = Page(text)
    assert "10,000 rows" in page.text and "of the rows are drawn" in page.text
    assert f"of {evidence.CRPS_ROWS:,} evenly chosen rows" in page.text
    svg = re.search(r'<svg class="chart"[^>]*aria-labelledby="band-900.*?</svg>', text, re.DOTALL)[0]
    assert scales_of(svg)[1].high > 50
    misses = re.search(r'class="miss" d="([^"]*)"', svg)[1]
    heights = scales_of(svg)[1].inverse(np.array([float(v) for v in re.findall(r" ([\d.]+)h0", misses)]))
    assert heights.max() == pytest.approx(50, abs=0.2)  # thinning kept the extreme


@pytest.mark.parametrize("n_classes", [2, 12, 50])
def test_any_number_of_classes(n_classes):
    x, labels = class_rows(10 * n_classes, n_classes)
    model = DropoutClassifier(**QUICK | {"n_steps": 20}, random_state=0).fit(x, labels)
    text = report(model, x, labels, target="class")
    assert len(text) < 400_000
    page = Page(text)
    assert f"one of {n_classes} classes" in page.text
    assert ('id="figure-confusion"' in text) == (n_classes <= pictures.CONFUSION_CLASSES)


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


def test_heteroscedastic_noise_and_extreme_units_are_shown():
    x, y = regression_rows(60)
    for scale in (1e-9, 1e9):
        model = DropoutRegressor(**QUICK, noise="heteroscedastic", random_state=0).fit(x, scale * y)
        page = Page(report(model, x, scale * y, target="t"))
        assert float(page.scores["RMSE"][0]) < 3 * scale
        assert "Noise" not in page.text


def test_an_impossible_truth_has_minus_infinity_not_a_crash():
    assert words.number(-math.inf) == "−∞"
    value, error = evidence.mean_and_error(np.array([-math.inf, 0.0]))
    assert words.score_text(evidence.Score("RMSE", value, error)) == "−∞"


def test_columns_beyond_a_few_are_counted_not_shown(regressor):
    x, y = regression_rows(20)
    page = Page(report(regressor, x, y, target="t", shown={f"c{k}": list(range(20)) for k in range(30)}))
    assert len(page.column("c0")) == 10 and not page.column("c29")
    assert f"{30 - 4} more columns are not shown" in page.text


# ------------------------------------------------------------------------------------------------ in a browser

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine")
    options = [
        "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-quic",
    ]  # fmt: skip
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory, regressor, one_feature, classifier):
    """Pages of every kind, with long and nasty names among them."""
    folder = tmp_path_factory.mktemp("pages")
    x, y = regression_rows(120, seed=5)
    names = np.array(["ant", "bee", "cat"])[class_rows(120)[1]]
    nasty = {text: [text] * 120 for text in NASTY[:4]}
    pages = {
        "sorted": report(regressor, x, y, target="height", shown=nasty, done={NASTY[0]: NASTY[1], "To repeat": "dropbayes " + "x" * 300}),
        "band": report(one_feature, x[:, :1], y, target="y" * 200, title="t" * 500, training=(x[:50, :1], y[:50])),
        "along": report(regressor, x, y, target="t", along=1, unknown=2 * x),
        "classes": report(classifier, class_rows(120)[0], names, target=NASTY[0]),
        "two": report(regressor, x[:2], y[:2], target="t"),
    }  # fmt: skip
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


# The contrast of a colour with the first opaque background behind it [WCAG 2.2, 1.4.3].
CONTRAST = r"""() => {
  const parse = c => c.match(/[\d.]+/g).map(Number);
  const light = c => { const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("h1,h2,h3,p,a,td,th,caption,figcaption,li,dt,dd,code,svg.chart text:not(.cell)")) {
    if (!e.getClientRects().length || !e.textContent.trim()) continue;
    const style = getComputedStyle(e), ink = parse(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(e))].sort((p, q) => q - p);
    found.push([(a + 0.05) / (b + 0.05), e.tagName + " " + e.textContent.trim().slice(0, 40)]);
  }
  return found.sort((p, q) => p[0] - q[0]).slice(0, 1)[0];
}"""


@pytest.mark.parametrize("name", ["sorted", "band", "along", "classes", "two"])
def test_a_browser_shows_the_page_without_errors_requests_or_sideways_scrolling(browser, written, name):
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        tab = context.new_page()
        errors, requests = [], []
        tab.on("console", lambda message, errors=errors: errors.append(message.text))
        tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        tab.on("dialog", lambda dialog, errors=errors: errors.append("dialog"))
        tab.on("request", lambda request, requests=requests: requests.append(request.url))
        tab.goto((written / f"{name}.html").as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (scheme, width)
            wide = tab.evaluate(
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, .scroll, thead') && "
                "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + ' ' + e.className)"
            )
            assert not wide, (scheme, width, wide)
            sections = tab.locator("section")
            assert sections.count() == 7 and all(sections.nth(k).is_visible() for k in range(7))
            assert all(tab.locator("figure").nth(k).locator("svg.chart:visible").count() == 1
                       for k in range(tab.locator("figure").count()))  # fmt: skip
            smallest = tab.evaluate(
                "Math.min(...[...document.querySelectorAll('svg.chart text')].map(e => e.getBoundingClientRect().height)"
                ".filter(h => h > 0))"
            )
            assert smallest >= 9, "letters too small to read"
            worst, where = tab.evaluate(CONTRAST)
            assert worst >= 4.5, (scheme, width, worst, where)
        assert errors == [] and [url for url in requests if not url.startswith(("file:", "data:"))] == []
        assert len(requests) == 1 + sum(url == "data:," for url in requests)
        context.close()


@pytest.mark.parametrize("name", ["classes.html", "sorted.html"])
def test_a_page_prints_on_white_with_the_wide_charts(browser, written, tmp_path, name):
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.set_viewport_size({"width": 700, "height": 1000})  # about the width of a sheet of paper
    tab.goto((written / name).as_uri())
    tab.emulate_media(media="print", color_scheme="dark")
    wide = "[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, thead') && e.getBoundingClientRect().right > 701)"
    assert tab.evaluate(f"{wide}.length") == 0  # paper does not scroll
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('h2')).color") == "rgb(0, 0, 0)"
    assert tab.locator(".on-wide:visible").count() == tab.locator("figure").count()
    assert tab.locator(".on-narrow:visible").count() == 0
    tab.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    context.close()


# -------------------------------------------------------------------------------------------------- bad arguments

X, Y = regression_rows(10)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[:, :2]}, ValueError, "`x` must be"),
        ({"x": X[:1], "y": Y[:1]}, ValueError, "at least 2 rows"),
        ({"x": X[0]}, ValueError, "`x` must be"),
        ({"x": [["a"] * 3] * 10}, ValueError, "`x` must be a matrix of numbers"),
        ({"x": np.where(X[3, 1] == X, np.nan, X)}, ValueError, "`x` must hold finite numbers; row 3"),
        ({"y": Y[:5]}, ValueError, "`y` must hold one truth for each of the 10 rows"),
        ({"y": Y[:, None]}, ValueError, "`y` must hold one truth"),
        ({"y": np.where(Y[4] == Y, np.inf, Y)}, ValueError, "`y` must hold finite numbers; row 4"),
        ({"y": ["a"] * 10}, ValueError, "`y` must hold numbers"),
        ({"target": 3}, TypeError, "`target` must be text"),
        ({"title": None}, TypeError, "`title` must be text"),
        ({"shown": {"a": [1, 2]}}, ValueError, "`shown` must have one value"),
        ({"shown": {"a": "0123456789"}}, ValueError, "`shown` must have one value"),
        ({"shown": [1]}, TypeError, "`shown` must map"),
        ({"done": "all"}, TypeError, "`done` must map"),
        ({"n_draws": 0}, ValueError, "`n_draws` must be a positive integer"),
        ({"n_draws": 2.5}, ValueError, "`n_draws` must be a positive integer"),
        ({"seed": -1}, ValueError, "`seed` must be"),
        ({"names": ["a"]}, ValueError, "`names` must name each of the 3"),
        ({"names": "abc"}, ValueError, "`names` must name each of the 3"),
        ({"along": 3}, ValueError, "`along` must number a column"),
        ({"training": X}, TypeError, "`training` must be a pair"),
        ({"training": (X, Y[:3])}, ValueError, "`training` must hold one truth"),
        ({"unknown": X[:, :1]}, ValueError, "`unknown` must be"),
        ({"model": "model"}, TypeError, "`model` must be a DropoutRegressor or"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(regressor, change, error, message):
    arguments = {"model": regressor, "x": X, "y": Y, "target": "t"} | change
    with pytest.raises(error, match=re.escape(message)):
        report(arguments.pop("model"), arguments.pop("x"), arguments.pop("y"), **arguments)


def test_models_that_cannot_be_reported_on_are_refused(classifier):
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        report(DropoutRegressor(), X, Y, target="t")
    two = DropoutRegressor(**QUICK, random_state=0).fit(X, np.stack([Y, -Y], 1))
    with pytest.raises(ValueError, match="`model` must predict one output; it predicts 2"):
        report(two, X, Y, target="t")
    with pytest.raises(ValueError, match="only the classes the model was fitted to; got 'dog'"):
        report(classifier, class_rows(2)[0], ["ant", "dog"], target="t")


def test_frames_and_shuffled_series_are_read_by_position_without_a_warning(recwarn):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    x, y = regression_rows(40)
    frame = pandas.DataFrame(x, columns=["a", "b", "c"], index=np.arange(40)[::-1])
    model = DropoutRegressor(**QUICK, random_state=0).fit(frame, y)
    page = Page(
        report(
            model,
            frame,
            pandas.Series(y),
            target="t",
            shown={"a": frame["a"], "n": pandas.Series(range(40), index=frame.index)},
        )
    )
    assert page.column("n") == [str(int(row) - 1) for row in page.column("row")]
    assert not recwarn.list and list(model.feature_names_in_) == ["a", "b", "c"]
    assert page.column("a") == Page(report(model, x, y, target="t")).column("a")  # the model's own names


def test_a_missing_class_and_an_endless_prediction_are_refused(regressor, classifier):
    with pytest.raises(ValueError, match="only the classes the model was fitted to; got 'None'"):
        report(classifier, class_rows(2)[0], np.array(["ant", None], dtype=object), target="t")
    with pytest.raises(ValueError, match="row 1 does not"):
        report(regressor, np.array([[0.0, 0, 0], [1e300, 0, 0]]), np.zeros(2), target="t")
    with pytest.raises(ValueError, match="row 0 does not"):
        report(classifier, np.array([[1e300, 0, 0, 0], [0.0, 0, 0, 0]]), ["ant", "bee"], target="t")


def test_the_page_needs_neither_matplotlib_nor_pandas():
    script = (
        "import sys; import numpy as np; from dropbayes.report import report; from dropbayes.estimators import *; "
        "x = np.linspace(-1, 1, 8)[:, None]; m = DropoutRegressor(drop_prob=.1, weight_decay=1e-4, n_steps=2, n_networks=1); "
        "report(m.fit(x, x[:, 0]), x, x[:, 0], target='t'); print({'matplotlib', 'pandas'} & set(sys.modules))"
    )
    source = pathlib.Path(__file__).parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert "matplotlib" not in out.stdout
