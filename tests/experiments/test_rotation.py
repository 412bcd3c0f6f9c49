"""Rotated digits."""

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
