"""The draws of a network: its outputs under fixed masks, evaluated in tiles of rows and draws.

A row is always evaluated as a batch of one, whatever batch it came in. Rows and draws are then mapped over together
(`torch.func.vmap`), so what comes before the first site is computed once for all draws. The size of a tile follows from
the network and the number of draws, never from the batch: a row takes part in products of the same shape whether it
comes alone or among a million, and so has the same bits.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.masks import SAMPLERS, Keys, keep_mask, uniform
from dropbayes.operations import Interception, Noise
from dropbayes.sequential import Perceptron, compact_draw, perceptron, prepared_draws
from dropbayes.sites import Anatomy, anatomy, checked_network, eagerly, view
from dropbayes.trees import Inputs, as_inputs, split

MASKS = ("shared", "row")

# Tile sizes. A lone row is padded to a whole tile, so a tile's work is bounded by what the calls that evaluate it cost
# anyway, counted in operations. Measured, not derived; any value gives right results.
_FREE_OPERATIONS = {"cpu": 8e7, "cuda": 8e9}
_FREE_OPERATIONS_DIRECT = {"cpu": 2e6, "cuda": 4e9}
_MOST_ROWS = 256
_FEWEST_PAIRS = 8
_FEWEST_PAIRS_DIRECT = {"shared": 64, "row": 512}  # a layer that is one product needs more rows to be fast
_WORKING_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
_LIVE_TENSORS = 4  # as many tensors of the largest size are alive at once
_DIRECT_ROWS = 64  # the direct path does so many rows at once: few enough for the cache
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
    r"""The outputs of `n_draws` draws of the network, $\widehat{\mathbf y}_t(\mathbf x)$: its own structure, draws first.

    Args:
        net: Any network with dropout; it is not changed.
        x: Its input: a tensor, a tuple of positional or a dict of named arguments.
        n_draws: The number of draws $T$.
        seed: With `n_draws` and `sampler`, fixes every mask.
        masks: "shared" for one mask per draw, so that a draw is a function; "row" for a fresh mask for every row.
        sampler: "stratified" or "independent" (see `dropbayes.masks`).
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
    """The outputs of some draws for some rows, `[draw, row, ...]`, and the variances over an integrated last layer."""

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
        direct = perceptron(net) if plain else None
        # Rows with masks of their own cannot share products, only calls.
        free = _FREE_OPERATIONS_DIRECT if direct is not None and masks == "shared" else _FREE_OPERATIONS
        pairs = _FEWEST_PAIRS if direct is None else _FEWEST_PAIRS_DIRECT[masks]
        rows, chunk = _tile_shape(found, wanted, keys.n_draws, inputs.device.type, free, pairs, max_bytes)
        way = "direct" if direct is not None else _ways_that_worked.get(net, _WAYS[0])
        compact = direct is not None and not exact_rows and masks == "shared" and direct.is_wide
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
            leaves = inputs.padded_rows(start, stop, 1 if self.compact else self.tile_rows)
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
        blocks = max(1, min(_MACRO_ROWS, 2**18 // self.tile_draws) // self.tile_rows)
        return blocks * self.tile_rows

    def arranged(self, tensors: list[Tensor], *, leading: int) -> list[Tensor]:
        """The tensors with their row axis, which stands after `leading` axes, where the network has it."""
        pairs = zip(tensors, self.anatomy.row_axes, strict=True)
        return [t if axis is None else t.movedim(leading, leading + axis) for t, axis in pairs]

    def _evaluate(
        self, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, first: int, real: int
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs of a tile and their variances over the last layer; of its rows, the first `real` are wanted."""
        if self.direct is not None:
            return self._direct(leaves[0], chunk, first, real)
        rows = range(first, first + self.tile_rows)
        outputs = [out[:, :real] for out in self._mapped(own, inputs, leaves, chunk, rows, real)]
        return (outputs[:-1], outputs[-1:]) if self.integrate else (outputs, None)

    def _direct(self, x: Tensor, chunk: range, first: int, real: int) -> tuple[list[Tensor], list[Tensor] | None]:
        assert self.direct is not None
        if self.compact:
            return [torch.stack([compact_draw(self.direct, x, keys=self.keys, draw=draw) for draw in chunk])], None
        prepared = prepared_draws(
            self.direct, self.keys, chunk, block=self.tile_rows, per_row=self.per_row, integrate=self.integrate, like=x
        )
        size = max(self.tile_rows, _DIRECT_ROWS)
        parts = x.split(size)
        results = [prepared(part, first + place * size) for place, part in enumerate(parts)]
        outputs = _joined_rows([out for out, _ in results], real)
        variances = [variance for _, variance in results if variance is not None]
        return [outputs], [_joined_rows(variances, real)] if variances else None

    def _mapped(
        self, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, rows: range, real: int
    ) -> list[Tensor]:
        """The draws by the fastest way that this network allows; the one that worked is taken again."""
        while True:
            try:
                outputs = _BY_WAY[self.way](self, own, inputs, leaves, chunk, rows, real)
            except (RuntimeError, ValueError, TypeError) as error:
                if _is_out_of_memory(error) or self.way == _WAYS[-1]:
                    raise
                # Control flow that depends on data, a write into an unmapped tensor, an operation without a rule.
                self.way = _WAYS[_WAYS.index(self.way) + 1]
            else:
                _ways_that_worked[self.net] = self.way
                return outputs


def _joined_rows(parts: list[Tensor], real: int) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :real]


def _check_random(found: Anatomy) -> None:
    if any(site.is_random for site in found.sites):
        return
    seen = ", ".join(f"{s.path or 'network'} (drop_prob {s.drop_prob:g})" for s in found.sites if s.drop_prob is not None)
    what = f"its dropout is switched off: {seen}" if seen else "it has no dropout"
    raise ValueError(
        f"`net` must have dropout to be a distribution over functions, but {what}: every draw would be the same. "
        "Make a network that has it with dropbayes.add_dropout(net, drop_prob=0.1); dropbayes.sites(net, x) lists what is "
        "random."
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
    """The rows and draws of a tile: from the network and the number of draws alone (and a memory bound, if it binds)."""
    a_row = found.prefix_cost + len(wanted) * found.suffix_cost
    affordable = free.get(device, free["cuda"]) / max(a_row, 1.0)
    rows = 2 ** int(math.log2(min(max(affordable, 1.0), _MOST_ROWS)))
    if a_row < n_draws * (found.prefix_cost + found.suffix_cost) / 16:
        rows = max(rows, 4)  # nearly all work is shared: four rows of it are far below one row drawn one by one
    elif len(wanted) < fewest_pairs:
        rows = max(rows, 2 ** math.ceil(math.log2(fewest_pairs / len(wanted))))
    limit = max_bytes if max_bytes is not None else _WORKING_BYTES.get(device, _WORKING_BYTES["cuda"])
    pairs = max(1, limit // max(found.pair_bytes * _LIVE_TENSORS, 1))
    rows = min(rows, 2 ** int(math.log2(pairs)))
    chunks = math.ceil(len(wanted) / max(1, pairs // rows))
    return rows, math.ceil(len(wanted) / chunks)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class _KeyedNoise(Noise):
    """The masks of some draws and rows; axes that are mapped over are hidden from the network."""

    def __init__(self, plan: Plan, chunk: range, rows: range) -> None:
        self.plan, self.chunk = plan, chunk
        self.rows = rows if plan.per_row else None
        self.n_rows = len(rows)
        self.draw_level: int | None = None
        self.row_level: int | None = None
        self.site = 0
        self.variance: Tensor | None = None
        self._pending: tuple[Tensor, float] | None = None

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        mask = keep_mask(
            self.plan.keys, self._next(), drop_prob=drop_prob, draws=self.chunk, rows=self.rows, shape=shape,
            dtype=like.dtype, device=like.device,
        )  # fmt: skip
        return self._hidden(mask)

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        words = uniform(self.plan.keys, self._next(), draws=self.chunk, rows=self.rows, shape=shape, device=device)
        return self._hidden(words)

    def integrate(self, x: Tensor, drop_prob: float) -> Tensor | None:
        if not self.plan.integrate or self.site != len(self.plan.anatomy.sites) - 1:
            return None
        self._next()
        alias = x.view_as(x)
        self._pending = (alias, drop_prob)
        return alias

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._pending is None or x is not self._pending[0]:
            return None
        drop_prob = self._pending[1]
        # Var[W (h ∘ z / keep_prob)] = (W ∘ W)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob)
        self.variance = nn.functional.linear(x.square(), weight.square()) * (drop_prob / (1 - drop_prob))
        return nn.functional.linear(x, weight, bias)

    def spread(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` for every draw and row that is mapped over."""
        levels = [(self.draw_level, len(self.chunk)), (self.row_level, self.n_rows)]
        for level, size in levels:
            if level is not None:
                zero = _add_batch_dim(torch.zeros(size, dtype=tensor.dtype, device=tensor.device), 0, level)
                tensor = tensor | zero if tensor.dtype == torch.bool else tensor + zero
        return tensor

    def _next(self) -> int:
        self.site += 1
        return self.site - 1

    def _hidden(self, value: Tensor) -> Tensor:
        """`[draw, (row,) ...]` as the network sees it: one row of one draw."""
        value = value[0] if self.draw_level is None else _add_batch_dim(value, 0, self.draw_level)
        if self.rows is not None:
            value = value[0] if self.row_level is None else _add_batch_dim(value, 0, self.row_level)
        return value


# functorch's own primitive: a real tensor seen as batched along one axis at a level of vmap.
_add_batch_dim: Callable[[Tensor, int, int], Tensor] = torch._C._functorch._add_batch_dim
_current_level: Callable[[], int] = torch._C._functorch.maybe_current_level


def _map_draws(
    plan: Plan, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, rows: range, whole: bool = False
) -> list[Tensor]:
    """All draws of all rows at once, `[draw, row, ...]` of each tensor.

    With `whole`, inputs and newly made tensors differ between rows and draws from the start, so that they can be
    written to; without, all that does not depend on the draw is computed once.
    """
    noise = _KeyedNoise(plan, chunk, rows)
    places = [place for place, is_row in enumerate(inputs.is_row) if is_row]
    axis = inputs.row_axis
    mode: Interception = _WholeInterception(noise) if whole else Interception(noise)

    def one_row(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor.unsqueeze(axis)
        if whole:
            arguments = [noise.spread(a) if isinstance(a, Tensor) else a for a in arguments]
        noise.site = 0
        with mode:
            output, _ = split(eagerly(inputs.call)(own, arguments))
        if plan.integrate:
            assert noise.variance is not None
            output = [*output, noise.variance]
        axes = (*plan.anatomy.row_axes, 0) if plan.integrate else plan.anatomy.row_axes
        return tuple(out if a is None else out.squeeze(a) for out, a in zip(output, axes, strict=True))

    def all_rows() -> tuple[Tensor, ...]:
        tensors = [leaves[place] for place in places]
        if len(rows) == 1:
            return tuple(out.unsqueeze(0) for out in one_row(*(t.select(axis, 0) for t in tensors)))

        def mapped(*row: Tensor) -> tuple[Tensor, ...]:
            noise.row_level = _current_level()
            return one_row(*row)

        return torch.func.vmap(mapped, in_dims=axis)(*tensors)

    if len(chunk) == 1:
        return [out.unsqueeze(0) for out in all_rows()]

    def mapped_draw(_: Tensor) -> tuple[Tensor, ...]:
        noise.draw_level = _current_level()
        return all_rows()

    return list(torch.func.vmap(mapped_draw)(torch.empty(len(chunk))))


_FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.empty, torch.zeros, torch.ones, torch.full, torch.empty_like, torch.zeros_like, torch.ones_like,
        torch.full_like, Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, torch.tensor,
    }
)  # fmt: skip


class _WholeInterception(Interception):
    """The mode in which new tensors, too, differ between rows and draws."""

    noise: _KeyedNoise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return self.noise.spread(result) if func in _FACTORIES else result


def _map_row_by_row(
    plan: Plan, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, rows: range, real: int,
    *, whole: bool = False, one_draw: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The draws of one row after another; with `one_draw`, also draw after draw, which is the oracle of all others."""
    per_row: list[list[Tensor]] = []
    for place in range(real):
        index = torch.tensor([place])
        row = range(rows[place], rows[place] + 1)
        own_leaves = [
            leaf.index_select(inputs.row_axis, index.to(leaf.device)) if is_row else leaf
            for leaf, is_row in zip(leaves, inputs.is_row, strict=True)
        ]
        parts = [range(draw, draw + 1) for draw in chunk] if one_draw else [chunk]
        # A network may write into its input: every run has its own.
        runs = [_map_draws(plan, own, inputs, _cloned(own_leaves), part, row, whole) for part in parts]
        per_row.append([torch.cat(outputs) for outputs in zip(*runs, strict=True)])
    return [torch.cat(outputs, dim=1) for outputs in zip(*per_row, strict=True)]


def _cloned(leaves: list[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


# From the fastest to the one that always works.
_BY_WAY: dict[str, Callable[..., list[Tensor]]] = {
    "mapped": lambda *args: _map_draws(*args[:-1]),
    "mapped whole": lambda *args: _map_draws(*args[:-1], whole=True),
    "row by row": _map_row_by_row,
    "row by row, whole": functools.partial(_map_row_by_row, whole=True),
    "one by one": functools.partial(_map_row_by_row, one_draw=True),
}
_WAYS = tuple(_BY_WAY)
_ways_that_worked: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
