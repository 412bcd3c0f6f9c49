"""One network under many masks: all draws of all rows in one call, or as few at a time as the network demands.

A row is always evaluated as a batch of one, whatever batch it came in; rows and draws are mapped over together
(`torch.func.vmap`), so that what comes before the first site is computed once for all draws. A network that cannot be
mapped, because its control flow depends on its data, is run row by row or draw by draw with the same masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy
from dropbayes.sampling.masks import Keys, keep_mask, uniform
from dropbayes.sampling.operations import Interception, Noise
from dropbayes.sampling.trees import Inputs, split
from dropbayes.sampling.views import eagerly


@dataclass(frozen=True)
class Randomness:
    """What the masks of a network are: of which sites, by which keys, for rows together or each."""

    anatomy: Anatomy
    keys: Keys
    per_row: bool
    integrate: bool  # the last site is left out, and its variance given instead


class KeyedNoise(Noise):
    """The masks of some draws and rows; axes that are mapped over are hidden from the network."""

    def __init__(self, randomness: Randomness, chunk: range, rows: range) -> None:
        self.randomness, self.chunk = randomness, chunk
        self.rows = rows if randomness.per_row else None
        self.n_rows = len(rows)
        self.draw_level: int | None = None
        self.row_level: int | None = None
        self.site = 0
        self.variance: Tensor | None = None
        self._pending: tuple[Tensor, float] | None = None

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        mask = keep_mask(
            self.randomness.keys, self._next(), drop_prob=drop_prob, draws=self.chunk, rows=self.rows, shape=shape,
            dtype=like.dtype, device=like.device,
        )  # fmt: skip
        return self._hidden(mask)

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        words = uniform(
            self.randomness.keys, self._next(), draws=self.chunk, rows=self.rows, shape=shape, device=device
        )
        return self._hidden(words)

    def integrate(self, x: Tensor, drop_prob: float) -> Tensor | None:
        if not self.randomness.integrate or self.site != len(self.randomness.anatomy.sites) - 1:
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
_current_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def _map_draws(
    randomness: Randomness,
    own: nn.Module,
    inputs: Inputs,
    leaves: list[Any],
    chunk: range,
    rows: range,
    whole: bool = False,
) -> list[Tensor]:
    """All draws of all rows at once, `[draw, row, ...]` of each tensor.

    With `whole`, inputs and newly made tensors differ between rows and draws from the start, so that they can be
    written to; without, all that does not depend on the draw is computed once.
    """
    noise = KeyedNoise(randomness, chunk, rows)
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
        if randomness.integrate:
            assert noise.variance is not None
            output = [*output, noise.variance]
        axes = (*randomness.anatomy.row_axes, 0) if randomness.integrate else randomness.anatomy.row_axes
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

    noise: KeyedNoise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return self.noise.spread(result) if func in _FACTORIES else result


def _map_row_by_row(
    randomness: Randomness, own: nn.Module, inputs: Inputs, leaves: list[Any], chunk: range, rows: range, real: int,
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
        runs = [_map_draws(randomness, own, inputs, _cloned(own_leaves), part, row, whole) for part in parts]
        per_row.append([torch.cat(outputs) for outputs in zip(*runs, strict=True)])
    return [torch.cat(outputs, dim=1) for outputs in zip(*per_row, strict=True)]


def _cloned(leaves: list[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


# From the fastest to the one that always works.
BY_WAY: dict[str, Callable[..., list[Tensor]]] = {
    "mapped": lambda *args: _map_draws(*args[:-1]),
    "mapped whole": lambda *args: _map_draws(*args[:-1], whole=True),
    "row by row": _map_row_by_row,
    "row by row, whole": functools.partial(_map_row_by_row, whole=True),
    "one by one": functools.partial(_map_row_by_row, one_draw=True),
}
