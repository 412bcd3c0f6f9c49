r"""Keep probabilities of the inputs of all weights, by tracing a forward pass.

A function mode intercepts every operation. Dropout is not applied but recorded with its output, and the record follows
the tensor through operations that preserve a mask: reshapes, elementwise products, rectifiers. A product with a
parameter ends the record, which gives the keep probability of its input.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dropbayes.weight_layers.structure import (
    is_bias,
    kl_is_weight_decay,
    layer_parameters,
    parameter_value,
    stated_keep_prob,
    weight_layers,
)

Function = Callable[..., Any]

_DROPOUTS: dict[Function, float] = {
    F.dropout: 0.5, F.dropout1d: 0.5, F.dropout2d: 0.5, F.dropout3d: 0.5, F.alpha_dropout: 0.5,
    F.feature_alpha_dropout: 0.5, torch.dropout: 0.5, torch.feature_dropout: 0.5,
}  # fmt: skip
_PASSES_ON: frozenset[Function] = frozenset({
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.transpose, Tensor.permute, Tensor.contiguous,
    Tensor.squeeze, Tensor.unsqueeze, Tensor.to, Tensor.clone, Tensor.movedim, Tensor.expand, Tensor.gather,
    Tensor.view_as, Tensor.__getitem__, torch.flatten, torch.reshape, torch.transpose, torch.permute, torch.squeeze,
    torch.unsqueeze, torch.movedim, torch.gather, F.relu, torch.relu, Tensor.relu, F.leaky_relu, F.max_pool1d,
    F.max_pool2d, F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
})  # fmt: skip
_ELEMENTWISE: frozenset[Function] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_})
_RECURRENT: frozenset[Function] = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_CELLS: frozenset[Function] = frozenset({torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell})
_PRODUCTS: frozenset[Function] = frozenset({
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.bilinear,
    torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__,
    torch.addmm, Tensor.addmm, torch.baddbmm, torch.einsum,
})  # fmt: skip
_LOOKUPS: frozenset[Function] = frozenset({F.embedding, F.embedding_bag})


class _Trace(TorchFunctionMode):
    """Records the keep probability with which each named weight's input is kept, in the order of use."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.uses: list[tuple[str, float]] = []
        self.keep_probs: dict[int, float] = {}
        self.lookups: set[int] = set()
        self.alive: list[Any] = []  # prevents the reuse of ids

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is F.batch_norm and len(args) > 2 and args[1] is not None:
            kwargs = {**kwargs, "training": False}
            args = args[:5]
        result = func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._attention(args, kwargs)
        elif func in _RECURRENT or func in _CELLS:
            self._recurrent(func, args)
        elif func in _PRODUCTS:
            self._product(args, kwargs)
        elif func in _LOOKUPS:
            self.lookups.add(id(result))
            self.alive.append(result)
        elif func in _PASSES_ON:
            self._remember(result, self._keep_prob_of(*args[:1]))
        # A mask of looked-up words belongs to the table.
        elif func in _ELEMENTWISE and not any(id(a) in self.lookups for a in args):
            self._remember(result, self._keep_prob_of(*args))
        return result

    def _keep_prob_of(self, *operands: Any) -> float:
        product = 1.0
        for operand in operands:
            product *= self.keep_probs.get(id(operand), 1.0)
        return product

    def _remember(self, tensor: Any, keep_prob: float) -> None:
        if keep_prob != 1.0 and isinstance(tensor, Tensor):
            self.keep_probs[id(tensor)] = keep_prob
            self.alive.append(tensor)

    def _dropout(self, func: Function, input: Tensor, p: Any = None, *_: Any, **kwargs: Any) -> Tensor:
        drop_prob = float(_DROPOUTS[func] if p is None else p)
        result = input.view_as(input)
        self._remember(result, self._keep_prob_of(input) * (1 - drop_prob))
        return result

    def _use(self, weight: Any, keep_prob: float) -> None:
        if isinstance(weight, Tensor) and id(weight) in self.names:
            self.uses.append((self.names[id(weight)], keep_prob))

    def _product(self, args: Any, kwargs: Any) -> None:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        operands += [a for arg in args if isinstance(arg, (tuple, list)) for a in arg if isinstance(a, Tensor)]
        factors = [a for a in operands if id(a) not in self.names]
        for weight in operands:
            self._use(weight, self._keep_prob_of(*factors))

    def _attention(self, args: Any, kwargs: Any) -> None:
        weights = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and id(a) in self.names]
        by_input = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), args[:3], strict=True))
        for weight in weights:
            parameter = self.names[id(weight)].rpartition(".")[2]
            source = by_input.get(parameter, args[0])
            self._use(weight, self._keep_prob_of(source) if parameter != "weight" else 1.0)

    def _recurrent(self, func: Function, args: Any) -> None:
        weights = [w for a in args if isinstance(a, (tuple, list)) for w in a if isinstance(w, Tensor)]
        weights += [a for a in args if isinstance(a, Tensor)]
        dropout = next((a for a in args if isinstance(a, float)), 0.0)
        for weight in weights:
            parameter = self.names.get(id(weight), "").rpartition(".")[2]
            first = parameter == "weight_ih" or parameter.startswith("weight_ih_l0")
            later = 1.0 - dropout if parameter.startswith("weight_ih_l") else 1.0
            self._use(weight, self._keep_prob_of(args[0]) if first else later)


