"""One network under many masks: draws folded into the batch, mapped over, or run one at a time.

Rows are an ordinary batch. A site knows which axis of its tensor holds the rows, so every strategy lays the same keyed
masks along it: a row's mask is the one it has alone. The plainest strategy, one row of one draw at a time, is the
oracle of the others.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy, RowLayout, Site
from dropbayes.sampling.fusion import kernels_on
from dropbayes.sampling.generators import unchanged_generators
from dropbayes.sampling.masks import Keys, Units, derived_seed, keep_mask, uniform
from dropbayes.sampling.names import SiteNames
from dropbayes.sampling.operations import Interception, RandomSource, scaled_product, transform_depth
from dropbayes.sampling.positions import Positions
from dropbayes.sampling.recorder import SENTINEL_SEED
from dropbayes.sampling.trees import Inputs, own_leaves, split
from dropbayes.sampling.views import eagerly

# functorch's own primitive: a real tensor seen as batched along one axis at a level of vmap.
_functorch: Any = torch._C._functorch
_add_batch_dim: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _kernels_for(x: Tensor) -> Any:
    """The kernels that make masks in registers; None where there are none for this device, or a gradient is wanted."""
    return None if torch.is_grad_enabled() and x.requires_grad else kernels_on(x.device)


class NetworkChanged(Exception):
    """The network met other sites than when it was inspected: what is remembered of it is out of date."""


class Unsuited(Exception):
    """A strategy that cannot give these masks to this network; another can."""


@dataclass(frozen=True)
class Strategy:
    """How draws and rows go through a network.

    Args:
        draws: "folded" into the batch beside the rows, "mapped" over with `torch.func.vmap` (which computes what comes
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
class Masks:
    """What the masks of a network are: of which sites, by which keys, for rows together or each."""

    anatomy: Anatomy
    keys: Keys
    per_row: bool
    integrate: bool  # the last site is left out, and its variance given instead
    positions: Positions | None = None  # how they depend on position; None where a position is a unit like any other


@dataclass(frozen=True)
class Work:
    """Some draws of some rows: `rows` are their indices, by which per-row masks are keyed."""

    network: Callable[[], nn.Module]  # what runs: a new view each time where the network has a state
    inputs: Inputs
    leaves: list[Any]
    draws: range
    rows: range


class KeyedSource(RandomSource):
    """The masks of some draws and rows, laid along the axis where each site has its rows.

    Args:
        masks: Sites and keys.
        draws: The draws of this run.
        rows: The rows of this run.
        folded: Whether the draws are part of the row axis, outermost; else they are mapped over, or only one.
    """

    def __init__(self, masks: Masks, draws: range, rows: range, *, folded: bool) -> None:
        # One row of one draw needs no layout: the number of its sites may even depend on its values.
        self.lenient = len(draws) == 1 and len(rows) == 1 and not masks.integrate and masks.positions is None
        self.masks, self.draws, self.rows, self.folded = masks, draws, rows, folded
        self.level: int | None = None  # of vmap, where draws are mapped over
        self.variance: Tensor | None = None
        self.site = 0
        self._names: SiteNames | None = None
        self._by_name: dict[str, Site] = {}
        self._calls = 0
        self._pending: tuple[Tensor, float] | None = None
        self._integrated: tuple[Tensor, int] | None = None

    def follow(self, net: nn.Module) -> None:
        """Knows the sites of `net` by name where a draw may skip layers (LayerDrop), and with them their sites."""
        sites = self.masks.anatomy.sites
        if self.masks.positions is not None and any(site.kind == "rand" and not site.shape for site in sites):
            self._names = SiteNames({id(module): path for path, module in net.named_modules()})
            self._by_name = {site.name: site for site in sites}

    def is_off(self, training: bool) -> bool:
        self._calls += 1
        return self._calls - 1 in self.masks.anatomy.off_calls

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        return generator is not None or (
            self.masks.anatomy.seeds_itself and torch.default_generator.initial_seed() != SENTINEL_SEED
        )

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        site = self._next(kind, drop_prob)
        layout, inner_shape = self._layout(site, shape)
        return self._laid(self._mask(site, drop_prob, inner_shape, like), layout, shape, inner_shape)

    def _mask(self, site: Site, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        def make(number: int, shape: tuple[int, ...], units: Units | None) -> Tensor:
            return keep_mask(
                self.masks.keys, number, drop_prob=drop_prob, draws=self.draws, rows=self._own_rows, shape=shape,
                dtype=like.dtype, device=like.device, units=units,
            )  # fmt: skip

        positions = self.masks.positions
        return make(site.index, shape, None) if positions is None else positions.made(site, shape, make)

    def masked(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        site = self._next(kind, drop_prob)
        layout, inner_shape = self._layout(site, shape)
        fused = self._fused(site, layout, x, drop_prob, shape)
        if fused is not None:
            return x.copy_(fused) if inplace and not isinstance(x, nn.Parameter) else fused
        mask = self._mask(site, drop_prob, inner_shape, x)
        if layout is None or self._own_rows is not None:
            return scaled_product(x, self._laid(mask, layout, shape, inner_shape), drop_prob, inplace)
        # A mask that rows share is multiplied in without a copy for each row.
        sizes = (len(self.draws) if self.folded else 1, len(self.rows), layout.inner)
        split_x = x.unflatten(layout.axis, sizes)
        mask = self._among_rows(mask, layout).unsqueeze(layout.axis + 1)
        product = scaled_product(split_x, mask, drop_prob).flatten(layout.axis, layout.axis + 2)
        return x.copy_(product) if inplace and not isinstance(x, nn.Parameter) else product

    def _fused(
        self, site: Site, layout: RowLayout | None, x: Tensor, drop_prob: float, shape: tuple[int, ...]
    ) -> Tensor | None:
        """The masked tensor by one kernel that makes the mask in registers; None where there is none for it."""
        if self.masks.positions is not None:
            return None
        kernels = _kernels_for(x) if layout is not None else None
        if kernels is None or layout is None or x.dtype not in _KERNEL_DTYPES:
            return None
        if shape != tuple(x.shape):  # whole channels: their few factors first, then a product that broadcasts
            ones = torch.ones((), dtype=x.dtype, device=x.device).expand(shape)
            factors = self._fused(site, layout, ones, drop_prob, shape)
            return None if factors is None else x * factors
        drawn = self.level is None or _is_mapped(x, self.level)
        folded = _folded_draws(x, self.level, layout.axis) if self.level is not None and drawn else x
        result: Tensor = kernels.masked(
            folded.contiguous(), self.masks.keys, site.index, drop_prob=drop_prob, draws=self.draws,
            rows=self._own_rows, drawn=drawn, **_extents(shape, layout),
        )  # fmt: skip
        result = self._as_seen(result, layout, shape)
        if self.level is None and x.dim() == 4 and not x.is_contiguous():
            last = x.is_contiguous(memory_format=torch.channels_last)
            return result.contiguous(memory_format=torch.channels_last) if last else result
        return result

    def _as_seen(self, result: Tensor, layout: RowLayout, shape: tuple[int, ...]) -> Tensor:
        """A kernel's result, `[outer, draw, row, inner]`, as the network sees it: mapped draws hidden."""
        if self.level is None:
            return result.view(shape)
        sizes = (*shape[: layout.axis], len(self.draws), *shape[layout.axis :])
        return _add_batch_dim(result.view(sizes), layout.axis, self.level)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, is_causal: bool,
        scale: float,
    ) -> Tensor | None:  # fmt: skip
        if self.lenient or self.site >= len(self.masks.anatomy.sites):
            return None
        if self.masks.positions is not None:
            return self._tied_attention(query, key, value, attn_mask, drop_prob, is_causal, scale)
        layout = self.masks.anatomy.sites[self.site].layout
        kernels = _kernels_for(query) if query.dim() == 4 and layout is not None and layout.axis == 0 else None
        if kernels is None or query.shape[-1] > 256 or value.shape[-1] > 256:
            return None
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
        if dtype not in _KERNEL_DTYPES[:3] or {key.dtype, value.dtype} - {dtype, query.dtype}:
            return None
        site = self._next("attention", drop_prob)
        layout, _ = self._layout(site, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
        assert layout is not None
        if self.level is not None:
            query, key, value = (_folded_draws(t, self.level, 0, len(self.draws)) for t in (query, key, value))
            if attn_mask is not None and (
                _is_mapped(attn_mask, self.level) or (attn_mask.dim() == 4 and attn_mask.shape[0] > 1)
            ):
                attn_mask = _folded_draws(attn_mask, self.level, 0, len(self.draws))
        result: Tensor = kernels.attention(
            query.to(dtype), key.to(dtype), value.to(dtype), keys=self.masks.keys, site=site.index,
            drop_prob=drop_prob, draws=self.draws, rows=self._own_rows, attn_mask=attn_mask, is_causal=is_causal,
            scale=scale, folded=layout.inner,
        )  # fmt: skip
        return (
            result if self.level is None else _add_batch_dim(result.unflatten(0, (len(self.draws), -1)), 0, self.level)
        )

    def _tied_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, is_causal: bool,
        scale: float,
    ) -> Tensor | None:  # fmt: skip
        """Attention whose heads are dropped whole, by torch's own kernel: what it gives is dropped instead."""
        positions, site = self.masks.positions, self.masks.anatomy.sites[self.site]
        weights = (*query.shape[:-1], key.shape[-2])
        by_head = [place.axis for place in site.positions] == [len(weights) - 2, len(weights) - 1]
        if positions is None or not positions.tied or not by_head or site.layout is None or self._own_rows is not None:
            return None
        result = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        return self.masked("attention", result, drop_prob, weights, False)

    def uniform(
        self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device
    ) -> Tensor | None:
        self._calls += 1
        if self._calls - 1 in self.masks.anatomy.off_calls:
            return None
        site = self._next(kind, drop_prob)
        if not shape and not site.is_random:  # LayerDrop of probability 0 or 1
            return torch.full((), 0.5, dtype=torch.float64, device=device)
        layout, inner_shape = self._layout(site, shape)
        kernels, positions = kernels_on(device), self.masks.positions
        if kernels is not None and layout is not None and positions is None:
            result: Tensor = kernels.uniforms(
                self.masks.keys, site.index, draws=self.draws, rows=self._own_rows, n_rows=len(self.rows),
                device=device, **_extents(shape, layout),
            )  # fmt: skip
            return self._as_seen(result, layout, shape)

        def make(number: int, shape: tuple[int, ...], units: Units | None) -> Tensor:
            return uniform(
                self.masks.keys, number, draws=self.draws, rows=self._own_rows, shape=shape, device=device, units=units
            )

        words = make(site.index, inner_shape, None) if positions is None else positions.made(site, inner_shape, make)
        return self._laid(words, layout, shape, inner_shape)

    def integrate(self, x: Tensor, drop_prob: float) -> Tensor | None:
        if not self.masks.integrate or self.site != len(self.masks.anatomy.sites) - 1:
            return None
        self._next("dropout", drop_prob)
        alias = x.view_as(x)
        self._pending = (alias, drop_prob)
        return alias

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._pending is None or x is not self._pending[0]:
            return None
        drop_prob = self._pending[1]
        # Var[W (h ∘ z / keep_prob)] = (W ∘ W)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob)
        self.variance = nn.functional.linear(x.square(), weight.square()) * (drop_prob / (1 - drop_prob))
        result = nn.functional.linear(x, weight, bias)
        self._integrated = (result, _version(result))
        return result

    def finish(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, with the integrated variance after them; an error where other sites were met than expected."""
        if self.site != len(self.masks.anatomy.sites) and not (self.lenient or self._names):
            raise NetworkChanged(f"{self.site} sites instead of {len(self.masks.anatomy.sites)}")
        if not self.masks.integrate:
            return outputs
        if self._integrated is None or self.variance is None or len(outputs) != 1:
            raise NetworkChanged("the last layer was not met")
        if outputs[0] is not self._integrated[0] or _version(outputs[0]) != self._integrated[1]:
            raise NetworkChanged("the last layer's output is not the network's")
        return [*outputs, self.variance]

    @property
    def _own_rows(self) -> range | None:
        return self.rows if self.masks.per_row else None

    def _next(self, kind: str, drop_prob: float | None) -> Site:
        depth = transform_depth()
        if depth is not None and (self.level is None or depth > self.level) and not _draws_one_for_all():
            raise NotImplementedError(
                "`net` drops inside a torch.func transform of its own, whose members would all share one mask. Write "
                "the members as an axis of one tensor."
            )
        if self.lenient:
            self.site += 1
            return Site(self.site - 1, "", kind, drop_prob, ())
        if self._names is None and self.site >= len(self.masks.anatomy.sites):
            raise NetworkChanged("more sites than before")
        name = None if self._names is None else self._names.next(kind)
        site = self.masks.anatomy.sites[self.site] if name is None else self._by_name.get(name)
        if site is None:
            raise NetworkChanged(f"a site {name!r} that was not there before")
        if site.kind != kind or (drop_prob is not None and site.drop_prob != drop_prob):
            raise NetworkChanged(
                f"site {self.site} is {kind} with {drop_prob}, no longer {site.kind} with {site.drop_prob}"
            )
        self.site += 1
        return site

    def _layout(self, site: Site, shape: tuple[int, ...]) -> tuple[RowLayout | None, tuple[int, ...]]:
        """Where this run's tensor of `shape` has its rows, and the shape of one row's mask."""
        copies = len(self.rows) * (len(self.draws) if self.folded else 1)
        if site.layout is None:
            if (self.folded and len(self.draws) > 1) or (self.masks.per_row and len(self.rows) > 1):
                raise Unsuited("a mask without a row axis")
            return None, shape
        axis = site.layout.axis
        if axis >= len(shape) or shape[axis] % copies:
            raise Unsuited("rows along another axis")
        return RowLayout(axis, shape[axis] // copies), (*shape[:axis], shape[axis] // copies, *shape[axis + 1 :])

    def _laid(
        self, value: Tensor, layout: RowLayout | None, shape: tuple[int, ...], inner_shape: tuple[int, ...]
    ) -> Tensor:
        """`[draw, (row,) ...]` as the network sees it, with draws and rows along the row axis."""
        value = value.expand(*value.shape[: value.dim() - len(inner_shape)], *inner_shape)  # tied positions
        if layout is None:
            value = value[0] if self.level is None else _add_batch_dim(value, 0, self.level)
            return value[0] if self._own_rows is not None else value
        value = self._among_rows(value, layout)
        if self._own_rows is None:
            value = value.unsqueeze(layout.axis + 1).expand(
                *value.shape[: layout.axis + 1], len(self.rows), *value.shape[layout.axis + 1 :]
            )
        return value.reshape(shape)

    def _among_rows(self, value: Tensor, layout: RowLayout) -> Tensor:
        """`[draw, (row,) ...]` with the draws (and rows) right before the axis that holds rows; mapped draws hidden."""
        n_leading = 1 if self._own_rows is None else 2
        if not self.folded and self.level is not None:
            value = _add_batch_dim(value, 0, self.level)
            value = value.unsqueeze(0)
        leading = list(range(n_leading))
        return value.movedim(leading, [layout.axis + place for place in leading])


def _extents(shape: tuple[int, ...], layout: RowLayout) -> dict[str, int]:
    """How many of a row's units precede and follow the rows in memory."""
    axis = layout.axis
    return {"outer": math.prod(shape[:axis]), "inner": layout.inner * math.prod(shape[axis + 1 :])}


def _is_mapped(x: Tensor, level: int) -> bool:
    """Whether a tensor differs between the draws that are mapped over."""
    return bool(_functorch.is_batchedtensor(x)) and _functorch.maybe_get_level(x) == level


def _folded_draws(x: Tensor, level: int, axis: int, n_draws: int = 1) -> Tensor:
    """A tensor mapped over draws with these as part of `axis`, outermost; any other repeated for `n_draws`."""
    if not _is_mapped(x, level):
        return x.unsqueeze(axis).expand(*x.shape[:axis], n_draws, *x.shape[axis:]).flatten(axis, axis + 1)
    return _functorch.get_unwrapped(x).movedim(_functorch.maybe_get_bdim(x), axis).flatten(axis, axis + 1)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _draws_one_for_all() -> bool:
    """Whether the innermost transform is a vmap that gives all its members the same random numbers."""
    interpreter: Any = torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter()
    return interpreter.key() == torch._C._functorch.TransformType.Vmap and interpreter.randomness() == "same"


def evaluate(strategy: Strategy, masks: Masks, work: Work) -> list[Tensor]:
    """All draws of the work's rows, `[draw, row, ...]` of each tensor of the output; then the integrated variance."""
    if strategy.rows == "single" and len(work.rows) > 1:
        parts = [evaluate(strategy, masks, _one_row(work, place)) for place in range(len(work.rows))]
        return [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]
    if strategy.draws == "single" and len(work.draws) > 1:
        runs = [evaluate(strategy, masks, _one_draw(work, draw)) for draw in work.draws]
        return [torch.cat(tensors) for tensors in zip(*runs, strict=True)]
    if strategy.draws == "mapped" and len(work.draws) > 1:
        return _mapped(masks, work)
    return _folded(masks, work)


def _one_row(work: Work, place: int) -> Work:
    leaves = [
        leaf if axis is None or not isinstance(leaf, Tensor) else leaf.narrow(axis, place, 1).clone()
        for leaf, axis in zip(work.leaves, work.inputs.axes, strict=True)
    ]
    return Work(work.network, work.inputs, leaves, work.draws, work.rows[place : place + 1])


def _one_draw(work: Work, draw: int) -> Work:
    # A network may write into its input: every run has its own.
    leaves = own_leaves(work.leaves)
    return Work(work.network, work.inputs, leaves, range(draw, draw + 1), work.rows)


def _run(masks: Masks, source: KeyedSource, work: Work, leaves: list[Any]) -> list[Tensor]:
    net = work.network()
    source.follow(net)
    with Interception(source):
        output, _ = split(eagerly(work.inputs.call)(net, leaves))
    return source.finish(output)


def _folded(masks: Masks, work: Work) -> list[Tensor]:
    """Draws and rows as one batch, draws outermost."""
    n_draws, n_rows = len(work.draws), len(work.rows)
    source = KeyedSource(masks, work.draws, work.rows, folded=True)
    leaves = [_repeated(leaf, axis, n_draws) for leaf, axis in zip(work.leaves, work.inputs.axes, strict=True)]
    with _seeded(masks, work):
        outputs = _run(masks, source, work, leaves)
    return [_rows_first(out, layout, n_draws, n_rows) for out, layout in _with_layouts(masks, outputs)]


def _repeated(leaf: Any, axis: int | None, n_draws: int) -> Any:
    if n_draws == 1 or axis is None:
        return leaf
    if not isinstance(leaf, Tensor):
        raise Unsuited("an argument that is no tensor")
    return leaf.repeat(*(n_draws if place == axis else 1 for place in range(leaf.dim())))


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


def _mapped(masks: Masks, work: Work) -> list[Tensor]:
    """The rows as a batch, mapped over draws: what comes before the first site is computed once."""
    if masks.anatomy.host_random:
        raise Unsuited("random numbers of the host")
    source = KeyedSource(masks, work.draws, work.rows, folded=False)

    def one_draw(_: Tensor) -> tuple[Tensor, ...]:
        source.level = transform_depth()
        outputs = _run(masks, source, work, work.leaves)
        return tuple(_rows_first(out, layout, 1, len(work.rows))[0] for out, layout in _with_layouts(masks, outputs))

    return list(torch.func.vmap(one_draw)(torch.empty(len(work.draws))))


@contextlib.contextmanager
def _seeded(masks: Masks, work: Work) -> Iterator[None]:
    """Keys the host's generators to seed, draw and row where the network uses them, and restores their states."""
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
            random.seed(seed)
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed(seed % 2**32)
        yield
