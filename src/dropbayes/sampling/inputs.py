"""Inputs cut into rows: what a network takes, as a tree of tensors."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import PyTree

from dropbayes.runtime.batches import takes_whole
from dropbayes.tracing.operations import tensor_leaves
from dropbayes.tracing.states import held, is_object

RowAxis = int | None | Mapping[str, int | None] | Sequence[int | None]
"""The axis of the rows: one for all arguments, one per argument, or None if the whole input is one row."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the network; `axes[i]` is the row axis of leaf i, None for a leaf passed whole."""

    leaves: tuple[PyTree, ...]
    axes: tuple[int | None, ...]
    spec: pytree.TreeSpec
    n_rows: int
    copied: bool = False  # a lone row stands beside a copy of itself: the network takes none that is made of it

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The inputs with `function` of each tensor in its place, those of caches as well."""
        return dataclasses.replace(self, leaves=tuple(copied_cache(leaf, function) for leaf in self.leaves))

    def to(self, device: torch.device) -> Self:
        """The inputs on a device."""
        return self.with_tensors(lambda tensor: tensor.to(device))

    @property
    def is_matrix(self) -> bool:
        """Whether the input is one tensor `[row, feature]`, passed by place or by torch's name for it."""
        known = self.spec == _ONE_ARGUMENT or self.arguments == ["input"]
        return known and self.axes == (0,) and self.leaves[0].dim() == 2

    @property
    def is_one_row(self) -> bool:
        """Whether the whole input is one row."""
        return all(axis is None for axis in self.axes)

    def rows(self, index: Sequence[int] | Tensor) -> list[Any]:
        """The leaves with the rows of `index` selected."""
        return [_select(leaf, axis, index) for leaf, axis in zip(self.leaves, self.axes, strict=True)]

    def padded_rows(self, start: int, stop: int, size: int) -> list[Any]:
        """The leaves with the rows from `start` to `stop`, the last repeated up to `size`: no new NaN comes in."""
        if size > stop - start:
            return self.rows(torch.arange(start, start + size, device="cpu").clamp(max=stop - 1))
        return self.rows(range(start, stop))

    def block(self, start: int, stop: int) -> Self:
        """The rows from `start` to `stop` as separate inputs."""
        return dataclasses.replace(self, leaves=tuple(self.rows(range(start, stop))), n_rows=stop - start)

    def call(self, net: Callable[..., Any], leaves: Sequence[Any]) -> PyTree:
        """The network's output for these leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return net(*args, **kwargs)

    @property
    def arguments(self) -> list[str]:
        """The name of the argument that each leaf is part of; empty for positional ones."""
        _, named = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        names = [""] * len(self.leaves)
        for name, value in named.items():
            for index in pytree.tree_leaves(value):
                names[index] = name
        return names

    @property
    def device(self) -> torch.device:
        """The device of the first row tensor, or of the first tensor."""
        tensors = self.tensors_of_rows(self.leaves)
        return tensors[0].device if tensors else torch.device("cpu")

    def tensors_of_rows(self, leaves: Iterable[Any]) -> list[Tensor]:
        """Of such leaves, the tensors that hold rows; all of them, if the whole input is one row."""
        pairs, one_row = zip(leaves, self.axes, strict=True), self.is_one_row
        return [leaf for leaf, axis in pairs if isinstance(leaf, Tensor) and (one_row or axis is not None)]

    @property
    def signature(self) -> tuple[Any, ...]:
        """The form of the input: everything but the number and the values of the rows."""
        described: list[tuple[Any, ...]] = []
        for leaf, axis in zip(self.leaves, self.axes, strict=True):
            if isinstance(leaf, Tensor):
                shape = tuple(-1 if dimension == axis else size for dimension, size in enumerate(leaf.shape))
                described.append((shape, axis, leaf.dtype, leaf.device))
            else:
                # A flag or a name may choose a branch; a number is a value like any other.
                described.append((type(leaf), axis, leaf if isinstance(leaf, (bool, str)) else ""))
        return tuple(described)

    def different_rows(self) -> Self:
        """A few rows that differ as much as possible; two made from the only one where there is one."""
        if self.is_one_row:
            return self
        if self.n_rows == 1 and not self.copied:
            leaves = tuple(map(_with_altered_copy, self.leaves, self.axes))
            return dataclasses.replace(self, leaves=leaves, n_rows=2)
        sizes = self.row_sizes()
        least, largest, most = int(sizes[:, 0].argmin()), int(sizes[:, 1].argmax()), int(sizes[:, 0].argmax())
        if least == most:
            least, most = 0, self.n_rows - 1
        between = [row for row in (largest, *range(min(3, self.n_rows))) if row not in (least, most)]
        index = [least, *between[:1], most]
        return dataclasses.replace(self, leaves=tuple(self.rows(index)), n_rows=len(index))

    def are_alike(self) -> bool:
        """Whether nothing tells rows apart, or a lone one of zeros from others: a swap of two would not be seen."""
        sizes = self.row_sizes()
        return not (self.is_one_row or bool((sizes != sizes[:1] if self.n_rows > 1 else sizes).any()))

    def row_sizes(self) -> Tensor:
        """The mean and the largest magnitude of each row's numbers, over all arguments: they tell rows apart."""
        sizes = torch.zeros(self.n_rows, 2, dtype=torch.float64, device="cpu")
        for leaf, axis in zip(self.leaves, self.axes, strict=True):
            if axis is not None and isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex():
                flat = leaf.detach().movedim(axis, 0).reshape(self.n_rows, -1)
                for size, some in zip(sizes.split(4096), flat.split(4096), strict=True):  # a copy of all may not fit
                    exact = some.double().nan_to_num()
                    size += torch.stack([exact.mean(1), exact.abs().amax(1)], 1).cpu()
        return sizes


