"""Dropout with keyed masks in one pass: read, mask in registers, write."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropbayes.sampling.kernels import words
from dropbayes.sampling.kernels.launching import launch, power_of_two, tile_count
from dropbayes.sampling.masks import ROW_BYTES, SHARED_BYTES, Keys, as_signed, keep_scale, kept, signed_threshold

_TILE_BYTES = 8192  # four 16-byte accesses of each of 128 threads
_MAX_TILE = 1024  # columns; the rows of a tile share look-ups of the lattice
_MAX_PROGRAMS = 4096  # enough to fill a large GPU: beyond, draws share a program


def dropout(
    x: Tensor,
    keys: Keys,
    site: int,
    *,
    drop_prob: float,
    draws: range,
    rows: range | None,
    outer: int,
    inner: int,
    drawn: bool = True,
    minor: int = 1,
) -> Tensor:
    """x ∘ mask / (1 - `drop_prob`) as a new tensor `[outer, draw, row, inner]`.

    The memory of `x`, in order, is `[outer, draw, row, inner]`, or the same without draws: unless `drawn`, one tensor
    is read and one per draw is written. `outer` units of a row precede the draws, such as a sequence's steps, `inner`
    follow the rows; a unit's index is outer index * `inner` + inner index, or of units `[minor, inner / minor]` that
    memory has transposed, their index before that. Without `rows`, all have one mask.
    """
    n_rows = x.numel() // (outer * inner * (len(draws) if drawn else 1))
    out = x.new_empty(outer, len(draws), n_rows, inner)
    _launch(x, out, keys, site, drop_prob, draws, rows, minor)
    return out


def uniforms(
    keys: Keys,
    site: int,
    *,
    draws: range,
    rows: range | None,
    n_rows: int,
    outer: int,
    inner: int,
    device: torch.device,
) -> Tensor:
    """Uniforms in (0, 1) in float64, `[outer, draw, row, inner]`, keyed as in `dropout`; not to be written to."""

    def make() -> Tensor:
        out = torch.empty(outer, len(draws), n_rows, inner, dtype=torch.float64, device=device)
        _launch(None, out, keys, site, 0.0, draws, rows, minor=1)
        return out

    largest = SHARED_BYTES if rows is None else ROW_BYTES
    return kept((device, keys, site, draws, rows, n_rows, outer, inner), make, largest)


def _launch(
    x: Tensor | None, out: Tensor, keys: Keys, site: int, drop_prob: float, draws: range, rows: range | None, minor: int
) -> None:
    outer, n_drawn, n_rows, inner = out.shape
    tile_columns = min(_MAX_TILE, power_of_two(inner))
    tile_rows = max(1, min(_TILE_BYTES // out.element_size() // tile_columns, power_of_two(n_rows)))
    tiles = outer * tile_count(n_rows, tile_rows) * tile_count(inner, tile_columns)
    stratified, own_rows = keys.sampler == "stratified", rows is not None
    drawn = x is not None and x.numel() == out.numel()
    # Rows that begin at draws of their own share the look-ups of the lattice where they pass all of it.
    sweeps = stratified and own_rows and n_drawn * tile_rows >= keys.n_draws
    steps = keys.n_draws if sweeps else n_drawn
    chunk = draws_per_program(steps, tiles)
    constants = (stratified, own_rows, sweeps, drawn, inner % 2 == 0 and minor == 1, minor > 1, tile_rows, tile_columns)
    launch(
        _dropout, tiles * tile_count(steps, chunk), (inner,), (x, out),
        x, out, *words.source(keys, out.device), as_signed(site), signed_threshold(drop_prob),
        struct.unpack("q", struct.pack("d", keep_scale(drop_prob)))[0],
        draws.start, n_drawn, steps, chunk, rows.start if rows else 0, n_rows, outer * inner, minor, inner,
        constants=constants,
    )  # fmt: skip


def draws_per_program(n_drawn: int, tiles: int) -> int:
    """The number of draws per program, so that the programs just fill the GPU."""
    return tile_count(n_drawn, min(n_drawn, max(1, _MAX_PROGRAMS // tiles)))


@triton.jit(do_not_specialize=["key", "n_draws", "n_permutations", "site", "threshold", "scale", "first_draw",
                               "n_drawn", "steps", "chunk", "first_row", "n_rows", "n_units", "minor"])  # fmt: skip
def _dropout(
    x_at, out_at, lattices_at, key: tl.int64, n_draws: tl.int32, n_permutations: tl.int32, site: tl.int64,
    threshold: tl.int32, scale: tl.int64, first_draw: tl.int32, n_drawn: tl.int32, steps: tl.int32, chunk: tl.int32,
    first_row: tl.int64, n_rows: tl.int32, n_units: tl.int32, minor: tl.int32, inner,
    STRATIFIED: tl.constexpr, OWN_ROWS: tl.constexpr, SWEEPS: tl.constexpr, DRAWN: tl.constexpr, PAIRED: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column_tiles, row_tiles, chunks = tl.cdiv(inner, COLUMNS), tl.cdiv(n_rows, ROWS), tl.cdiv(steps, chunk)
    column_tile = program % column_tiles
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    program = program // column_tiles
    row = (program % row_tiles) * ROWS + tl.arange(0, ROWS)
    program = program // row_tiles
    first = (program % chunks) * chunk
    outside = program // chunks
    unit = outside * inner + ((column % minor) * (inner // minor) + column // minor if TRANSPOSED else column)
    pair = (outside * inner + column_tile * COLUMNS) // 2 + tl.arange(0, COLUMNS // 2 if PAIRED else 1)
    is_inside = (row < n_rows)[:, None] & (column < inner)[None, :]
    own_row = (first_row + row if OWN_ROWS else row * 0)[:, None]
    if STRATIFIED:
        place, shift = words.choice(words.stream(key, site, 1), unit, n_draws, n_permutations)
        place, shift = place[None, :], shift[None, :]
        if OWN_ROWS:
            shift = words.unit_words(words.stream(key, site, 2), own_row, unit, pair, n_units, PAIRED)
            begin = words.turn(key, own_row, n_draws)
    else:
        draw_key = words.stream(key, site, 3)
    DTYPE: tl.constexpr = out_at.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    factor = scale.to(tl.int64).to(tl.float64, bitcast=True).to(WIDE).to(DTYPE).to(WIDE)
    block = n_rows.to(tl.int64) * inner
    within = row[:, None].to(tl.int64) * inner + column[None, :]
    if x_at is not None and not DRAWN:
        x = tl.load(x_at + outside * block + within, mask=is_inside, other=0.0)
    for step in range(first, tl.minimum(first + chunk, steps)):
        if SWEEPS:  # each row writes the draw that it has at this point of the lattice, if it is asked for
            t, point = (step + n_draws - begin) % n_draws - first_draw, step
            is_written = is_inside & (t >= 0) & (t < n_drawn)
        else:
            t, is_written = step, is_inside
            point = (first_draw + t + begin) % n_draws if STRATIFIED and OWN_ROWS else first_draw + t
        at = (outside.to(tl.int64) * n_drawn + t) * block + within
        if DRAWN:
            x = tl.load(x_at + at, mask=is_written, other=0.0)
        if STRATIFIED:
            word = tl.load(lattices_at + place + point) + shift  # beyond the last column the value is unused
        else:
            word = words.unit_words(words.hash_word(draw_key, first_draw + t), own_row, unit, pair, n_units, PAIRED)
        if x_at is None:
            odd = (word.to(tl.int64) + 0x80000000) * 2 + 1
            result = (odd.to(tl.float64) * 1.1641532182693481e-10).to(DTYPE)  # 2⁻³³
        else:
            result = (x.to(WIDE) * tl.where(word >= threshold, factor, 0.0)).to(DTYPE)
        tl.store(out_at + at, result, mask=is_written)
