"""The draws of a network: its outputs under fixed masks, evaluated in tiles of rows and draws.

The size of a tile follows from the network and the number of draws, never from the batch: a row takes part in products
of the same shape whether it comes alone or among a million, and so has the same bits.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy, anatomy
from dropbayes.sampling.masks import SAMPLERS, Keys
from dropbayes.sampling.perceptron import Perceptron, compact_draw, perceptron, prepared_draws
from dropbayes.sampling.strategies import BY_WAY, Randomness
from dropbayes.sampling.trees import Inputs, as_inputs
from dropbayes.sampling.views import checked_network, view

MASKS = ("shared", "row")

_WAYS = tuple(BY_WAY)
_ways_that_worked: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

# Tile sizes. A lone row is padded to a whole tile, so a tile's work is bounded by what the calls that evaluate it cost
# anyway, counted in operations. Measured, not derived; any value gives right results.
_FREE_OPERATIONS = {"cpu": 8e7, "cuda": 3e10}
_FREE_OPERATIONS_DIRECT = {"cpu": 4e6, "cuda": 2e10}
_MOST_ROWS = {"cpu": 256, "cuda": 4096}
_FEWEST_PAIRS = 8
_FEWEST_PAIRS_DIRECT = {"shared": 64, "row": 512}  # a layer that is one product needs more rows to be fast
_WORKING_BYTES = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
_LIVE_TENSORS = 4  # as many tensors of the largest size are alive at once
_MACRO_ROWS = 1024  # the direct path hands its tiles on in batches of this many rows


def draws(
    net: nn.Module,
    x: Any,
    *,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "shared",
    sampler: str = "stratified",
    row_axis: int = 0,
    max_bytes: int | None = None,
) -> Any:
    r"""The outputs of `n_draws` draws, $\widehat{\mathbf y}_t(\mathbf x)$: the network's own structure, draws first.

    Args:
        net: Any network with dropout; it is not changed.
        x: Its input: a tensor, a tuple of positional or a dict of named arguments.
        n_draws: The number of draws $T$.
        seed: With `n_draws` and `sampler`, fixes every mask.
        masks: "shared" for one mask per draw, so that a draw is a function; "row" for a fresh mask for every row.
        sampler: "stratified" or "independent" (see `dropbayes.sampling.masks`).
        row_axis: The axis of the rows in the inputs.
        max_bytes: A bound on working memory, the result not counted.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> draws(net, torch.ones(3, 2), n_draws=10).shape
        torch.Size([10, 3, 1])
    """
    inputs = as_inputs(x, row_axis=row_axis)
    keys = checked_keys(n_draws, seed, sampler)
    plan = Plan.of(net, inputs, keys=keys, masks=masks, max_bytes=max_bytes)
    results: list[Tensor] = []
    with torch.no_grad():
        for tile in plan.tiles(inputs):
            if not results:
                results = [out.new_empty((keys.n_draws, inputs.n_rows, *out.shape[2:])) for out in tile.outputs]
            for result, out in zip(results, tile.outputs, strict=True):
                result[tile.draws.start : tile.draws.stop, tile.rows.start : tile.rows.stop] = out
    return plan.anatomy.structure.build(plan.arranged(results, leading=1))


def function_draw(
    net: nn.Module,
    index: int = 0,
    *,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "shared",
    sampler: str = "stratified",
    row_axis: int = 0,
) -> Callable[..., Any]:
    """One draw of the network as a deterministic, differentiable function of its input.

    `function_draw(net, i, n_draws=T, seed=s)(x)` equals `draws(net, x, n_draws=T, seed=s)[i]`.

    Args:
        net: Any network with dropout.
        index: Which draw.
        n_draws: The number of draws the index counts in.
        seed: As in `draws`.
        masks: As in `draws`; a draw is a function of its input alone only with "shared".
        sampler: As in `draws`.
        row_axis: As in `draws`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> f = function_draw(net, 3, n_draws=10, seed=1)
        >>> torch.allclose(f(torch.ones(2, 2)), draws(net, torch.ones(2, 2), n_draws=10, seed=1)[3])
        True
    """
    keys = checked_keys(n_draws, seed, sampler)
    if not 0 <= operator.index(index) < keys.n_draws:
        raise ValueError(f"`index` must be one of the {n_draws} draws, 0 to {n_draws - 1}; got {index}.")
    checked_network(net)

    def function(x: Any) -> Any:
        inputs = as_inputs(x, row_axis=row_axis)
        plan = Plan.of(net, inputs, keys=keys, masks=masks, only=index)
        blocks = [[out[0] for out in tile.outputs] for tile in plan.tiles(inputs)]
        whole = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
        return plan.anatomy.structure.build(plan.arranged(whole, leading=0))

    return function


def checked_keys(n_draws: int, seed: int, sampler: str) -> Keys:
    """The keys of a prediction, their parts checked."""
    if isinstance(n_draws, bool) or not hasattr(n_draws, "__index__"):
        raise TypeError(f"`n_draws` must be a whole number; got {n_draws!r}. Try n_draws=100.")
    if operator.index(n_draws) < 1:
        raise ValueError(f"`n_draws` must be at least 1; got {n_draws}. Try n_draws=100.")
    if not hasattr(seed, "__index__"):
        raise TypeError(f"`seed` must be a whole number; got {seed!r}.")
    if sampler not in SAMPLERS:
        raise ValueError(f"`sampler` must be one of {', '.join(map(repr, SAMPLERS))}; got {sampler!r}.")
    return Keys(operator.index(seed), operator.index(n_draws), sampler)


@dataclass(frozen=True)
class Tile:
    """The outputs of some draws for some rows, `[draw, row, ...]`.

    Where the last layer is integrated over, also the mean over these draws of its variance, `[row, ...]`.
    """

    rows: range
    draws: range
    outputs: list[Tensor]
    variances: list[Tensor] | None


@dataclass
class Plan:
    """How the draws of one network are evaluated on inputs of one form."""

    net: nn.Module
    anatomy: Anatomy
    keys: Keys
    per_row: bool
    integrate: bool
    tile_rows: int
    tile_draws: int
    direct: Perceptron | None
    draws: range
    way: str
    compact: bool = False

    @classmethod
    def of(
        cls,
        net: nn.Module,
        inputs: Inputs,
        *,
        keys: Keys,
        masks: str,
        max_bytes: int | None = None,
        integrate: bool = False,
        only: int | None = None,
        exact_rows: bool = True,
    ) -> Plan:
        """The plan for a network that was checked to be random.

        Args:
            net: The network.
            inputs: Its inputs; only their form matters.
            keys: Seed, number of draws and sampler.
            masks: "shared" or "row".
            max_bytes: A bound on working memory.
            integrate: Leave the last site out and integrate over it, where the last layer allows it.
            only: The one draw wanted, instead of all.
            exact_rows: Give up the bitwise independence of a row from its batch where that is faster, if False.
        """
        if masks not in MASKS:
            raise ValueError(f"`masks` must be one of {', '.join(map(repr, MASKS))}; got {masks!r}.")
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"`max_bytes` must be a positive number of bytes; got {max_bytes!r}.")
        net, found = anatomy(net, inputs)
        _check_random(found)
        integrate = integrate and found.last_layer
        wanted = range(keys.n_draws) if only is None else range(only, only + 1)
        if integrate and sum(site.is_random for site in found.sites) == 1:
            wanted = range(1)  # nothing is left to draw
        plain = len(inputs.leaves) == 1 and inputs.leaves[0].dim() == 2 and inputs.row_axis == 0
        direct = perceptron(net) if plain and only is None else None  # its products cannot be differentiated
        # Rows with masks of their own cannot share products, only calls.
        free = _FREE_OPERATIONS_DIRECT if direct is not None and masks == "shared" else _FREE_OPERATIONS
        pairs = _FEWEST_PAIRS if direct is None else _FEWEST_PAIRS_DIRECT[masks]
        rows, chunk = _tile_shape(found, wanted, keys.n_draws, inputs.device.type, free, pairs, max_bytes)
        way = "direct" if direct is not None else _ways_that_worked.get(net, _WAYS[0])
        on_cpu = inputs.device.type == "cpu"  # elsewhere, finding the units to leave out costs more than it saves
        compact = direct is not None and not exact_rows and masks == "shared" and direct.is_wide and on_cpu
        if compact:
            integrate, wanted, way = False, range(keys.n_draws) if only is None else wanted, "direct, compacted"
        return cls(net, found, keys, masks == "row", integrate, rows, chunk, direct, wanted, way, compact)

    @property
    def exact(self) -> bool:
        """Whether the moments need no draws at all."""
        return self.integrate and sum(site.is_random for site in self.anatomy.sites) == 1

    @property
    def method(self) -> str:
        """How the moments are found, in words."""
        if self.exact:
            return "exact"
        return f"last layer integrated, {self.way}" if self.integrate else self.way

    def tiles(self, inputs: Inputs, *, offset: int = 0) -> Iterator[Tile]:
        """Every tile of the inputs: all draws of the first rows, then all draws of the next.

        Args:
            inputs: The rows.
            offset: The index of the first row, which keys per-row masks.
        """
        own = self.net if self.direct is not None else view(self.net, self.anatomy.raised)
        step = self._rows_at_once()
        for start in range(0, inputs.n_rows, step):
            stop = min(start + step, inputs.n_rows)
            leaves = inputs.padded_rows(start, stop, self.tile_rows if self.direct is None else 1)
            position = self.draws.start
            while position < self.draws.stop:
                chunk = range(position, min(position + self.tile_draws, self.draws.stop))
                try:
                    outputs, variances = self._evaluate(own, inputs, leaves, chunk, offset + start, stop - start)
                except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                    if not _is_out_of_memory(error) or self.tile_draws == 1:
                        raise
                    self.tile_draws = max(1, self.tile_draws // 2)
                    continue
                yield Tile(range(start, stop), chunk, outputs, variances)
                position = chunk.stop

    def _rows_at_once(self) -> int:
        if self.direct is None:
            return self.tile_rows
        if self.compact:
            return _MACRO_ROWS
        blocks = max(1, min(_MACRO_ROWS, 2**18 // self.tile_draws) // self.tile_rows)  # bounds the draws held at once
        return blocks * self.tile_rows

    def arranged(self, tensors: list[Tensor], *, leading: int) -> list[Tensor]:
        """The tensors with their row axis, which stands after `leading` axes, where the network has it."""
        pairs = zip(tensors, self.anatomy.row_axes, strict=True)
        return [t if axis is None else t.movedim(leading, leading + axis) for t, axis in pairs]

    def _evaluate(
        self, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, first: int, real: int
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs of a tile and their mean variance over the last layer; its first `real` rows are wanted."""
        if self.direct is not None:
            return self._direct(leaves[0], chunk, first)
        rows = range(first, first + self.tile_rows)
        outputs = [out[:, :real] for out in self._mapped(own, inputs, leaves, chunk, rows, real)]
        return (outputs[:-1], [outputs[-1].mean(0, dtype=torch.float64)]) if self.integrate else (outputs, None)

    def _direct(self, x: Tensor, chunk: range, first: int) -> tuple[list[Tensor], list[Tensor] | None]:
        assert self.direct is not None
        if self.compact:
            return [torch.stack([compact_draw(self.direct, x, keys=self.keys, draw=draw) for draw in chunk])], None
        prepared = prepared_draws(
            self.direct, self.keys, chunk, block=self.tile_rows, per_row=self.per_row, integrate=self.integrate, like=x
        )
        outputs, variance = prepared(x, first)
        return [outputs], None if variance is None else [variance]

    def _mapped(
        self, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, rows: range, real: int
    ) -> list[Tensor]:
        """The draws by the fastest way that this network allows; the one that worked is taken again."""
        randomness = Randomness(self.anatomy, self.keys, self.per_row, self.integrate)
        while True:
            try:
                outputs = BY_WAY[self.way](randomness, own, inputs, leaves, chunk, rows, real)
            except (RuntimeError, ValueError, TypeError) as error:
                if _is_out_of_memory(error) or self.way == _WAYS[-1]:
                    raise
                # Control flow that depends on data, a write into an unmapped tensor, an operation without a rule.
                self.way = _WAYS[_WAYS.index(self.way) + 1]
            else:
                _ways_that_worked[self.net] = self.way
                return outputs


