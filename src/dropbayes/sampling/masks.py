r"""Keyed random masks: a pure function of seed, site, draw and row, with the same bits for any chunking.

Every random word is a hash of its coordinates (SplitMix64 over integer tensors), so any tile of draws and rows can be
generated independently, on any device and thread, without a generator's state.

The *stratified* sampler gives each unit of a site $T$ uniforms that form a randomly shifted, permuted lattice,
$u_t = \mathrm{frac}(\pi(t)/T + s)$. The shift $s$ is uniform and independent between units (and rows), so every single
draw is an exact, independent Bernoulli mask; over the $T$ draws each unit is dropped as near to $T \cdot$ `drop_prob`
times as integers allow, which removes most of the Monte Carlo error of a mean. The *independent* sampler hashes every
draw separately; its first draws do not depend on how many follow.

A network that reads a sequence token by token, with a cache, must have at every step the masks that it would have on
the whole sequence: only then are its steps those of one function. *Tied* masks have one value for all positions, as Gal
and Ghahramani (2016, *A Theoretically Grounded Application of Dropout in Recurrent Neural Networks*) require: the
weights are then random, $\mathbf{W} \operatorname{diag}(\mathbf{z})$, and not the tokens. Attention weights, which
have a position for queries and one for keys, are tied over both: a head is dropped whole, which drops its block of rows
of the output projection. Masks *per position* are keyed by the absolute position (attention weights by that of query
and key).
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.tracing import Site

SAMPLERS = ("stratified", "independent")

_WORD = 2**64
# SplitMix64 (Steele, Lea and Flood 2014): the golden-ratio increment, then the shifts and multipliers of its finaliser.
_INCREMENT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_PERMUTATION_KEY = 0x6D61736B73  # any constant: the table of permutations is the same for every seed
_TABLE_ENTRIES = 2**20  # bounds the table's memory (8 MB) and the time to sort it
_MAX_PERMUTATIONS = 256
_CACHED_BYTES = 2**25  # of all masks that are kept for their next use
SHARED_BYTES = 2**22  # of the largest one of them
ROW_BYTES = 2**17  # likewise with masks for each row: those of many rows would displace the others

_UNIT, _ROW, _DRAW, _TURN = 1, 2, 3, 4  # streams of one site; the last is of none, and so of site -1
_HOST = 4  # the stream of seeds for generators outside of torch

MAX_POSITIONS = 2**20  # positions along one axis: two of them number a pair without collision


@dataclass(frozen=True)
class Keys:
    """The parameters of the masks of one prediction, besides their coordinates."""

    seed: int
    n_draws: int
    sampler: str = "stratified"
    replicate: int = 0  # sets of draws that are independent of each other

    @property
    def word(self) -> int:
        """The 64-bit key that all streams of words begin with."""
        return fold(self.seed % _WORD, self.replicate)

    def stream(self, site: int, purpose: int) -> int:
        """The 64-bit key of one of a site's streams of words."""
        return fold(self.word, site, purpose)


def named_site(name: str) -> int:
    """The number of a site identified by its name instead of its index in the order of execution."""
    return fold(0, *name.encode())


def site_number(site: Site) -> int:
    """The number that keys a site's masks: its own or, if it was learned, that of its name."""
    if site.number is not None:
        return site.number
    return named_site(site.name) if site.name else site.index


@dataclass(frozen=True)
class Units:
    """Units of a mask numbered by absolute position, independently of the length of the sequence."""

    shape: tuple[int, ...]  # of the mask
    axes: tuple[int, ...]  # that hold positions, one or two
    starts: tuple[int, ...]  # the absolute position of the first entry along each of them

    def numbers(self, device: torch.device) -> Tensor:
        """The number of each unit, flattened: place * (units at one place) + unit, place = position or a pair's."""
        within = tuple(1 if axis in self.axes else size for axis, size in enumerate(self.shape))
        place = torch.zeros((), dtype=torch.int64, device=device)
        for axis, start in zip(self.axes, self.starts, strict=True):
            positions = torch.arange(start, start + self.shape[axis], device=device)
            place = place * MAX_POSITIONS + positions.reshape(-1, *(1,) * (len(self.shape) - axis - 1))
        unit = torch.arange(math.prod(within), device=device).reshape(within)
        return (place * math.prod(within) + unit).expand(self.shape).reshape(-1)


