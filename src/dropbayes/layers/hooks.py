r"""Dropout attached to a layer: hooks that drop its input, its looked-up vectors or the factors of its matrices.

Evaluation mode, the modules of the network and its state dict are unchanged.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import PyTree

from dropbayes.layers.weights import mask_shape, word_mask
from dropbayes.tracing.operations import Arguments, NamedArguments, Operation
from dropbayes.weight_layers import matrices

__all__ = ["AttachedDropout", "InputDropout", "ProductDropout", "Units", "WordDropout", "drop_units"]

Units = Literal["channel", "element"]


def drop_units(x: Tensor, drop_prob: float, training: bool, row_axis: int, unit_axis: int) -> Tensor:
    """`x` with whole units dropped: one mask per row, the same at all its positions."""
    if x.dim() <= 2 and unit_axis in (-1, x.dim() - 1):
        return F.dropout(x, drop_prob, training)
    ones = torch.ones(mask_shape(x, row_axis, unit_axis), dtype=x.dtype, device=x.device)
    return x * F.dropout(ones, drop_prob, training)


class AttachedDropout:
    """Dropout that is attached to a layer by hooks."""

    def __init__(self, drop_prob: float, row_axis: int = 0) -> None:
        self.drop_prob, self.row_axis = drop_prob, row_axis

    @property
    def keep_prob(self) -> float:
        return 1.0 - self.drop_prob


class InputDropout(AttachedDropout):
    """A forward pre-hook that drops the input of the layer it is attached to."""

    def __init__(self, drop_prob: float, units: Units = "channel", row_axis: int = 0) -> None:
        super().__init__(drop_prob, row_axis)
        self.units = units

    def __call__(self, layer: nn.Module, args: Arguments, kwargs: NamedArguments) -> tuple[Any, Any]:
        n_inputs = 2 if isinstance(layer, nn.Bilinear) else 1  # later arguments (states, sizes) are not dropped
        names = list(kwargs)[: max(n_inputs - len(args), 0)]
        inputs = (self.drop(layer, x) for x in args[:n_inputs])
        return (*inputs, *args[n_inputs:]), kwargs | {name: self.drop(layer, kwargs[name]) for name in names}

    def drop(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.units == "element":
            return F.dropout(x, self.drop_prob, layer.training)
        if isinstance(layer, nn.modules.conv._ConvNd):
            if x.dim() == len(layer.kernel_size) + 1:  # one row without its axis, as torch allows
                return drop_units(x[None], self.drop_prob, layer.training, 0, 1)[0]
            return drop_units(x, self.drop_prob, layer.training, 0, 1)
        return drop_units(x, self.drop_prob, layer.training, self.row_axis if x.dim() > 2 else 0, -1)


class WordDropout(AttachedDropout):
    """A forward hook that drops whole vectors of an embedding table: a word type is dropped at all positions."""

    def __call__(self, layer: nn.Embedding, args: Arguments, kwargs: NamedArguments, output: Tensor) -> Tensor:
        indices = args[0] if args else kwargs["input"]

        def mask(*shape: int) -> Tensor:
            ones = torch.ones(shape, dtype=output.dtype, device=output.device)
            return F.dropout(ones, self.drop_prob, layer.training)

        row_axis = self.row_axis if indices.dim() > 1 else 0
        return output * word_mask(indices, layer.num_embeddings, mask, row_axis)


class ProductDropout(AttachedDropout):
    """A pair of hooks for a module of unknown code: while it runs, the factors of its matrices are dropped."""

    def begin(self, module: nn.Module, args: Any) -> None:
        """The forward pre-hook."""
        del args
        ids = {id(matrix): name for name, matrix in matrices(module).items()}
        _Products(self, ids, module.training, type(module).__name__).__enter__()

    def end(self, module: nn.Module, args: Any, output: PyTree) -> None:
        """The forward hook, called after an error too."""
        del module, args, output
        TorchFunctionMode.__exit__(_Products(self, {}, False, ""), None, None, None)  # leaves the innermost mode


class _Products(TorchFunctionMode):
    """Drops the other factor of every product with one of the given matrices."""

    def __init__(self, dropout: ProductDropout, ids: dict[int, str], training: bool, owner: str) -> None:
        super().__init__()
        self.dropout, self.ids, self.training, self.owner = dropout, ids, training, owner

    def __torch_function__(self, func: Operation, types: Any, args: Any = (), kwargs: Any = None) -> PyTree:
        position = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and id(a) in self.ids), None)
        if position is None:
            return func(*args, **(kwargs or {}))
        args = list(args)
        if func is F.linear and position == 1:
            args[0] = self._drop(args[0], -1)
        elif func in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__):
            other = 1 - position
            args[other] = self._drop(args[other], -1 if position == 1 else max(-2, -args[other].dim()))
        elif func is torch.addmm and position == 2:
            args[1] = self._drop(args[1], -1)
        elif func in (torch.einsum, torch.bmm, torch.baddbmm, torch.tensordot, Tensor.__rmatmul__):
            warnings.warn(
                f"{self.owner}.{self.ids[id(args[position])]} is multiplied by {func.__name__}, which add_dropout "
                "cannot drop: this matrix stays as it is.",
                stacklevel=2,
            )
        return func(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, unit_axis: int) -> Tensor:
        row_axis = self.dropout.row_axis if x.dim() > 2 else 0
        if unit_axis == -2 and x.dim() == 2:  # W x with x [unit, row]
            return F.dropout(x, self.dropout.drop_prob, self.training)
        return drop_units(x, self.dropout.drop_prob, self.training, row_axis, unit_axis)
