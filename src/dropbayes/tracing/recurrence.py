"""Torch's fused recurrent layers run one layer at a time, so that dropout between layers can be drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from dropbayes.tracing.operations import Arguments, is_batched


def recurrence(func: Callable[..., Any], args: Arguments, between: Callable[[Tensor, float], Tensor]) -> PyTree:
    """The result of `torch.lstm`, `gru` or `rnn_*` called with `args`, with `between` applied between its layers.

    Where derivatives are taken the layers run in training, without dropout of their own: cuDNN has no others.

    Args:
        func: The fused function, as `nn.LSTM` and its like call it.
        args: Its arguments, in the form for padded or for packed sequences.
        between: A map of a layer's output and the drop probability to the next layer's input.
    """
    packed = isinstance(args[3], (list, tuple))  # (data, batch_sizes, hx, weights, ...), not (input, hx, weights, ...)
    input, batch_sizes, hx, weights, *settings = (*args, False) if packed else (args[0], None, *args[1:])
    has_biases, n_layers, drop_prob, _, bidirectional, batch_first = settings
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // n_layers
    finals: list[list[Tensor]] = []
    for layer in range(n_layers):
        if layer > 0 and drop_prob > 0:
            input = between(input, drop_prob)
        layer_states = [state[layer * directions : (layer + 1) * directions] for state in states]
        layer_weights = weights[layer * per_layer : (layer + 1) * per_layer]
        flags = (func, batch_sizes, has_biases, bidirectional, batch_first, len(layer_states))
        tensors = (input, *layer_states, *layer_weights)
        # Called as it stands, torch's layer has derivatives of any order; only padded sequences can be mapped over.
        run = _Layer.apply if not packed and any(map(is_batched, tensors)) else _Layer.forward
        input, *last = run(flags, *tensors)
        finals.append(last)
    return (input, *(torch.cat(state) for state in zip(*finals, strict=True)))


class _Layer(torch.autograd.Function):
    """One fused recurrent layer; under vmap the mapped axis becomes part of the sequence batch."""

    @staticmethod
    def forward(flags: tuple[Any, ...], input: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        func, batch_sizes, has_biases, bidirectional, batch_first, n_states = flags
        states, weights = [state.contiguous() for state in tensors[:n_states]], list(tensors[n_states:])
        if input.is_cuda and not has_biases:
            # Without biases cuDNN would read the wrong weights from the buffer of all layers.
            weights = [weight.clone() for weight in weights]
        hx = states if n_states > 1 else states[0]
        with warnings.catch_warnings():  # cuDNN's buffer holds all layers, and one runs here
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            settings = (has_biases, 1, 0.0, torch.is_grad_enabled(), bidirectional)
            if batch_sizes is not None:
                return func(input, batch_sizes, hx, weights, *settings)
            return func(input, hx, weights, *settings, batch_first)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: PyTree) -> None:
        ctx.flags = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():  # run again: the fused forward stores nothing for the backward pass
            inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in ctx.saved_tensors]
            outputs = _Layer.forward(ctx.flags, *inputs)
            grads = torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)
        return (None, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], flags: tuple[Any, ...], input: Tensor, *tensors: Tensor) -> PyTree:
        *_, batch_first, n_states = flags
        if any(dim is not None for dim in in_dims[2 + n_states :]):
            raise RuntimeError("vmap: recurrent weights that differ between draws run one draw at a time")
        rows = 0 if batch_first else 1
        folded = [_fold(input, in_dims[1], rows, info.batch_size)]
        folded += [_fold(s, d, 1, info.batch_size) for s, d in zip(tensors[:n_states], in_dims[2:], strict=False)]
        outputs = _Layer.apply(flags, *folded, *tensors[n_states:])
        axes = (rows, *(1,) * n_states)
        unfolded = tuple(out.unflatten(axis, (info.batch_size, -1)) for out, axis in zip(outputs, axes, strict=True))
        return unfolded, axes


def _fold(tensor: Tensor, mapped: int | None, axis: int, size: int) -> Tensor:
    """The mapped axis merged into `axis`, the axis right after it."""
    if mapped is None:
        tensor, mapped = tensor.unsqueeze(0).expand(size, *tensor.shape), 0
    return tensor.movedim(mapped, axis).flatten(axis, axis + 1)
