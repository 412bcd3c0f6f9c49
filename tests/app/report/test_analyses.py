"""Tests of the sections on features, on the training rows and on other models."""

import csv
import io
import urllib.parse

import numpy as np

from dropbayes.app.report import report
from tests.app.report.pages import Page, class_rows, regression_rows


def tables(text):
    """Every table of a page, as the link below its caption downloads it."""
    links = {a["download"]: a["href"] for tag, a in Page(text).tags if "download" in a}
    return {
        name: list(csv.DictReader(io.StringIO(urllib.parse.unquote(href.partition(",")[2]), newline="")))
        for name, href in links.items()
    }


def test_every_table_downloads_as_it_is_shown(regressor):
    x, y = regression_rows(120, seed=5)
    text = report(regressor, x, y, target="t", training=regression_rows(80))
    measured = tables(text)
    assert set(measured) == {
        "scores.csv",
        "baselines.csv",
        "dropout.csv",
        "importance.csv",
        "segments.csv",
        "training.csv",
        "uncertain.csv",
    }
    page = Page(text)
    assert [row["row"] for row in measured["uncertain.csv"]] == page.column("row")
    assert {row["score"]: row["value"] for row in measured["scores.csv"]}["RMSE"][:6] == page.scores["RMSE"][0][:6]


def test_all_three_features_matter_alike_and_are_said_to(regressor):
    x, y = regression_rows(300, seed=5)  # the truth is their sum
    page = Page(report(regressor, x, y, target="t", names=["a", "b", "c"]))
    rises = [float(text.split()[0]) for text in page.column("rise")]
    assert min(rises) > 0.6 * max(rises)
    assert "matters most" in page.text


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


def test_a_class_that_is_never_predicted_is_told(classifier):
    x, _ = class_rows(90, seed=4)
    predicted = classifier.predict(x)
    truth = np.where((predicted == "bee") & (np.arange(90) % 2 == 0), "cat", predicted)
    never = predicted != "cat"
    page = Page(report(classifier, x[never], truth[never], target="animal"))
    assert "1 class that occurs is never predicted" in page.text
    measured = tables(report(classifier, x[never], truth[never], target="animal"))["classes.csv"]
    assert {row["class"]: row["predicted"] for row in measured}["cat"] == "0"


def test_inputs_of_one_category_are_one_feature(regressor):
    x, y = regression_rows(60, seed=5)
    page = Page(report(regressor, x, y, target="t", names=["c = x", "c = y", "n"], features={"c": [0, 1], "n": [2]}))
    assert sorted(page.column("feature")[:2]) == ["c", "n"]
