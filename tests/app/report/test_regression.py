"""Tests of the sections on a regression."""

import re

import numpy as np

from dropbayes.app.report import measurements, report
from dropbayes.estimators import DropoutRegressor
from tests.app.report.pages import QUICK, Page, regression_rows, scales_of


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
    measured = measurements.regression(one_feature, x, y)
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
