"""Tests of bounded extrapolation: nothing changes inside the range, nothing leaves it far."""

import warnings

import numpy as np
import pytest
import torch

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.bounds import Bounds
from tests.estimators.samples import QUICK, toy

UNIT = Bounds(*(torch.tensor([value], dtype=torch.float64) for value in (-2.0, 2.0, -1.0, 3.0)))


def test_values_inside_the_range_keep_their_bits():
    x = torch.linspace(-2, 2, 101, dtype=torch.float64)[:, None]
    assert torch.equal(UNIT.inputs(x), x)
    y = torch.linspace(-5, 7, 101, dtype=torch.float64)[:, None]
    assert torch.equal(UNIT.outputs(y), y)


def test_values_outside_rise_smoothly_to_one_width_beyond():
    x = torch.linspace(2, 2.01, 3, dtype=torch.float64)[:, None]
    torch.testing.assert_close(UNIT.inputs(x), x, atol=1e-7, rtol=0)  # the slope at the end of the range is 1
    far = UNIT.inputs(torch.tensor([[3.0], [10.0], [1e9], [-1e9]], dtype=torch.float64)).flatten()
    assert 2.9 < far[0] < 3 and far[0] < far[1] < far[2]
    assert far[2:].tolist() == [6, -6]
    assert UNIT.outputs(torch.tensor([[1e9], [-1e9]], dtype=torch.float64)).flatten().tolist() == [11, -9]


def test_a_row_far_off_is_predicted_within_reach_of_the_targets_and_said_so(tmp_path):
    x, y = toy(150)
    y = y + 5 * x[:, 1]
    model = DropoutRegressor(**QUICK, random_state=0).fit(x, y)
    far = np.array([[1e6, -1e6], [-1e6, 1e6], [1e6, 1e6]])
    width = y.max() - y.min()
    faulty = model.with_draws()
    faulty.bounds_ = Bounds(-torch.ones(2) * 1e6, torch.ones(2) * 1e6, model.bounds_.y_low, model.bounds_.y_high)
    with pytest.warns(UserWarning, match="predicted further beyond the targets than these range"):
        bounded = faulty.predict(far)
    with warnings.catch_warnings(action="ignore"):
        predicted = model.predict(far)
    for found in (predicted, bounded):
        assert (found > y.min() - 2 * width).all() and (found < y.max() + 2 * width).all()
    model.save(tmp_path / "m.safetensors")
    with warnings.catch_warnings(action="ignore"):
        np.testing.assert_array_equal(DropoutRegressor.load(tmp_path / "m.safetensors").predict(far), predicted)


def test_more_rows_widen_the_bounds():
    x, y = toy(100)
    model = DropoutRegressor(**QUICK, random_state=0).fit(x, y)
    before = model.bounds_
    model.partial_fit(x + 10, y)
    assert (model.bounds_.x_high > before.x_high + 5).all() and torch.equal(model.bounds_.x_low, before.x_low)
