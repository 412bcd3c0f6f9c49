"""One network under many masks: draws folded into the batch, mapped over, or run one at a time.

Rows are an ordinary batch where a site knows which axis of its tensor holds them, so that every strategy places the
same keyed masks along it. Mapped over as well, each row is alone with its masks. The plain loop, one row of one draw at
a time, is the law: the other strategies must give what it gives.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from dropbayes.runtime.devices import is_out_of_memory
from dropbayes.sampling.inputs import Inputs, cloned_leaves
from dropbayes.sampling.masks import derived_seed
from dropbayes.sampling.routing import GroupedSource, SentSource, same_paths
from dropbayes.sampling.source import KeyedSource, Made, MaskSpec, NetworkChanged, Parted
from dropbayes.tracing import Interception, RowLayout, Site, UnsupportedStrategy
from dropbayes.tracing.generators import keyed_generators, seed_generators
from dropbayes.tracing.outputs import split
from dropbayes.tracing.transforms import transform_depth
from dropbayes.tracing.views import View, eagerly


@dataclass(frozen=True)
class Strategy:
    """The way draws and rows go through a network."""

    # Part of the batch, mapped over by `torch.func.vmap` (the layers before the first site run once), or one at a time.
    draws: Literal["folded", "mapped", "single"]
    rows: Literal["together", "mapped", "parted", "single"]  # "parted" as they read different values
    name: str  # in words


FOLDED = Strategy("folded", "together", "folded")
BY_PATH = Strategy("single", "together", "path by path")  # those that take one path through the network folded
MAPPED = Strategy("mapped", "together", "mapped")
MAPPED_ROWS = Strategy("mapped", "mapped", "mapped over rows")
BY_BRANCH = Strategy("mapped", "parted", "branch by branch")
DRAW_BY_DRAW = Strategy("single", "together", "draw by draw")
ROW_BY_ROW = Strategy("mapped", "single", "row by row")
ONE_BY_ONE = Strategy("single", "single", "one by one")


@dataclass(frozen=True)
class Work:
    """Some draws of some rows: `rows` are their indices, by which per-row masks are keyed."""

    network: Callable[[], View]  # the view to run: a new one each time if the network has a state
    inputs: Inputs
    leaves: list[PyTree]
    draws: Sequence[int]
    rows: range
    among: Sequence[int] | None = None  # the draws that run one after the other, if this is one of them
    made: Made = field(default_factory=dict)  # and what was made for them at once
    learned: dict[str, Site] | None = None  # where sites that were not met before are noted; None if there are none
    pairs: int = 8  # of a draw and a row, in one pass, where they may take different branches
    parted: set[int] | None = None  # where draws are noted in which rows read different values
    runs: set[int] = field(default_factory=set)  # where the operations of each pass are noted, as a hash

    def row(self, index: int) -> Self:
        """The same of one of its rows, alone."""
        leaves = replace(self.inputs, leaves=tuple(self.leaves)).rows([index])
        return replace(self, leaves=leaves, rows=self.rows[index : index + 1])


def evaluate(strategy: Strategy, spec: MaskSpec, work: Work) -> list[Tensor]:
    """All draws of the work's rows, `[draw, row, ...]` of each tensor of the output; then the integrated variance."""
    uses_host = spec.profile.host_random or spec.profile.seeds_torch  # generators keyed to seed, draw and row
    with keyed_generators(None) if uses_host else contextlib.nullcontext():
        return eagerly(_evaluate)(strategy, spec, work)


def _evaluate(strategy: Strategy, spec: MaskSpec, work: Work) -> list[Tensor]:
    if strategy.rows == "single" and len(work.rows) > 1:
        outputs = [_evaluate(strategy, spec, work.row(index)) for index in range(len(work.rows))]
        return [torch.cat(tensors, dim=1) for tensors in zip(*outputs, strict=True)]
    if strategy == BY_PATH and len(work.draws) > 1:
        return _fold_paths(spec, work)
    if strategy.draws == "single" and len(work.draws) > 1:
        singles = [replace(work, draws=range(draw, draw + 1), among=work.draws) for draw in work.draws]
        runs = [_evaluate(strategy, spec, one) for one in singles]
        return [torch.cat(tensors) for tensors in zip(*runs, strict=True)]
    if strategy == BY_BRANCH:
        return _map_branches(spec, work)
    if strategy.rows == "mapped" and len(work.rows) > 1:
        return _map_rows(spec, work)
    return _map(spec, work) if strategy.draws == "mapped" and len(work.draws) > 1 else _fold(spec, work)


