"""Gathered parts of a matrix are those that indexing gives."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels import gathered_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def picked(n_draws, count, width):
    return torch.stack([torch.randperm(width, device=DEVICE)[:count].sort().values for _ in range(n_draws)])


@pytest.mark.parametrize(("n_rows", "n_columns", "dtype"), [(40, 35, torch.float32), (3, 600, torch.float64)])
def test_every_draw_has_its_own_part(n_rows, n_columns, dtype):
    weight = torch.randn(70, 700, device=DEVICE, dtype=dtype)
    rows, columns = picked(3, n_rows, 70), picked(3, n_columns, 700)
    expected = weight[rows[:, :, None], columns[:, None, :]]
    assert torch.equal(gathered_weights(weight, rows, columns), expected)
