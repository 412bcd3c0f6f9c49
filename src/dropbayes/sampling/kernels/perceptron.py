"""The moments of a small perceptron's draws in one kernel: masks, products and moments stay in registers.

A program holds some rows under many draws as one matrix `[row * draw, unit]` and carries it through all layers; only
the mean and the variance over draws are written.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from dropbayes.sampling.kernels.launching import launch, power_of_two, tile_count
from dropbayes.sampling.kernels.words import choice, hash_word, paired_words, source, stream
from dropbayes.sampling.masks import Keys, keep_scale, signed_threshold

WIDEST, MAX_HIDDEN = 128, 3
_MAX_WEIGHTS = 10_240  # padded, of all hidden layers: more do not fit into registers and shared memory
_NARROW = 64
_PAIRS = 128  # rows times draws in one product, for layers up to the width above
_RESIDENT = 4  # programs on one multiprocessor
_REGISTERS = 128  # of a thread: two programs of eight warps fit on a multiprocessor; larger networks need more
_ACTIVATIONS: dict[type, int] = {nn.ReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3, nn.SiLU: 4}


class Affine(NamedTuple):
    """A linear layer, the drop probability before it (0: none) and the code of the activation after it (0: none)."""

    linear: nn.Linear
    drop_prob: float
    activation: int


def affine_layers(layers: Sequence[nn.Module]) -> tuple[Affine, ...] | None:
    """The layers of a perceptron, without dropout of probability 0, in the kernel's form; None without support."""
    affines: list[Affine] = []
    drop_prob = 0.0
    for layer in layers:
        if type(layer) is nn.Dropout and drop_prob == 0.0 and layer.p < 1:
            drop_prob = layer.p
        elif type(layer) is nn.Linear and _is_plain(layer):
            affines.append(Affine(layer, drop_prob, 0))
            drop_prob = 0.0
        elif type(layer) in _ACTIVATIONS and affines and not affines[-1].activation and drop_prob == 0.0:
            affines[-1] = affines[-1]._replace(activation=_ACTIVATIONS[type(layer)])
        else:
            return None
    if not 0 < len(affines) <= MAX_HIDDEN + 1 or drop_prob > 0:
        return None
    padded = [_padded_width(affine.linear.in_features) for affine in affines]
    fits = sum(before * after for before, after in itertools.pairwise(padded)) <= _MAX_WEIGHTS
    return tuple(affines) if fits else None


def _is_plain(layer: nn.Linear) -> bool:
    """Whether the kernel can read the layer's parameters as they lie in memory."""
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    plain = all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    return plain and max(layer.in_features, layer.out_features) <= WIDEST


def _padded_width(width: int) -> int:
    return max(16, power_of_two(width))


