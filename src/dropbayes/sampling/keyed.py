"""The keyed source of randomness: the masks of some draws and rows, along the row axis of each site."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy, RowLayout, Site
from dropbayes.sampling.fusion import kernels_on
from dropbayes.sampling.masks import Keys, Units, keep_mask, uniform
from dropbayes.sampling.names import SiteNames
from dropbayes.sampling.operations import RandomSource, scaled_product
from dropbayes.sampling.positions import Positions
from dropbayes.sampling.recorder import SENTINEL_SEED

# From functorch: a real tensor seen as batched along one axis at a level of vmap; the depth of nested transforms, None
# outside all of them.
_functorch: Any = torch._C._functorch
_add_batch_dim: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim
transform_depth: Callable[[], int | None] = _functorch.maybe_current_level

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _kernels_for(x: Tensor) -> Any:
    """The kernels that make masks in registers; None if there are none for this device, or a gradient is needed."""
    return None if torch.is_grad_enabled() and x.requires_grad else kernels_on(x.device)


class NetworkChanged(Exception):
    """The network met other sites than when it was inspected: its inspection is out of date."""


class Unsuited(Exception):
    """A strategy that cannot give these masks to this network; another can."""


@dataclass(frozen=True)
class Masks:
    """The specification of a network's masks: sites, keys, and whether rows share them."""

    anatomy: Anatomy
    keys: Keys
    per_row: bool
    integrate: bool  # the last site is integrated out, and its variance returned
    positions: Positions | None = None  # None if a position is like any other unit


