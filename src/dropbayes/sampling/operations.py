"""The stochastic operations of PyTorch, and their replacements while a network is sampled.

A `TorchFunctionMode` intercepts every torch call of its thread, from any module. Deterministic operations pass through.
A stochastic one is computed here instead, with randomness from a `RandomSource`: keyed masks when drawing, none when a
network is only inspected.
"""

from __future__ import annotations

import functools
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dropbayes.layers import STOCHASTIC
from dropbayes.sampling.recurrence import recurrence

# From functorch: whether a tensor is mapped over; the depth of nested transforms, None outside all of them.
_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
transform_depth: Callable[[], int | None] = torch._C._functorch.maybe_current_level


class RandomSource(ABC):
    """The source of randomness of one run of a network, asked once per site, in the order of execution."""

    @abstractmethod
    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """The 0/1 mask of the next site, broadcastable to `shape`; None to keep everything, unscaled."""

    @abstractmethod
    def uniform(
        self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device
    ) -> Tensor | None:
        """Uniforms of the next site in float64; None for the expectation of the result."""

    def masked(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        """`x` with the mask of the next site, scaled by 1 / keep probability: the result of dropout."""
        keep = self.keep(kind, drop_prob, shape, x)
        if keep is None:
            return x.view_as(x)
        return scaled_product(x, keep, drop_prob, inplace)

    def is_off(self, training: bool) -> bool:
        """Whether the next dropout is switched off; `training` is the argument that the network passed."""
        return False

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        """Whether random numbers from `generator` (None: torch's own) are the same in every forward pass."""
        return False

    def integrate(self, x: Tensor, drop_prob: float) -> Tensor | None:
        """The input of a last layer whose mask is integrated out; None to draw the mask."""
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The expected output of the layer that takes `x` from `integrate`; None for any other layer."""
        return None

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, drop_prob: float, is_causal: bool,
        scale: float,
    ) -> Tensor | None:  # fmt: skip
        """Attention whose weights have the mask of the next site, by a fused kernel; None without one."""
        return None

    def comparison(self, func: Callable[..., Any], left: Any, right: Any) -> Tensor | None:
        """The result of comparing a number with a drawn one, if independent of the draw; otherwise None."""
        return None

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Called after every operation with its arguments and result; most sources ignore it."""
        return


class Interception(TorchFunctionMode):
    """The mode in which stochastic operations ask `source` for their randomness."""

    def __init__(self, source: RandomSource) -> None:
        super().__init__()
        self.source = source
        self._after = None if type(source).after is RandomSource.after else source.after

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        result = func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)
        if self._after is not None:
            self._after(func, args, kwargs, result)
        return result


def scaled_product(x: Tensor, keep: Tensor, drop_prob: float, inplace: bool = False) -> Tensor:
    """`x * keep / (1 - drop_prob)`; 0 if `drop_prob` is 1."""
    factor = keep * (1 / (1 - drop_prob)) if drop_prob < 1 else keep
    return x.mul_(factor) if inplace and not isinstance(x, nn.Parameter) else x * factor


# Dropout of activations, features and weights --------------------------------------------------------------------