def _with_altered_copy(leaf: PyTree, axis: int | None) -> PyTree:
    """One row, and another made of it: numbers shrunk unequally, which keeps their signs; tokens in reverse order."""
    if axis is None:
        return leaf
    if not isinstance(leaf, Tensor):
        return _select(leaf, axis, [0, 0])
    other = leaf.clone()
    if leaf.is_floating_point() or leaf.is_complex():
        factors = 0.8 + 0.2 * torch.frac(torch.arange(1, leaf.numel() + 1, device=leaf.device) * 0.618034)
        other = (leaf * factors.view(leaf.shape)).to(leaf.dtype)
    elif leaf.dim() > axis + 1:
        other = leaf.flip(axis + 1)
    return torch.cat((leaf, other), axis)


def is_cache(leaf: PyTree) -> bool:
    """Whether a leaf is a key-value cache whose rows can be selected (by transformers' method for beams)."""
    return hasattr(leaf, "reorder_cache") and not isinstance(leaf, type)  # a cache may hold the class of its layers


def _select(leaf: PyTree, axis: int | None, index: Sequence[int] | Tensor) -> PyTree:
    if axis is None:
        return leaf
    if isinstance(leaf, Tensor) and isinstance(index, range):
        return leaf.narrow(axis, index.start, len(index))
    if isinstance(leaf, Tensor):
        return leaf.index_select(axis, torch.as_tensor(index, device=leaf.device))
    # A layer's own method for beams may leave some of its tensors as they are, such as compressed keys.
    return copied_cache(leaf, lambda held: held[torch.as_tensor(index, device=held.device)] if held.dim() > 1 else held)


def copied_cache(leaf: PyTree, function: Callable[[Tensor], Tensor] = Tensor.clone) -> PyTree:
    """A copy of a tensor or a cache that can be changed without changing the original; any other leaf unchanged."""
    if is_cache(leaf):
        copied = copy.copy(leaf)
        copied.__dict__.update(pytree.tree_map(lambda held: copied_cache(held, function), vars(leaf)))
        return copied
    return function(leaf) if isinstance(leaf, Tensor) else leaf


def cloned_leaves(leaves: Iterable[Any]) -> list[Any]:
    """The leaves for one run, which may write into its tensors and objects and append to its caches."""
    return [_copied_object(leaf) if is_object(leaf) and not is_cache(leaf) else copied_cache(leaf) for leaf in leaves]