class KeyedSource(RandomSource):
    """The masks of some draws and rows, along the row axis of each site.

    Args:
        masks: Sites and keys.
        draws: The draws of this run.
        rows: The rows of this run.
        folded: Whether the draws are part of the row axis, outermost; otherwise they are mapped over, or single.
    """

    def __init__(self, masks: Masks, draws: range, rows: range, *, folded: bool) -> None:
        # One row of one draw needs no layout: the number of its sites may even depend on its values.
        self.lenient = len(draws) == 1 and len(rows) == 1 and not masks.integrate and masks.positions is None
        self.masks, self.draws, self.rows, self.folded = masks, draws, rows, folded
        self.level: int | None = None  # of vmap, if draws are mapped over
        self.variance: Tensor | None = None
        self.site = 0
        self._names: SiteNames | None = None
        self._by_name: dict[str, Site] = {}
        self._calls = 0
        self._pending: tuple[Tensor, float] | None = None
        self._integrated: tuple[Tensor, int] | None = None

    def follow(self, net: nn.Module) -> None:
        """Identifies the sites of `net` by name if a draw may skip layers and their sites."""
        if self.masks.anatomy.skips_layers:
            self._names = SiteNames({id(module): path for path, module in net.named_modules()})
            self._by_name = {site.name: site for site in self.masks.anatomy.sites}

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
        return self._lay_out(self._mask(site, drop_prob, inner_shape, like), layout, shape, inner_shape)

    def _mask(self, site: Site, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        def make(number: int, shape: tuple[int, ...], units: Units | None) -> Tensor:
            return keep_mask(
                self.masks.keys, number, drop_prob=drop_prob, draws=self.draws, rows=self._mask_rows, shape=shape,
                dtype=like.dtype, device=like.device, units=units,
            )  # fmt: skip

        positions = self.masks.positions
        return make(site.index, shape, None) if positions is None else positions.generate(site, shape, make)

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        site = self._next(kind, drop_prob)
        layout, inner_shape = self._layout(site, shape)
        fused = self._dropout_by_kernel(site, layout, x, drop_prob, shape)
        if fused is not None:
            return x.copy_(fused) if inplace and not isinstance(x, nn.Parameter) else fused
        mask = self._mask(site, drop_prob, inner_shape, x)
        if layout is None or self._mask_rows is not None:
            return scaled_product(x, self._lay_out(mask, layout, shape, inner_shape), drop_prob, inplace)
        # A mask shared by rows is multiplied without a copy per row.
        sizes = (len(self.draws) if self.folded else 1, len(self.rows), layout.inner)
        split_x = x.unflatten(layout.axis, sizes)
        mask = self._among_rows(mask, layout).unsqueeze(layout.axis + 1)
        product = scaled_product(split_x, mask, drop_prob).flatten(layout.axis, layout.axis + 2)
        return x.copy_(product) if inplace and not isinstance(x, nn.Parameter) else product

    def _dropout_by_kernel(
        self, site: Site, layout: RowLayout | None, x: Tensor, drop_prob: float, shape: tuple[int, ...]
    ) -> Tensor | None:
        """The masked tensor by one kernel that generates the mask in registers; None without one."""
        if self.masks.positions is not None:
            return None
        kernels = _kernels_for(x) if layout is not None else None
        if kernels is None or layout is None or x.dtype not in _KERNEL_DTYPES:
            return None
        if shape != tuple(x.shape):  # whole channels: their few factors first, then a product that broadcasts
            ones = torch.ones((), dtype=x.dtype, device=x.device).expand(shape)
            factors = self._dropout_by_kernel(site, layout, ones, drop_prob, shape)
            return None if factors is None else x * factors
        drawn = self.level is None or _is_mapped(x, self.level)
        folded = _folded_draws(x, self.level, layout.axis) if self.level is not None and drawn else x
        result: Tensor = kernels.dropout(
            folded.contiguous(), self.masks.keys, site.index, drop_prob=drop_prob, draws=self.draws,
            rows=self._mask_rows, drawn=drawn, **_extents(shape, layout),
        )  # fmt: skip
        result = self._hide_draws(result, layout, shape)
        if self.level is None and x.dim() == 4 and not x.is_contiguous():
            last = x.is_contiguous(memory_format=torch.channels_last)
            return result.contiguous(memory_format=torch.channels_last) if last else result
        return result

    def _hide_draws(self, result: Tensor, layout: RowLayout, shape: tuple[int, ...]) -> Tensor:
        """A kernel's result, `[outer, draw, row, inner]`, as the network sees it: mapped draws hidden."""
        if self.level is None:
            return result.view(shape)
        sizes = (*shape[: layout.axis], len(self.draws), *shape[layout.axis :])
        return _add_batch_dim(result.view(sizes), layout.axis, self.level)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, is_causal: bool,
        scale: float,
    ) -> Tensor | None:  # fmt: skip
        if self.lenient or self._names is not None or self.site >= len(self.masks.anatomy.sites):
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
            drop_prob=drop_prob, draws=self.draws, rows=self._mask_rows, attn_mask=attn_mask, is_causal=is_causal,
            scale=scale, folded=layout.inner,
        )  # fmt: skip
        return (
            result if self.level is None else _add_batch_dim(result.unflatten(0, (len(self.draws), -1)), 0, self.level)
        )

    def _tied_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, is_causal: bool,
        scale: float,
    ) -> Tensor | None:  # fmt: skip
        """Attention whose heads are dropped whole, by torch's kernel: its outputs are dropped instead."""
        positions, site = self.masks.positions, self.masks.anatomy.sites[self.site]
        weights = (*query.shape[:-1], key.shape[-2])
        by_head = [position.axis for position in site.positions] == [len(weights) - 2, len(weights) - 1]
        if positions is None or not positions.tied or not by_head or site.layout is None or self._mask_rows is not None:
            return None
        result = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        return self.dropout("attention", result, drop_prob, weights, False)

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
                self.masks.keys, site.index, draws=self.draws, rows=self._mask_rows, n_rows=len(self.rows),
                device=device, **_extents(shape, layout),
            )  # fmt: skip
            return self._hide_draws(result, layout, shape)

        def make(number: int, shape: tuple[int, ...], units: Units | None) -> Tensor:
            return uniform(
                self.masks.keys,
                number,
                draws=self.draws,
                rows=self._mask_rows,
                shape=shape,
                device=device,
                units=units,
            )

        words = (
            make(site.index, inner_shape, None) if positions is None else positions.generate(site, inner_shape, make)
        )
        return self._lay_out(words, layout, shape, inner_shape)

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
        """The outputs, then the integrated variance; raises if other sites were met than expected."""
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
    def _mask_rows(self) -> range | None:
        return self.rows if self.masks.per_row else None

    def _next(self, kind: str, drop_prob: float | None) -> Site:
        depth = transform_depth()
        if depth is not None and (self.level is None or depth > self.level) and not _draws_one_for_all():
            raise NotImplementedError(
                "`net` drops inside its own torch.func transform, whose members would all share one mask. Write "
                "the members as an axis of one tensor."
            )
        name = None if self._names is None else self._names.next(kind)
        if self.lenient:
            self.site += 1
            known = self._by_name.get(name) if name is not None else None
            number = self.site - 1 if name is None else len(self._by_name) + self.site - 1
            return Site(number if known is None else known.index, "", kind, drop_prob, ())
        if name is None and self.site >= len(self.masks.anatomy.sites):
            raise NetworkChanged("more sites than before")
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
        """The row layout of this run's tensor of `shape`, and the shape of one row's mask."""
        copies = len(self.rows) * (len(self.draws) if self.folded else 1)
        if site.layout is None:
            if (self.folded and len(self.draws) > 1) or (self.masks.per_row and len(self.rows) > 1):
                raise Unsuited("a mask without a row axis")
            return None, shape
        axis = site.layout.axis
        if axis >= len(shape) or shape[axis] % copies:
            raise Unsuited("rows along another axis")
        return RowLayout(axis, shape[axis] // copies), (*shape[:axis], shape[axis] // copies, *shape[axis + 1 :])

    def _lay_out(
        self, value: Tensor, layout: RowLayout | None, shape: tuple[int, ...], inner_shape: tuple[int, ...]
    ) -> Tensor:
        """`[draw, (row,) ...]` as the network sees it, with draws and rows along the row axis."""
        value = value.expand(*value.shape[: value.dim() - len(inner_shape)], *inner_shape)  # tied positions
        if layout is None:
            value = value[0] if self.level is None else _add_batch_dim(value, 0, self.level)
            return value[0] if self._mask_rows is not None else value
        value = self._among_rows(value, layout)
        if self._mask_rows is None:
            value = value.unsqueeze(layout.axis + 1).expand(
                *value.shape[: layout.axis + 1], len(self.rows), *value.shape[layout.axis + 1 :]
            )
        return value.reshape(shape)

    def _among_rows(self, value: Tensor, layout: RowLayout) -> Tensor:
        """`[draw, (row,) ...]` with the draws (and rows) right before the axis that holds rows; mapped draws hidden."""
        n_leading = 1 if self._mask_rows is None else 2
        if not self.folded and self.level is not None:
            value = _add_batch_dim(value, 0, self.level)
            value = value.unsqueeze(0)
        leading = list(range(n_leading))
        return value.movedim(leading, [layout.axis + offset for offset in leading])


def _extents(shape: tuple[int, ...], layout: RowLayout) -> dict[str, int]:
    """The numbers of a row's units that precede and follow the rows in memory."""
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
