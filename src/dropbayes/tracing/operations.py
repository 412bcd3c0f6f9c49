"""The operations of torch that the reading of a network tells apart: one list of each kind for the whole library."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

Operation = Callable[..., Any]
Arguments = tuple[Any, ...]
NamedArguments = dict[str, Any]
Operations = frozenset[Operation]

SHAPES: Operations = frozenset({
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.transpose, Tensor.permute, Tensor.contiguous,
    Tensor.squeeze, Tensor.unsqueeze, Tensor.to, Tensor.clone, Tensor.movedim, Tensor.expand, Tensor.view_as,
    Tensor.__getitem__, torch.flatten, torch.reshape, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
    torch.movedim, Tensor.gather, torch.gather,
})  # fmt: skip
"""Operations that only rearrange their input."""

PASSES_MASK: Operations = SHAPES | {
    F.relu, torch.relu, Tensor.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.hardswish,
    F.softsign, F.hardtanh, F.prelu, F.tanhshrink, F.softshrink, F.hardshrink, torch.sin, Tensor.sin, torch.erf,
    Tensor.erf, F.tanh, torch.tanh, Tensor.tanh, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool1d,
    F.adaptive_max_pool2d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, F.pad, F.interpolate, F.pixel_shuffle,
}  # fmt: skip
"""Operations that leave a dropped unit at zero, as a non-linearity with σ(0) = 0 does [GG16, section "Insights"]."""

CONVOLUTIONS: Operations = frozenset(
    {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
)
RECURRENT: Operations = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
CELLS: Operations = frozenset({torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell})
LOOKUPS: Operations = frozenset({F.embedding, F.embedding_bag})
PRODUCTS: Operations = CONVOLUTIONS | {
    F.linear, F.bilinear, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__,
    Tensor.__rmatmul__, torch.addmm, Tensor.addmm, torch.baddbmm, torch.einsum,
}  # fmt: skip
"""Operations that multiply their input by a weight."""

ELEMENTWISE: Operations = frozenset({
    F.silu, F.mish, F.softplus, F.elu, F.elu_, F.selu, F.selu_, F.celu, F.celu_, F.gelu, F.sigmoid, F.tanh,
    F.logsigmoid, Tensor.__pow__, Tensor.__rpow__, torch.special.expit, torch.special.logit, *(
        getattr(owner, f"{name}{end}") for owner in (Tensor, torch) for end in ("", "_") for name in (
            "sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "sinh", "cosh",
            "asinh", "atanh", "erf", "rsqrt", "pow", "logit",
        ) if hasattr(owner, f"{name}{end}")
    ),
})  # fmt: skip
"""Functions of single numbers whose last digit may depend on whether torch takes one alone or as part of a vector."""

LESS: Operations = frozenset({Tensor.__lt__, Tensor.__le__, Tensor.lt, Tensor.le, torch.lt, torch.le})
MORE: Operations = frozenset({Tensor.__gt__, Tensor.__ge__, Tensor.gt, Tensor.ge, torch.gt, torch.ge})

SCALARS: Operations = frozenset({
    Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.is_nonzero,
    torch.is_nonzero,
})  # fmt: skip
"""Operations that give Python the one value of a tensor."""

READS: dict[Operation, bool] = {
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__), True),
    **dict.fromkeys((Tensor.size, Tensor.numel, Tensor.__len__, Tensor.__iter__), False),
    Tensor.shape.__get__: False,  # type: ignore[attr-defined]
}
"""Operations that give Python all values of a tensor, or else its lengths, without a call to the dispatcher."""


def operands(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, which are in lists at most."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def axes_in(func: Operation, args: Arguments, kwargs: NamedArguments) -> list[Any]:
    """What may be an axis among the arguments of an operation: small numbers that are no lengths, and equations."""
    given = [a for a in (*args, *kwargs.values()) if type(a) in (int, tuple, list, str)]
    if not given or func.__name__ in ("view", "reshape", "expand", "repeat", "__getitem__"):
        return []
    parts = itertools.chain(*(a if type(a) in (tuple, list) else (a,) for a in given))
    return [part for part in parts if type(part) is str or (type(part) is int and -8 <= part < 8)]


def uses_values(func: Operation, result: Any) -> bool:
    """Whether an operation with this result uses the values of its tensors, not only their form."""
    return torch.is_tensor(result) or func in SCALARS or READS.get(func, False)


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree: an input, an output, the result of any function."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
