"""The keyed source of randomness: the masks of some draws and rows, along the row axis of each site.

The draws of a run are folded into the row axis, outermost, or mapped over by `torch.func.vmap`, or one alone. Its rows
are a batch, or mapped over as well: then every row meets its masks as it does alone.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.kernels import kernels_on
from dropbayes.sampling.masks import SHARED_BYTES, Keys, Positions, Units, keep_mask, keep_scale, site_number, uniform
from dropbayes.sampling.probes import is_ignored
from dropbayes.sampling.profile import Profile
from dropbayes.tracing import (
    RowLayout,
    Site,
    SiteNames,
    Source,
    UnsupportedStrategy,
    is_ours,
    neutral_uniform,
    scaled_product,
    version,
)
from dropbayes.tracing.generators import SENTINEL_SEED
from dropbayes.tracing.sites import is_checkpointed
from dropbayes.tracing.transforms import add_batch_dim, is_batched, is_mapped, maps_randomly, transform_depth, unmapped

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class NetworkChanged(UnsupportedStrategy):
    """The network met other sites than when it was inspected: its profile is out of date."""


class UnknownSite(NetworkChanged):
    """One of some draws, given here, met a site that no pass had: of an expert, say, to which no row had been sent."""


class Parted(UnsupportedStrategy):
    """Pairs of a draw and a row that are mapped over read different values, given here: they may part."""


@dataclass(frozen=True)
class MaskSpec:
    """The specification of a network's masks: sites, keys, and whether rows share them."""

    profile: Profile
    keys: Keys
    per_row: bool
    integrate: bool = False  # the last site is integrated out, and its variance returned
    positions: Positions | None = None  # None if a position is like any other unit
    ignored: tuple[str, ...] = ()
    trial: bool = False  # a different real number for every unit, in which no misplaced mask can hide


Made = dict[tuple[object, ...], Sequence[Tensor]]
"""Scaled masks and uniforms of draws that run one after the other, by site: made at once for all of them."""


class SiteSource(Source):
    """A source that knows the sites of a network, and the names of its modules."""

    def __init__(self, profile: Profile, names: SiteNames, ignored: tuple[str, ...], *, alone: bool = False) -> None:
        self.profile, self.names, self.ignored = profile, names, ignored
        named = profile.by_name or (alone and profile.reads_rows)  # alone, a row may take a branch of its own
        self.by_name = {site.name: site for site in profile.sites} if named else {}
        self.gates = dict(profile.gates)

    def is_off(self, training: bool) -> bool:
        return self.is_ignored() or not (training or is_ours(self.names.caller()[1]))

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        seed = torch.default_generator.initial_seed()
        return generator is not None or (self.profile.seeds_torch and seed >> 32 != SENTINEL_SEED >> 32)

    def is_ignored(self) -> bool:
        """Whether the module that asks is one to ignore."""
        path, module = self.names.caller() if self.ignored else ("", None)
        return module is not None and is_ignored(self.ignored, path, module)


