"""One network under many masks: draws folded into the batch, mapped over, or run one at a time.

Rows are an ordinary batch. A site knows which axis of its tensor holds the rows, so every strategy places the same
keyed masks along it: a row has the same mask as alone. The simplest strategy, one row of one draw at a time, is the
reference for the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import RowLayout
from dropbayes.sampling.generators import seed_host, unchanged_generators
from dropbayes.sampling.keyed import KeyedSource, Masks, NetworkChanged, Unsuited, transform_depth
from dropbayes.sampling.masks import derived_seed
from dropbayes.sampling.operations import Interception
from dropbayes.sampling.recorder import SENTINEL_SEED
from dropbayes.sampling.trees import Inputs, cloned_leaves, split
from dropbayes.sampling.views import eagerly


@dataclass(frozen=True)
class Strategy:
    """The way draws and rows go through a network.

    Args:
        draws: "folded" into the batch beside the rows, "mapped" over with `torch.func.vmap` (which computes the layers
            before the first site once), or one at a "single" time.
        rows: "together" as a batch, or one at a "single" time.
    """

    draws: Literal["folded", "mapped", "single"]
    rows: Literal["together", "single"]

    def __str__(self) -> str:
        return {
            ("folded", "together"): "folded",
            ("mapped", "together"): "mapped",
            ("single", "together"): "draw by draw",
            ("mapped", "single"): "row by row",
        }.get((self.draws, self.rows), "one by one")


FOLDED, MAPPED = Strategy("folded", "together"), Strategy("mapped", "together")
DRAW_BY_DRAW, ROW_BY_ROW = Strategy("single", "together"), Strategy("mapped", "single")
ONE_BY_ONE = Strategy("single", "single")


@dataclass(frozen=True)
class Work:
    """Some draws of some rows: `rows` are their indices, by which per-row masks are keyed."""

    network: Callable[[], nn.Module]  # the view to run: a new one each time if the network has a state
    inputs: Inputs
    leaves: list[Any]
    draws: range
    rows: range


def evaluate(strategy: Strategy, masks: Masks, work: Work) -> list[Tensor]:
    """All draws of the work's rows, `[draw, row, ...]` of each tensor of the output; then the integrated variance."""
    if strategy.rows == "single" and len(work.rows) > 1:
        outputs = [evaluate(strategy, masks, _one_row(work, index)) for index in range(len(work.rows))]
        return [torch.cat(tensors, dim=1) for tensors in zip(*outputs, strict=True)]
    if strategy.draws == "single" and len(work.draws) > 1:
        runs = [evaluate(strategy, masks, _one_draw(work, draw)) for draw in work.draws]
        return [torch.cat(tensors) for tensors in zip(*runs, strict=True)]
    if strategy.draws == "mapped" and len(work.draws) > 1:
        return _map(masks, work)
    return _fold(masks, work)


def _one_row(work: Work, index: int) -> Work:
    leaves = [
        leaf if axis is None or not isinstance(leaf, Tensor) else leaf.narrow(axis, index, 1).clone()
        for leaf, axis in zip(work.leaves, work.inputs.axes, strict=True)
    ]
    return Work(work.network, work.inputs, leaves, work.draws, work.rows[index : index + 1])


def _one_draw(work: Work, draw: int) -> Work:
    # A network may write into its input: every run gets a copy.
    leaves = cloned_leaves(work.leaves)
    return Work(work.network, work.inputs, leaves, range(draw, draw + 1), work.rows)


def _run(masks: Masks, source: KeyedSource, work: Work, leaves: list[Any]) -> list[Tensor]:
    net = work.network()
    source.follow(net)
    with Interception(source):
        output, _ = split(eagerly(work.inputs.call)(net, leaves))
    return source.finish(output)


def _fold(masks: Masks, work: Work) -> list[Tensor]:
    """Draws and rows as one batch, draws outermost."""
    n_draws, n_rows = len(work.draws), len(work.rows)
    source = KeyedSource(masks, work.draws, work.rows, folded=True)
    leaves = [_repeat(leaf, axis, n_draws) for leaf, axis in zip(work.leaves, work.inputs.axes, strict=True)]
    with _seed_host(masks, work):
        outputs = _run(masks, source, work, leaves)
    return [_rows_first(out, layout, n_draws, n_rows) for out, layout in _with_layouts(masks, outputs)]


def _repeat(leaf: Any, axis: int | None, n_draws: int) -> Any:
    if n_draws == 1 or axis is None:
        return leaf
    if not isinstance(leaf, Tensor):
        raise Unsuited("an argument that is no tensor")
    return leaf.repeat(*(n_draws if dimension == axis else 1 for dimension in range(leaf.dim())))


def _with_layouts(masks: Masks, outputs: list[Tensor]) -> list[tuple[Tensor, RowLayout | None]]:
    layouts = masks.anatomy.outputs
    if len(outputs) > len(layouts):  # the variance over the last layer has the layout of the output
        layouts = (*layouts, layouts[-1])
    if len(outputs) != len(layouts):
        raise NetworkChanged(f"{len(outputs)} tensors in the output instead of {len(layouts)}")
    return list(zip(outputs, layouts, strict=True))


def _rows_first(out: Tensor, layout: RowLayout | None, n_draws: int, n_rows: int) -> Tensor:
    """`[draw, row, ...]` of an output whose row axis holds draws and rows; without rows, one for all of them."""
    if layout is None:
        if n_draws > 1:
            raise Unsuited("an output without rows")
        return out.expand(n_draws, n_rows, *out.shape)
    if out.dim() <= layout.axis or out.shape[layout.axis] != n_draws * n_rows * layout.inner:
        raise Unsuited("an output with rows along another axis")
    split_out = out.unflatten(layout.axis, (n_draws, n_rows, layout.inner))
    moved = split_out.movedim((layout.axis, layout.axis + 1), (0, 1))
    return moved.squeeze(2 + layout.axis) if layout.inner == 1 else moved


def _map(masks: Masks, work: Work) -> list[Tensor]:
    """The rows as a batch, mapped over draws: the layers before the first site are computed once."""
    if masks.anatomy.host_random:
        raise Unsuited("random numbers of the host")
    source = KeyedSource(masks, work.draws, work.rows, folded=False)

    def one_draw(_: Tensor) -> tuple[Tensor, ...]:
        source.level = transform_depth()
        outputs = _run(masks, source, work, work.leaves)
        return tuple(_rows_first(out, layout, 1, len(work.rows))[0] for out, layout in _with_layouts(masks, outputs))

    return list(torch.func.vmap(one_draw)(torch.empty(len(work.draws))))


@contextlib.contextmanager
def _seed_host(masks: Masks, work: Work) -> Iterator[None]:
    """Keys the host's generators to seed, draw and row if the network uses them, and restores their states."""
    anatomy = masks.anatomy
    if not (anatomy.host_random or anatomy.seeds_itself):
        yield
        return
    if anatomy.host_random and len(work.draws) > 1:
        raise Unsuited("random numbers of the host")
    if anatomy.host_random and masks.per_row and len(work.rows) > 1:
        raise Unsuited("random numbers of the host, for each row")
    with unchanged_generators():
        torch.default_generator.manual_seed(SENTINEL_SEED)
        if anatomy.host_random:
            seed = derived_seed(masks.keys, work.draws[0], work.rows[0] if masks.per_row else 0)
            seed_host(seed)
        yield