@dataclass(frozen=True)
class Positions:
    """The dependence of the masks of one run on position."""

    tied: bool  # all positions share a mask
    lengths: tuple[int, ...]  # the number of positions of each sequence of the input, including those in a cache

    def generate(self, site: Site, shape: tuple[int, ...], make: Callable[..., Tensor]) -> Tensor:
        """The result of `make` for a site's number, the shape of its mask (1 along tied positions) and its units."""
        axes, number = {position.axis for position in site.positions}, site_number(site)
        if self.tied or not axes:
            return make(number, shape=tuple(1 if a in axes else n for a, n in enumerate(shape)))
        return make(number, shape=shape, units=self._units(site, shape))

    def _units(self, site: Site, shape: tuple[int, ...]) -> Units:
        lengths = [shape[position.axis] for position in site.positions]
        totals = [self.lengths[position.sequence] for position in site.positions]
        # The last entry is the last position: queries are the newest tokens, keys reach back to the first (or, in a
        # sliding window, to the first that is left). Only a cache with room to spare is longer than the sequence.
        starts = [max(0, total - length) for total, length in zip(totals, lengths, strict=True)]
        if max(start + length for start, length in zip(starts, lengths, strict=True)) > MAX_POSITIONS:
            rule = f'"per_position" numbers at most {MAX_POSITIONS} positions; {site.path or "net"} has more'
            raise ValueError(f"`positions` {rule}.")
        return Units(shape, tuple(position.axis for position in site.positions), tuple(starts))


def keep_mask(
    keys: Keys, site: int, *, drop_prob: float, draws: Sequence[int], rows: range | None, shape: tuple[int, ...],
    dtype: torch.dtype, device: torch.device, units: Units | None = None,
) -> Tensor:  # fmt: skip
    """The 0/1 masks of one site, `[draw, *shape]`, or `[draw, row, *shape]` where each of some `rows` has its own.

    `drop_prob` is resolved to 2⁻³². `units` are numbered by absolute position; by default in row-major order.
    """
    spec = (device, keys, site, draws, rows, shape, units, dtype, drop_prob)
    return _numbers(spec, lambda words: _thresholded(words, drop_prob, dtype), dtype)


def uniform(
    keys: Keys, site: int, *, draws: Sequence[int], rows: range | None, shape: tuple[int, ...], device: torch.device,
    units: Units | None = None,
) -> Tensor:  # fmt: skip
    """Uniforms in (0, 1) in float64, `[draw, *shape]` or `[draw, row, *shape]`, keyed as in `keep_mask`."""
    spec = (device, keys, site, draws, rows, shape, units)
    return _numbers(spec, lambda words: (words.double() + (2**31 + 0.5)) * 2.0**-32, torch.float64)


