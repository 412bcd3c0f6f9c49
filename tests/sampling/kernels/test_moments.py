"""Moments over draws in one kernel, against torch operations in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels.all import moments_over_draws

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3), (16, 5, 7), (9, 2, 3, 300)])
def test_moments_are_those_of_operations_in_float64(shape, dtype):
    draws = (1000 + torch.randn(shape, device=DEVICE)).to(dtype)
    mean, squares = moments_over_draws(draws)
    wide = draws.double()
    torch.testing.assert_close(mean, wide.mean(0), rtol=1e-14, atol=0)
    torch.testing.assert_close(squares, (wide - wide.mean(0)).square().sum(0), rtol=1e-9, atol=1e-9)


def test_draws_that_are_not_contiguous_are_taken_in_their_logical_order():
    draws = torch.randn(6, 4, device=DEVICE).t()
    torch.testing.assert_close(moments_over_draws(draws)[0], draws.double().mean(0))
