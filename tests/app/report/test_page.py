"""Tests of the whole page: safe, small, the same for the same arguments."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from dropbayes.app.report import report
from dropbayes.estimators import DropoutClassifier
from dropbayes.runtime.formatting import printable_name
from tests.app.report.pages import NASTY, QUICK, Page, class_rows, regression_rows, scales_of
from tests.cases import slow_except


def test_the_same_arguments_give_the_same_bytes(classifier):
    x, labels = class_rows(30)
    names = np.array(["ant", "bee", "cat"])[labels]
    assert report(classifier, x, names, target="t") == report(classifier, x, names, target="t")


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
        assert tags.count("caption") == tags.count("table") == sum("download" in a for _, a in page.tags) >= 3
        assert tags.count("figcaption") == tags.count("figure") and text.count("<figcaption></figcaption>") == 0
        assert not re.search(r"(https?:)?//", text), "an address"
        assert not re.search(r"url\((?!#)", text)
        anchors = [a["href"] for t, a in page.tags if t == "a" and "download" not in a]
        assert anchors and all(href[0] == "#" and href[1:] in page.ids for href in anchors)
        assert re.search(r"\bnan\b", page.text, re.I) is None
        text.encode("utf-8")


@pytest.mark.parametrize(("n_wrong", "words"), [(0, "0 predictions are wrong."), (1, "1 prediction is wrong.")])
def test_wrong_predictions_are_counted_in_words(classifier, n_wrong, words):
    x, _ = class_rows(30)
    predicted = classifier.predict(x)
    predicted[:n_wrong] = next(name for name in classifier.classes_ if name != predicted[0])
    assert f"In all, {words}" in Page(report(classifier, x, predicted, target="t")).text


def assert_harmless(text):
    page = Page(text)
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    links = [a for _, a in page.tags if "href" in a]
    assert all(a["href"][0] == "#" or a["href"] == "data:," or "download" in a for a in links)
    assert all(a["href"].startswith("data:text/csv;charset=utf-8,") for a in links if "download" in a)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00\x1b]", text)
    assert text.count("<style>") == text.count("</style>") == 1
    text.encode("utf-8")
    return page


@pytest.mark.parametrize(
    "nasty",
    slow_except(NASTY, *NASTY[:2], NASTY[3], *NASTY[5:8], "", "a\x00b\x1b[31m", "\ud800"),
    ids=lambda text: repr(text)[:24],
)
def test_every_name_of_a_regression_is_shown_as_text_only(regressor, nasty):
    x, y = regression_rows(12)
    page = assert_harmless(report(
        regressor, x, y, target=nasty, title=nasty, columns={nasty: [nasty] * 12}, provenance={nasty: nasty, "b": nasty},
        names=[nasty, nasty, "c"], band_feature=0, training=(x, y),
    ))  # fmt: skip
    assert "49" not in nasty or "{{7*7}}" in page.text
    shown = printable_name(nasty, max_length=40)
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


@pytest.mark.parametrize("n_rows", slow_except([2, 3, 9, 29, 31], 2, 29, 31))
def test_few_rows_are_enough_for_a_page(regressor, classifier, n_rows):
    x, y = regression_rows(n_rows)
    page = Page(report(regressor, x, y, target="t"))
    assert len(page.column("row")) == min(10, n_rows)
    assert ("too few to judge" in page.text) == (n_rows < 30)
    x, labels = class_rows(n_rows)
    assert Page(report(classifier, x, np.array(["ant", "bee", "cat"])[labels], target="t")).scores["Accuracy"]


def test_ten_thousand_rows_make_a_small_file_with_every_outlier_row(regressor):
    x, y = regression_rows(10_000, seed=3)
    y[1234] = 50.0
    text = report(regressor, x, y, target="height")
    assert len(text.encode()) < 300_000
    page = Page(text)
    assert "10,000 rows" in page.text and "of the rows are drawn" in page.text
    assert "of 2,000 evenly chosen rows" in page.text
    drawing = re.search(r'<svg class="chart"[^>]*aria-labelledby="band-900.*?</svg>', text, re.DOTALL)[0]
    assert scales_of(drawing)[1].high > 50
    misses = re.search(r'class="miss" d="([^"]*)"', drawing)[1]
    heights = scales_of(drawing)[1].inverse(np.array([float(v) for v in re.findall(r" ([\d.]+)h0", misses)]))
    assert heights.max() == pytest.approx(50, abs=0.2)  # thinning kept the extreme


@pytest.mark.slow
def test_the_page_needs_neither_matplotlib_nor_pandas():
    script = (
        "import sys; import numpy as np; from dropbayes.app.report import report; from dropbayes.estimators import *; "
        "x = np.linspace(-1, 1, 8)[:, None]; m = DropoutRegressor(drop_prob=.1, weight_decay=1e-4, n_steps=2, n_networks=1); "
        "report(m.fit(x, x[:, 0]), x, x[:, 0], target='t'); print({'matplotlib', 'pandas'} & set(sys.modules))"
    )
    source = pathlib.Path(__file__).parent.parent.parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert "matplotlib" not in out.stdout
