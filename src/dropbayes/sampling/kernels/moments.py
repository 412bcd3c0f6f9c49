"""The moments over draws in one kernel, summed in float64 without a float64 copy of the draws."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropbayes.sampling.kernels.launching import tile_count

_TILE = 512


def moments_over_draws(draws: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over draws `[draw, ...]` and the sum of squared deviations from it, in float64."""
    draws = draws.contiguous()
    n_elements = draws[0].numel()
    mean = torch.empty(draws.shape[1:], dtype=torch.float64, device=draws.device)
    squares = torch.empty_like(mean)
    _moments_over_draws[(tile_count(n_elements, _TILE),)](draws, mean, squares, n_elements, draws.shape[0], TILE=_TILE)
    return mean, squares


@triton.jit(do_not_specialize=["n_elements", "n_draws"])
def _moments_over_draws(draws_at, mean_at, squares_at, n_elements: tl.int64, n_draws: tl.int32, TILE: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = element < n_elements
    total = tl.zeros([TILE], tl.float64)
    for t in range(n_draws):
        total += tl.load(draws_at + t * n_elements + element, mask=inside, other=0.0).to(tl.float64)
    mean = total / n_draws
    squares = tl.zeros([TILE], tl.float64)
    for t in range(n_draws):
        deviation = tl.load(draws_at + t * n_elements + element, mask=inside, other=0.0).to(tl.float64) - mean
        squares += deviation * deviation
    tl.store(mean_at + element, mean, mask=inside)
    tl.store(squares_at + element, squares, mask=inside)