def _check_random(found: Anatomy) -> None:
    if any(site.is_random for site in found.sites):
        return
    seen = ", ".join(
        f"{s.path or 'network'} (drop_prob {s.drop_prob:g})" for s in found.sites if s.drop_prob is not None
    )
    what = f"its dropout is switched off: {seen}" if seen else "it has no dropout"
    raise ValueError(
        f"`net` must have dropout to be a distribution over functions, but {what}: every draw would be the same. "
        "Make a network that has it with dropbayes.add_dropout(net, drop_prob=0.1); dropbayes.sites(net, x) lists what "
        "is random."
    )


def _tile_shape(
    found: Anatomy,
    wanted: range,
    n_draws: int,
    device: str,
    free: dict[str, float],
    fewest_pairs: int,
    max_bytes: int | None,
) -> tuple[int, int]:
    """The rows and draws of a tile: from the network and the number of draws alone (and a memory bound that binds)."""
    a_row = found.prefix_cost + len(wanted) * found.suffix_cost
    device = device if device in free else "cuda"
    affordable = free[device] / max(a_row, 1.0)
    rows = 2 ** int(math.log2(min(max(affordable, 1.0), _MOST_ROWS[device])))
    if a_row < n_draws * (found.prefix_cost + found.suffix_cost) / 16:
        rows = max(rows, 4)  # nearly all work is shared: four rows of it are far below one row drawn one by one
    elif len(wanted) < fewest_pairs:
        rows = max(rows, 2 ** math.ceil(math.log2(fewest_pairs / len(wanted))))
    limit = max_bytes if max_bytes is not None else _WORKING_BYTES[device]
    pairs = max(1, limit // max(found.pair_bytes * _LIVE_TENSORS, 1))
    rows = min(rows, 2 ** int(math.log2(pairs)))
    chunks = math.ceil(len(wanted) / max(1, pairs // rows))
    return rows, math.ceil(len(wanted) / chunks)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