def called(source: KeyedSource, work: Work, leaves: list[PyTree]) -> PyTree:
    """The network's own output, with masks from a source that has still to finish the tensors in it."""
    view = work.network()
    leaves = cloned_leaves(leaves) if source.spec.profile.writes_input else leaves
    source.follow(view.paths, work.inputs.tensors_of_rows(leaves))
    mode = Interception(source)
    mode.own |= view.own_tensors if source.spec.profile.is_stateful else set()  # the view is of this pass alone
    with mode.at_sites() if view.at_sites else mode:
        output = work.inputs.call(view.net, leaves)
    if mode.drawn_elsewhere:
        raise NetworkChanged("random numbers that are asked for elsewhere than before")
    work.runs.add(hash(tuple(mode.operations)))
    return output


def _run(source: KeyedSource, work: Work, leaves: list[PyTree]) -> list[Tensor]:
    (tensors, structure), profile = split(called(source, work, leaves)), source.spec.profile
    if profile.draws_branch and structure.leaves != profile.structure.leaves:
        rule = "return numbers as tensors: its output holds a Python number that depends on the draw"
        raise ValueError(f"`net` must {rule}. Return the tensor it was read from.")
    outputs = source.finish(tensors)
    # A network that differentiates itself would keep the graph of every draw.
    return outputs if torch.is_grad_enabled() else [output.detach() for output in outputs]


def _fold(spec: MaskSpec, work: Work) -> list[Tensor]:
    """Draws and rows as one batch, draws outermost."""
    n_draws, n_rows = len(work.draws), len(work.rows)
    one_path = GroupedSource if spec.profile.gates and n_draws > 1 else KeyedSource
    shared = n_draws == 1 and not (spec.per_row or spec.profile.by_name)  # one mask fits sorted rows of one entry
    anywhere = shared and all(site.layout is None or site.layout.inner == 1 for site in spec.profile.sites)
    source = (SentSource if spec.profile.moves_rows and n_draws * n_rows > 1 and not anywhere else one_path)(
        spec, work.draws, work.rows, folded=True, among=work.among, made=work.made, learned=work.learned
    )
    leaves = [_repeat(leaf, axis, n_draws) for leaf, axis in zip(work.leaves, work.inputs.axes, strict=True)]
    if spec.profile.host_random:
        if n_draws > 1 or (spec.per_row and n_rows > 1):
            raise UnsupportedStrategy("random numbers of the host")
        seed_generators(derived_seed(spec.keys, work.draws[0], work.rows[0] if spec.per_row else 0))
    elif spec.profile.seeds_torch:
        seed_generators(None)
    return [rows_first(out, layout, n_draws, n_rows) for out, layout in _with_layouts(spec, _run(source, work, leaves))]


def _fold_paths(spec: MaskSpec, work: Work) -> list[Tensor]:
    """The draws that take one path through the network folded, path by path."""
    groups, runs = same_paths(spec, work.draws), list[list[Tensor]]()
    for group in groups:
        one = replace(work, draws=group, made={})
        try:
            runs.append(_fold(spec, one))
        except Exception as error:  # a path that no trial took, or too many rows
            if spec.trial or is_out_of_memory(error):
                raise
            runs.append(_evaluate(DRAW_BY_DRAW, spec, one))
    order = torch.tensor([draw for group in groups for draw in group]).argsort()
    return [torch.cat(tensors)[order] for tensors in zip(*runs, strict=True)]


def _repeat(leaf: PyTree, axis: int | None, n_draws: int) -> PyTree:
    if n_draws == 1 or axis is None:
        return leaf
    if not isinstance(leaf, Tensor):
        raise UnsupportedStrategy("an argument that is no tensor")
    return leaf.repeat(*(n_draws if dimension == axis else 1 for dimension in range(leaf.dim())))


def _with_layouts(spec: MaskSpec, outputs: list[Tensor]) -> list[tuple[Tensor, RowLayout | None]]:
    layouts = spec.profile.outputs
    layouts += layouts[-1:] if spec.integrate else ()  # the variance over the last layer has that of the output
    if len(outputs) != len(layouts):
        raise NetworkChanged(f"{len(outputs)} tensors in the output instead of {len(layouts)}")
    return list(zip(outputs, layouts, strict=True))


def rows_first(out: Tensor, layout: RowLayout | None, n_draws: int, n_rows: int) -> Tensor:
    """`[draw, row, ...]` of an output whose row axis holds draws and rows; without rows, one for all of them."""
    if layout is None:
        if n_draws > 1:
            raise UnsupportedStrategy("an output without rows")
        return out.expand(n_draws, n_rows, *out.shape)
    if out.dim() <= layout.axis or out.shape[layout.axis] != n_draws * n_rows * layout.inner:
        if n_draws == n_rows == 1:
            rule = f"gives outputs of different shapes, {tuple(out.shape)} here, for rows of one shape"
            remedy = "their number depends on the values of a row. Return a tensor of one shape, padded, with a mask"
            raise ValueError(f"`net` {rule}: {remedy}.")
        raise UnsupportedStrategy("an output with rows along another axis")
    if n_draws == 1 and layout == RowLayout(0, 1):
        return out[None]
    split_out = out.unflatten(layout.axis, (n_draws, n_rows, layout.inner))
    moved = split_out.movedim((layout.axis, layout.axis + 1), (0, 1))
    return moved.squeeze(2 + layout.axis) if layout.inner == 1 else moved


