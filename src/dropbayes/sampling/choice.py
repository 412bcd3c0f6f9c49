"""The choice of a strategy by a trial run, and of block sizes in which a row has the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy
from dropbayes.sampling.evaluators import Chunk, General
from dropbayes.sampling.inspection import Inspection
from dropbayes.sampling.keyed import Masks
from dropbayes.sampling.looks import autocast_dtype, equal_but_for_rounding, flags_up
from dropbayes.sampling.strategies import (
    DRAW_BY_DRAW,
    FOLDED,
    MAPPED,
    ONE_BY_ONE,
    ROW_BY_ROW,
    Strategy,
    Work,
    evaluate,
)  # fmt: skip
from dropbayes.sampling.trees import Inputs, cloned_leaves
from dropbayes.sampling.views import View

# Mapped calls take longer to launch, so mapping needs at least this share of a forward pass before the first site, and
# on a GPU at least this many operations saved: fewer if launches are replayed from a CUDA graph.
_SHARED_PREFIX = {"cpu": 0.05, "cuda": 0.2}
_SAVED_OPERATIONS, _SAVED_OPERATIONS_OF_A_GRAPH = 1e12, 2e11


def _shares_prefix(record: Inspection, inputs: Inputs, n_draws: int) -> bool:
    anatomy, on_cpu = record.anatomy, inputs.device.type == "cpu"
    if anatomy.prefix_share <= _SHARED_PREFIX["cpu" if on_cpu else "cuda"]:
        return False
    saved = anatomy.prefix_cost * inputs.n_rows * (n_draws - 1)
    is_graph = not on_cpu and record.graphs.read is not None
    return on_cpu or saved >= (_SAVED_OPERATIONS_OF_A_GRAPH if is_graph else _SAVED_OPERATIONS)


def _candidates(anatomy: Anatomy, per_row: bool, shares_prefix: bool) -> tuple[Strategy, ...]:
    """The strategies from the fastest to the one that always works."""
    if anatomy.host_random:
        return (DRAW_BY_DRAW,) if anatomy.rows_together and not per_row else ()
    if not anatomy.rows_together:
        return (ROW_BY_ROW,)
    first = (MAPPED, FOLDED) if shares_prefix else (FOLDED, MAPPED)
    return (*first, DRAW_BY_DRAW, ROW_BY_ROW)


def chosen_strategy(
    net: nn.Module, inputs: Inputs, record: Inspection, masks: Masks, leave_out: tuple[str, ...]
) -> Strategy:
    """The fastest strategy that agrees, on a few rows and draws, with one row of one draw at a time."""
    shares_prefix = _shares_prefix(record, inputs, masks.keys.n_draws)
    key = (masks.per_row, shares_prefix, autocast_dtype(inputs.device))
    if key not in record.strategies:
        candidates = _candidates(masks.anatomy, masks.per_row, shares_prefix)
        record.strategies[key] = _probe(net, inputs, record, masks, leave_out, candidates)
    return cast(Strategy, record.strategies[key])


@torch.inference_mode(False)
@torch.no_grad()
def _probe(
    net: nn.Module,
    inputs: Inputs,
    record: Inspection,
    masks: Masks,
    leave_out: tuple[str, ...],
    candidates: tuple[Strategy, ...],
) -> Strategy:
    masks = replace(masks, integrate=False)
    index = [0] if inputs.n_rows == 1 else [0, inputs.n_rows - 1]
    draws = range(min(2, masks.keys.n_draws))

    def run(strategy: Strategy) -> list[Tensor]:
        flags = flags_up(leave_out, masks.anatomy.lowered)
        leaves = cloned_leaves(inputs.rows(index))
        work = Work(lambda: View(net, flags).net, inputs, leaves, draws, range(len(index)))
        with _without_fallbacks() if strategy is MAPPED else contextlib.nullcontext():
            return evaluate(strategy, masks, work)

    def outputs_of(strategy: Strategy) -> list[Tensor]:
        """Its outputs, in full precision if the network allows it: rounding then hides no difference."""
        if autocast_dtype(inputs.device) is None or record.needs_autocast:
            return run(strategy)
        run(strategy)
        with torch.autocast(inputs.device.type, enabled=False):
            return run(strategy)

    oracle: list[Tensor] | None = None
    for strategy in candidates:
        try:
            outputs = outputs_of(strategy)
        except Exception as error:  # control flow that depends on data, an operation without a rule, ...
            if is_out_of_memory(error):
                raise
            continue
        oracle = oracle or outputs_of(ONE_BY_ONE)
        if len(oracle) == len(outputs) and all(map(equal_but_for_rounding, outputs, oracle)):
            return strategy
    return ONE_BY_ONE


@contextlib.contextmanager
def _without_fallbacks() -> Iterator[None]:
    """Makes an operation without a batching rule an error: mapped one draw at a time, it would be slow."""
    functorch: Any = torch._C._functorch
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(enabled)


@torch.inference_mode(False)
@torch.no_grad()
def agreeing_sizes(general: General, inputs: Inputs, usual: int, largest: int, draws: range) -> tuple[int, ...]:
    """The block sizes, up to `largest`, in which every row has the same bits as in blocks of the usual size."""
    masks = general.masks
    drawn = (masks.per_row, masks.integrate, masks.keys.n_draws, masks.keys.sampler)
    key = (*drawn, usual, largest, len(draws), torch.get_num_threads())
    known = general.record.sizes
    if key not in known:
        index = [row % inputs.n_rows for row in range(largest)]
        rows = replace(inputs, leaves=tuple(inputs.rows(index)), n_rows=largest)

        def run(first: int, last: int) -> Chunk:
            return replace(general, sizes=())(rows, range(first, last), first, draws)

        reference = [run(first, first + usual) for first in range(0, largest, usual)]
        sizes = [size for size in (usual // 4, usual // 16, usual // 64, 1) if 0 < size < usual]
        agreeing = [s for s in dict.fromkeys(sizes) if _same_bits(run(largest - s, largest), reference[-1:], s)]
        larger = [largest] if largest > usual and _same_bits(run(0, largest), reference, largest) else []
        known[key] = (*larger, usual, *agreeing)
    return known[key]


def _same_bits(chunk: Chunk, reference: list[Chunk], size: int) -> bool:
    """Whether a chunk of `size` rows has the bits of the last of these rows in smaller or larger blocks."""
    outputs = [torch.cat(tensors, 1) for tensors in zip(*(block.outputs for block in reference), strict=True)]
    variances = [torch.cat(tensors) for tensors in zip(*(block.variances or [] for block in reference), strict=True)]
    return all(torch.equal(a, b[:, -size:]) for a, b in zip(chunk.outputs, outputs, strict=True)) and all(
        torch.equal(a, b[-size:]) for a, b in zip(chunk.variances or [], variances, strict=True)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
