"""Dropout in one kernel, against the masks of torch operations: on a GPU, or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dropbayes.sampling.kernels.all import dropout, uniforms
from dropbayes.sampling.kernels.masking import draws_per_program
from dropbayes.sampling.masks import Keys, keep_mask, uniform
from tests.cases import slow_except

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEED, SITE, N_DRAWS, DRAWS, ROWS = 2**63 + 5, 2, 5, range(1, 4), range(7, 11)  # few: the interpreter takes its time
SHAPES = {
    "features": (1, 13),
    "steps first": (2, 5),
    "pairs": (2, 6),
}


def expected(x, keys, drop_prob, rows, outer, inner):
    """x `[outer, draw, row, inner]` times masks of `[outer, inner]` units."""
    mask = keep_mask(
        keys, SITE, drop_prob=drop_prob, draws=DRAWS, rows=rows, shape=(outer, inner), dtype=x.dtype, device=x.device
    )
    mask = mask if rows else mask[:, None].expand(-1, len(ROWS), -1, -1)
    return x * (mask.permute(2, 0, 1, 3) * (1 / (1 - drop_prob)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("sampler", slow_except(["stratified", "independent"], "stratified"))
def test_a_masked_tensor_has_the_bits_of_the_torch_masks(sampler, rows, shape):
    outer, inner = shape
    keys, x = Keys(SEED, N_DRAWS, sampler, 1), torch.randn(outer, 3, 4, inner, device=DEVICE)
    result = dropout(x, keys, SITE, drop_prob=0.3, draws=DRAWS, rows=rows, outer=outer, inner=inner)
    assert torch.equal(result, expected(x, keys, 0.3, rows, outer, inner))


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("sampler", slow_except(["stratified", "independent"], "stratified"))
def test_a_tensor_without_draws_is_spread_over_them(sampler, rows):
    keys, x = Keys(SEED, N_DRAWS, sampler), torch.randn(2, 1, 4, 6, device=DEVICE)
    result = dropout(x, keys, SITE, drop_prob=0.2, draws=DRAWS, rows=rows, outer=2, inner=6, drawn=False)
    assert torch.equal(result, expected(x.expand(-1, 3, -1, -1), keys, 0.2, rows, 2, 6))


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("sampler", slow_except(["stratified", "independent"], "stratified"))
def test_units_that_lie_transposed_in_memory_have_the_masks_of_their_own_order(sampler, rows):
    keys, x = Keys(SEED, N_DRAWS, sampler), torch.randn(3, 4, 2, 3, device=DEVICE)  # draws, rows, two axes of units
    memory = x.transpose(2, 3).reshape(1, 3, 4, 6)  # as of channels last, say
    result = dropout(memory, keys, SITE, drop_prob=0.3, draws=DRAWS, rows=rows, outer=1, inner=6, minor=2)
    plain = expected(x.reshape(1, 3, 4, 6), keys, 0.3, rows, 1, 6)
    assert torch.equal(result.view(3, 4, 3, 2).transpose(2, 3), plain.view(x.shape))


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("sampler", slow_except(["stratified", "independent"], "independent"))
def test_uniforms_have_the_bits_of_torch_operations(sampler, rows):
    keys, arguments = Keys(SEED, N_DRAWS, sampler), {"draws": DRAWS, "rows": rows, "device": DEVICE}
    result = uniforms(keys, SITE, n_rows=4, outer=2, inner=5, **arguments)
    words = uniform(keys, SITE, shape=(2, 5), **arguments)
    words = words if rows else words[:, None].expand(-1, 4, -1, -1)
    assert torch.equal(result, words.permute(2, 0, 1, 3))


def test_few_uniforms_are_made_once():
    keys, arguments = Keys(SEED + 1, N_DRAWS), {"draws": DRAWS, "n_rows": 4, "outer": 1, "device": DEVICE}
    first = uniforms(keys, SITE, rows=ROWS, inner=1, **arguments)
    assert uniforms(keys, SITE, rows=ROWS, inner=1, **arguments) is first
    assert uniforms(keys, SITE, rows=None, inner=1, **arguments) is not first


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_dtype_has_the_same_masks(dtype):
    # Twice a number is exact in every dtype; the interpreter truncates other products in bfloat16.
    keys, x = Keys(SEED, N_DRAWS), torch.randn(1, 3, 4, 33, device=DEVICE).to(dtype)
    result = dropout(x, keys, SITE, drop_prob=0.5, draws=DRAWS, rows=ROWS, outer=1, inner=33)
    assert torch.equal(result, expected(x, keys, 0.5, ROWS, 1, 33))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter truncates to bfloat16 where a GPU rounds")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_products_are_rounded_as_torch_rounds_them(dtype):
    keys, x = Keys(SEED, N_DRAWS), torch.randn(1, 3, 4, 1000, device=DEVICE).to(dtype)
    result = dropout(x, keys, SITE, drop_prob=0.3, draws=DRAWS, rows=ROWS, outer=1, inner=1000)
    assert torch.equal(result, expected(x, keys, 0.3, ROWS, 1, 1000))


@pytest.mark.parametrize("drop_prob", [1e-12, 1 - 2**-33, 1.0])
def test_extreme_drop_probabilities_are_those_of_the_definition(drop_prob):
    keys, x = Keys(SEED, N_DRAWS), torch.ones(1, 3, 4, 50, device=DEVICE)
    result = dropout(x, keys, SITE, drop_prob=drop_prob, draws=DRAWS, rows=ROWS, outer=1, inner=50)
    mask = keep_mask(keys, SITE, drop_prob=drop_prob, draws=DRAWS, rows=ROWS, shape=(50,), dtype=x.dtype, device=DEVICE)
    assert torch.equal(result.bool().squeeze(), mask.bool())


@pytest.mark.parametrize("tiles", [1, 148, 1000, 10_000])
def test_every_draw_has_a_program_and_no_program_is_without_draws(tiles):
    for n_drawn in range(1, 130):
        chunk = draws_per_program(n_drawn, tiles)
        programs = -(-n_drawn // chunk)
        assert (programs - 1) * chunk < n_drawn <= programs * chunk


def test_nothing_is_written_outside_the_result(monkeypatch):
    # Four programs at most for five draws: two draws each, and three programs, of which the last has one draw left.
    monkeypatch.setattr("dropbayes.sampling.kernels.masking._MAX_PROGRAMS", 4)
    keys, x = Keys(SEED, N_DRAWS), torch.randn(1, 3, 4, 6, device=DEVICE)
    result = dropout(x, keys, SITE, drop_prob=0.3, draws=DRAWS, rows=ROWS, outer=1, inner=6)
    assert torch.equal(result, expected(x, keys, 0.3, ROWS, 1, 6))
