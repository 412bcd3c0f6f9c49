"""Tests of the report's figures."""

import re

import numpy as np

from dropbayes.app.report import figures, measurements, svg
from tests.app.report.pages import regression_rows, scales_of


def test_the_curves_drawn_are_the_librarys(classifier, regressor):
    x, y = regression_rows(150, seed=5)
    measured = measurements.measure(regressor, x, y)
    for figure, expected in (
        (figures.coverage(measured), (measured.reliability.claimed, measured.reliability.observed)),
        (figures.risk_coverage(measured), (measured.risk.coverage, measured.risk.risk)),
    ):
        drawing = svg.draw(figure, width=900, height=400)
        horizontal, vertical = scales_of(drawing)
        path = re.search(r'class="measured" d="M([^"]*)"', drawing)[1]
        pixels = np.array([[float(v) for v in pair.split()] for pair in path.split("L")])
        np.testing.assert_allclose(horizontal.inverse(pixels[:, 0]), expected[0], atol=2e-4)
        np.testing.assert_allclose(vertical.inverse(pixels[:, 1]), expected[1], atol=2e-3)


def test_a_square_of_the_confusion_is_the_share_of_its_true_class():
    labels = np.array([0, 0, 0, 0, 1, 1])
    predicted = np.array([0, 0, 0, 1, 1, 0])
    measured = measurements.Classification(1, labels, np.eye(2)[predicted], *[np.zeros(6)] * 3, classes="ab")
    drawing = svg.draw(figures.confusion(measured), width=450, height=400)
    x, y = scales_of(drawing)
    squares = {
        (int(y.inverse(float(top) + 5)), int(x.inverse(float(left) + 5))): float(opacity)
        for left, top, opacity in re.findall(
            r'class="tile" x="([\d.]+)" y="([\d.]+)".*?fill-opacity="([\d.]+)"', drawing
        )
    }
    assert squares == {(0, 0): 0.75, (0, 1): 0.25, (1, 0): 0.5, (1, 1): 0.5}  # (true, predicted), row 0 on top
    assert re.findall(r'class="cell[^>]*>(\d)<', drawing) == ["3", "1", "1", "1"]


def test_the_bars_of_the_ranks_lie_over_the_scatter_of_chance_and_below_its_ends(regressor):
    measured = measurements.measure(regressor, *regression_rows(150, seed=5))
    drawing = svg.draw(figures.transforms(measured), width=450, height=400)
    kinds = re.findall(r'<path class="(\w+)"', drawing.partition("<g ")[2])
    assert kinds == ["chance", "bar", "edge", "edge", "ideal"]