def _dropout(
    mode: Interception, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not 0 < p <= 1 or mode.source.is_off(training):
        return func(input, p, False)
    integrated = mode.source.integrate(input, p)
    if integrated is not None:
        return integrated
    return mode.source.masked("dropout", input, p, tuple(input.shape), inplace)


def _feature_dropout(
    mode: Interception,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    unbatched_dim: int = 0,
) -> Tensor:
    if not 0 < p <= 1 or mode.source.is_off(training):
        return func(input, p, False)
    return mode.source.masked("feature_dropout", input, p, _features(input, unbatched_dim), inplace)


def _alpha_dropout(
    mode: Interception,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    *,
    features: bool = False,
) -> Tensor:
    if not 0 < p < 1 or mode.source.is_off(training):
        return func(input, p, p == 1 and training)
    kind, shape = ("feature_alpha_dropout", _features(input, 0)) if features else ("alpha_dropout", tuple(input.shape))
    keep = mode.source.keep(kind, p, shape, input)
    if keep is None:
        return input
    # SELU's limit for large negative inputs, -λα, and the affine map that restores mean 0 and variance 1
    # (Klambauer et al. 2017, "Self-normalizing neural networks").
    saturation = -1.7580993408473766
    scale = ((1 - p) * (1 + p * saturation**2)) ** -0.5
    result = (input * keep + saturation * (1 - keep)) * scale - scale * p * saturation
    return input.copy_(result) if inplace else result


def _features(input: Tensor, unbatched_dim: int) -> tuple[int, ...]:
    """The mask's shape for whole channels: `[row, channel, 1, ...]`, or `[channel, 1, ...]` without a row axis."""
    leading = 1 if input.dim() == unbatched_dim else 2
    return tuple(input.shape[:leading]) + (1,) * (input.dim() - leading)


def _native_dropout(
    mode: Interception, func: Any, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if not 0 < p <= 1 or mode.source.is_off(bool(train)):
        return func(input, p, False)
    keep = mode.source.keep("dropout", p, tuple(input.shape), input)
    if keep is None:
        return input.view_as(input), torch.ones_like(input, dtype=torch.bool)
    return scaled_product(input, keep, p), keep.expand(input.shape).bool()


# Attention and recurrence ----------------------------------------------------------------------------------------


def _attention(
    mode: Interception,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0 or mode.source.is_off(True):
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    fused = mode.source.attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if fused is not None:
        return fused
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch._safe_softmax(scores, -1)  # 0 for a query that sees no key, as in torch's attention
    return mode.source.masked("attention", weights, dropout_p, tuple(weights.shape), False).to(value.dtype) @ value


def _multi_head_attention(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Any:
    # Its dropout is gated by `training`, its thirteenth argument; the calls in its body are then intercepted here.
    training = args[13] if len(args) > 13 else kwargs.get("training", True)
    on = training or not mode.source.is_off(training)
    if len(args) > 13:
        args = (*args[:13], on, *args[14:])
    else:
        kwargs["training"] = on
    with mode:
        return _undispatched(func)(*args, **kwargs)


@functools.cache
def _undispatched(func: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function of torch without its dispatch to modes, so that they intercept the calls inside it."""
    scope = {**func.__globals__}
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = lambda *_: False
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _inside(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A composite function of torch: run with the mode on, so that its random calls are intercepted."""
    with mode:
        return _undispatched(func)(*args, **kwargs)


def _uniform_initialiser(
    mode: Interception, func: Any, tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None
) -> Tensor:
    with mode, torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


def _normal_initialiser(
    mode: Interception, func: Any, tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> Tensor:
    with mode, torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def _recurrent(mode: Interception, func: Any, *args: Any) -> Any:
    packed = isinstance(
        args[3], (list, tuple)
    )  # (data, batch_sizes, hx, weights, ...) and not (input, hx, weights, ...)
    drop_prob, training = args[6:8] if packed else args[5:7]
    if drop_prob > 0 and mode.source.is_off(training):
        return func(*args)

    def between(output: Tensor, drop_prob: float) -> Tensor:
        return mode.source.masked("recurrent", output, drop_prob, tuple(output.shape), False)

    return recurrence(func, args, between)


def _linear(mode: Interception, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = mode.source.linear(input, weight, bias)
    return func(input, weight, bias) if result is None else result


def _convolution(
    mode: Interception, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    device = input.device.type
    if _is_batched(input) and torch.is_autocast_enabled(device):  # under vmap, autocast does not convert the bias
        dtype = torch.get_autocast_dtype(device)
        input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return func(input, weight, bias, *args, **kwargs)


def _batch_norm(
    mode: Interception,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalisation in evaluation mode as an affine map: under vmap, torch's own takes twice as long."""
    if not _is_batched(input) or training or running_mean is None or running_var is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (-1,) + (1,) * (input.dim() - 2)
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)  # in the wider dtype, as torch's own


# Random numbers ---------------------------------------------------------------------------------------------------


def _keyed(handler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The handler, for random numbers that differ between forward passes; fixed ones are torch's own."""

    @functools.wraps(handler)
    def checked(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        if mode.source.is_fixed(kwargs.get("generator")):
            return func(*args, **kwargs)
        return handler(mode, func, *args, **kwargs)

    return checked


@_keyed
def _bernoulli(mode: Interception, func: Any, input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
    probability = input if p is None else torch.full_like(input, p)
    return _bernoulli_values(mode, probability, None if p is None else 1 - p).to(input.dtype)


@_keyed
def _bernoulli_(mode: Interception, func: Any, input: Tensor, p: Any = 0.5, **kwargs: Any) -> Tensor:
    is_number = not isinstance(p, Tensor)
    probability = torch.full(tuple(input.shape), p, device=input.device) if is_number else p.expand(input.shape)
    return input.copy_(_bernoulli_values(mode, probability, 1 - p if is_number else None))


def _bernoulli_values(mode: Interception, probability: Tensor, drop_prob: float | None) -> Tensor:
    uniform = mode.source.uniform("bernoulli", drop_prob, tuple(probability.shape), probability.device)
    return probability if uniform is None else (uniform < probability).to(probability.dtype)


# The uniform of an inspected network: LayerDrop and DropPath, written as rand() < drop_prob, keep everything.
_LARGEST_UNIFORM = 1 - 2.0**-24


def _standard_uniform(mode: Interception, kind: str, like: Tensor) -> Tensor:
    uniform = mode.source.uniform(kind, None, tuple(like.shape), like.device)
    if uniform is not None:
        return uniform
    expected = 0.5 if kind == "randn" else _LARGEST_UNIFORM
    return torch.full(tuple(like.shape), expected, dtype=torch.float64, device=like.device)


@_keyed
def _rand(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    like = _template(func, args, kwargs)
    return _rounded(_standard_uniform(mode, "rand", like), like.dtype)


def _rounded(uniform: Tensor, dtype: torch.dtype) -> Tensor:
    """The uniforms in `dtype`, below 1 as torch's are."""
    return uniform.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)


@_keyed
def _randn(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    like = _template(func, args, kwargs)
    return torch.special.ndtri(_standard_uniform(mode, "randn", like)).to(like.dtype)


def _template(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An empty tensor of the shape, dtype and device that a call of `rand` or `randn` asks for."""
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return (torch.empty_like if func.__name__.endswith("_like") else torch.empty)(*args, **kwargs)


@_keyed
def _uniform_(mode: Interception, func: Any, input: Tensor, *bounds: float, **kwargs: Any) -> Tensor:
    low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    return input.copy_(low + (high - low) * _standard_uniform(mode, "rand", input))


@_keyed
def _normal_(mode: Interception, func: Any, input: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(mean + std * torch.special.ndtri(_standard_uniform(mode, "randn", input)))


@_keyed
def _normal(mode: Interception, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    like = torch.empty(size) if size is not None else torch.as_tensor(mean) + torch.as_tensor(std)
    return (mean + std * torch.special.ndtri(_standard_uniform(mode, "randn", like))).to(like.dtype)


@_keyed
def _exponential_(mode: Interception, func: Any, input: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(-torch.log(_standard_uniform(mode, "rand", input)) / lambd)


def _rrelu(
    mode: Interception, func: Any, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training or mode.source.is_off(training):
        return func(input, lower, upper, False, inplace)
    uniform = mode.source.uniform("rrelu", None, tuple(input.shape), input.device)
    slope = (lower + upper) / 2 if uniform is None else (lower + (upper - lower) * uniform).to(input.dtype)
    result = torch.where(input >= 0, input, input * slope)
    return input.copy_(result) if inplace else result


def _compare(mode: Interception, func: Any, left: Any, right: Any) -> Any:
    fixed = mode.source.comparison(func, left, right)
    return func(left, right) if fixed is None else fixed


def _drawn(
    mode: Interception, func: Any, sample: Callable[[], Tensor], mean: Tensor, *, training: bool = False
) -> Tensor:
    """A layer of `dropbayes.layers`: it draws its weights on request, with random numbers intercepted here."""
    del training
    with mode:
        return func(sample, mean, training=True)


def _unkeyed(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Any:
    if mode.source.is_fixed(kwargs.get("generator")):
        return func(*args, **kwargs)
    raise NotImplementedError(
        f"`net` draws random numbers with torch's {func.__name__}, which cannot be keyed to a seed. "
        "Write that step with torch.rand, torch.randn or torch.bernoulli."
    )


_COMPARISONS = (
    Tensor.__lt__, Tensor.__le__, Tensor.__gt__, Tensor.__ge__, Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, torch.lt,
    torch.le, torch.gt, torch.ge,
)  # fmt: skip


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
    torch.dropout_: functools.partial(_dropout, inplace=True),
    torch.native_dropout: _native_dropout,
    F.dropout1d: functools.partial(_feature_dropout, unbatched_dim=2),
    F.dropout2d: _feature_dropout,
    F.dropout3d: functools.partial(_feature_dropout, unbatched_dim=4),
    torch.feature_dropout: _feature_dropout,
    torch.feature_dropout_: functools.partial(_feature_dropout, inplace=True),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout), _alpha_dropout),
    torch.alpha_dropout_: functools.partial(_alpha_dropout, inplace=True),
    **dict.fromkeys(
        (F.feature_alpha_dropout, torch.feature_alpha_dropout), functools.partial(_alpha_dropout, features=True)
    ),
    torch.feature_alpha_dropout_: functools.partial(_alpha_dropout, features=True, inplace=True),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _convolution
    ),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    Tensor.bernoulli_: _bernoulli_,
    **dict.fromkeys((torch.rand, torch.rand_like), _rand),
    **dict.fromkeys((torch.randn, torch.randn_like), _randn),
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    torch.normal: _normal,
    Tensor.exponential_: _exponential_,
    F.gumbel_softmax: _inside,
    nn.init.uniform_: _uniform_initialiser,
    nn.init.normal_: _normal_initialiser,
    **dict.fromkeys(_COMPARISONS, _compare),
    **dict.fromkeys(STOCHASTIC, _drawn),
    F.rrelu: _rrelu,
    **dict.fromkeys(
        (
            torch.multinomial,
            Tensor.multinomial,
            torch.randint,
            torch.randint_like,
            torch.randperm,
            torch.poisson,
            Tensor.random_,
            Tensor.cauchy_,
            Tensor.log_normal_,
            Tensor.geometric_,
            F.fractional_max_pool2d,
            F.fractional_max_pool3d,
        ),
        _unkeyed,
    ),
}