def perceptron_moments(
    layers: tuple[Affine, ...], x: Tensor, keys: Keys, *, draws: range, rows: range | None, integrate_last: bool
) -> tuple[Tensor, Tensor]:
    """The mean and the population variance over draws, each `[row, out]`, summed in float64.

    Args:
        layers: From `affine_layers`, with float32 weights.
        x: The rows, `[row, feature]` in float32, contiguous.
        keys: Seed, number of draws and sampler.
        draws: The draws.
        rows: The indices of the rows, each with its own masks; None for masks shared by all rows.
        integrate_last: Whether to integrate over the last layer's mask, adding its variance in closed form.
    """
    n_rows, n_drawn, last, hidden = x.shape[0], len(draws), layers[-1], layers[:-1]
    mean, variance = x.new_empty(2, n_rows, last.linear.out_features)
    widths = (*[layer.linear.in_features for layer in layers], last.linear.out_features)
    padded = tuple([_padded_width(width) for width in widths])
    pairs = _PAIRS if max(padded) <= _NARROW else _PAIRS // 2
    tile_draws = min(pairs, max(8, power_of_two(n_drawn)))
    tiles = tile_count(n_rows, pairs // tile_draws)
    unused = [None] * (MAX_HIDDEN - len(hidden))
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    weights = [*[layer.linear.weight for layer in hidden], *unused, last.linear.weight]
    biases = [*[layer.linear.bias for layer in hidden], *unused, last.linear.bias]
    narrow = len(hidden) == 1 and max(padded) <= _NARROW
    launch(
        _moments, min(tiles, _programs(x.device)), (), (x, mean, variance, *weights, *biases),
        x, mean, variance, *weights, *biases,
        *[signed_threshold(layer.drop_prob) for layer in hidden], *[0 for _ in unused],
        signed_threshold(last.drop_prob),
        *[keep_scale(layer.drop_prob) for layer in hidden], *[1.0 for _ in unused], keep_scale(last.drop_prob),
        last.drop_prob / (1 - last.drop_prob) if integrate_last else 0.0,
        *source(keys, x.device), draws.start, n_drawn, rows.start if rows else 0, n_rows,
        constants=(
            widths, padded, tuple([layer.drop_prob > 0 for layer in layers]),
            tuple([layer.activation for layer in layers]), integrate_last, keys.sampler == "stratified",
            rows is not None, n_drawn <= tile_draws, pairs // tile_draws, tile_draws, "tf32x3" if exact else "tf32",
        ),
        num_warps=8, num_stages=1, maxnreg=_REGISTERS if narrow else None,
    )  # fmt: skip
    return mean, variance


@functools.cache
def _programs(device: torch.device) -> int:
    """The largest number of programs: as many as run concurrently."""
    if device.type != "cuda":
        return 2
    return _RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _draw_words(
    words_of, site, draw, WIDTH: tl.constexpr, PADDED: tl.constexpr, HAS_SITE: tl.constexpr, SAMPLER: tl.constexpr
):
    """A site's words `[draw, unit]` as far as all rows share them; for independent rows, the draws' keys."""
    lattices_at, key, n_draws, n_permutations = words_of
    STRATIFIED: tl.constexpr = SAMPLER[0]
    OWN_ROWS: tl.constexpr = SAMPLER[1]
    unit = tl.arange(0, PADDED)
    if not HAS_SITE:
        words = tl.zeros([1, 1], tl.int32)
    elif STRATIFIED:
        place, shift = choice(stream(key, site, 1), unit, n_draws, n_permutations)
        words = tl.load(lattices_at + place[None, :] + draw[:, None])
        if not OWN_ROWS:
            words += shift[None, :]
    else:
        words = hash_word(stream(key, site, 3), draw)[:, None]
        if not OWN_ROWS:
            words = paired_words(words, draw[:, None] * 0, tl.arange(0, PADDED // 2)[None, :], WIDTH)
    return words


@triton.jit
def _drop(h, words, row, words_of, site, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr, SAMPLER: tl.constexpr):
    """h `[row, draw, unit]` times a site's masks; beyond `WIDTH` the weights are zero."""
    threshold, scale = keep
    STRATIFIED: tl.constexpr = SAMPLER[0]
    OWN_ROWS: tl.constexpr = SAMPLER[1]
    pair = tl.arange(0, PADDED // 2)
    if not OWN_ROWS:
        word = words[None, :, :]
    elif STRATIFIED:
        shift = paired_words(stream(words_of[1], site, 2), row[:, None], pair[None, :], WIDTH)
        word = words[None, :, :] + shift[:, None, :]
    else:
        word = paired_words(words[None, :, :], row[:, None, None], pair[None, None, :], WIDTH)
    return h * tl.where(word >= threshold, scale, 0.0)


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:  # ReLU
        return tl.maximum(z, 0.0)
    elif ACTIVATION == 2:  # tanh
        return 2 * tl.sigmoid(2 * z) - 1
    elif ACTIVATION == 3:  # sigmoid
        return tl.sigmoid(z)
    elif ACTIVATION == 4:  # SiLU
        return z * tl.sigmoid(z)
    else:
        return z


@triton.jit
def _load_transposed(weight_at, IN: tl.constexpr, OUT: tl.constexpr, PADDED_IN: tl.constexpr, PADDED_OUT: tl.constexpr):
    """The weights as `[in, out]`, zero beyond their widths."""
    unit_in, unit_out = tl.arange(0, PADDED_IN)[:, None], tl.arange(0, PADDED_OUT)[None, :]
    return tl.load(weight_at + unit_out * IN + unit_in, mask=(unit_in < IN) & (unit_out < OUT), other=0.0)


@triton.jit
def _vector(at, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """A row of weights or biases, zero beyond its width and where there is none."""
    unit = tl.arange(0, PADDED)
    if at is None:
        return tl.zeros([PADDED], tl.float32)
    else:
        return tl.load(at + unit, mask=unit < WIDTH, other=0.0)


@triton.jit
def _hidden_layer(
    h, words, row, words_of, site, keep, weights, bias, LAYER: tl.constexpr, NET: tl.constexpr, SAMPLER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs `[row, draw, unit]` of a hidden layer."""
    WIDTHS: tl.constexpr = NET[0]
    PADDED: tl.constexpr = NET[1]
    DROPS: tl.constexpr = NET[2]
    ACTIVATIONS: tl.constexpr = NET[3]
    if DROPS[LAYER]:
        h = _drop(h, words, row, words_of, site, keep, WIDTHS[LAYER], PADDED[LAYER], SAMPLER)
    flat = tl.reshape(h, [h.shape[0] * h.shape[1], PADDED[LAYER]])
    z = tl.dot(flat, weights, input_precision=PRECISION) + bias[None, :]
    return tl.reshape(_activate(z, ACTIVATIONS[LAYER]), [h.shape[0], h.shape[1], PADDED[LAYER + 1]])


@triton.jit(do_not_specialize=["key", "n_draws", "n_permutations", "threshold0", "threshold1", "threshold2",
                               "last_threshold", "first_draw", "n_drawn", "first_row", "n_rows"])  # fmt: skip
def _moments(
    x_at, mean_at, variance_at, weight0_at, weight1_at, weight2_at, last_weight_at,
    bias0_at, bias1_at, bias2_at, last_bias_at,
    threshold0: tl.int32, threshold1: tl.int32, threshold2: tl.int32, last_threshold: tl.int32,
    scale0, scale1, scale2, last_scale, odds,
    lattices_at, key: tl.int64, n_draws: tl.int32, n_permutations: tl.int32,
    first_draw: tl.int32, n_drawn: tl.int32, first_row: tl.int64, n_rows: tl.int32,
    WIDTHS: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr, ACTIVATIONS: tl.constexpr,
    INTEGRATE: tl.constexpr, STRATIFIED: tl.constexpr, OWN_ROWS: tl.constexpr, ONE_CHUNK: tl.constexpr,
    ROWS: tl.constexpr, DRAWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    LAST: tl.constexpr = len(DROPS) - 1
    IN: tl.constexpr = PADDED[LAST]
    OUT: tl.constexpr = WIDTHS[LAST + 1]
    PADDED_OUT: tl.constexpr = 1 if OUT == 1 else PADDED[LAST + 1]
    LAST_DRAWN: tl.constexpr = DROPS[LAST] and not INTEGRATE
    # Sites are counted in order; a layer without dropout has none.
    SITE1: tl.constexpr = 1 if DROPS[0] else 0
    SITE2: tl.constexpr = SITE1 + (1 if LAST > 1 and DROPS[1] else 0)
    LAST_SITE: tl.constexpr = (
        (0 if LAST == 0 else SITE1) if LAST < 2 else (SITE2 if LAST == 2 else SITE2 + (1 if DROPS[2] else 0))
    )
    NET: tl.constexpr = (WIDTHS, PADDED, DROPS, ACTIVATIONS)
    SAMPLER: tl.constexpr = (STRATIFIED, OWN_ROWS)
    words_of = (lattices_at, key, n_draws, n_permutations)
    site0 = first_draw * 0
    site1, site2, last_site = site0 + SITE1, site0 + SITE2, site0 + LAST_SITE

    # With all draws in one chunk, these serve every row; with more, they are those of the first chunk.
    draw = first_draw + tl.minimum(tl.arange(0, DRAWS), n_drawn - 1)
    if LAST > 0:
        words0 = _draw_words(words_of, site0, draw, WIDTHS[0], PADDED[0], DROPS[0], SAMPLER)
        weights0 = _load_transposed(weight0_at, WIDTHS[0], WIDTHS[1], PADDED[0], PADDED[1])
        bias0 = _vector(bias0_at, WIDTHS[1], PADDED[1])
    if LAST > 1:
        words1 = _draw_words(words_of, site1, draw, WIDTHS[1], PADDED[1], DROPS[1], SAMPLER)
        weights1 = _load_transposed(weight1_at, WIDTHS[1], WIDTHS[2], PADDED[1], PADDED[2])
        bias1 = _vector(bias1_at, WIDTHS[2], PADDED[2])
    if LAST > 2:
        words2 = _draw_words(words_of, site2, draw, WIDTHS[2], PADDED[2], DROPS[2], SAMPLER)
        weights2 = _load_transposed(weight2_at, WIDTHS[2], WIDTHS[3], PADDED[2], PADDED[3])
        bias2 = _vector(bias2_at, WIDTHS[3], PADDED[3])
    last_words = _draw_words(words_of, last_site, draw, WIDTHS[LAST], IN, LAST_DRAWN, SAMPLER)
    if OUT == 1:
        last_weights = _vector(last_weight_at, WIDTHS[LAST], IN)
    else:
        last_weights = _load_transposed(last_weight_at, WIDTHS[LAST], OUT, IN, PADDED_OUT)
    last_bias = _vector(last_bias_at, OUT, PADDED_OUT)

    feature, out = tl.arange(0, PADDED[0]), tl.arange(0, PADDED_OUT)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        is_x = (row < n_rows)[:, None] & (feature < WIDTHS[0])[None, :]
        x = tl.load(x_at + row[:, None].to(tl.int64) * WIDTHS[0] + feature[None, :], mask=is_x, other=0.0)
        own_row = first_row + row
        mean = tl.zeros([ROWS, PADDED_OUT], tl.float64)
        squares = tl.zeros([ROWS, PADDED_OUT], tl.float64)  # of deviations from the mean
        integrated = tl.zeros([ROWS, PADDED_OUT], tl.float64)
        for start in range(0, n_drawn, DRAWS):
            slot = start + tl.arange(0, DRAWS)
            if not ONE_CHUNK:
                draw = first_draw + tl.minimum(slot, n_drawn - 1)
                if LAST > 0:
                    words0 = _draw_words(words_of, site0, draw, WIDTHS[0], PADDED[0], DROPS[0], SAMPLER)
                if LAST > 1:
                    words1 = _draw_words(words_of, site1, draw, WIDTHS[1], PADDED[1], DROPS[1], SAMPLER)
                if LAST > 2:
                    words2 = _draw_words(words_of, site2, draw, WIDTHS[2], PADDED[2], DROPS[2], SAMPLER)
                last_words = _draw_words(words_of, last_site, draw, WIDTHS[LAST], IN, LAST_DRAWN, SAMPLER)
            h = tl.broadcast_to(x[:, None, :], [ROWS, DRAWS, PADDED[0]])
            if LAST > 0:
                keep = (threshold0, scale0)
                h = _hidden_layer(
                    h, words0, own_row, words_of, site0, keep, weights0, bias0, 0, NET, SAMPLER, PRECISION
                )
            if LAST > 1:
                keep = (threshold1, scale1)
                h = _hidden_layer(
                    h, words1, own_row, words_of, site1, keep, weights1, bias1, 1, NET, SAMPLER, PRECISION
                )
            if LAST > 2:
                keep = (threshold2, scale2)
                h = _hidden_layer(
                    h, words2, own_row, words_of, site2, keep, weights2, bias2, 2, NET, SAMPLER, PRECISION
                )
            if LAST_DRAWN:
                keep = (last_threshold, last_scale)
                h = _drop(h, last_words, own_row, words_of, last_site, keep, WIDTHS[LAST], IN, SAMPLER)
            flat = tl.reshape(h, [ROWS * DRAWS, IN])
            if OUT == 1:
                z = tl.sum(flat * last_weights[None, :], 1)[:, None]
            else:
                z = tl.dot(flat, last_weights, input_precision=PRECISION)
            y = tl.reshape(_activate(z + last_bias[None, :], ACTIVATIONS[LAST]), [ROWS, DRAWS, PADDED_OUT])
            # The chunk's moments about its own mean, merged with those so far: Chan, Golub and LeVeque 1979.
            is_drawn = (slot < n_drawn)[None, :, None]
            count = tl.minimum(n_drawn - start, DRAWS)
            chunk_mean = tl.sum(tl.where(is_drawn, y, 0.0), 1) / count
            deviation = tl.where(is_drawn, y - chunk_mean[:, None, :], 0.0)
            chunk_squares = tl.sum(deviation * deviation, 1).to(tl.float64)
            step = chunk_mean.to(tl.float64) - mean
            mean += step * count / (start + count)
            squares += chunk_squares + step * step * start * count / (start + count)
            if INTEGRATE:
                # Var[w (h ∘ z / keep_prob)] = (w ∘ w)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob)
                if OUT == 1:
                    spread = tl.sum(flat * flat * (last_weights * last_weights)[None, :], 1)[:, None]
                else:
                    spread = tl.dot(flat * flat, last_weights * last_weights, input_precision=PRECISION)
                spread = tl.reshape(spread, [ROWS, DRAWS, PADDED_OUT])
                integrated += tl.sum(tl.where(is_drawn, spread, 0.0), 1).to(tl.float64)
        at = row[:, None].to(tl.int64) * OUT + out[None, :]
        is_out = (row < n_rows)[:, None] & (out < OUT)[None, :]
        tl.store(mean_at + at, mean, mask=is_out)
        tl.store(variance_at + at, (squares + integrated * odds) / n_drawn, mask=is_out)
