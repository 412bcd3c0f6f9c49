"""Submatrices of a weight matrix, one per draw, gathered in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dropbayes.sampling.kernels.tiles import tile_count

_TILE_ROWS, _TILE_COLUMNS = 4, 512


def gathered_weights(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`weight[rows[t]][:, columns[t]]` for every draw t, `[draw, row, column]`.

    Args:
        weight: The matrix, contiguous.
        rows: The row indices of every draw, `[draw, row]`, contiguous.
        columns: The column indices, `[draw, column]`, contiguous; ascending ones coalesce the reads.
    """
    (n_draws, n_rows), n_columns = rows.shape, columns.shape[1]
    out = weight.new_empty(n_draws, n_rows, n_columns)
    tiles = tile_count(n_rows, _TILE_ROWS) * tile_count(n_columns, _TILE_COLUMNS)
    _gather[(tiles, n_draws)](
        weight, rows, columns, out, weight.shape[1], n_rows, n_columns,
        ROWS=_TILE_ROWS, COLUMNS=_TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gather(
    weight_at, rows_at, columns_at, out_at, width, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    draw, column_tiles = tl.program_id(1).to(tl.int64), tl.cdiv(n_columns, COLUMNS)
    row = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < n_rows, column < n_columns
    unit_out = tl.load(rows_at + draw * n_rows + row, mask=is_row, other=0)
    unit_in = tl.load(columns_at + draw * n_columns + column, mask=is_column, other=0)
    inside = is_row[:, None] & is_column[None, :]
    weight = tl.load(weight_at + unit_out[:, None] * width + unit_in[None, :], mask=inside, other=0.0)
    tl.store(out_at + (draw * n_rows + row[:, None]) * n_columns + column[None, :], weight, mask=inside)
