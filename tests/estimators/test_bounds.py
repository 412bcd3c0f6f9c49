"""Tests of bounded extrapolation: nothing changes inside the bounds, no mean leaves the range by more than twice its width."""

import numpy as np
import pytest
import torch

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.extrapolation import Bounds
from tests.estimators.samples import QUICK, toy

UNIT = Bounds(*(torch.tensor([value], dtype=torch.float64) for value in (-1.0, 3.0)))


def test_means_inside_the_bounds_stay_and_those_outside_rise_to_two_widths_beyond():
    inside = torch.linspace(-5, 7, 101, dtype=torch.float64)[:, None]
    assert bool((UNIT.shift(inside) == 0).all())
    mean = torch.tensor([[7.001], [8.0], [12.0], [1e9], [-1e9]], dtype=torch.float64)
    found = (mean + UNIT.shift(mean)).flatten()
    assert abs(found[0] - 7.001) < 1e-9  # the slope at the end of the bounds is 1
    assert 7.9 < found[1] < 8 and found[1] < found[2] < found[3]
    assert found[3:].tolist() == pytest.approx([11, -9])


def test_a_row_far_off_is_predicted_within_reach_of_the_targets_with_its_spread_and_said_so(tmp_path):
    x, y = toy(150)
    y = y + 5 * x[:, 1]
    model = DropoutRegressor(**QUICK, random_state=0).fit(x, y)
    far, width = np.array([[1e4, -1e4], [-1e4, 1e4], [1e4, 1e4]]), y.max() - y.min()
    with pytest.warns(UserWarning, match="predicted beyond the targets by more than their range"):
        mean, std = model.predict(far, return_std=True)
    assert (mean > y.min() - 2.001 * width).all() and (mean < y.max() + 2.001 * width).all()
    free = model.with_draws()
    free.bounds_ = None
    expected = free.predict(far, return_std=True)
    assert (np.abs(expected[0] - y.mean()) > 10 * width).any()
    np.testing.assert_allclose(std, expected[1])
    np.testing.assert_array_equal(model.predict(x), free.predict(x))
    model.save(tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match="such predictions are bounded"):
        again = DropoutRegressor.load(tmp_path / "m.safetensors").predict(far)
    np.testing.assert_array_equal(again, mean)


def test_more_rows_widen_the_bounds():
    x, y = toy(100)
    model = DropoutRegressor(**QUICK, random_state=0).fit(x, y)
    before = model.bounds_
    model.partial_fit(x, y + 100)
    assert (model.bounds_.high > before.high).all() and torch.equal(model.bounds_.low, before.low)
