"""Attention with keyed masks in one kernel, against scores, softmax, mask and product in double precision."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import OutOfResources

from dropbayes.sampling.kernels import attention as kernel
from dropbayes.sampling.kernels.all import attention
from dropbayes.sampling.kernels.attention import keep_bits
from dropbayes.sampling.masks import Keys, keep_mask
from tests.cases import slow_except

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SITE, DRAWS, ROWS, HEADS = 3, range(1, 3), range(4, 6), 2
BATCH = len(DRAWS) * len(ROWS)


def explicit_attention(q, k, v, keys, rows, attn_mask=None, draws=DRAWS, folded=1, drop_prob=0.2):
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if attn_mask is not None:
        added = torch.where(attn_mask, 0.0, -torch.inf) if attn_mask.dtype == torch.bool else attn_mask
        scores = scores + added
    weights = scores.softmax(-1).nan_to_num(0.0)  # a query that attends to nothing
    shape = (folded, *weights.shape[1:])
    mask = keep_mask(
        keys, SITE, drop_prob=drop_prob, draws=draws, rows=rows, shape=shape, dtype=torch.float64, device=q.device
    )
    mask = mask if rows else mask[:, None].expand(-1, q.shape[0] // len(draws) // folded, -1, -1, -1, -1)
    return (weights * mask.reshape(weights.shape) / (1 - drop_prob)) @ v


def projections(queries, n_keys, features=24, value_features=16, heads=HEADS, key_heads=HEADS, batch=BATCH):
    """q with strides as a projection leaves them, `[batch, step, head, feature]` in memory; k and v contiguous."""
    q = torch.randn(batch, queries, heads, features, device=DEVICE).transpose(1, 2)
    k = torch.randn(batch, key_heads, n_keys, features, device=DEVICE)
    return q, k, torch.randn(batch, key_heads, n_keys, value_features, device=DEVICE)


def check(q, k, v, keys, rows, attn_mask=None, expected_mask=None, **keywords):
    result = attention(
        q,
        k,
        v,
        keys=keys,
        site=SITE,
        drop_prob=0.2,
        draws=DRAWS,
        rows=rows,
        attn_mask=attn_mask,
        **keywords,
    )
    expected = explicit_attention(q, k, v, keys, rows, attn_mask if expected_mask is None else expected_mask)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("sampler", slow_except(["stratified", "independent"], "stratified"))
def test_attention_has_the_masks_of_torch_operations(sampler, rows):
    check(*projections(19, 37), Keys(5, 12, sampler), rows)  # type: ignore[call-arg]


@pytest.mark.slow
def test_many_blocks_of_queries_and_keys_are_one_softmax():
    q, k, v = projections(150, 130, features=16, heads=1, key_heads=1, batch=1)
    result = attention(q, k, v, keys=Keys(5, 12), site=SITE, drop_prob=0.2, draws=range(1), rows=range(1))
    expected = explicit_attention(q, k, v, Keys(5, 12), range(1), draws=range(1))
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", slow_except([None, ROWS], None))
def test_more_draws_than_a_byte_holds_and_entries_of_a_row_in_the_batch_are_told_apart(rows):
    q, k, v = projections(3, 5, heads=1, key_heads=1, batch=9 * 2 * 3)
    arguments = {"draws": range(1, 10), "folded": 3}
    result = attention(q, k, v, keys=Keys(5, 12), site=SITE, drop_prob=0.2, rows=rows, **arguments)
    expected = explicit_attention(q, k, v, Keys(5, 12), rows, **arguments)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", slow_except([None, -0.3], None))
def test_whole_blocks_need_no_bounds(scale):
    q, k, v = projections(128, 64, features=16, heads=1, key_heads=1, batch=1)
    result = attention(q, k, v, keys=Keys(5, 12), site=SITE, drop_prob=0.2, draws=range(1), rows=range(1), scale=scale)
    q = q if scale is None else q * scale * 4
    expected = explicit_attention(q, k, v, Keys(5, 12), range(1), draws=range(1))
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_causal_query_sees_no_later_key():
    causal = torch.ones(40, 40, dtype=torch.bool, device=DEVICE).tril()  # two blocks of keys
    check(*projections(40, 40, heads=1, key_heads=1), Keys(5, 12), ROWS, expected_mask=causal, is_causal=True)  # type: ignore[call-arg]


@pytest.mark.slow
def test_a_query_that_attends_to_nothing_gives_zero():
    allowed = torch.rand(BATCH, 1, 19, 37, device=DEVICE) > 0.5
    allowed[:, :, 3] = False
    check(*projections(19, 37), Keys(5, 12), ROWS, attn_mask=allowed)  # type: ignore[call-arg]


@pytest.mark.slow
def test_an_additive_mask_is_broadcast_to_the_scores():
    added = torch.randn(HEADS, 1, 37, device=DEVICE)
    added[:, :, :4] = -torch.inf
    check(*projections(19, 37), Keys(5, 12), ROWS, attn_mask=added)  # type: ignore[call-arg]


@pytest.mark.slow
def test_keys_may_have_fewer_heads_than_queries():
    check(*projections(19, 37, key_heads=1), Keys(5, 12), ROWS)  # type: ignore[call-arg]


def test_a_given_scale_replaces_the_usual_one():
    q, k, v = projections(5, 7)
    keys = Keys(5, 12)
    result = attention(q, k, v, keys=keys, site=SITE, drop_prob=0.2, draws=DRAWS, rows=None, scale=0.5)
    torch.testing.assert_close(
        result.double(), explicit_attention(q * 0.5 * 24**0.5, k, v, keys, None), rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a compiled kernel for each size of the heads")
@pytest.mark.parametrize("features", [8, 40, 64, 72, 80, 96, 128, 160, 256])
def test_heads_of_any_size_are_right(features):
    for queries, n_keys in ((7, 7), (70, 90), (128, 128)):
        check(*projections(queries, n_keys, features, features), Keys(5, 12), ROWS)  # type: ignore[call-arg]


def test_a_device_with_too_little_shared_memory_has_no_kernel(monkeypatch):
    def refuse(*arguments, **options):
        raise OutOfResources(2**18, 2**16, "shared memory")

    monkeypatch.setattr(kernel, "launch", refuse)
    monkeypatch.setattr(kernel, "keep_bits", lambda *_, **__: torch.zeros(1))
    q, k, v = projections(5, 7)
    assert attention(q, k, v, keys=Keys(5, 12), site=SITE, drop_prob=0.2, draws=DRAWS, rows=None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16])
def test_half_precision_differs_by_its_rounding(dtype):
    q, k, v = (t.to(dtype) for t in projections(19, 37))
    result = attention(q, k, v, keys=Keys(5, 12), site=SITE, drop_prob=0.2, draws=DRAWS, rows=ROWS)
    assert result.dtype == dtype
    expected = explicit_attention(q, k, v, Keys(5, 12), ROWS)
    torch.testing.assert_close(result.double(), expected, rtol=0.05, atol=0.03)


@pytest.mark.parametrize(
    ("sampler", "rows", "length"), list(product(("stratified", "independent"), (None, ROWS), (21, 22)))
)
def test_a_bit_is_the_mask_of_a_draw(sampler, rows, length):
    keys = Keys(5, 12, sampler)
    bits = keep_bits(keys, SITE, drop_prob=0.3, draws=range(1, 10), rows=rows, lines=6, length=length, device=DEVICE)
    mask = keep_mask(
        keys, SITE, drop_prob=0.3, draws=range(1, 10), rows=rows, shape=(6, length), dtype=torch.float32, device=DEVICE
    )
    for index in range(9):
        kept = (bits[index // 8, ..., :length] >> (index % 8)) & 1
        assert torch.equal(kept.float(), mask[index].view(kept.shape))


def test_too_many_weights_for_the_kernel_are_refused():
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31"):
        keep_bits(Keys(5, 12), 0, drop_prob=0.3, draws=DRAWS, rows=None, lines=2**16, length=2**15, device=DEVICE)
