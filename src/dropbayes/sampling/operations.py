"""The stochastic operations of PyTorch, and what stands in for each of them while a network is drawn from.

A `TorchFunctionMode` sees every call into torch of its own thread, whatever module makes it and whatever its training
flag says. Deterministic operations pass through. A stochastic one is computed here instead, with randomness asked of a
`Noise`: keyed masks when drawing, nothing at all when a network is only being looked at.
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


class Noise(ABC):
    """The source of randomness of one run of a network, asked once per site, in the order of execution."""

    @abstractmethod
    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """The 0/1 mask of the next site, broadcastable to `shape`; None to keep everything, unscaled."""

    @abstractmethod
    def uniform(
        self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device
    ) -> Tensor | None:
        """Uniforms of the next site in float64; None for the expectation of whatever is made of them."""

    def integrate(self, x: Tensor, drop_prob: float) -> Tensor | None:
        """The input of a last layer that is to be integrated over its mask; None to draw the mask."""
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The expected output of the layer that takes `x` from `integrate`; None for any other layer."""
        return None

    def passed(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Told of every operation and what it gave; most need not know."""
        return


class Interception(TorchFunctionMode):
    """The mode in which stochastic operations ask `noise` for their randomness."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        result = func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)
        self.noise.passed(func, args, result)
        return result


# Dropout of activations, features and weights --------------------------------------------------------------------


def _dropout(
    mode: Interception, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    del training  # the draw decides, not the flag
    if not 0 < p <= 1:
        return func(input, p, False)
    integrated = mode.noise.integrate(input, p)
    if integrated is not None:
        return integrated
    return _masked(input, mode.noise.keep("dropout", p, tuple(input.shape), input), p, inplace)


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
    del training
    if not 0 < p <= 1:
        return func(input, p, False)
    return _masked(input, mode.noise.keep("feature_dropout", p, _features(input, unbatched_dim), input), p, inplace)


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
    del training
    if not 0 < p < 1:
        return func(input, p, p == 1)
    kind, shape = ("feature_alpha_dropout", _features(input, 0)) if features else ("alpha_dropout", tuple(input.shape))
    keep = mode.noise.keep(kind, p, shape, input)
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


def _masked(input: Tensor, keep: Tensor | None, drop_prob: float, inplace: bool) -> Tensor:
    if keep is None:
        return input.view_as(input)
    factor = keep * (1 / (1 - drop_prob)) if drop_prob < 1 else keep
    if inplace and not isinstance(input, nn.Parameter):
        return input.mul_(factor)
    return input * factor


def _native_dropout(
    mode: Interception, func: Any, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    keep = mode.noise.keep("dropout", p, tuple(input.shape), input) if p > 0 else None
    mask = torch.ones_like(input) if keep is None else keep.expand(input.shape)
    return _masked(input, keep, p, False), mask.bool()


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
    if dropout_p == 0:
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    keep = mode.noise.keep("attention", dropout_p, tuple(weights.shape), weights)
    return _masked(weights, keep, dropout_p, False) @ value


def _multi_head_attention(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Any:
    # Its dropout is gated by `training`, its thirteenth argument; its own body then makes calls that are seen here.
    if len(args) > 13:
        args = (*args[:13], True, *args[14:])
    else:
        kwargs["training"] = True
    with mode:
        return _undispatched(func)(*args, **kwargs)


@functools.cache
def _undispatched(func: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function of torch without its hand-over to modes, so that the calls inside it are seen by them."""
    scope = {**func.__globals__}
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = lambda *_: False
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _inside(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A composite function of torch: run with the mode on, so that the random calls it makes are seen."""
    with mode:
        return _undispatched(func)(*args, **kwargs)


def _recurrent(mode: Interception, func: Any, *args: Any) -> Any:
    def between(output: Tensor, drop_prob: float) -> Tensor:
        keep = mode.noise.keep("recurrent", drop_prob, tuple(output.shape), output)
        return _masked(output, keep, drop_prob, False)

    return recurrence(func, args, between)


def _linear(mode: Interception, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = mode.noise.linear(input, weight, bias)
    return func(input, weight, bias) if result is None else result


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
    """Batch normalisation in evaluation as the affine map it is: mapped over rows, torch's own takes twice as long."""
    if training or running_mean is None or running_var is None or input.dtype != running_var.dtype:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (-1,) + (1,) * (input.dim() - 2)
    return input * scale.view(shape) + shift.view(shape)


# Random numbers ---------------------------------------------------------------------------------------------------


def _bernoulli(mode: Interception, func: Any, input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
    probability = input if p is None else torch.full_like(input, p)
    return _bernoulli_values(mode, probability, None if p is None else 1 - p).to(input.dtype)


def _bernoulli_(mode: Interception, func: Any, input: Tensor, p: Any = 0.5, **kwargs: Any) -> Tensor:
    is_number = not isinstance(p, Tensor)
    probability = torch.full(tuple(input.shape), p, device=input.device) if is_number else p.expand(input.shape)
    return input.copy_(_bernoulli_values(mode, probability, 1 - p if is_number else None))


def _bernoulli_values(mode: Interception, probability: Tensor, drop_prob: float | None) -> Tensor:
    uniform = mode.noise.uniform("bernoulli", drop_prob, tuple(probability.shape), probability.device)
    return probability if uniform is None else (uniform < probability).to(probability.dtype)


def _standard_uniform(mode: Interception, kind: str, like: Tensor) -> Tensor:
    uniform = mode.noise.uniform(kind, None, tuple(like.shape), like.device)
    return torch.full(tuple(like.shape), 0.5, dtype=torch.float64, device=like.device) if uniform is None else uniform


def _rand(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    like = _template(func, args, kwargs)
    return _standard_uniform(mode, "rand", like).to(like.dtype)


def _randn(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    like = _template(func, args, kwargs)
    return torch.special.ndtri(_standard_uniform(mode, "randn", like)).to(like.dtype)


def _template(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An empty tensor of the shape, dtype and device that a call of `rand` or `randn` asks for."""
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return (torch.empty_like if func.__name__.endswith("_like") else torch.empty)(*args, **kwargs)


def _uniform_(mode: Interception, func: Any, input: Tensor, *bounds: float, **kwargs: Any) -> Tensor:
    low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    return input.copy_(low + (high - low) * _standard_uniform(mode, "rand", input))


def _normal_(mode: Interception, func: Any, input: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(mean + std * torch.special.ndtri(_standard_uniform(mode, "randn", input)))


def _normal(mode: Interception, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    like = torch.empty(size) if size is not None else torch.as_tensor(mean) + torch.as_tensor(std)
    return (mean + std * torch.special.ndtri(_standard_uniform(mode, "randn", like))).to(like.dtype)


def _exponential_(mode: Interception, func: Any, input: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(-torch.log(_standard_uniform(mode, "rand", input)) / lambd)


def _drawn(
    mode: Interception, func: Any, sample: Callable[[], Tensor], mean: Tensor, *, training: bool = False
) -> Tensor:
    """A layer of ours: it draws its weights when told to, with random numbers that are seen here."""
    del training
    with mode:
        return func(sample, mean, training=True)


def _unkeyed(mode: Interception, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"`net` draws random numbers with torch's {func.__name__}, which cannot be keyed to a seed. "
        "Write that step with torch.rand, torch.randn or torch.bernoulli."
    )


def _rrelu(mode: Interception, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    training = kwargs.get("training", args[2] if len(args) > 2 else False)
    return _unkeyed(mode, func) if training else func(input, *args, **kwargs)


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
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    Tensor.bernoulli_: _bernoulli_,
    **dict.fromkeys((torch.rand, torch.rand_like), _rand),
    **dict.fromkeys((torch.randn, torch.randn_like), _randn),
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    torch.normal: _normal,
    Tensor.exponential_: _exponential_,
    F.gumbel_softmax: _inside,
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