def _numbers(spec: tuple[Any, ...], made: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """What is `made` of the words of a site."""
    device, keys, site, draws, rows, shape, units = spec[:7]

    def some(draws: Sequence[int]) -> Tensor:
        return made(_words(keys, site, draws, rows, units or math.prod(shape), device))

    def make() -> Tensor:
        step = max(1, 2**17 // max(1, math.prod(shape)))  # draws whose words stay in the cache
        if step >= len(draws) or rows is not None or device.type != "cpu":
            numbers = some(draws)
        else:
            numbers = torch.empty(len(draws), math.prod(shape), dtype=dtype, device=device)
            for first, part in zip(range(0, len(draws), step), numbers.split(step), strict=True):
                part.copy_(some(draws[first : first + step]))
        return numbers.reshape(*numbers.shape[:-1], *shape)

    return kept(spec, make, SHARED_BYTES if rows is None else ROW_BYTES)


def _thresholded(words: Tensor, drop_prob: float, dtype: torch.dtype) -> Tensor:
    return torch.ge(words, signed_threshold(drop_prob), out=torch.empty(words.shape, dtype=dtype, device=words.device))


def signed_threshold(drop_prob: float) -> int:
    """The least signed word that is kept."""
    return min(round(drop_prob * 2**32), 2**32 - 1) - 2**31


def keep_scale(drop_prob: float) -> float:
    """The factor of a kept element."""
    return 1 / (1 - drop_prob) if drop_prob < 1 else 1.0


class _Kept:
    """The masks, and tables of lattices, used last, up to a number of bytes.

    The next block of rows, and the next call with the same seed, use the same masks; they are never written to.
    """

    def __init__(self) -> None:
        self._tensors: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, spec: tuple[Any, ...], make: Callable[[], Tensor], largest: int) -> Tensor:
        """The tensor of a specification, its device first: made if it is not here, and kept if it is not too large."""
        if spec[0].type == "cuda":  # another stream would not wait until it is made, nor be waited for at its end
            index = torch.cuda.current_device() if spec[0].index is None else spec[0].index
            spec = (*spec, torch._C._cuda_getCurrentRawStream(index))
        with self._lock:
            if spec in self._tensors:
                self._tensors.move_to_end(spec)
                return self._tensors[spec]
        # An ordinary tensor, also within the caller's inference mode or transforms: it may meet gradients later.
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            new = make()
        with self._lock:
            if new.nbytes <= largest and self._tensors.setdefault(spec, new) is new:
                self._bytes += new.nbytes
            while self._bytes > _CACHED_BYTES:
                self._bytes -= self._tensors.popitem(last=False)[1].nbytes
        return new


kept = _Kept()


def derived_seed(keys: Keys, draw: int, row: int) -> int:
    """A seed for generators that cannot be keyed to a site, one per draw and row."""
    return fold(keys.word, _HOST, draw, row)


def _words(
    keys: Keys, site: int, draws: Sequence[int], rows: range | None, units: int | Units, device: torch.device
) -> Tensor:
    """Signed 32-bit words, uniform over their range: `[draw, unit]` or `[draw, row, unit]`."""
    n_units, numbers = (units, None) if isinstance(units, int) else (0, units.numbers(device))
    if keys.sampler == "independent":
        streams = _hash_numbers(keys.stream(site, _DRAW), torch.tensor(draws, device=device))[:, None]
        if numbers is None:
            words = _hash_rows(streams, rows or range(1), n_units, device)
            return words if rows is None else words.reshape(len(draws), len(rows), n_units)
        if rows is None:
            return _halves(streams, numbers)
        own = [_halves(_hash_numbers(streams, streams.new_tensor([row + 1])), numbers) for row in rows]
        return torch.stack(own, dim=1)
    places, shifts = _chosen(keys, site, units, device)
    if rows is None:
        return _lattice(keys, draws, places).add_(shifts)  # int32 wraps around: the fractional part
    key = keys.stream(site, _ROW)
    if numbers is None:
        return _row_lattice(keys, draws, rows, places).add_(_hash_rows(key, rows, n_units, device))
    # The row is folded into the key, since rows have no fixed width.
    return _row_lattice(keys, draws, rows, places).add_(torch.stack([_halves(fold(key, row), numbers) for row in rows]))


def _chosen(keys: Keys, site: int, units: int | Units, device: torch.device) -> Tensor:
    """Where the lattice of each unit begins in the table and, with shared masks, its shift, as int32 `[2, unit]`.

    Kept for the next draws and rows: one hash of each unit decides for all of them.
    """

    def make() -> Tensor:
        numbers = units.numbers(device) if isinstance(units, Units) else torch.arange(units, device=device)
        choice, table = _hash_numbers(keys.stream(site, _UNIT), numbers), permuted_lattices(keys.n_draws, device)
        shift, high = choice.to(torch.int32), (choice >> 32).to(torch.int32)
        permutation, start = (high & 0xFFFF) % table.shape[0], (high >> 16 & 0xFFFF) % keys.n_draws
        return torch.stack([permutation * table.shape[1] + start, shift])

    return kept((device, keys, site, units), make, _CACHED_BYTES)


def _halves(key: int | Tensor, numbers: Tensor) -> Tensor:
    """The 32-bit word of each numbered unit: half of the 64-bit hash it shares with its neighbour."""
    words = _hash_numbers(key, numbers // 2)
    return torch.where(numbers % 2 == 1, words >> 32, words).to(torch.int32)


def _lattice(keys: Keys, draws: Sequence[int], places: Tensor) -> Tensor:
    r"""The permuted lattice $\pi_k(t)/T$ of every unit $k$ as 32-bit words, `[draw, unit]`."""
    index = places + torch.tensor(draws, dtype=torch.int32, device=places.device)[:, None]
    return permuted_lattices(keys.n_draws, places.device).view(-1).index_select(0, index.view(-1)).view(index.shape)


def _row_lattice(keys: Keys, draws: Sequence[int], rows: range, places: Tensor) -> Tensor:
    """The lattices of rows that each begin at a draw of their own, `[draw, row, unit]`.

    Rows that began at the same one would be correlated over the draws of a seed, and more draws would not change that.
    """
    turns = _shift_right(_hash(keys.stream(-1, _TURN), rows.start, rows.stop, places.device), 32)
    positions = (torch.tensor(draws, device=places.device)[:, None] + turns) % keys.n_draws
    if positions.numel() >= keys.n_draws:
        return _lattice(keys, range(keys.n_draws), places)[positions]
    return permuted_lattices(keys.n_draws, places.device).view(-1)[positions[..., None] + places]


def permuted_lattices(n_draws: int, device: torch.device) -> Tensor:
    """Random permutations of the lattice of `n_draws` points, each stored twice so that offsets never wrap."""

    def make() -> Tensor:
        count = max(1, min(_MAX_PERMUTATIONS, _TABLE_ENTRIES // n_draws))
        words = _hash(_PERMUTATION_KEY, 0, count * n_draws, torch.device("cpu"))
        points = (words.reshape(count, n_draws).argsort(dim=1) * 2**32) // n_draws - 2**31
        return torch.cat([points, points], dim=1).to(torch.int32).to(device)

    return kept((device, n_draws), make, _CACHED_BYTES)


def _hash_rows(key: int | Tensor, rows: range, units: int, device: torch.device) -> Tensor:
    """Hashed 32-bit words of `units` units for each row, `[(stream,) row, unit]`: two words from each 64-bit hash."""
    per_row = max(1, (units + 1) // 2)  # a mask of no units, too
    words = _hash(key, rows.start * per_row, rows.stop * per_row, device).view(torch.int32)
    return words.reshape(-1, 2 * per_row)[:, :units]


def _hash(key: int | Tensor, first: int, last: int, device: torch.device) -> Tensor:
    """SplitMix64's outputs `first` to `last` of the stream `key` (or of each stream of a column), as int64."""
    return _hash_numbers(key, torch.arange(first, last, device=device))


def _hash_numbers(key: int | Tensor, numbers: Tensor) -> Tensor:
    """SplitMix64's outputs of the given numbers: of the stream `key`, or of each stream of a column."""
    if numbers.device.type == "cpu":  # NumPy's unsigned words: the same bits, without the overhead of torch calls
        stream = np.uint64(key) if isinstance(key, int) else key.numpy().view(np.uint64)
        state = numbers.numpy().view(np.uint64) * np.uint64(_INCREMENT) + stream
        for shift, multiplier in _ROUNDS:
            state ^= state >> np.uint64(shift)
            state *= np.uint64(multiplier)
        return torch.from_numpy((state ^ (state >> np.uint64(31))).view(np.int64))
    words = numbers * as_signed(_INCREMENT) + (as_signed(key) if isinstance(key, int) else key)
    for shift, multiplier in _ROUNDS:  # in place: those of a long sequence's attention are gigabytes
        words.bitwise_xor_(_shift_right(words, shift)).mul_(as_signed(multiplier))
    return words.bitwise_xor_(_shift_right(words, 31))


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """The logical right shift: torch's shift is arithmetic."""
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def fold(key: int, *coordinates: int) -> int:
    """A 64-bit key from a key and more coordinates, by the same hash on Python integers."""
    for coordinate in coordinates:
        state = (key + (coordinate + 1) * _INCREMENT) % _WORD
        for shift, multiplier in _ROUNDS:
            state = ((state ^ (state >> shift)) * multiplier) % _WORD
        key = state ^ (state >> 31)
    return key


def as_signed(word: int) -> int:
    """The 64-bit word as the signed integer torch stores."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
