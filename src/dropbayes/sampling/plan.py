"""The plan for evaluating the draws of a network: blocks of rows, each in chunks of draws.

On a CPU the size of a block follows from the network and the number of draws, not from the batch: a row takes part in
products of the same shape whether it comes alone or among a million, and so has the same bits. Other sizes, for small
and large batches, are used where a trial shows that they give a row the same bits. Otherwise blocks are as large as
memory allows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.runtime.devices import cpu_threads
from dropbayes.sampling.anatomy import Anatomy, RowLayout
from dropbayes.sampling.choice import agreeing_sizes, chosen_strategy, is_out_of_memory
from dropbayes.sampling.evaluators import Chunk, Compacted, Direct, Evaluator, General
from dropbayes.sampling.fusion import kernels_on
from dropbayes.sampling.inspection import inspect_cached, names_of
from dropbayes.sampling.keyed import Masks, NetworkChanged
from dropbayes.sampling.lengths import sequence_lengths
from dropbayes.sampling.looks import autocast_dtype
from dropbayes.sampling.masks import SAMPLERS, Keys
from dropbayes.sampling.perceptron import Form, Perceptron, anatomy_of, perceptron
from dropbayes.sampling.positions import Positions, checked_positions
from dropbayes.sampling.strategies import ONE_BY_ONE
from dropbayes.sampling.streaming import moments_of_one_group, result_dtype
from dropbayes.sampling.trees import Inputs
from dropbayes.sampling.views import checked_network, unwrap

__all__ = ["MASKS", "Chunk", "NetworkChanged", "Plan", "check_random", "checked_keys", "plan_draws", "position_masks"]

MASKS = ("shared", "row")

# Block sizes. A lone row is padded to a whole block where bits matter, so a block's work is bounded by the overhead of
# its calls, counted in operations. Measured, not derived; any value gives right results.
_FREE_OPERATIONS = {"cpu": 3e7, "cuda": 3e10}
_FREE_OPERATIONS_DIRECT = {"cpu": 4e6, "cuda": 2e10}
_MOST_ROWS = {"cpu": 256, "cuda": 4096}
_FEWEST_PAIRS = 8
_FEWEST_PAIRS_DIRECT = 64  # a layer that is one product needs more rows to be fast
_WORKING_BYTES = {"cpu": 32 * 2**20, "cuda": 3 * 2**30}  # on a CPU, about what its caches hold
_WORKING_BYTES_DIRECT = {"cpu": 64 * 2**20, "cuda": 3 * 2**30}
_LARGER_BLOCK = 4  # times the rows of a block: fewer calls for a larger batch, if they give the same bits
_TRIAL_OPERATIONS = 1e10
_MACRO_ROWS = 1024  # the direct path yields its blocks in batches of this many rows
_THREADED_OPERATIONS = 5e7  # a smaller block finishes before other threads have started


_UNCHANGED = contextlib.nullcontext()


def checked_keys(n_draws: int, seed: int, sampler: str) -> Keys:
    """The keys of a prediction, validated."""
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
class Plan:
    """The plan for evaluating the draws of one network on inputs of one form."""

    anatomy: Anatomy
    evaluator: Evaluator
    draws: range
    sizes: tuple[int, ...]  # numbers of rows in a block, from the largest: a row has the same bits in each
    chunk_draws: int
    exact: bool  # the moments need no draws at all
    integrate: bool
    operations: float  # of a block
    usual_rows: int | None = None  # the number of rows in a block that is padded; None for the largest

    @property
    def block_rows(self) -> int:
        """The number of rows in a full block."""
        return self.sizes[0]

    @property
    def method(self) -> str:
        """The method of computing the moments, in words."""
        if self.exact:
            return "exact"
        return f"last layer integrated, {self.evaluator.name}" if self.integrate else self.evaluator.name

    def blocks(self, inputs: Inputs, *, first_row: int = 0) -> Iterator[tuple[range, Iterator[Chunk]]]:
        """The rows of `inputs` in blocks, each with its chunks of draws; row i is keyed as row `first_row` + i."""
        for rows in _blocks_of_rows(inputs.n_rows, self.sizes, self.usual_rows or self.block_rows):
            yield rows, self._chunks(inputs, rows, first_row + rows.start)

    def _chunks(self, inputs: Inputs, rows: range, first_row: int) -> Iterator[Chunk]:
        position, size = self.draws.start, self.chunk_draws
        while position < self.draws.stop:
            draws = range(position, min(position + size, self.draws.stop))
            try:
                chunk = self.evaluator(inputs, rows, first_row, draws)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                size = max(1, size // 2)
                continue
            yield chunk
            position = draws.stop

    def moments(self, inputs: Inputs, first_row: int) -> list[tuple[Tensor, Tensor]] | None:
        """The mean and variance of each output over all draws at once; None if the draws must be streamed."""
        if inputs.device.type != "cpu":
            whole = isinstance(self.evaluator, Direct) or self.chunk_draws >= len(self.draws)
            with self.running():
                return self.evaluator.moments(inputs, first_row, self.draws) if whole else None
        one_chunk = inputs.n_rows <= self.block_rows and self.chunk_draws >= len(self.draws)
        if not one_chunk or not isinstance(self.evaluator, Direct) or torch.is_inference_mode_enabled():
            return None
        x = inputs.leaves[0]
        with self._threads(), torch.inference_mode():  # in which torch's calls take less time
            outputs, variance = self.evaluator.prepared_draws(self.draws, x)(x, first_row)
            moments, dtype = moments_of_one_group(outputs), result_dtype(outputs)
        if moments is None:
            return None
        epistemic = moments[1] if variance is None else moments[1] + variance
        return [(moments[0].to(dtype, copy=True), epistemic.to(dtype, copy=True))]  # as ordinary tensors

    def replicate(self, number: int) -> Plan:
        """The plan with draws that are independent of those of other replicates."""
        return replace(self, evaluator=self.evaluator.replicate(number))

    def arrange(self, tensors: list[Tensor], *, leading: int) -> list[Tensor]:
        """The tensors with their row axis, which follows `leading` axes, moved to the network's position."""
        return [
            move_row_axis(tensor, layout, leading) for tensor, layout in zip(tensors, self.anatomy.outputs, strict=True)
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context without gradients, and with one thread for blocks of little work."""
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else _UNCHANGED
        with inference, torch.no_grad(), self._threads():
            yield

    def _threads(self) -> contextlib.AbstractContextManager[None]:
        one = self.operations < _THREADED_OPERATIONS and torch.get_num_threads() > 1
        return cpu_threads(1) if one else _UNCHANGED


def _blocks_of_rows(n_rows: int, sizes: tuple[int, ...], most_padded: int) -> Iterator[range]:
    """The rows in blocks of the given sizes, the largest first; the last one may fall short of its size."""
    start = 0
    while start < n_rows:
        left = n_rows - start
        fitting = next((size for size in sizes if size <= left), sizes[-1])
        larger = next((size for size in reversed(sizes) if size >= left), fitting)
        # Half a block of padding costs less than another call, if the block is not large.
        size = larger if larger <= min(2 * left, most_padded) else fitting
        yield range(start, min(start + size, n_rows))
        start += size


def move_row_axis(tensor: Tensor, layout: RowLayout | None, leading: int) -> Tensor:
    """The tensor with its row axis, which follows `leading` axes, moved to the layout's position."""
    if layout is None:
        return tensor.select(leading, 0)
    if layout.inner == 1:
        return tensor if layout.axis == 0 else tensor.movedim(leading, leading + layout.axis)
    return tensor.movedim(leading, leading + layout.axis).flatten(leading + layout.axis, leading + layout.axis + 1)


def plan_draws(
    net: nn.Module,
    inputs: Inputs,
    *,
    keys: Keys,
    masks: str,
    positions: str | None = None,
    max_bytes: int | None = None,
    integrate: bool = False,
    exact_rows: bool | None = None,
    leave_out: str | tuple[str, ...] = (),
    careful: bool = False,
) -> Plan:
    """The plan for a network that was checked to be random.

    Args:
        net: The network.
        inputs: Its inputs; only their form matters.
        keys: Seed, number of draws and sampler.
        masks: "shared" or "row".
        positions: "tied", "own" or None.
        max_bytes: A bound on working memory.
        integrate: Whether to integrate over the last site, if the last layer allows it.
        exact_rows: Whether a row must have the same bits in any batch; by default only on a CPU.
        leave_out: Modules whose randomness is not dropout, by name.
        careful: Whether to take one row of one draw at a time: for networks whose sites depend on the values of a row.
    """
    if masks not in MASKS:
        raise ValueError(f"`masks` must be one of {', '.join(map(repr, MASKS))}; got {masks!r}.")
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"`max_bytes` must be a positive number of bytes; got {max_bytes!r}.")
    names, positions = names_of(leave_out), checked_positions(positions)
    device = "cpu" if inputs.device.type == "cpu" else "cuda"
    exact_rows = device == "cpu" if exact_rows is None else exact_rows
    plain = inputs.is_matrix and isinstance(net, nn.Module) and not (names or careful or positions)
    direct = perceptron(unwrap(net), inputs.leaves[0]) if plain else None
    if direct is not None:
        plan = _direct_plan(direct, inputs.leaves[0], keys, masks, integrate, exact_rows, max_bytes)
        if plan is not None:
            return plan
    net = checked_network(net)
    record = inspect_cached(net, inputs, names, positions=positions is not None)
    anatomy = record.anatomy
    check_random(anatomy)
    integrate = integrate and anatomy.last_layer and not (careful or anatomy.skips_layers)
    exact = integrate and anatomy.n_random == 1
    draws = range(1) if exact else range(keys.n_draws)
    drawn = Masks(anatomy, keys, masks == "row", integrate, position_masks(positions, inputs))
    strategy = ONE_BY_ONE if careful else chosen_strategy(net, inputs, record, drawn, names)
    limit = max_bytes if max_bytes is not None else _WORKING_BYTES[device]
    # Mapped over draws, the layers before the first site are computed once for all of them.
    pairs = max(1, limit // max(anatomy.suffix_bytes if strategy.draws == "mapped" else anatomy.pass_bytes, 1))
    if exact_rows and not inputs.is_one_row:
        rows, chunk = _block_shape(anatomy, len(draws), keys.n_draws, device, pairs, _FREE_OPERATIONS, _FEWEST_PAIRS)
    else:
        rows, chunk = _largest_block(inputs.n_rows, len(draws), pairs)
    general = General(net, record, drawn, strategy, names, (rows,))
    sizes: tuple[int, ...] = (rows,)
    if exact_rows and strategy.rows == "together":
        larger = _larger_block(anatomy, inputs.n_rows, rows, chunk, pairs)
        sizes = agreeing_sizes(general, inputs, rows, larger, range(chunk))
        general = replace(general, sizes=sizes)
    elif not exact_rows:
        general = replace(general, sizes=())
    operations = rows * (anatomy.prefix_cost + chunk * anatomy.suffix_cost)
    return Plan(anatomy, general, draws, sizes, chunk, exact, integrate, operations, usual_rows=rows)


# Perceptrons ----------------------------------------------------------------------------------------------------------


_remembered: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
_REMEMBERED_PLANS = 8


def _direct_plan(
    net: Perceptron, x: Tensor, keys: Keys, masks: str, integrate: bool, exact_rows: bool, max_bytes: int | None
) -> Plan | None:
    """The plan for a perceptron, remembered for small ones; None where it is best treated like any other network.

    A remembered plan has a copy of the network, found by the values of its weights: every change of them is noticed.
    """
    values = net.values
    if values is None:
        return _new_direct_plan(net, x, keys, masks, integrate, exact_rows, max_bytes)
    key = (net.form, values, keys, masks, integrate, exact_rows, max_bytes, torch.get_num_threads())
    plan = _remembered.get(key)
    if plan is None:
        plan = _new_direct_plan(copy.deepcopy(net), x, keys, masks, integrate, exact_rows, max_bytes)
        assert plan is not None
        if isinstance(plan.evaluator, Direct):
            plan = replace(plan, evaluator=replace(plan.evaluator, prepared={}))
        _remembered[key] = plan
        while len(_remembered) > _REMEMBERED_PLANS:
            _remembered.popitem(last=False)
    return plan


def _new_direct_plan(
    net: Perceptron, x: Tensor, keys: Keys, masks: str, integrate: bool, exact_rows: bool, max_bytes: int | None
) -> Plan | None:
    on_cpu = x.device.type == "cpu"
    compact = masks == "shared" and not exact_rows and net.is_wide
    # On a GPU a kernel gathers the weights, which costs more than it saves when autocast makes the products cheap.
    if compact and not on_cpu:
        compact = kernels_on(x.device) is not None and autocast_dtype(x.device) is None
    if not on_cpu and not compact and (exact_rows or net.kernel_layers is None):
        return None
    shape = _direct_shape(net.form, keys.n_draws, masks, integrate, max_bytes, on_cpu)
    rows, chunk = shape.rows, shape.chunk
    if compact:
        if not on_cpu:
            rows, chunk = _largest_block(x.shape[0], len(shape.draws), shape.pairs)
        evaluator: Evaluator = Compacted(net, keys, shape.integrate)
        macro = _MACRO_ROWS if on_cpu else rows
    else:
        evaluator = Direct(net, keys, masks == "row", shape.integrate, rows)
        macro = max(1, min(_MACRO_ROWS, 2**18 // chunk) // rows) * rows
    operations = rows * (shape.anatomy.prefix_cost + chunk * shape.anatomy.suffix_cost)
    return Plan(shape.anatomy, evaluator, shape.draws, (macro,), chunk, shape.exact, shape.integrate, operations)


@dataclass(frozen=True)
class _DirectShape:
    """The part of a perceptron's plan that follows from the form of its layers."""

    anatomy: Anatomy
    integrate: bool
    exact: bool
    draws: range
    pairs: int
    rows: int
    chunk: int


@functools.lru_cache(maxsize=64)
def _direct_shape(
    form: Form, n_draws: int, masks: str, integrate: bool, max_bytes: int | None, on_cpu: bool
) -> _DirectShape:
    device, anatomy = "cpu" if on_cpu else "cuda", anatomy_of(form)
    check_random(anatomy)
    integrate = integrate and anatomy.last_layer
    exact = integrate and anatomy.n_random == 1
    draws = range(1) if exact else range(n_draws)
    pairs = max(1, (max_bytes or _WORKING_BYTES_DIRECT[device]) // max(anatomy.pass_bytes, 1))
    # Rows with their own masks cannot share products, only calls.
    free = _FREE_OPERATIONS_DIRECT if masks == "shared" else _FREE_OPERATIONS
    rows, chunk = _block_shape(anatomy, len(draws), n_draws, device, pairs, free, _FEWEST_PAIRS_DIRECT)
    return _DirectShape(anatomy, integrate, exact, draws, pairs, rows, chunk)


def position_masks(positions: str | None, inputs: Inputs) -> Positions | None:
    """The dependence of the masks on position in a run on `inputs`; None if a position is like any other unit."""
    if positions is None:
        return None
    return Positions(positions == "tied", () if positions == "tied" else sequence_lengths(inputs))


def check_random(anatomy: Anatomy) -> None:
    """Raises on a network in which nothing is random."""
    if anatomy.n_random:
        return
    switched_off = ", ".join(
        f"{site.path or 'network'} (drop_prob {site.drop_prob:g})"
        for site in anatomy.sites
        if site.drop_prob is not None
    )
    what = f"its dropout is switched off: {switched_off}" if switched_off else "it has no dropout that is switched on"
    raise ValueError(
        f"`net` must have dropout to be a distribution over functions, but {what}: every draw would be the same. "
        "Make a network that has it with dropbayes.add_dropout(net, drop_prob=0.1); dropbayes.sites(net, x) lists what "
        "is random."
    )


# Sizes ----------------------------------------------------------------------------------------------------------------


def _block_shape(
    anatomy: Anatomy, n_wanted: int, n_draws: int, device: str, pairs: int, free: dict[str, float], fewest_pairs: int
) -> tuple[int, int]:
    """The rows and draws of a block: from the network, the number of draws, and the pairs that fit into memory."""
    a_row = anatomy.prefix_cost + n_wanted * anatomy.suffix_cost
    affordable = free[device] / max(a_row, 1.0)
    rows = 2 ** int(math.log2(min(max(affordable, 1.0), _MOST_ROWS[device])))
    if a_row < n_draws * (anatomy.prefix_cost + anatomy.suffix_cost) / 16:
        rows = max(rows, 4)  # nearly all work is shared: four rows cost far less than one row draw by draw
    elif n_wanted < fewest_pairs:
        rows = max(rows, 2 ** math.ceil(math.log2(fewest_pairs / n_wanted)))
    rows = min(rows, 2 ** int(math.log2(pairs)))
    chunks = math.ceil(n_wanted / max(1, pairs // rows))
    return rows, math.ceil(n_wanted / chunks)


def _larger_block(anatomy: Anatomy, n_rows: int, rows: int, chunk: int, pairs: int) -> int:
    """The rows of a larger block than usual, if the batch has as many, memory holds them and a trial takes a moment."""
    larger = _LARGER_BLOCK * rows
    operations = larger * (anatomy.prefix_cost + chunk * anatomy.suffix_cost)
    fits = larger <= n_rows and larger * chunk <= pairs and operations <= _TRIAL_OPERATIONS
    return larger if fits else rows


def _largest_block(n_rows: int, n_wanted: int, pairs: int) -> tuple[int, int]:
    """The rows and draws of blocks of as many pairs as memory holds: all draws of some rows, or some draws of one."""
    n_blocks = math.ceil(n_rows / max(1, min(n_rows, pairs // n_wanted)))
    rows = math.ceil(n_rows / n_blocks)
    n_chunks = math.ceil(n_wanted / max(1, min(n_wanted, pairs // rows)))
    return rows, math.ceil(n_wanted / n_chunks)