class KeyedSource(SiteSource):
    """The masks of some draws and rows.

    Args:
        folded: Whether the draws are part of the row axis; otherwise they are mapped over, or one.
        rows_mapped: Whether the rows are mapped over, too.
        pairs: The draws and the rows, by their place among these, that are mapped over as pairs; None for all.
        among: The draws that run one after the other, if this is one of them.
        made: What was made for them at once.
        learned: Where sites that were not met before are noted, by name; they then have the numbers of a trial.
    """

    by_kernels = True  # whose draws follow each other

    def __init__(
        self, spec: MaskSpec, draws: Sequence[int], rows: range, *, folded: bool, rows_mapped: bool = False,
        among: Sequence[int] | None = None, made: Made | None = None, learned: dict[str, Site] | None = None,
        pairs: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        # One row of one draw, or several that read the same: its sites may depend on its values.
        one_draw = len(draws) == 1 or not (folded or spec.profile.rows_together)
        self.alone = (pairs is not None or (len(rows) == 1 and one_draw)) and not spec.integrate
        super().__init__(spec.profile, SiteNames({}), spec.ignored, alone=self.alone)
        self.spec, self.draws, self.rows, self._new = spec, draws, rows, learned
        self._among, self._made = among, {} if made is None else made
        self.folded, self.maps, self.rows_mapped, self._chosen = folded, not folded, rows_mapped, pairs
        self.level: int | None = None  # of vmap, if draws are mapped over
        self.row_level: int | None = None  # and if rows are
        self.variance: Tensor | None = None
        self.site = 0
        self._followed: Tensor | None = None  # what meets a site, if its entries are followed
        self._depth = transform_depth() or 0  # of the caller's own transforms
        self._pending: tuple[Tensor, float] | None = None
        self._integrated: tuple[Tensor, int] | None = None
        self._computed_again: bool | None = None if torch.is_grad_enabled() else False  # a part of it, for gradients

    def follow(self, paths: Mapping[int, str], inputs: Sequence[Tensor]) -> None:
        """Tells sites by name, and what calls them, by the names of the modules that run, by id.

        `inputs` are the tensors that have rows.
        """
        self.names = SiteNames(paths)

    def read(self, tensor: Tensor) -> Tensor:
        values = tensor if self._chosen is None else unmapped(tensor, self.row_level or 0, 0, len(self._chosen[0]))
        if is_batched(values) or bool((values == values[0]).all()):
            return super().read(tensor)
        values = values.reshape(-1)
        raise UnsupportedStrategy("real numbers of rows") if values.is_floating_point() else Parted(values)

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        site = self._next(kind, drop_prob, shape)
        layout, inner_shape = self._layout(site, shape)
        return self._lay_out(self._mask(site, drop_prob, inner_shape, like), layout, shape, inner_shape)

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        site, units = self._next(kind, drop_prob, shape), x
        if self.spec.trial and x.dim() > 1:  # a row of zeros, as after a ReLU of few units, is right under any mask
            others = [axis for axis in range(x.dim()) if axis != (site.layout.axis if site.layout else 0)]
            units = x.masked_fill((x != 0).sum(others, keepdim=True) == 0, 1.0)  # rounding may decide on single ones
        product = self._dropped(site, units, drop_prob, shape)
        return x.copy_(product) if inplace and not isinstance(x, nn.Parameter) else product

    def _dropped(self, site: Site, x: Tensor, drop_prob: float, shape: tuple[int, ...]) -> Tensor:
        if (factor := self._precomputed(site, shape, drop_prob, x.dtype, x.device)) is not None:
            return x * factor
        layout, inner_shape = self._layout(site, shape)
        if (fused := self._dropout_by_kernel(site, layout, x, drop_prob, shape)) is not None:
            return fused
        mask, is_shared = self._mask(site, drop_prob, inner_shape, x), self._mask_rows(site) is None
        if self.folded and len(self.draws) == 1 and is_shared and (layout is None or layout.inner < 2):
            return scaled_product(x, mask[0], drop_prob)  # one mask, which fits every row
        if layout is None or layout.inner == 0 or self.rows_mapped or not is_shared:
            return scaled_product(x, self._lay_out(mask, layout, shape, inner_shape), drop_prob)
        # A mask shared by rows is multiplied without a copy per row.
        sizes = (len(self.draws) if self.folded else 1, len(self.rows), layout.inner)
        mask = self._among_rows(mask, layout, 1).unsqueeze(layout.axis + 1)
        return scaled_product(x.unflatten(layout.axis, sizes), mask, drop_prob).flatten(layout.axis, layout.axis + 2)

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if self.is_ignored():
            return neutral_uniform(kind, shape, device)
        site = self._next(kind, drop_prob, shape)
        if not shape and not site.is_random:  # LayerDrop of probability 0 or 1
            return torch.full((), 0.5, dtype=torch.float64, device=device)
        drawn = self._precomputed(site, shape, None, torch.float64, device)
        if drawn is not None and site.layout is None:
            return drawn
        layout, inner_shape = self._layout(site, shape)
        kernels = kernels_on(device) if self.by_kernels else None
        plain = self.spec.positions is None and not self.spec.trial and not self.rows_mapped
        if kernels is not None and layout is not None and layout.inner and plain and math.prod(shape):
            result: Tensor = kernels.uniforms(
                self.spec.keys, site_number(site), draws=self.draws, rows=self._mask_rows(site), n_rows=len(self.rows),
                device=device, **_extents(shape, layout),
            )  # fmt: skip
            return self._hide_draws(result, layout, shape)
        uniforms = self._uniforms(site, inner_shape, device) if drawn is None else drawn[None]
        return self._lay_out(uniforms, layout, shape, inner_shape)

    def bernoulli(self, probability: Tensor, drop_prob: float | None) -> Tensor:
        if self.is_ignored():
            return probability
        drawn = self.uniform("bernoulli", drop_prob, tuple(probability.shape), probability.device)
        if self.spec.trial:  # zeros and ones aside, the numbers show what the probability depends on
            return torch.where(drawn % 1 == 0, drawn, drawn * (0.5 + probability))
        return drawn < probability

    def integrate(self, x: Tensor, drop_prob: float, inplace: bool) -> Tensor | None:
        if not self.spec.integrate or self.site != len(self.spec.profile.sites) - 1:
            return None
        self._next("dropout", drop_prob, tuple(x.shape))
        alias = x if inplace else x.view_as(x)  # the network may go on with either
        self._pending = (alias, drop_prob)
        return alias

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._pending is None or x is not self._pending[0]:
            plain = not x.is_cpu or weight.shape[0] > 1 or weight.dim() == 1 or torch.is_autocast_enabled("cpu")
            return None if plain else _linear(x, weight, bias)
        drop_prob = self._pending[1]
        # Var[W (h ∘ z / keep_prob)] = (W ∘ W)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob)
        # As products: autocast takes a square in float32, twice the memory of half precision.
        self.variance = _linear(x * x, weight * weight) * (drop_prob / (1 - drop_prob))
        result = _linear(x, weight, bias)
        self._integrated = (result, version(result))
        return result

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, *,
        is_causal: bool, scale: float,
    ) -> Tensor | None:  # fmt: skip
        sites = self.spec.profile.sites
        numbered = not (self.by_name or self.spec.trial or self._chosen is not None) and self.site < len(sites)
        if not numbered or sites[self.site].kind != "attention":
            return None
        if self.spec.positions is not None:
            return self._tied_attention(query, key, value, attn_mask, drop_prob, is_causal, scale)
        layout = sites[self.site].layout
        fits = query.dim() == 4 and (self.rows_mapped or (layout is not None and layout == RowLayout(0, layout.inner)))
        kernels = self._kernels(query) if fits else None
        if kernels is None or query.shape[-1] > 256 or value.shape[-1] > 256:
            return None
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
        if dtype not in _KERNEL_DTYPES[:3] or {key.dtype, value.dtype} - {dtype, query.dtype}:
            return None
        layout, _ = self._layout(sites[self.site], (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
        inner = query.shape[0] if self.rows_mapped or layout is None else layout.inner
        query, key, value = (self._batch(t) for t in (query, key, value))
        if attn_mask is not None and (is_batched(attn_mask) or (attn_mask.dim() == 4 and attn_mask.shape[0] > 1)):
            attn_mask = self._batch(attn_mask)
        result: Tensor | None = kernels.attention(
            query.to(dtype), key.to(dtype), value.to(dtype), keys=self.spec.keys, site=site_number(sites[self.site]),
            drop_prob=drop_prob, draws=self.draws, rows=self._mask_rows(sites[self.site]), attn_mask=attn_mask,
            is_causal=is_causal, scale=scale, folded=inner,
        )  # fmt: skip
        if result is None:
            return None
        self._next("attention", drop_prob, sites[self.site].shape)
        return self._map_batch(result)

    def _tied_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, is_causal: bool,
        scale: float,
    ) -> Tensor | None:  # fmt: skip
        """Attention whose heads are dropped whole, by torch's kernel: its outputs are dropped instead."""
        positions, site = self.spec.positions, self.spec.profile.sites[self.site]
        weights = (*query.shape[:-1], key.shape[-2])
        by_head = [position.axis for position in site.positions] == [len(weights) - 2, len(weights) - 1]
        if positions is None or not positions.tied or not by_head or site.layout is None or self.spec.per_row:
            return None
        result = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        return self.dropout("attention", result, drop_prob, weights, False)

    def finish(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, then the integrated variance; raises if other sites were met than expected."""
        if self.site != len(self.spec.profile.sites) and not (self.alone or self.by_name):
            raise NetworkChanged(f"{self.site} sites instead of {len(self.spec.profile.sites)}")
        for output in outputs if self._computed_again else ():
            if output.requires_grad:
                output.register_hook(_refuse_gradient)
        if not self.spec.integrate:
            return outputs
        last, written = self._integrated or (None, 0)
        if self.variance is None or len(outputs) != 1 or outputs[0] is not last or version(outputs[0]) != written:
            raise NetworkChanged("the last layer was not met, or its output is not the network's")
        return [*outputs, self.variance]

    def _mask_rows(self, site: Site) -> range | None:
        """The rows that have masks of their own at a site; None if they share one."""
        # In a trial, several entries of a row have its own numbers: of shared ones, those of others might do by chance.
        several = self._has_parts(site) or (site.layout is not None and site.layout.inner > 1)
        return self.rows if self.spec.per_row or (several and self._tries(site)) else None

    def _has_parts(self, site: Site) -> bool:
        """Whether a row may have any number of entries at a site, and none."""
        return self.spec.profile.sends_parts and site.layout == RowLayout(0, 0)

    def _next(self, kind: str, drop_prob: float | None, shape: tuple[int, ...]) -> Site:
        self._check_transforms()
        sites, by_name = self.spec.profile.sites, self.spec.profile.by_name or bool(self.by_name)
        self.site += 1
        if by_name:
            name = self.names.next(kind)
            site = self.by_name.get(name)
            if site is None and (self.alone or self._new is not None):
                return self._learned(Site(self.site - 1, "", kind, drop_prob, shape, name=name))
            if site is None:
                raise UnknownSite(self.draws)
        elif self.site > len(sites):
            if self.alone:
                return Site(self.site - 1, "", kind, drop_prob, ())
            raise NetworkChanged("more sites than before")
        else:
            site = sites[self.site - 1]
        other = site.kind != kind or (drop_prob is not None and site.drop_prob != drop_prob)
        if other and not (self.alone or by_name):  # a draw may choose its drop probability
            before = f"{site.kind} with {site.drop_prob}"
            raise NetworkChanged(f"site {self.site - 1} is {kind} with {drop_prob}, no longer {before}")
        return site

    def _learned(self, site: Site) -> Site:
        """A site that was not met before, noted. The rows, or some with one entry each, lie as at other sites."""
        axis = next((known.layout.axis for known in self.spec.profile.sites if known.layout is not None), 0)
        if len(site.shape) > axis:
            inner, rest = divmod(site.shape[axis], len(self.rows) * (len(self.draws) if self.folded else 1))
            some = rest or inner < 2 or self.spec.profile.sends_parts
            site = replace(site, layout=RowLayout(axis, 0 if some else inner))
        if self._new is not None:
            self._new[site.name] = site
        return site

    def _tries(self, site: Site) -> bool:
        return self.spec.trial or (self._new is not None and site.name in self._new)

    def _check_transforms(self) -> None:
        if self._computed_again is None and is_checkpointed():
            self._computed_again = True
        depth = transform_depth()
        if depth and depth > max(self._depth, self.level or 0, self.row_level or 0) and maps_randomly():
            rule = "drops inside its own torch.func transform, whose members would all share one mask"
            raise NotImplementedError(f"`net` {rule}. Write the members as an axis of one tensor.")

    def _mask(self, site: Site, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._tries(site):
            words = self._numbers(site, shape, functools.partial(uniform, device=like.device))
            return (self._tried(site, words, shape) * (1 - drop_prob)).to(like.dtype)
        make = functools.partial(keep_mask, drop_prob=drop_prob, dtype=like.dtype, device=like.device)
        return self._numbers(site, shape, make)

    def _precomputed(
        self, site: Site, shape: tuple[int, ...], drop_prob: float | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """The scaled mask, or the uniforms, of one of the draws in turn, where all rows share them; otherwise None."""
        of_all = self._followed is None or site.layout in (None, RowLayout(0, 1))  # not of those that a draw has sent
        if (among := self._among) is None or self._mask_rows(site) is not None or self._tries(site) or not of_all:
            return None
        if (key := (site.index, site.name, shape, drop_prob, dtype, among)) not in self._made:
            layout, shape = self._layout(site, shape)
            n_bytes = len(among) * math.prod(shape) * dtype.itemsize
            held = sum(len(numbers) * numbers[0].nbytes for numbers in self._made.values())
            is_large = n_bytes > SHARED_BYTES or held + n_bytes > 8 * SHARED_BYTES
            if is_large or self.spec.positions is not None or (layout is not None and layout.inner > 1):
                return None
            make = uniform if drop_prob is None else functools.partial(keep_mask, drop_prob=drop_prob, dtype=dtype)
            numbers = make(self.spec.keys, site_number(site), draws=among, rows=None, shape=shape, device=device)
            self._made[key] = (numbers if drop_prob is None else numbers * keep_scale(drop_prob)).unbind()
        return self._made[key][among.index(self.draws[0])]

    def _uniforms(self, site: Site, shape: tuple[int, ...], device: torch.device) -> Tensor:
        words = self._numbers(site, shape, functools.partial(uniform, device=device))
        if not self._tries(site) or site.kind not in ("rand", "bernoulli"):
            return words
        if site.kind == "bernoulli":
            return self._tried(site, words, shape)
        # Near 0, near 1 and between: the network's own comparison with any rate or number tells the units apart.
        near = 1e-9 + 1e-3 * (4 * torch.minimum(words, 1 - words)) ** 3
        return torch.where(words < 0.25, near, torch.where(words > 0.75, 1 - near, 2 * words - 0.5))

    def _tried(self, site: Site, words: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The masks of a trial: real numbers, among many units zeros and ones as well; after two draws these alone."""
        # Around 1 or -1: where a non-linearity saturates, a sign is seen, and a large number is not.
        real = torch.where(words < 0.25, -0.5 - words, 0.5 + words)
        draws = torch.tensor(self.draws, device=words.device)
        is_mask = self.spec.trial & (draws > 1).view(-1, *(1,) * (words.dim() - 1))
        n_units = math.prod(shape[1:] if self._has_parts(site) else shape)
        some = (words - 0.5).abs() < (0.2 if n_units >= 8 else 0.0)  # of few, zeros would hide what they close
        return torch.where(is_mask | some, words.round(), real)

    def _numbers(self, site: Site, shape: tuple[int, ...], generate: Callable[..., Tensor]) -> Tensor:
        """The numbers of this run's draws."""
        paths = self.spec.trial and site.name in self.gates  # which several draws take
        draws = tuple(draw // 4 for draw in self.draws) if paths else self.draws
        make = functools.partial(generate, self.spec.keys, draws=draws, rows=self._mask_rows(site))
        positions = self.spec.positions
        if positions is not None:
            return positions.generate(site, shape, make)
        units = Units(shape, (0,), (0,)) if self._has_parts(site) else None  # alike for any number of parts
        return make(site_number(site), shape=shape, units=units)

    def _layout(self, site: Site, shape: tuple[int, ...]) -> tuple[RowLayout | None, tuple[int, ...]]:
        """The row layout of this run's tensor of `shape`, and the shape of one row's mask."""
        if self.rows_mapped or self.alone:
            return None, shape
        several = (self.folded and len(self.draws) > 1) or (self.spec.per_row and len(self.rows) > 1)
        if site.layout is None:
            if several:
                raise UnsupportedStrategy("a mask without a row axis")
            if len(self.rows) > 1 and self.spec.positions is None and shape != site.shape:
                raise NetworkChanged(f"a mask of shape {shape} instead of {site.shape}")
            return None, shape
        axis, copies = site.layout.axis, len(self.rows) * (len(self.draws) if self.folded else 1)
        if axis >= len(shape):
            raise UnsupportedStrategy("rows along another axis")
        some = site.layout.inner == 0 or (self.spec.profile.by_name and site.layout.inner == 1 and shape[axis] < copies)
        if some and len(self.rows) > 1:  # some of the rows, each with one entry
            if several or self.level is not None or self._has_parts(site):
                raise UnsupportedStrategy("a mask for some of the rows")
            return RowLayout(axis, 0), (*shape[:axis], 1, *shape[axis + 1 :])
        if shape[axis] % copies:
            raise UnsupportedStrategy("rows along another axis")
        inner = shape[axis] // copies
        if inner != site.layout.inner and self.spec.positions is None and not self.by_name:
            raise NetworkChanged(f"{inner} entries of each row instead of {site.layout.inner}")
        return RowLayout(axis, inner), (*shape[:axis], inner, *shape[axis + 1 :])

    def _lay_out(
        self, value: Tensor, layout: RowLayout | None, shape: tuple[int, ...], inner_shape: tuple[int, ...]
    ) -> Tensor:
        """`[draw, (row,) ...]` as the network sees it, with draws and rows along the row axis."""
        if layout is None and self.spec.positions is not None:  # a tied mask has length 1 along its positions
            inner_shape = tuple(value.shape[value.dim() - len(inner_shape) :])
        n_leading = value.dim() - len(inner_shape)  # 2 if each row has a mask of its own
        value = value.expand(*value.shape[:n_leading], *inner_shape)  # tied positions
        if self.rows_mapped:
            return self._hide(value, n_leading)
        if layout is None:
            value = value[0] if self.level is None else add_batch_dim(value, 0, self.level)
            return value[0] if n_leading == 2 else value
        if layout.inner == 0:
            return value[0] if n_leading == 1 else value[0, 0]
        value = self._among_rows(value, layout, n_leading)
        if n_leading == 1:
            after = layout.axis + 1
            value = value.unsqueeze(after).expand(*value.shape[:after], len(self.rows), *value.shape[after:])
        return value.reshape(shape)

    def _among_rows(self, value: Tensor, layout: RowLayout, n_leading: int) -> Tensor:
        """`[draw, (row,) ...]` with the draws (and rows) right before the axis that holds rows; mapped draws hidden."""
        if not self.folded and self.level is not None:
            value = add_batch_dim(value, 0, self.level).unsqueeze(0)
        leading = list(range(n_leading))
        return value.movedim(leading, [layout.axis + offset for offset in leading])

    def _hide(self, value: Tensor, n_leading: int) -> Tensor:
        """`[draw, (row,) ...]` as one row of one draw, both mapped over."""
        if self._chosen is not None:
            value = value[self._chosen[0]] if n_leading == 1 else value[self._chosen]
            return add_batch_dim(value, 0, self.row_level or 0)
        if n_leading == 2:
            value = add_batch_dim(value, 1, self.row_level or 0)
        return value[0] if self.level is None else add_batch_dim(value, 0, self.level)

    def _kernels(self, x: Tensor) -> Any:
        """The kernels for `x`; None where torch must see what is done: for gradients, within other transforms."""
        is_own = self.by_kernels and (transform_depth() or 0) == max(self.level or 0, self.row_level or 0)
        return kernels_on(x.device) if is_own and not (torch.is_grad_enabled() and x.requires_grad) else None

    def _dropout_by_kernel(
        self, site: Site, layout: RowLayout | None, x: Tensor, drop_prob: float, shape: tuple[int, ...]
    ) -> Tensor | None:
        """The masked tensor by one kernel that generates the mask in registers; None without one."""
        plain = self.spec.positions is None and not self.spec.trial and self._chosen is None
        has_rows = self.rows_mapped if layout is None else layout.inner > 0
        kernels = self._kernels(x) if plain and has_rows else None
        if kernels is None or x.dtype not in _KERNEL_DTYPES or not x.numel():
            return None
        if shape != tuple(x.shape):  # whole channels: their few factors first, then a product that broadcasts
            ones = torch.ones((), dtype=x.dtype, device=x.device).expand(shape)
            factors = self._dropout_by_kernel(site, layout, ones, drop_prob, shape)
            return None if factors is None else x * factors
        masked = functools.partial(
            kernels.dropout, keys=self.spec.keys, site=site_number(site), drop_prob=drop_prob, draws=self.draws,
            rows=self._mask_rows(site),
        )  # fmt: skip
        if self.rows_mapped:
            pairs = self._pairs(x).contiguous()
            return self._hide(masked(pairs, outer=1, inner=math.prod(shape)).view(pairs.shape), 2)
        assert layout is not None
        if self.level is None and layout == RowLayout(0, 1) and not x.is_contiguous() and (split := _transposed(x)):
            behind, ahead = tuple(range(split, x.dim())), tuple(range(1, 1 + x.dim() - split))
            memory = x.movedim(behind, ahead)
            result = masked(memory, outer=1, inner=math.prod(shape[1:]), minor=math.prod(shape[1:split]))
            return result.view(memory.shape).movedim(ahead, behind)
        drawn, axis = self.level is None or is_mapped(x, self.level), layout.axis
        folded = x if self.level is None else unmapped(x, self.level, axis, 1).flatten(axis, axis + 1)
        return self._hide_draws(masked(folded.contiguous(), drawn=drawn, **_extents(shape, layout)), layout, shape)

    def _hide_draws(self, result: Tensor, layout: RowLayout, shape: tuple[int, ...]) -> Tensor:
        """A kernel's result, `[outer, draw, row, inner]`, as the network sees it: mapped draws hidden."""
        if self.level is None:
            return result.view(shape)
        sizes = (*shape[: layout.axis], len(self.draws), *shape[layout.axis :])
        return add_batch_dim(result.view(sizes), layout.axis, self.level)

    def _pairs(self, x: Tensor) -> Tensor:
        """A tensor of one row of one draw, both mapped over, as `[draw, row, ...]`."""
        x = x[None] if self.level is None else unmapped(x, self.level, 0, len(self.draws))
        return unmapped(x, self.row_level or 0, 1, len(self.rows))

    def _batch(self, x: Tensor) -> Tensor:
        """A tensor with mapped draws and rows as part of its first axis."""
        if self.rows_mapped:
            return self._pairs(x).flatten(0, 2)
        return x if self.level is None else unmapped(x, self.level, 0, len(self.draws)).flatten(0, 1)

    def _map_batch(self, x: Tensor) -> Tensor:
        if self.rows_mapped:
            return self._hide(x.unflatten(0, (len(self.draws), len(self.rows), -1)), 2)
        return x if self.level is None else add_batch_dim(x.unflatten(0, (len(self.draws), -1)), 0, self.level)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's; of one output, computed as one of two: with one, the bits depend on the number of rows on a CPU."""
    if not x.is_cpu or weight.shape[0] > 1 or weight.dim() == 1:
        return nn.functional.linear(x, weight, bias)
    return nn.functional.linear(x, weight.expand(2, -1), None if bias is None else bias.expand(2))[..., :1]


def _extents(shape: tuple[int, ...], layout: RowLayout) -> dict[str, int]:
    """The numbers of a row's units that precede and follow the rows in memory."""
    axis = layout.axis
    return {"outer": math.prod(shape[:axis]), "inner": layout.inner * math.prod(shape[axis + 1 :])}


def _transposed(x: Tensor) -> int:
    """The axis whose units, and those behind it, come before a row's others in memory, as channels last; 0 if none."""
    axes = range(x.dim())
    splits = (split for split in axes[2:] if x.permute(0, *axes[split:], *axes[1:split]).is_contiguous())
    return next(splits, 0)


def _refuse_gradient(_: Tensor) -> None:
    rule = "drops inside torch.utils.checkpoint, which computes it again for the gradient of a draw, with other masks"
    raise NotImplementedError(f"`net` {rule}. Switch checkpointing off, or call the draw under torch.no_grad().")
