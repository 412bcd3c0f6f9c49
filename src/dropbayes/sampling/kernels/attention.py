"""Scaled dot-product attention with keyed masks on its weights, which are never written to memory.

The masks are stored as bits: one byte per weight holds those of eight draws. A separate pass generates them cheaply,
because the hashes of a unit and of a row serve all draws; the attention then needs one shift per mask.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dropbayes.sampling.kernels import words
from dropbayes.sampling.kernels.launching import ALIGNMENT, launch, power_of_two, tile_count
from dropbayes.sampling.masks import Keys, as_signed, keep_scale, signed_threshold

_TILE_UNITS, _TILE_ROWS = 256, 8


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keys: Keys,
    site: int,
    drop_prob: float,
    draws: range,
    rows: range | None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    folded: int = 1,
) -> Tensor | None:
    """softmax(q kᵀ · scale + mask) ∘ keyed mask / (1 - `drop_prob`) times v, `[draw * row, head, query, feature]`.

    A query that may attend to nothing gives 0, as in `torch.nn.functional.scaled_dot_product_attention`. None if the
    device has too little shared memory.

    `q` is `[draw * row * folded, head, query, feature]`, draws outermost, with `folded` entries of the batch for a row,
    whose mask is `[folded, head, query, key]`; without `rows`, all have one mask. `k` has as many heads or a divisor of
    that number, `v` any number of features. `attn_mask` says where queries may attend, or is added to the scores.
    """
    batch, n_heads, n_queries, features = q.shape
    n_keys, value_features = k.shape[2], v.shape[3]
    n_rows = batch // (len(draws) * folded)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    lines = folded * n_heads * n_queries
    # Rows that begin at draws of their own share the look-ups of the lattice until their bits are read.
    turned = rows is not None and keys.sampler == "stratified" and len(draws) == keys.n_draws
    bits = keep_bits(
        keys, site, drop_prob=drop_prob, draws=draws, rows=rows, lines=lines, length=n_keys, device=q.device,
        turned=not turned,
    )  # fmt: skip
    out = q.new_empty(batch, n_queries, n_heads, value_features).transpose(1, 2)
    is_boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    added: Tensor | None = None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        added = attn_mask.expand(batch, n_heads, n_queries, n_keys)
        strides = added.stride()
        added = added.view(torch.uint8) if is_boolean else added
    widest = max(power_of_two(features), power_of_two(value_features))
    block_queries, block_keys, warps, stages = _blocks(q.dtype, n_queries, n_keys, widest)
    whole = n_queries % block_queries == 0 == n_keys % block_keys and features == widest == value_features >= 16
    scale = features**-0.5 if scale is None else scale
    if scale < 0:  # the kernel takes the maximum before scaling
        q, scale = -q, -scale
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
    sizes = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *strides)
    counts = (n_heads, n_heads // k.shape[1], folded, n_rows, lines, bits.shape[-1], n_queries, n_keys)
    try:
        launch(
            _attention, tile_count(n_queries, block_queries) * n_heads * batch, (*sizes, *counts),
            (q, k, v, out, bits, added), q, k, v, out, bits, added, *sizes, scale * math.log2(math.e),
            keep_scale(drop_prob), *words.source(keys, q.device)[1:3], rows.start if rows else 0, *counts,
            constants=(
                features, max(16, power_of_two(features)), value_features, max(16, power_of_two(value_features)),
                block_queries, block_keys, whole, rows is not None, turned, is_causal, is_boolean,
                precision if q.dtype == torch.float32 else None,
            ),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    except OutOfResources:
        return None
    return out


def _blocks(dtype: torch.dtype, n_queries: int, n_keys: int, widest: int) -> tuple[int, int, int, int]:
    """Queries and keys of one product, warps and stages of the pipeline.

    Eight warps for 64 queries and 16 keys read and wrote outside their memory in float32, compiled by Triton 3.6.
    """
    if dtype == torch.float32:
        return (128, 32, 4, 2) if widest <= 64 else (64 if widest <= 128 else 32, 32, 4, 1)
    if widest > 128:
        return 64, 32, 4, 2
    return (128, 32, 4, 4) if n_queries > 64 and n_keys <= 256 and widest <= 64 else (64, 64, 4, 3)


def keep_bits(
    keys: Keys,
    site: int,
    *,
    drop_prob: float,
    draws: range,
    rows: range | None,
    lines: int,
    length: int,
    device: torch.device,
    turned: bool = True,
) -> Tensor:
    """The masks `[line, length]` of a site as bits: bit d of `[g, row, line, unit]` says whether draw 8 g + d keeps it.

    Without `rows` there is one row. Lines are padded to a multiple of 16 units. Unless `turned`, draws are counted from
    the one at which a row begins.
    """
    if lines * length >= 2**31:
        raise ValueError(f"a row's attention weights must be fewer than 2**31, got {lines * length}. Use fewer keys.")
    n_rows = 1 if rows is None else len(rows)
    padded = tile_count(length, ALIGNMENT) * ALIGNMENT  # a line starts where a vector load may
    bits = torch.empty(tile_count(len(draws), 8), n_rows, lines, padded, dtype=torch.uint8, device=device)
    tile_rows = min(_TILE_ROWS, power_of_two(n_rows))
    launch(
        _keep_bits, (tile_count(lines * padded, _TILE_UNITS), tile_count(n_rows, tile_rows)), (padded,), (bits,),
        bits, *words.source(keys, device), as_signed(site), signed_threshold(drop_prob),
        draws.start, len(draws), rows.start if rows else 0, n_rows, lines, length, padded,
        constants=(keys.sampler == "stratified", rows is not None, turned, length % 2 == 0, tile_rows, _TILE_UNITS),
    )  # fmt: skip
    return bits


@triton.jit(do_not_specialize=["key", "n_draws", "n_permutations", "site", "threshold", "first_draw", "n_drawn",
                               "first_row", "n_rows", "lines", "length"])  # fmt: skip
def _keep_bits(
    bits_at, lattices_at, key: tl.int64, n_draws: tl.int32, n_permutations: tl.int32, site: tl.int64,
    threshold: tl.int32, first_draw: tl.int32, n_drawn: tl.int32, first_row: tl.int64, n_rows: tl.int32,
    lines: tl.int32, length: tl.int32, padded,
    STRATIFIED: tl.constexpr, OWN_ROWS: tl.constexpr, TURNED: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    unit = element // padded * length + element % padded  # the padding repeats units of the next line, unread
    even = tl.program_id(0) * UNITS + 2 * tl.arange(0, UNITS // 2)
    pair = (even // padded * length + even % padded) // 2
    n_units = lines * length
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own_row = (first_row + row if OWN_ROWS else row * 0)[:, None]
    if STRATIFIED:
        place, shift = words.choice(words.stream(key, site, 1), unit, n_draws, n_permutations)
        place, shift = place[None, :], shift[None, :]
        if OWN_ROWS:
            shift = words.unit_words(words.stream(key, site, 2), own_row, unit, pair, n_units, PAIRED)
            begin = words.turn(key, own_row, n_draws)
    else:
        draw_key = words.stream(key, site, 3)
    is_inside = (row < n_rows)[:, None] & (element < lines * padded)[None, :]
    size = (lines * padded).to(tl.int64)
    at = bits_at + row[:, None] * size + element[None, :]
    for group in range(tl.cdiv(n_drawn, 8)):
        byte = tl.zeros([ROWS, UNITS], tl.int32)
        for bit in tl.static_range(8):
            draw = first_draw + tl.minimum(group * 8 + bit, n_drawn - 1)
            if STRATIFIED:
                point = (draw + begin) % n_draws if OWN_ROWS and TURNED else draw
                word = tl.load(lattices_at + place + point) + shift
            else:
                word = words.unit_words(words.hash_word(draw_key, draw), own_row, unit, pair, n_units, PAIRED)
            byte |= tl.where(word >= threshold, 1 << bit, 0)
        tl.store(at, byte.to(tl.uint8), mask=is_inside)
        at += n_rows * size


@triton.jit(do_not_specialize=["prediction_key", "n_draws", "first_row"])
def _attention(
    q_at, k_at, v_at, out_at, bits_at, added_at,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    added_batch, added_head, added_query, added_key, score_scale, keep_scale,
    prediction_key: tl.int64, n_draws: tl.int32, first_row: tl.int64,
    n_heads, heads_per_key, folded, n_rows, lines, padded, n_queries, n_keys,
    FEATURES: tl.constexpr, PADDED: tl.constexpr, VALUE_FEATURES: tl.constexpr, VALUE_PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, OWN_ROWS: tl.constexpr, TURNED: tl.constexpr,
    CAUSAL: tl.constexpr, BOOLEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    query_blocks = tl.cdiv(n_queries, QUERIES)
    query_block, program = tl.program_id(0) % query_blocks, tl.program_id(0) // query_blocks
    entry, head = (program // n_heads).to(tl.int64), program % n_heads
    pair = entry // folded
    draw, line = pair // n_rows, (entry % folded) * n_heads + head
    if TURNED:
        draw = (draw + words.turn(prediction_key, first_row + pair % n_rows, n_draws)) % n_draws
    block = (draw // 8) * n_rows + pair % n_rows if OWN_ROWS else draw // 8
    bit = (draw % 8).to(tl.int32)

    query = query_block * QUERIES + tl.arange(0, QUERIES)
    is_query = query < n_queries
    feature, value_feature = tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    q = tl.load(
        q_at + entry * q_batch + head * q_head + query[:, None].to(tl.int64) * q_step + feature[None, :],
        mask=is_query[:, None] & (feature < FEATURES)[None, :],
        other=0.0,
    )
    k_at += entry * k_batch + (head // heads_per_key) * k_head
    v_at += entry * v_batch + (head // heads_per_key) * v_head
    bits_at += (block * lines + line * n_queries) * padded

    key = tl.arange(0, KEYS)
    k_at += key[None, :].to(tl.int64) * k_step + feature[:, None]
    v_at += key[:, None].to(tl.int64) * v_step + value_feature[None, :]
    bits_at += query[:, None].to(tl.int64) * padded + key[None, :]
    flag = (1 << bit).to(tl.uint8)

    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    end = tl.minimum(n_keys, (query_block + 1) * QUERIES) if CAUSAL else n_keys
    for start in range(0, end, KEYS):
        if WHOLE:
            bits, k, v = tl.load(bits_at), tl.load(k_at), tl.load(v_at)
        else:
            is_key = start + key < n_keys
            bits = tl.load(bits_at, mask=is_query[:, None] & (start + key < padded)[None, :], other=0)
            k = tl.load(k_at, mask=is_key[None, :] & (feature < FEATURES)[:, None], other=0.0)
            v = tl.load(v_at, mask=is_key[:, None] & (value_feature < VALUE_FEATURES)[None, :], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION)
        if added_at is not None:
            score *= score_scale
            added = tl.load(
                added_at + entry * added_batch + head * added_head + query[:, None].to(tl.int64) * added_query
                + (start + key)[None, :].to(tl.int64) * added_key,
                mask=is_query[:, None] & (start + key < n_keys)[None, :], other=0,
            )  # fmt: skip
            if BOOLEAN:
                score = tl.where(added != 0, score, float("-inf"))
            else:
                score += added.to(tl.float32) * 1.4426950408889634  # log2(e): exponentials are taken to base 2
        if CAUSAL:
            score = tl.where(query[:, None] >= (start + key)[None, :], score, float("-inf"))
        if not WHOLE:
            score = tl.where(is_key[None, :], score, float("-inf"))
        peak = tl.max(score, 1)
        factor = score_scale if added_at is None else 1.0
        new_most = tl.maximum(most, peak * factor)
        reference = tl.where(new_most == float("-inf"), 0.0, new_most)
        weight = tl.exp2(score * factor - reference[:, None])
        shrink = tl.exp2(most - reference)
        total = total * shrink + tl.sum(weight, 1)
        weight = tl.where((bits & flag) != 0, weight, 0.0)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        most = new_most
        k_at += KEYS * k_step
        v_at += KEYS * v_step
        bits_at += KEYS
    mixed *= (keep_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(
        out_at + entry * out_batch + head * out_head + query[:, None].to(tl.int64) * out_step + value_feature[None, :],
        mixed.to(out_at.dtype.element_ty),
        mask=is_query[:, None] & (value_feature < VALUE_FEATURES)[None, :],
    )