def _map(spec: MaskSpec, work: Work) -> list[Tensor]:
    """The rows as a batch, mapped over draws: the layers before the first site are computed once."""
    source = KeyedSource(spec, work.draws, work.rows, folded=False)

    def one_draw(_: Tensor) -> tuple[Tensor, ...]:
        source.level = transform_depth()
        outputs = _run(source, work, work.leaves)
        return tuple(rows_first(out, layout, 1, len(work.rows))[0] for out, layout in _with_layouts(spec, outputs))

    return list(torch.func.vmap(one_draw)(torch.empty(len(work.draws), device="cpu")))


def _map_branches(spec: MaskSpec, work: Work) -> list[Tensor]:
    """Mapped over pairs of a draw and a row, in passes of those that read the same values so far.

    All passes have one size, to which the last is padded: a row so has the same bits in any batch.
    """
    n_draws, places, parts = len(work.draws), list[Tensor](), list[list[Tensor]]()
    pairs = torch.arange(n_draws * len(work.rows), device=work.inputs.device)
    waiting: dict[tuple[float, ...], Tensor] = {(): pairs}  # by the values that they read
    while waiting:
        path, pairs = waiting.popitem()
        for some in pairs.split(work.pairs):
            padded = some[torch.arange(work.pairs, device=some.device).clamp(max=len(some) - 1)]
            try:
                found = _map_rows(spec, work, (padded % n_draws, padded // n_draws))
            except Parted as parted:
                values = parted.args[0][: len(some)]
                for value in values.unique():
                    key = (*path, value.item())
                    waiting[key] = torch.cat([waiting.get(key, some[:0]), some[values == value]])
                if work.parted is not None:
                    work.parted.update(work.draws[i] for i in (some[values != values[0]] % n_draws).tolist())
                continue
            except Exception as error:
                # An operation without a rule, in a branch that no trial took; or the network's own.
                if spec.trial or isinstance(error, NetworkChanged) or is_out_of_memory(error):
                    raise
                alone = [(work.row(i // n_draws), work.draws[i % n_draws :][:1]) for i in some.tolist()]
                runs = [evaluate(ONE_BY_ONE, spec, replace(row, draws=draw)) for row, draw in alone]
                found = [torch.cat(tensors, 1) for tensors in zip(*runs, strict=True)]
            places.append(some)
            parts.append([out[0, : len(some)] for out in found])
    order = torch.cat(places).argsort()
    return [torch.cat(outs)[order].unflatten(0, (-1, n_draws)).transpose(0, 1) for outs in zip(*parts, strict=True)]


def _map_rows(spec: MaskSpec, work: Work, pairs: tuple[Tensor, Tensor] | None = None) -> list[Tensor]:
    """Mapped over rows and, inside, over draws: each row of each draw is alone. Of `pairs` alone, `[1, pair, ...]`."""
    rows, places = work.rows, None
    if pairs is not None:  # the masks of the rows among them
        first, last = int(pairs[1].min()), int(pairs[1].max())
        rows, places = rows[first : last + 1], (pairs[0], pairs[1] - first)
    source = KeyedSource(spec, work.draws, rows, folded=False, rows_mapped=True, pairs=places)
    axes, maps_draws = work.inputs.axes, len(work.draws) > 1 and pairs is None
    if any(axis is not None and not isinstance(leaf, Tensor) for leaf, axis in zip(work.leaves, axes, strict=True)):
        raise UnsupportedStrategy("an argument that is no tensor")
    mapped = [leaf for leaf, axis in zip(work.leaves, axes, strict=True) if axis is not None]
    in_dims = tuple(axis for axis in axes if axis is not None)
    if pairs is not None:
        mapped = [leaf.index_select(axis, pairs[1]) for leaf, axis in zip(mapped, in_dims, strict=True)]

    def one_row(*own: Tensor) -> tuple[Tensor, ...]:
        source.row_level = transform_depth()
        remaining = iter(own)
        leaves = [
            leaf if axis is None else next(remaining).unsqueeze(axis)
            for leaf, axis in zip(work.leaves, axes, strict=True)
        ]

        def one_draw(_: Tensor | None) -> tuple[Tensor, ...]:
            source.level = transform_depth() if maps_draws else None
            outputs = _run(source, work, leaves)
            return tuple(rows_first(out, layout, 1, 1)[0, 0] for out, layout in _with_layouts(spec, outputs))

        if maps_draws:
            return torch.func.vmap(one_draw)(torch.empty(len(work.draws), device="cpu"))
        return tuple(out[None] for out in one_draw(None))

    return list(torch.func.vmap(one_row, in_dims=in_dims, out_dims=1)(*mapped))
