"""Products with a few rows and columns of a weight matrix, picked while they are read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _UNITS, _DEPTH = 128, 64, 32  # the tile of one program, and how many terms it sums at a time


def gathered_product(
    h: Tensor, weight: Tensor, bias: Tensor | None, *, units: Tensor | None, wanted: Tensor | None
) -> Tensor:
    """h times the transposed weights, with only some of their columns read and some of their rows wanted.

    Args:
        h: The inputs, `[draw, row, unit]` in float32, the units contiguous.
        weight: The weights of a linear layer, `[out, in]` in float32, contiguous.
        bias: Its bias, `[out]`, or None.
        units: Which inputs of the layer `h` holds in every draw, `[draw, unit]`, ascending; None for all.
        wanted: Which outputs are wanted in every draw, `[draw, unit]`; None for all.

    Returns:
        `[draw, row, wanted unit]`.
    """
    n_draws, n_rows, depth = h.shape
    n_wanted = weight.shape[0] if wanted is None else wanted.shape[1]
    out = h.new_empty(n_draws, n_rows, n_wanted)
    exact = torch.get_float32_matmul_precision() == "highest"
    grid = (triton.cdiv(n_rows, _ROWS) * triton.cdiv(n_wanted, _UNITS), n_draws)
    _product[grid](
        h, weight, bias, units, wanted, out, h.stride(0), h.stride(1), weight.shape[1],
        n_rows, depth, n_wanted, ROWS=_ROWS, UNITS=_UNITS, DEPTH=_DEPTH, PRECISION="tf32x3" if exact else "tf32",
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _product(
    h_at, weight_at, bias_at, units_at, wanted_at, out_at, h_draw, h_row, width, n_rows, depth, n_wanted,
    ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(1).to(tl.int64)
    row_tiles = tl.cdiv(n_rows, ROWS)  # tiles of rows that read the same weights run together
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    out = (tl.program_id(0) // row_tiles) * UNITS + tl.arange(0, UNITS)
    is_row, is_out = row < n_rows, out < n_wanted
    unit_out = out
    if wanted_at is not None:
        unit_out = tl.load(wanted_at + draw * n_wanted + out, mask=is_out, other=0)
    h_at += draw * h_draw + row[:, None].to(tl.int64) * h_row
    total = tl.zeros([ROWS, UNITS], tl.float32)
    for start in range(0, depth, DEPTH):
        term = start + tl.arange(0, DEPTH)
        is_term = term < depth
        unit_in = term
        if units_at is not None:
            unit_in = tl.load(units_at + draw * depth + term, mask=is_term, other=0)
        h = tl.load(h_at + term[None, :], mask=is_row[:, None] & is_term[None, :], other=0.0)
        # Neighbouring threads read along a row of the weights, where units ascend.
        weight = tl.load(
            weight_at + unit_out[:, None] * width + unit_in[None, :], mask=is_out[:, None] & is_term[None, :], other=0.0
        )
        total = tl.dot(h, tl.trans(weight), total, input_precision=PRECISION)
    if bias_at is not None:
        total += tl.load(bias_at + unit_out, mask=is_out, other=0.0)[None, :]
    at = (draw * n_rows + row[:, None]) * n_wanted + out[None, :]
    tl.store(out_at + at, total, mask=is_row[:, None] & is_out[None, :])
