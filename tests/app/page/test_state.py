"""What the page says of its scenes, and what its address holds."""

import os
import pathlib
import re

import numpy as np
import pytest

from tests.app.page.javascript import WEB, call, needs_node

pytestmark = needs_node


@pytest.fixture(scope="module")
def scenes():
    return call("./runs.mjs", "allScenes")


def test_an_address_holds_everything_that_is_not_usual():
    state = {"tab": "world", "scene": "co2", "points": [{"x": 0.125, "y": -1.5}, {"x": -3, "y": 2}],
             "settings": {"depth": 2, "dropProb": 0.0123, "learnPrecision": True, "activation": "tanh", "seed": 2147483647}}  # fmt: skip
    assert call("./runs.mjs", "readBack", state) == state


def test_a_scene_as_it_comes_has_a_short_address():
    assert call("./runs.mjs", "sceneAddress", "gap") == "tab=points&scene=gap"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dropProb", "0.2", 0.2),
        ("dropProb", "7", 0.6),
        ("dropProb", "-1", 0.005),
        ("width", "20.4", 20),
        ("seed", "1e99", 2**31 - 1),
        ("depth", "", None),
        ("depth", "two", None),
        ("precision", "Infinity", None),
        ("activation", "tanh", "tanh"),
        ("activation", "swish", None),
        ("mean", "0", False),
        ("mean", "yes", None),
    ],
)
def test_settings_from_an_address_are_sane_or_ignored(name, text, value):
    assert call("state.js", "settingOfText", name, text) == value


def test_every_scene_lies_inside_its_axes_and_to_a_thousandth(scenes):
    for scene in scenes.values():
        x, y = (np.array([point[name] for point in scene["points"]]) for name in "xy")
        assert len(x) >= 20 and (np.abs(np.r_[x, y] * 1000 - np.round(np.r_[x, y] * 1000)) < 1e-6).all()
        assert scene["xRange"][0] < x.min() and x.max() < scene["xRange"][1]
        assert scene["yRange"][0] < y.min() and y.max() < scene["yRange"][1]


@pytest.fixture(scope="module")
def data():
    folder = os.environ.get("DROPBAYES_DATA")
    if not folder:
        pytest.skip("DROPBAYES_DATA names no folder of data")
    return pathlib.Path(folder)


def test_the_co2_scene_is_the_record_of_mauna_loa(scenes, data):
    year, ppm = np.loadtxt(data / "co2" / "co2_mauna_monthly_1958_2003.csv", delimiter=",", skiprows=1).T
    shown = np.array([317 + 2 * point["y"] for point in scenes["co2"]["points"]])
    record = ppm[(year > 1958.99) & (year < 1962.99)]
    assert np.abs(shown - record).max() < 0.051  # rounded to a tenth


def test_the_scene_of_figure_2_has_the_yearly_means_of_its_data(scenes, data):
    series = np.loadtxt(data / "co2" / "co2_gal_train.csv", delimiter=",", skiprows=1)
    means = series[:264].reshape(22, 12, 2).mean(1)
    shown = np.array([[point["x"], point["y"]] for point in scenes["figure2"]["points"]])
    assert np.abs(shown - means).max() < 0.0101


def test_the_solar_scene_has_means_of_the_papers_training_points(scenes, data):
    x, y, is_test = np.loadtxt(data / "solar" / "solar_gal.csv", delimiter=",", skiprows=1).T
    for point in scenes["solar"]["points"]:
        near = (np.abs(x - point["x"] / 1.2) < 0.024) & (is_test == 0)
        assert 4 <= near.sum() <= 6 and y[near].min() - 0.01 <= point["y"] <= y[near].max() + 0.01


# Colours --------------------------------------------------------------------------------------------------------------


def palettes():
    """The colours of the light and of the dark scheme by name."""
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", (WEB / "style.css").read_text())
    return [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block)) for block in blocks[:2]]


def luminance(colour):
    channels = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    """The contrast ratio of WCAG 2.2."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_text_and_marks_have_the_contrast_that_aa_asks_for(palette):
    for text in ("ink", "faint", "brand", "food", "poison", "c0", "c1", "c2"):
        assert contrast(palette[text], palette["paper"]) >= 4.5, text
    assert contrast(palette["ink"], palette["panel"]) >= 4.5 and contrast(palette["on-brand"], palette["brand"]) >= 4.5
    for mark in ("mean", "draws", "one", "standard", "process", "point", "focus", "epistemic"):
        assert contrast(palette[mark], palette["paper"]) >= 3, mark
