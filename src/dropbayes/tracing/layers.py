"""Layers computed by steps: attention and recurrence, with the dropout inside them, and layers that vmap slows down."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import PyTree, tree_map_only

from dropbayes.tracing.operations import CELLS, ELEMENTWISE, SCALARS, Arguments, Operation, tensor_leaves
from dropbayes.tracing.sources import Handlers, RandomMode, handles, run_intercepted
from dropbayes.tracing.transforms import all_members, is_batched

HANDLERS: Handlers = {}
VECTOR = 64  #: Numbers: a multiple of those that torch takes at once, of any dtype, on any processor.


@handles(HANDLERS, *filter(None, [getattr(torch, "_grouped_mm", None)]))  # since PyTorch 2.8
def _experts(
    mode: RandomMode, func: Operation, rows: Tensor, matrices: Tensor, offs: Tensor | None = None, **options: object
) -> Tensor:
    """A matrix for each group of rows; torch has no kernel of double precision, in which passes are judged."""
    if rows.dtype is not torch.float64 or offs is None or matrices.dim() < 3:
        return func(rows, matrices, offs=offs, **options)
    groups = torch.searchsorted(offs, torch.arange(len(rows), device=rows.device), right=True)
    product = rows.new_zeros(len(rows), matrices.shape[-1])
    for index, matrix in enumerate(matrices):
        product = torch.where((groups == index)[:, None], rows @ matrix, product)
    return product


@handles(HANDLERS, F.scaled_dot_product_attention)
def _attention(
    mode: RandomMode, func: Operation, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    dropout_p = 0.0 if mode.source.is_off(True) else float(dropout_p)
    without_rule = query.device.type == "cpu" and any(map(is_batched, (query, key, value)))  # of torch's own, in vmap
    if dropout_p == 0 and not without_rule:
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if dropout_p:
        fused = mode.source.attention(query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale)
        if fused is not None:
            return fused
    weights = (query * scale) @ key.transpose(-2, -1)  # one name: of a long text, two would not fit
    # 0 for a query that sees no key, as in torch's attention: only a mask of the network's own hides them all.
    softmax = torch.softmax if attn_mask is None else torch._safe_softmax
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        weights = weights + attn_mask
    weights = softmax(weights, -1)
    if dropout_p:
        weights = mode.source.dropout("attention", weights, dropout_p, tuple(weights.shape), False)
    return weights.to(value.dtype) @ value


@handles(HANDLERS, F.multi_head_attention_forward)
def _multi_head_attention(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> PyTree:
    # Its dropout is gated by `training`, positional argument 13; the calls in its body are then intercepted here.
    training = args[13] if len(args) > 13 else kwargs.get("training", True)
    on = training or not mode.source.is_off(training)
    if len(args) > 13:
        args = (*args[:13], on, *args[14:])
    else:
        kwargs["training"] = on
    return run_intercepted(mode, func, *args, **kwargs)


def _recurrence(func: Operation, args: Arguments, between: Callable[[Tensor, float], Tensor]) -> PyTree:
    """The result of `torch.lstm`, `gru` or `rnn_*`, one layer at a time: `between` gives the next layer its input.

    Where derivatives are taken the layers run in training, without dropout of their own: cuDNN has no others.
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
        # Run again, as the fused forward stores nothing, and by a transform, which others and itself may enclose.
        _, pull_back = torch.func.vjp(lambda *tensors: _Layer.forward(ctx.flags, *tensors), *ctx.saved_tensors)
        return (None, *pull_back(grad_outputs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], flags: tuple[Any, ...], input: Tensor, *tensors: Tensor) -> PyTree:
        *_, batch_first, n_states = flags
        if any(dim is not None for dim in in_dims[2 + n_states :]):
            pairs = zip((input, *tensors), in_dims[1:], strict=True)
            members = zip(*(itertools.repeat(t) if d is None else t.unbind(d) for t, d in pairs), strict=False)
            runs = (_Layer.apply(flags, *one) for one in members)
            return tuple(map(torch.stack, zip(*runs, strict=True))), (0,) * (1 + n_states)
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


