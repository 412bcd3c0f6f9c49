"""Numbers and ticks as the page prints them."""

import numpy as np
import pytest

from tests.app.page.javascript import call, needs_node

pytestmark = needs_node


@pytest.mark.parametrize(("low", "high"), [(-3.5, 3.5), (0, 1), (1958.4, 1965), (-0.02, 0.031), (0, 200_000)])
@pytest.mark.parametrize("count", [2, 5, 12])
def test_ticks_are_round_even_and_inside(low, high, count):
    values = np.array(call("plot.js", "ticks", [low, high], count))
    steps = np.diff(values)
    assert ((low - 1e-9 <= values) & (values <= high + 1e-9)).all() and len(values) <= count + 1
    if len(steps):
        digits = steps[0] / 10.0 ** np.floor(np.log10(steps[0]) + 1e-9)
        assert np.allclose(steps, steps[0]) and min(abs(digits - round_one) for round_one in (1, 2, 5)) < 1e-6


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (-2, "\u22122"), (100, "100"), (0.36333, "0.363"), (5.2e-5, "5.2 \u00b7 10\u207b\u2075"), (0, "0"), (123456, "1.2 \u00b7 10\u2075")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert call("plot.js", "shortNumber", value) == text


def test_the_reward_curve_is_a_mean_of_the_last_five_blocks():
    curve = [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]
    means = call("world_view.js", "runningMean", curve)
    assert means == pytest.approx([1, 1.5, 2, 2.5, 3, (2 + 3 + 4 + 5 + 60) / 5])
