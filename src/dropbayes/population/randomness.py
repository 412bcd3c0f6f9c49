r"""The random words, row orders and initial weights of a population: functions of seed and step alone."""

import enum
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORD_VALUES = 2**16  # a word is 16 bits: a mask element is dropped when its word lies below the threshold
STEPS_PER_CHUNK = 64  # whose words and row orders are drawn at once; part of the definition of a seed's masks


class Stream(enum.IntEnum):
    """What a generator is for: the first number of its key."""

    INITIAL_WEIGHTS, MEMBER_WORDS, MEMBER_ORDER, EPOCH_ORDER, SHARED_WORDS, DITHERS, EVALUATION = range(7)


def generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for a tuple of non-negative integers; unequal tuples give unrelated streams."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])
    return torch.Generator(device).manual_seed(seed)


def words(shape: Sequence[int], source: torch.Generator) -> Tensor:
    """Uniform 16-bit words, four from each 64-bit random number."""
    n = math.prod(shape)
    quads = torch.empty((n + 3) // 4, dtype=torch.int64, device=source.device).random_(-(2**63), None, generator=source)
    return quads.view(torch.int16)[:n].view(*shape)


def thresholds(drop_prob: Tensor, dither: Tensor | float) -> Tensor:
    r"""Thresholds $\lfloor 2^{16} p + v \rfloor - 2^{15}$: with v uniform, exactly p of the words lie below."""
    return (drop_prob * WORD_VALUES + dither).floor().sub(WORD_VALUES // 2).to(torch.int16)


def initial_weights(seed: int, widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Glorot-uniform weights `[in, out]`, one per layer, as in the reference implementation of [GG16]'s experiments."""
    shapes = list(itertools.pairwise(widths))
    source = generator(Stream.INITIAL_WEIGHTS, seed)
    uniforms = [torch.rand(shape, generator=source, dtype=torch.float64) for shape in shapes]
    return [((2 * u - 1) * (6 / sum(shape)) ** 0.5).to(dtype) for u, shape in zip(uniforms, shapes, strict=True)]


def member_words(seeds: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """The words that members combine with the shared ones before each weight layer, `[member, 1, unit]` by layer."""
    sources = [generator(Stream.MEMBER_WORDS, seed) for seed in seeds]
    return [torch.stack([words((1, width), source) for source in sources]) for width in widths[:-1]]


def member_order(seed: int, n_rows: int) -> Tensor:
    return torch.randperm(n_rows, generator=generator(Stream.MEMBER_ORDER, seed))


@lru_cache(maxsize=8)  # an order of a million rows is 8 MB
def _epoch_order(n_rows: int, epoch: int) -> Tensor:
    return torch.randperm(n_rows, generator=generator(Stream.EPOCH_ORDER, n_rows, epoch))


def steps_per_epoch(n_rows: int, batch_size: int) -> int:
    """The number of batches per epoch; the last may be smaller."""
    return -(-n_rows // batch_size)


def batches(chunk: int, batch_size: int, sizes: Sequence[int], padding: int) -> tuple[Tensor, Tensor]:
    """Positions of each step's rows in a member's own order, `[step, size, row]`, and the numbers of true rows.

    There is one order for each distinct number of rows; `padding` fills an epoch's last, smaller batch.
    """
    first = chunk * STEPS_PER_CHUNK
    positions, counts = [], []
    for n_rows in sizes:
        per_epoch = steps_per_epoch(n_rows, batch_size)
        (first_epoch, skipped), last_epoch = divmod(first, per_epoch), (first + STEPS_PER_CHUNK - 1) // per_epoch
        # An epoch is its row order, padded to whole batches; a chunk is a window on the epochs that it overlaps.
        fill = torch.full((per_epoch * batch_size - n_rows,), padding)
        orders = [(_epoch_order(n_rows, epoch), fill) for epoch in range(first_epoch, last_epoch + 1)]
        window = torch.cat([order for pair in orders for order in pair]).view(-1, batch_size)
        positions.append(window[skipped : skipped + STEPS_PER_CHUNK])
        is_last = (first + torch.arange(STEPS_PER_CHUNK)) % per_epoch == per_epoch - 1
        counts.append(torch.where(is_last, n_rows - (per_epoch - 1) * batch_size, batch_size).float())
    return torch.stack(positions, 1), torch.stack(counts, 1)


def chunk_of(chunk: int, batch_size: int, sizes: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """The dithers `[step, layer]`, positions, row counts and words `[step, row, unit]` by layer of a chunk of steps."""
    source = generator(Stream.DITHERS, chunk)
    dithers = torch.rand(STEPS_PER_CHUNK, len(widths) - 1, generator=source, dtype=torch.float64)
    sources = [generator(Stream.SHARED_WORDS, chunk, layer) for layer in range(len(widths) - 1)]
    shared = [words((STEPS_PER_CHUNK, batch_size, n), own) for n, own in zip(widths[:-1], sources, strict=True)]
    return [dithers, *batches(chunk, batch_size, sizes, max(sizes)), *shared]
