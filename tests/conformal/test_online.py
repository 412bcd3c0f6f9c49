"""Levels that adapt: the long-run coverage holds for any sequence."""

import math

import pytest
import torch

from dropbayes.conformal import OnlineLevel
from tests.calibration.samples import generator


@pytest.mark.parametrize("rate", [0.01, 0.1])
@pytest.mark.parametrize("kind", ["drift", "jump", "adversary"])
def test_the_long_run_coverage_is_within_the_bound_for_every_sequence(kind, rate):
    steps, level = 1500, OnlineLevel(target=0.9, rate=rate)
    noise = torch.randn(steps, generator=generator(), dtype=torch.float64).abs()
    scale = {"drift": torch.linspace(1, 20, steps), "jump": torch.where(torch.arange(steps) < 700, 1.0, 9.0)}
    past, covered = [1.0], 0
    for step in range(steps):
        threshold = level.threshold(torch.tensor(past[-200:]))
        if kind == "adversary":  # misses whenever it can
            score = float(threshold) + 1 if threshold.isfinite() else 0.0
        else:
            score = float(noise[step] * scale[kind][step])
        covered += score <= threshold
        level = level.after(covered=score <= threshold)
        past.append(score)
    assert abs(covered / steps - 0.9) <= (0.9 + rate) / (rate * steps)


def test_a_fixed_level_fails_where_the_adaptive_one_holds():
    past = torch.randn(300, generator=generator(), dtype=torch.float64).abs()
    later = 5 * torch.randn(1000, generator=generator(1), dtype=torch.float64).abs()
    fixed = OnlineLevel(target=0.9).threshold(past)
    assert (later <= fixed).double().mean() < 0.5


def test_levels_outside_the_unit_interval_are_everything_or_nothing():
    scores = torch.ones(5)
    assert OnlineLevel(0.9, current=1.2).threshold(scores) == math.inf
    assert OnlineLevel(0.9, current=-0.1).threshold(scores) == -math.inf
    with pytest.raises(ValueError, match="`rate` must be a positive"):
        OnlineLevel(0.9, rate=0)
