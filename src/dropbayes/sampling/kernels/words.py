"""The words of docs/masks.md as functions that kernels call.

Words are signed here, as torch stores them: w - 2³¹ for the page's word w, compared with the threshold less 2³¹.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dropbayes.sampling.masks import Keys, as_signed, permuted_lattices


def source(keys: Keys, device: torch.device) -> tuple[Tensor | None, int, int, int]:
    """A kernel's arguments: the lattices (of the stratified sampler), the key, the numbers of draws and of lattices."""
    key = as_signed(keys.word)
    if keys.sampler == "independent":
        return None, key, keys.n_draws, 1
    lattices = permuted_lattices(keys.n_draws, device)
    return lattices, key, keys.n_draws, lattices.shape[0]


@triton.jit
def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def hash_word(key, n):
    return mix(key + n.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def stream(key, site, PURPOSE: tl.constexpr):
    """A site's stream of words: for its units (1), for rows with words of their own (2), or for draws (3)."""
    # SplitMix64's constants are written out: a launch compares every global a kernel reads.
    of_site = hash_word(key.to(tl.int64).to(tl.uint64, bitcast=True), site + 1)
    return mix(of_site + ((PURPOSE + 1) * 0x9E3779B97F4A7C15) % 0x10000000000000000)


@triton.jit
def turn(key, row, n_draws):
    """The draw at which a row with masks of its own begins."""
    word = hash_word(stream(key, row * 0 - 1, 4), row)
    return ((word >> 32).to(tl.uint32) % n_draws.to(tl.uint32)).to(tl.int32)


@triton.jit
def half_word(key, row, unit, n_units):
    """The half of a row's hash that belongs to a unit."""
    word = hash_word(key, row.to(tl.int64) * ((n_units + 1) // 2) + unit // 2)
    return tl.where(unit % 2 == 1, word >> 32, word).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def paired_words(key, row, pair, n_units):
    """The words of units 2 `pair` and 2 `pair` + 1, interleaved along the last axis: one hash for both."""
    word = hash_word(key, row.to(tl.int64) * ((n_units + 1) // 2) + pair)
    low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    return tl.interleave(low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True))


@triton.jit
def unit_words(key, row, unit, pair, n_units, PAIRED: tl.constexpr):
    """The words `[row, unit]`; for aligned pairs of neighbouring units, with one hash per `pair`."""
    if PAIRED:
        return paired_words(key, row, pair[None, :], n_units)
    else:
        return half_word(key, row, unit[None, :], n_units)


@triton.jit
def choice(key, unit, n_draws, n_permutations):
    """Where a unit's permuted lattice begins in the table, and the shift that all rows share."""
    word = hash_word(key, unit)
    permutation = ((word >> 32).to(tl.uint32) & 0xFFFF) % n_permutations.to(tl.uint32)
    start = (word >> 48).to(tl.uint32) % n_draws.to(tl.uint32)
    place = permutation * (2 * n_draws).to(tl.uint32) + start
    return place.to(tl.int32), word.to(tl.uint32).to(tl.int32, bitcast=True)
