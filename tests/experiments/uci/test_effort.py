"""Tests of the UCI sets with the estimator."""

from dataclasses import replace

import pytest

from experiments.uci import effort


@pytest.mark.slow
def test_no_test_row_chooses_anything(small):
    y = small.y.copy()
    y[small.splits[0][1]] = 1e3
    settings = effort.Settings(effort="quick")
    before, after = (
        effort.results(data, [0], settings=settings, device="cpu")[0] for data in (small, replace(small, y=y))
    )
    assert before["drop_prob"] == after["drop_prob"] and before["freedom"] == after["freedom"]
    assert after["rmse"] > 100 * before["rmse"]
    assert -1.5 < before["log_likelihood"] < 0 and before["rmse"] < 1.0  # the noise alone: -0.21 and 0.3


def test_the_cost_grows_with_the_splits_and_the_effort(small):
    quick, best = (effort.network_steps(small, 2, effort.Settings(effort=name)) for name in ("quick", "best"))
    assert best > 50 * quick
    assert quick == 2 * effort.network_steps(small, 1, effort.Settings(effort="quick"))
