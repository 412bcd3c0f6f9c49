r"""Dropout attached to a layer: hooks that drop its input, its looked-up vectors or columns of its matrices.

Evaluation mode, the modules of the network and its state dict are unchanged.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.layers.noise import Dropping, dropout_mask
from dropbayes.layers.weights import mask_shape, word_mask
from dropbayes.tracing.operations import Arguments, NamedArguments

Units = Literal["channel", "element"]


def drop_units(x: Tensor, drop_prob: float, training: bool, row_axis: int, unit_axis: int) -> Tensor:
    """`x` with whole units dropped: one mask per row, the same at all its positions."""
    if x.dim() <= 2 and unit_axis in (-1, x.dim() - 1):
        return F.dropout(x, drop_prob, training)
    return x * dropout_mask(*mask_shape(x, row_axis, unit_axis), drop_prob=drop_prob, like=x, training=training)


@dataclass(eq=False)
class AttachedDropout(Dropping):
    """Dropout that is attached to a layer by hooks."""

    drop_prob: float
    row_axis: int = field(default=0, kw_only=True)


@dataclass(eq=False)
class InputDropout(AttachedDropout):
    """A forward pre-hook that drops the input of the layer it is attached to."""

    units: Units

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
                return self.drop(layer, x[None])[0]
            return drop_units(x, self.drop_prob, layer.training, 0, 1)
        return drop_units(x, self.drop_prob, layer.training, self.row_axis if x.dim() > 2 else 0, -1)


class WordDropout(AttachedDropout):
    """A forward hook that drops whole vectors of an embedding table: a word type is dropped at all positions."""

    def __call__(self, layer: nn.Embedding, args: Arguments, kwargs: NamedArguments, output: Tensor) -> Tensor:
        indices = args[0] if args else kwargs["input"]
        mask = functools.partial(dropout_mask, drop_prob=self.drop_prob, like=output, training=layer.training)
        return output * word_mask(indices, layer.num_embeddings, mask, self.row_axis if indices.dim() > 1 else 0)


# A mask of the input units that is the same at every position is a mask of the weights' columns, W (z * x) =
# (W diag(z)) x. So a matrix can be dropped without knowing how its module uses it: the experts of a mixture, which are
# slices of one tensor, and the low-rank adapters of such experts.

_ORIGINALS = "_weights_without_dropout"

# Lists the matrices of a module to drop: their owner, their name in it and the shape of the mask.
Matrices = Callable[[nn.Module], Iterator[tuple[nn.Module, str, tuple[int, ...]]]]


@dataclass(eq=False)
class WeightDropout(AttachedDropout):
    """A pair of hooks: while a module runs, its `matrices` have columns dropped, one mask for all rows."""

    matrices: Matrices

    def begin(self, module: nn.Module, args: Arguments) -> None:
        for owner, name, shape in list(self.matrices(module)):
            weight = owner._parameters[name]
            assert weight is not None
            mask = dropout_mask(*shape, drop_prob=self.drop_prob, like=weight, training=module.training)
            if mask.dim() == weight.dim() == 2:  # [expert, unit], for rows [expert · rank, unit]
                mask = mask.repeat_interleave(weight.shape[0] // mask.shape[0], dim=0)
            owner.__dict__.setdefault(_ORIGINALS, {})[name] = weight
            owner._parameters[name] = weight * mask  # type: ignore[assignment]

    def end(self, module: nn.Module, args: Arguments, output: PyTree) -> None:
        for owner, _, _ in list(self.matrices(module)):
            owner._parameters.update(owner.__dict__.pop(_ORIGINALS, {}))


def stacked_matrices(module: nn.Module) -> Iterator[tuple[nn.Module, str, tuple[int, ...]]]:
    """The matrices of a transformers module that stacks those of all its experts in one tensor, either way round."""
    transposed = module.__dict__.get("is_transposed")
    for name, weight in module._parameters.items():
        if transposed is not None and weight is not None and weight.dim() == 3:
            experts, first, second = weight.shape
            yield module, name, (experts, first, 1) if transposed else (experts, 1, second)


def adapter_matrices(module: Any, adapter: str) -> Iterator[tuple[nn.Module, str, tuple[int, ...]]]:
    """The matrix A of PEFT's adapter of a stacked tensor, `[expert · rank, input]`: a mask for each expert."""
    matrix = module.lora_A[adapter]
    yield matrix, "weight", (module.num_experts, matrix.weight.shape[1])


class AdapterDropout(nn.Dropout):
    """The dropout before a low-rank adapter, with one mask for all positions of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return drop_units(x, self.p, self.training, 0, -1)


def adapted_layer(net: nn.Module, name: str) -> Any:
    """PEFT's layer whose adapter's first matrix has this name, `layer.lora_A.adapter`; None for any other layer."""
    layer, _, rest = name.rpartition(".lora_A.")
    adapted = net.get_submodule(layer) if rest else None
    return adapted if rest in getattr(adapted, "lora_dropout", {}) else None