def _copied_object(leaf: PyTree) -> PyTree:
    """A copy of an object (a graph); one that cannot be copied is shared."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(leaf, {id(one): one.clone() for one in tensor_leaves(held(leaf))})  # with gradients
    return leaf


def as_inputs(x: PyTree, net: nn.Module | None = None, *, row_axis: RowAxis = 0) -> Inputs:
    """The network's arguments in `x`: a tensor or array, a tuple of positional ones, or a mapping of named ones.

    A mapping none of whose names `net` takes, or a sequence where it takes one argument, is itself that argument.

    Tensors with as many entries along `row_axis` as the first tensor has are split into rows; all else is passed whole.
    A mapping or sequence gives the `row_axis` of each argument; with None, the whole input is one row.
    """
    x = _without_inference_mode(x)
    is_dense = isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_nested or x.is_meta)
    if is_dense and isinstance(row_axis, int) and _size(x, row_axis):
        return Inputs((x,), (row_axis,), _ONE_ARGUMENT, x.shape[row_axis])  # the common case, without the search
    x = _tensors(x)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((x,), {})
    if isinstance(x, Mapping):
        arguments = ((dict(x),), {}) if net is not None and takes_whole(net, x) else ((), dict(x))
    elif isinstance(x, (tuple, list)) and not (net is not None and takes_whole(net, x)):
        arguments = (tuple(x), {})
    elif not isinstance(x, (Tensor, tuple, list)) and row_axis is not None:
        raise TypeError(
            f"`x` must be a tensor or array, or a tuple or dict of them; got {type(x).__name__}. Pass a Dataset in a "
            "DataLoader to `predict` or `evaluate`, a data frame as frame.to_numpy(), single rows as "
            "torch.stack(list(rows)), and what the network takes whole (a graph) with Sampling(row_axis=None)."
        )
    leaves, spec = pytree.tree_flatten(arguments)
    leaves = [_without_inference_mode(leaf) for leaf in leaves]
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        raise TypeError("`x` must hold no nested tensors. Pad them: torch.nested.to_padded_tensor(x, 0.0).")
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
        raise ValueError("`x` must hold numbers; got a tensor on the meta device, which has none. Make it on a CPU.")
    stated = [None] * len(leaves) if row_axis is None else _stated_axes(row_axis, arguments)
    if all(axis is None for axis in stated) and leaves:
        return Inputs(tuple(leaves), (None,) * len(leaves), spec, 1)
    sizes = [s for leaf, axis in zip(leaves, stated, strict=True) if (s := _size(leaf, axis)) is not None]
    if not sizes:
        remedy = "Add a batch axis: x[None]." if any(isinstance(x, Tensor) for x in leaves) else "Pass torch.tensor(x)."
        if any(map(is_object, leaves)):
            remedy = "Pass the tensors of an object, or take it whole: Sampling(row_axis=None)."
        raise ValueError(f"`x` must hold a tensor with a row axis {row_axis}; got none. {remedy}")
    if sizes[0] == 0:
        raise ValueError("`x` must have at least one row; got an empty batch. Skip empty batches.")
    if not isinstance(row_axis, int) and len(set(sizes)) > 1:
        raise ValueError(f"`row_axis` must name axes of one length; got lengths {sizes}.")
    for leaf, axis in zip(leaves, stated, strict=True):
        if _size(leaf, axis) == sizes[0] and leaf.layout is not torch.strided:
            graph = "pass row_axis=None if the whole input is one row (a graph)"
            remedy = f"Pass it dense, say which arguments have rows, or {graph}"
            raise ValueError(f"`x` holds a sparse tensor, which cannot be cut into rows. {remedy}.")
    axes = tuple(
        axis if _size(leaf, axis) == sizes[0] or (axis is not None and is_cache(leaf)) else None
        for leaf, axis in zip(leaves, stated, strict=True)
    )
    return Inputs(tuple(leaves), axes, spec, sizes[0])


def _without_inference_mode(leaf: PyTree) -> PyTree:
    """A copy of an inference tensor, which is read-only outside inference mode; any other leaf unchanged."""
    if not (isinstance(leaf, Tensor) and leaf.is_inference()):
        return leaf
    with torch.inference_mode(False):
        return leaf.clone()


def _size(leaf: PyTree, axis: int | None) -> int | None:
    return leaf.size(axis) if axis is not None and isinstance(leaf, Tensor) and leaf.dim() > axis >= 0 else None


def _stated_axes(row_axis: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[int | None]:
    """The row axis of every leaf, as `row_axis` states it for all arguments or for each."""
    positional, named = arguments
    if isinstance(row_axis, bool) or not isinstance(row_axis, (int, Mapping, tuple, list)):
        raise TypeError(f"`row_axis` must be a whole number, None, or one for each argument; got {row_axis!r}.")
    if isinstance(row_axis, int):
        if row_axis < 0:
            raise ValueError(f"`row_axis` must be zero or more; got {row_axis}. Count the axis from the front.")
        return [row_axis] * len(pytree.tree_leaves(arguments))
    if isinstance(row_axis, Mapping):
        if positional or row_axis.keys() != named.keys():
            rule, remedy = f"name the arguments in `x`, {sorted(named)}", "Pass `x` as a dict, an axis or None for each"
            raise ValueError(f"`row_axis` must {rule}; got {sorted(row_axis)}. {remedy}.")
        per_argument = [(named[name], row_axis[name]) for name in named]
    elif named or len(row_axis) != len(positional):
        raise ValueError(f"`row_axis` must have one entry for each of {len(positional)} arguments; got {row_axis!r}.")
    else:
        per_argument = list(zip(positional, row_axis, strict=True))
    return [axis for argument, axis in per_argument for _ in pytree.tree_leaves(argument)]


def _tensors(x: PyTree) -> PyTree:
    """`x` with its NumPy arrays as tensors; float64 ones in torch's default dtype."""

    def tensor(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, np.ndarray):
            return leaf
        if leaf.dtype.kind not in "biufc":
            raise TypeError(f"`x` must hold numbers; got an array of dtype {leaf.dtype}.")
        copied = torch.from_numpy(np.array(leaf, order="C"))  # a copy: an array may be read-only
        return copied.to(torch.get_default_dtype()) if copied.dtype == torch.float64 else copied

    return pytree.tree_map(tensor, x) if isinstance(x, (np.ndarray, tuple, list, dict)) else x


_ONE_ARGUMENT = pytree.tree_flatten(((torch.empty(0),), {}))[1]
