"""Rotated digits."""

import numpy as np
import pytest
import torch

from experiments import rotation
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_uncertainty_rises_as_digits_turn(tmp_path):
    metrics = tiny("rotation", rotation, tmp_path)
    for network in metrics.values():
        assert network["error_mc"] < 0.2
        for measure in rotation.MEASURES:
            assert max(network[measure][1:]) > 1.5 * network[measure][0]
        assert network["auroc_entropy"] > 0.7


def test_rotating_by_a_right_angle_is_rot90():
    image = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        rotation.rotate(image, torch.tensor([90.0]))[0], image.rot90(1, (1, 2)), atol=1e-4, rtol=0
    )


def test_no_curve_lies_under_the_legend():
    pytest.importorskip("matplotlib")
    curves = {f"turned_{name}": np.linspace(0, 1, 12) for name in rotation.MEASURES}
    figure = rotation._curves(np.linspace(0, 120, 12), dict.fromkeys(rotation.NAMES, curves))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(ax.get_tightbbox()) for ax in figure.axes)
