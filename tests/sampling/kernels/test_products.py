"""A product with picked rows and columns is the product of the picked matrix."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels import gathered_product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def picked(n_draws, count, width):
    return torch.stack([torch.randperm(width, device=DEVICE)[:count].sort().values for _ in range(n_draws)])


@pytest.mark.parametrize(("some_in", "some_out", "has_bias"), list(product((True, False), repeat=3)))
def test_picked_units_are_multiplied_and_no_others(some_in, some_out, has_bias):
    weight, bias = torch.randn(70, 50, device=DEVICE), torch.randn(70, device=DEVICE)
    units, wanted = picked(3, 35, 50) if some_in else None, picked(3, 40, 70) if some_out else None
    h = torch.randn(3, 9, 35 if some_in else 50, device=DEVICE)
    result = gathered_product(h, weight, bias if has_bias else None, units=units, wanted=wanted)
    for draw in range(3):
        columns = slice(None) if units is None else units[draw]
        rows = slice(None) if wanted is None else wanted[draw]
        expected = h[draw].double() @ weight[rows][:, columns].double().t() + (bias[rows].double() if has_bias else 0)
        torch.testing.assert_close(result[draw].double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_the_inputs_may_lie_apart():
    weight, units = torch.randn(70, 50, device=DEVICE), picked(3, 35, 50)
    h = torch.randn(9, 3, 35, device=DEVICE).transpose(0, 1)
    apart = gathered_product(h, weight, None, units=units, wanted=None)
    assert torch.equal(apart, gathered_product(h.contiguous(), weight, None, units=units, wanted=None))
