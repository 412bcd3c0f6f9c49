"""Outputs flattened and rebuilt: what a network gives, as a tree of tensors."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import PyTree

_PLAIN = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of an output without its tensors, from which it is rebuilt with others."""

    leaves: tuple[PyTree, ...]  # a dataclass, or a dict of somebody's own class, is a structure of its own
    spec: pytree.TreeSpec
    made_of: Any = None  # that class

    def build(self, tensors: Iterable[Any], *, numbers: bool = True) -> PyTree:
        """The output with `tensors` in place of its own, in order; without `numbers`, None for all else."""
        remaining = iter(tensors)

        def leaf_of(leaf: PyTree) -> PyTree:
            if isinstance(leaf, Structure):
                return leaf.build(remaining, numbers=numbers)
            return next(remaining) if leaf is _TENSOR else leaf if numbers else None

        tree = pytree.tree_unflatten(map(leaf_of, self.leaves), self.spec)
        if self.made_of is None:
            return tree
        if issubclass(self.made_of, (dict, list)):
            return _container(self.made_of, tree)
        made = object.__new__(self.made_of)  # its own `__init__` may take other arguments, or compute fields anew
        for name, value in tree.items():
            object.__setattr__(made, name, value)
        return made


_TENSOR = object()  # in the place of a tensor


def split(output: PyTree) -> tuple[list[Tensor], Structure]:
    """The tensors of an output, and the structure around them; what is no tree of tensors, as a cache, becomes None."""
    tensors = list[Tensor]()
    structure = _structure(output, tensors)
    unusual = [
        f"{t.layout} {t.dtype}{' nested' * t.is_nested}"
        for t in tensors
        if t.layout is not torch.strided
        or t.is_nested
        or t.is_quantized
        or (t.is_floating_point() and t.dtype.itemsize == 1)
    ]
    if unusual or not tensors:
        raise TypeError(
            "`net` must return dense tensors, alone or in a tuple, dict or dataclass; got "
            f"{unusual[0] if unusual else type(output).__name__}. Return the tensors it is made of, such as the mean "
            "and the variance of a distribution; of others to_dense(), to_padded_tensor(0.0), dequantize() or float()."
        )
    return tensors, structure


def _structure(output: PyTree, tensors: list[Tensor]) -> Structure:
    """The structure of an output, whose tensors are added to `tensors` in order."""
    of = type(output) if _has_parts(output) else None
    if of is not None and issubclass(of, (dict, list)):
        output = dict(output) if issubclass(of, dict) else list(output)
    elif of is not None:
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    leaves, spec = pytree.tree_flatten(output, is_leaf=_has_parts)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            leaves[index] = _TENSOR
        elif not isinstance(leaf, _PLAIN):
            leaves[index] = _structure(leaf, tensors) if _has_parts(leaf) else None
    return Structure(tuple(leaves), spec, of)


def _container(kind: Any, parts: Any) -> PyTree:
    """A dict or list of somebody's own class, past its `__init__` where that takes other arguments than its parts."""

    def identities(whole: Any) -> list[int]:
        return list(map(id, whole.values() if issubclass(kind, dict) else whole))

    with contextlib.suppress(TypeError):
        if identities(made := kind(parts)) == identities(parts):
            return made
    made = kind.__new__(kind)
    made.update(parts) if issubclass(kind, dict) else made.extend(parts)
    return made


def _has_parts(value: PyTree) -> bool:
    """Whether a value is a dataclass, or a dict or list of somebody's own class, whose parts torch does not know."""
    kind = type(value)
    is_tree = issubclass(kind, (dict, list)) or (dataclasses.is_dataclass(kind) and not issubclass(kind, Mapping))
    return is_tree and kind not in pytree.SUPPORTED_NODES
