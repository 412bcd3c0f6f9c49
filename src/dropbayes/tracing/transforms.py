"""What the transforms of `torch.func` hide: tensors that stand for the members that they map over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch

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


def divided(tensor: Tensor) -> bool:
    """Makes a tensor, wherever it is held, one for each member that is mapped over; whether it was one for all.

    Their values can then be written into it. It stays as it is where other views of its memory would not follow.
    """
    base = made = tensor if tensor._base is None else tensor._base
    for transform in map(pyfunctorch.coerce_cinterpreter, _functorch.get_interpreter_stack() or ()):
        if isinstance(transform, pyfunctorch.VmapInterpreter) and _functorch.maybe_get_level(made) < transform.level():
            made = add_batch_dim(made.repeat(transform.batch_size(), *(1,) * made.dim()), 0, transform.level())
    if made is base or type(base) is not Tensor or not base.is_contiguous() or all_members(base)._is_view():
        return False
    form, is_whole = (tensor.shape, tensor.stride(), tensor.storage_offset()), base is tensor
    if not is_whole:
        torch.utils.swap_tensors(tensor, torch.empty(0))  # which no longer refers to the base
    try:
        torch.utils.swap_tensors(base, made)
    except RuntimeError:  # others refer to it
        made = base
    if not is_whole:
        torch.utils.swap_tensors(tensor, base.as_strided(*form))
    return made is not base


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