@handles(HANDLERS, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(mode: RandomMode, func: Operation, *args: Any) -> PyTree:
    # Packed sequences: (data, batch_sizes, hx, weights, ...); padded ones: (input, hx, weights, ...).
    packed = isinstance(args[3], (list, tuple))
    at = 6 if packed else 5
    drop_prob, training = args[at : at + 2]
    if drop_prob == 0 or mode.source.is_off(training):
        if any(map(is_batched, tensor_leaves(args[:3]))):  # mapped over: torch's own has no rule
            return _recurrence(func, args, lambda output, _: output)
        return func(*args[:at], 0.0, torch.is_grad_enabled(), *args[at + 2 :])  # cuDNN's derivatives need training

    def between(output: Tensor, drop_prob: float) -> Tensor:
        if not packed:
            return mode.source.dropout("recurrent", output, drop_prob, tuple(output.shape), False)
        # Padded, the tensor has an axis for the rows, and a step has the mask that it has in a longer sequence.
        padded, lengths = torch._VF._pad_packed_sequence(output, args[1], False, 0.0, 0)
        dropped = mode.source.dropout("recurrent", padded, drop_prob, tuple(padded.shape), False)
        return torch._VF._pack_padded_sequence(dropped, lengths, False)[0]

    return _recurrence(func, args, between)


@handles(HANDLERS, *CELLS)
def _cell(mode: RandomMode, func: Operation, input: Tensor, hx: PyTree, *weights: Tensor | None) -> PyTree:
    """A recurrent cell; where rows are mapped over, for which torch has no rule, a layer on sequences of one step."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if not mode.source.rows_mapped or not any(map(is_batched, (input, *states))):
        return func(input, hx, *weights)
    given = [weight for weight in weights if weight is not None]
    first = [state.unsqueeze(0) for state in states]
    args = (input.unsqueeze(0), first[0] if len(first) == 1 else first, given, len(given) > 2, 1, 0.0, *(False,) * 3)
    layer = getattr(torch, func.__name__.removesuffix("_cell"))
    last = [state.squeeze(0) for state in _recurrence(layer, args, lambda output, _: output)[1:]]
    return last[0] if len(last) == 1 else tuple(last)


@handles(HANDLERS, F.linear)
def _linear(mode: RandomMode, func: Operation, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if (result := mode.source.linear(input, weight, bias)) is not None:
        return result
    result = func(input, weight, bias)
    if not is_batched(result) or result.dtype != torch.float32 or not torch.is_autocast_enabled(result.device.type):
        return result
    return result.to(torch.get_autocast_dtype(result.device.type))  # vmap adds a bias in its own precision


@handles(HANDLERS, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _convolution(mode: RandomMode, func: Operation, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device = input.device.type
    if is_batched(input) and torch.is_autocast_enabled(device):  # under vmap, autocast does not convert the bias
        dtype = torch.get_autocast_dtype(device)
        input, args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(dtype), (input, args, kwargs))
    return func(input, *args, **kwargs)


@handles(HANDLERS, F.batch_norm)
def _batch_norm(
    mode: RandomMode, func: Operation, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Batch normalisation in evaluation mode as an affine map: under vmap, torch's own takes twice as long."""
    training = training and not (mode.source.freezes_statistics and running_mean is not None)
    if not is_batched(input) or training or running_mean is None or running_var is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (-1,) + (1,) * (input.dim() - 2)
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)  # in the wider dtype, as torch's own


@handles(HANDLERS, *ELEMENTWISE)
def _elementwise(mode: RandomMode, func: Operation, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    several = any(isinstance(one, Tensor) for one in (*args, *kwargs.values()))  # or one for the result
    if several or input.layout is not torch.strided or input.is_nested or not (input.is_cpu and input.numel() % VECTOR):
        return func(input, *args, **kwargs)
    return in_whole_vectors(func, input, *args, **kwargs)


def in_whole_vectors(func: Operation, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function of single numbers: on a CPU, torch computes those that fill no vector by code of other rounding."""
    padded = F.pad(input.flatten(), (0, -input.numel() % VECTOR))
    whole = func(padded, *args, **kwargs)
    result = whole[: input.numel()].view(input.shape)
    return input.copy_(result) if whole is padded else result


@handles(HANDLERS, *SCALARS)
def _read(mode: RandomMode, func: Operation, tensor: Tensor) -> Any:
    """The one value of a tensor; of a mapped one, that of all its members, if they agree as they would alone."""
    return func(mode.source.read(tensor) if is_batched(tensor) and tensor.numel() == 1 else tensor)


@handles(HANDLERS, Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(mode: RandomMode, func: Operation, tensor: Tensor) -> Tensor:
    return tensor.detach() if is_batched(tensor) else func(tensor)  # which torch.func.vmap refuses


@handles(HANDLERS, F.one_hot)
def _one_hot(mode: RandomMode, func: Operation, tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Without torch's look at the smallest and the largest class, which would count as a branch on them."""
    if num_classes < 0:
        return func(tensor)
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)  # which refuses a class that is not there


@handles(HANDLERS, F.embedding)
def _embedding(
    mode: RandomMode, func: Operation, input: Tensor, weight: Tensor, *args: object, **kwargs: object
) -> Tensor:
    try:
        return func(input, weight, *args, **kwargs)
    except IndexError as error:  # torch's own names neither the index nor the table
        input = all_members(input)
        rule = f"must look up entries 0 to {len(weight) - 1} of an embedding"
        raise IndexError(f"`net` {rule}; got {int(input.min())} to {int(input.max())}, in its input.") from error


@handles(HANDLERS, Tensor.__contains__)
def _contains(mode: RandomMode, func: Operation, tensor: Tensor, element: Any) -> bool:
    return bool(_read(mode, Tensor.__bool__, (tensor == element).any()))
