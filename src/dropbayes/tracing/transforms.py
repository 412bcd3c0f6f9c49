"""What the transforms of `torch.func` hide: tensors that stand for the members that they map over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_functorch: Any = torch._C._functorch

is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor  #: Whether a tensor is mapped over.
add_batch_dim: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim
"""A real tensor seen as mapped over along an axis, at a level of nested transforms."""
transform_depth: Callable[[], int | None] = _functorch.maybe_current_level
"""The depth of nested transforms, None outside all of them."""


def is_mapped(x: Tensor, level: int) -> bool:
    """Whether a tensor differs between the members that are mapped over at a level."""
    return is_batched(x) and bool(_functorch.maybe_get_level(x) == level)


def unmapped(x: Tensor, level: int, axis: int, size: int) -> Tensor:
    """A tensor with the members that are mapped over at a level as an axis; repeated `size` times if all are alike."""
    if not is_mapped(x, level):
        return x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
    members: Tensor = _functorch.get_unwrapped(x)
    return members.movedim(_functorch.maybe_get_bdim(x), axis)


def all_members(x: Tensor) -> Tensor:
    """A tensor with the members of all levels, wherever their axes are."""
    while is_batched(x):
        x = _functorch.get_unwrapped(x)
    return x


def outside_transforms(leaf: Any) -> Any:
    """A tensor as it is outside of the caller's own `torch.func` transforms; of a mapped one, the first member."""
    while isinstance(leaf, Tensor) and _functorch.is_functorch_wrapped_tensor(leaf):
        member = _functorch.maybe_get_bdim(leaf) if is_batched(leaf) else None
        leaf = _functorch.get_unwrapped(leaf)
        leaf = leaf if member is None else leaf.select(member, 0)
    return leaf


def maps_randomly() -> bool:
    """Whether the innermost transform is a vmap whose members should differ in their random numbers."""
    interpreter: Any = torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter()
    return interpreter.key() == _functorch.TransformType.Vmap and interpreter.randomness() != "same"