@contextlib.contextmanager
def _preserve_state(net: nn.Module) -> Iterator[None]:
    """Restores buffers (running statistics) and the random state."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def trace(net: nn.Module, x: Any) -> list[tuple[str, float]]:
    r"""The uses of the weights of `net` on input `x`, in order: the parameter's name, and $p$ of its input.

    A weight used twice appears twice. Flags, buffers and the random state are not changed.

    Args:
        net: Any network.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments.

    Example:
        >>> drop, fc = nn.Dropout(0.5), nn.Linear(3, 3)
        >>> trace(nn.Sequential(fc, nn.ReLU(), drop, fc), torch.ones(1, 3))
        [('0.weight', 1.0), ('0.weight', 0.5)]
    """
    # A computed weight (weight_norm) is computed once, so that it can be recognised by its identity.
    with torch.nn.utils.parametrize.cached(), _preserve_state(net):
        names = {
            id(parameter_value(module, parameter)): f"{layer}.{parameter}".lstrip(".")
            for layer, module in reversed(list(weight_layers(net)))  # a tied weight has its first name
            for parameter in layer_parameters(module)
            if not is_bias(parameter)
        }
        tracer = _Trace(names)
        with tracer:
            if isinstance(x, Mapping):
                net(**x)
            else:
                net(*x) if isinstance(x, (tuple, list)) else net(x)
    return tracer.uses


def keep_probs(net: nn.Module, x: Any) -> dict[str, float]:
    r"""The keep probability $p$ with which the input of every weight of `net` is kept, by parameter name.

    Found by a forward pass of `x`, so registration order, functional dropout and a dropout module used in several
    places make no difference. A dropout that no weight multiplies (on a residual branch) counts for no weight. A
    weight used more than once has the smallest of its keep probabilities. Weights that the input does not reach are
    absent, and so are layers whose KL is not a weight decay.

    Args:
        net: Any network; it is not changed.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments. One row suffices.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1))
        >>> keep_probs(net, torch.zeros(1, 2))
        {'0.weight': 1.0, '3.weight': 0.75}
    """
    layers = dict(weight_layers(net))
    by_parameter: dict[str, float] = {}
    for name, keep_prob in trace(net, x):
        by_parameter[name] = min(keep_prob, by_parameter.get(name, 1.0))
    for layer, module in layers.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and kl_is_weight_decay(module):
            by_parameter[f"{layer}.weight".lstrip(".")] = stated_keep_prob(module)
    decaying = {layer for layer, module in layers.items() if kl_is_weight_decay(module)}
    return {name: p for name, p in by_parameter.items() if _layer_of(name, layers) in decaying}


def complete_keep_probs(net: nn.Module, x: Any, given: Mapping[str, float] | None) -> dict[str, float]:
    """The traced keep probabilities of every weight whose layer `given` does not name, and `given`."""
    given = dict(given or {})
    try:
        traced = keep_probs(net, x)
    except Exception as error:  # code that fails inside a function mode or on few rows
        warnings.warn(f"`net` could not be traced ({error}): its dropout is read off its structure.", stacklevel=3)
        return given
    layers = dict(weight_layers(net))
    return {name: p for name, p in traced.items() if _layer_of(name, layers) not in given} | given


def _layer_of(parameter: str, layers: Mapping[str, nn.Module]) -> str:
    owner = parameter.rpartition(".")[0]
    while owner not in layers and owner:
        owner = owner.rpartition(".")[0]
    return owner
