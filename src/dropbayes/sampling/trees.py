"""Nested inputs and outputs: a network's arguments cut into rows, and its output taken apart and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the network; `is_row[i]` says whether leaf i is cut into rows or passed whole."""

    leaves: tuple[Any, ...]
    is_row: tuple[bool, ...]
    spec: pytree.TreeSpec
    row_axis: int
    n_rows: int

    def rows(self, index: Tensor) -> list[Any]:
        """The leaves with the rows of `index` selected."""
        pairs = zip(self.leaves, self.is_row, strict=True)
        return [leaf.index_select(self.row_axis, index.to(leaf.device)) if row else leaf for leaf, row in pairs]

    def padded_rows(self, start: int, stop: int, unit: int) -> list[Any]:
        """The leaves with the rows from `start` to `stop`, the last repeated up to a multiple of `unit`.

        A repeated row adds nothing new: no overflow, no NaN that the real rows do not have.
        """
        missing = -(stop - start) % unit
        axis = self.row_axis

        def cut(leaf: Tensor) -> Tensor:
            own = leaf.narrow(axis, start, stop - start)
            if not missing:
                return own
            shape = list(leaf.shape)
            shape[axis] = missing
            return torch.cat([own, leaf.narrow(axis, stop - 1, 1).expand(shape)], dim=axis)

        return [cut(leaf) if row else leaf for leaf, row in zip(self.leaves, self.is_row, strict=True)]

    def block(self, start: int, stop: int) -> Inputs:
        """The rows from `start` to `stop` as inputs of their own."""
        return dataclasses.replace(self, leaves=tuple(self.rows(torch.arange(start, stop))), n_rows=stop - start)

    def call(self, net: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """The network's output for these leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return net(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Where the first row tensor lies."""
        leaf: Tensor = self.leaves[self.is_row.index(True)]
        return leaf.device

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the shape of the computation depends on: everything but the number and the values of the rows."""
        described: list[tuple[Any, ...]] = []
        for leaf, row in zip(self.leaves, self.is_row, strict=True):
            if isinstance(leaf, Tensor):
                shape = list(leaf.shape)
                if row:
                    shape[self.row_axis] = -1
                described.append((tuple(shape), leaf.dtype, leaf.device))
            else:
                described.append((type(leaf), repr(leaf)))
        return (self.row_axis, *described)


def as_inputs(x: Any, *, row_axis: int = 0) -> Inputs:
    """The network's arguments in `x`: a tensor, a tuple or list of positional ones, or a mapping of named ones.

    Tensors with as many entries along `row_axis` as the first tensor has are cut into rows; all else is passed whole.
    """
    if isinstance(x, Tensor) and x.dim() > row_axis and x.shape[row_axis] > 0:
        return Inputs((x,), (True,), _ONE_ARGUMENT, row_axis, x.shape[row_axis])  # the usual case, without the search
    if isinstance(x, Tensor):
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((x,), {})
    elif isinstance(x, Mapping):
        arguments = ((), dict(x))
    elif isinstance(x, (tuple, list)):
        arguments = (tuple(x), {})
    else:
        raise TypeError(
            "`x` must be a tensor, a tuple or dict of tensors, or a DataLoader; "
            f"got {type(x).__name__}. Convert arrays with torch.as_tensor."
        )
    leaves, spec = pytree.tree_flatten(arguments)
    sizes = [leaf.shape[row_axis] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > row_axis]
    if not sizes:
        raise ValueError(f"`x` must hold a tensor with a row axis {row_axis}; got none. Add a batch axis: x[None].")
    if sizes[0] == 0:
        raise ValueError("`x` must have at least one row; got an empty batch. Skip empty batches.")
    is_row = tuple(
        isinstance(leaf, Tensor) and leaf.dim() > row_axis and leaf.shape[row_axis] == sizes[0] for leaf in leaves
    )
    return Inputs(tuple(leaves), is_row, spec, row_axis, sizes[0])


_ONE_ARGUMENT = pytree.tree_flatten(((torch.empty(0),), {}))[1]


@dataclasses.dataclass(frozen=True)
class Structure:
    """An output with its tensors taken out: how to put tensors of the same meaning back."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    dataclass: Any = None

    def build(self, tensors: Sequence[Any]) -> Any:
        """The output with `tensors` in the places of its own, in order."""
        if self.spec.is_leaf() and self.dataclass is None:
            return tensors[0]
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves]
        tree = pytree.tree_unflatten(leaves, self.spec)
        return self.dataclass(**tree) if self.dataclass is not None else tree


class _TensorMark:
    """Stands where a tensor was."""


_TENSOR = _TensorMark()


def split(output: Any) -> tuple[list[Tensor], Structure]:
    """The floating tensors of an output (tensor, tuple, dict, dataclass, ModelOutput) and the structure around them.

    Caches and other objects that are not trees of tensors cannot be averaged: they become None.
    """
    of = None
    is_plain_dataclass = dataclasses.is_dataclass(output) and type(output) not in pytree.SUPPORTED_NODES
    if is_plain_dataclass and not isinstance(output, Mapping):
        of = type(output)
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    leaves, spec = pytree.tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(f"the network's output must hold tensors; got {type(output).__name__}.")
    kept = tuple(_TENSOR if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves)
    return tensors, Structure(kept, spec, of)


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else None


def map_tensors(function: Callable[..., Any], *trees: Any) -> Any:
    """The tree of `function` applied to corresponding tensors of trees of one structure."""
    if isinstance(trees[0], Tensor):
        return function(*trees)
    first, structure = split(trees[0])
    others = [split(tree)[0] for tree in trees[1:]]
    return structure.build([function(*tensors) for tensors in zip(first, *others, strict=True)])
