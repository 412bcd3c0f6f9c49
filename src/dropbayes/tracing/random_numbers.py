"""Random numbers keyed to a seed, each made of uniforms; those without a handler come from a keyed generator."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dropbayes.tracing.operations import Arguments, NamedArguments, Operation, operands
from dropbayes.tracing.sources import Handlers, Ones, RandomMode, handles, run_intercepted
from dropbayes.tracing.transforms import is_batched

HANDLERS: Handlers = {F.gumbel_softmax: run_intercepted}


def draw_or_mean(sample: Callable[[], Tensor], mean: Tensor, *, training: bool) -> Tensor:
    """`sample()` in training mode, `mean` otherwise: a stochastic operation that a torch function mode can switch on.

    In evaluation mode the call is passed to any active `TorchFunctionMode`, which may return
    `draw_or_mean(sample, mean, training=True)`; the draws inside then come from `torch.rand` and `torch.randn`.
    """
    if training:
        return sample()
    if has_torch_function((mean,)):
        return handle_torch_function(draw_or_mean, (mean,), sample, mean, training=training)
    return mean


def _keyed(*operations: Operation) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Makes a function the handler of random numbers that differ between forward passes; fixed ones are torch's own."""

    def enter(handler: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @handles(HANDLERS, *operations)
        @functools.wraps(handler)
        def keyed_handler(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> Tensor:
            generator = kwargs.pop("generator", None)
            own = {} if generator in (None, torch.default_generator) else {"generator": generator}
            if mode.source.is_fixed(own.get("generator")):
                return func(*args, **kwargs, **own)
            out = kwargs.pop("out", None)
            mode.source.like = next(iter(operands(args)), None) if func.__name__.endswith("_like") else None
            result = handler(mode, func, *args, **kwargs)
            return result if out is None else out.resize_(result.shape).copy_(result)

        return keyed_handler

    return enter


@_keyed(torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_)
def _bernoulli(mode: RandomMode, func: Operation, input: Tensor, p: Any = None) -> Tensor:
    in_place = func is Tensor.bernoulli_
    chance: Any = (0.5 if in_place else input) if p is None else p
    is_number = not isinstance(chance, Tensor)
    probability = torch.full(tuple(input.shape), chance, device=input.device) if is_number else chance
    drawn = mode.source.bernoulli(probability.expand(input.shape), 1 - chance if is_number else None)
    return _filled(mode, input, drawn) if in_place else drawn.to(input.dtype)


def _filled(mode: RandomMode, input: Tensor, value: Tensor) -> Tensor:
    """`input` with these values, which may differ between members that are mapped over."""
    if is_batched(value):
        mode.divides(input)
    return input.copy_(value)


def _uniforms(mode: RandomMode, kind: str, like: Tensor) -> Tensor:
    return mode.source.uniform(kind, None, tuple(like.shape), like.device)


def _normals(mode: RandomMode, like: Tensor) -> Tensor:
    """Standard normal numbers; of a complex dtype, with variance 1/2 for each part."""
    if not like.is_complex():
        return torch.special.ndtri(_uniforms(mode, "randn", like))
    parts = torch.special.ndtri(mode.source.uniform("randn", None, (*like.shape, 2), like.device))
    return torch.view_as_complex(parts * 0.5**0.5)


@_keyed(torch.rand, torch.rand_like)
def _rand(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> Tensor:
    like = _template(func, args, kwargs)
    if like.is_complex():
        parts = mode.source.uniform("rand", None, (*like.shape, 2), like.device)
        return torch.view_as_complex(parts).to(like.dtype, copy=True)
    below_one = 1 - torch.finfo(like.dtype).eps / 2  # as torch's are
    return _uniforms(mode, "rand", like).to(like.dtype).clamp(max=below_one)


@_keyed(torch.randn, torch.randn_like)
def _randn(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> Tensor:
    like = _template(func, args, kwargs)
    return _normals(mode, like).to(like.dtype)


def _template(func: Operation, args: Arguments, kwargs: NamedArguments) -> Tensor:
    """An empty tensor of the shape, dtype and device that a call of `rand` or `randn` asks for."""
    return (torch.empty_like if func.__name__.endswith("_like") else torch.empty)(*args, **kwargs)


@_keyed(Tensor.uniform_)
def _uniform_(mode: RandomMode, func: Operation, input: Tensor, *bounds: float, **kwargs: Any) -> Tensor:
    low, high = ({"from": 0.0, "to": 1.0} | dict(zip(("from", "to"), bounds, strict=False)) | kwargs).values()
    return _filled(mode, input, low + (high - low) * _uniforms(mode, "rand", input))


@_keyed(Tensor.normal_)
def _normal_(mode: RandomMode, func: Operation, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _filled(mode, input, mean + std * _normals(mode, input))


@_keyed(torch.normal)
def _normal(mode: RandomMode, func: Operation, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    like = _template(func, (size,), kwargs) if size is not None else torch.as_tensor(mean) + torch.as_tensor(std)
    return (mean + std * _normals(mode, like)).to(like.dtype)


_QUANTILES: dict[Operation, Callable[..., Tensor]] = {
    Tensor.exponential_: lambda u, lambd=1.0: -torch.log(u) / lambd,
    Tensor.log_normal_: lambda u, mean=1.0, std=2.0: torch.exp(mean + std * torch.special.ndtri(u)),
    Tensor.cauchy_: lambda u, median=0.0, sigma=1.0: median + sigma * torch.tan(torch.pi * (u - 0.5)),
    Tensor.geometric_: lambda u, p: (u.log() / math.log1p(-p)).ceil().clamp(min=1),
}


@_keyed(*_QUANTILES)
def _by_quantile(mode: RandomMode, func: Operation, input: Tensor, *args: float, **kwargs: Any) -> Tensor:
    """Numbers by their quantile function: the median where noise is left out; of a waiting time, none."""
    kind = "rand" if func is Tensor.exponential_ else "randn"
    return _filled(mode, input, _QUANTILES[func](_uniforms(mode, kind, input), *args, **kwargs))


@_keyed(torch.randint, torch.randint_like)
def _randint(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> Tensor:
    name, place, dtype = ("input", 0, {}) if func is torch.randint_like else ("size", -1, {"dtype": torch.int64})
    bounds = list(args)
    if name not in kwargs:
        kwargs[name] = bounds.pop(place)
    bounds += [kwargs.pop(bound) for bound in ("low", "high") if bound in kwargs]
    low, high = map(int, [0, *bounds][-2:])  # which may be numbers of NumPy, or tensors of one number
    like = _template(func, (), dtype | kwargs)
    return (low + (high - low) * _uniforms(mode, "rand", like)).floor().to(like.dtype)


@_keyed(torch.randperm)
def _randperm(mode: RandomMode, func: Operation, n: int, **kwargs: Any) -> Tensor:
    like = _template(func, (n,), {"dtype": torch.int64, **kwargs})
    return _uniforms(mode, "randperm", like).argsort(stable=True).to(like.dtype)


@_keyed(torch.multinomial, Tensor.multinomial)
def _multinomial(
    mode: RandomMode, func: Operation, input: Tensor, num_samples: int, replacement: bool = False
) -> Tensor:
    # Of exponential waiting times with these rates the shortest is a sample, the shortest ones are some without
    # replacement; if all are alike, they are the most probable.
    rates = input.double().unsqueeze(-2).expand(*input.shape[:-1], num_samples, -1) if replacement else input.double()
    speed = rates / -torch.log(_uniforms(mode, "rand", rates))
    return speed.argmax(-1) if replacement else speed.topk(num_samples, -1).indices


@_keyed(torch.binomial)
def _binomial(mode: RandomMode, func: Operation, count: Tensor, prob: Tensor) -> Tensor:
    counted = torch.arange(int(count.max()), device=prob.device) < count.unsqueeze(-1)
    chances, counted = torch.broadcast_tensors(prob.unsqueeze(-1), counted)
    return (mode.source.bernoulli(chances, None) * counted).sum(-1).to(prob.dtype)


@_keyed(torch._standard_gamma)
def _standard_gamma(mode: RandomMode, func: Operation, input: Tensor) -> Tensor:
    drawn = _above_zero(_gammas(mode, input.detach()), input.dtype)
    if not (torch.is_grad_enabled() and input.requires_grad):
        return drawn
    return drawn + (input - input.detach()) * torch._standard_gamma_grad(input.detach(), drawn)


@_keyed(torch._sample_dirichlet)
def _sample_dirichlet(mode: RandomMode, func: Operation, input: Tensor) -> Tensor:
    drawn = _gammas(mode, input)
    return _above_zero(drawn / drawn.sum(-1, keepdim=True), input.dtype)


def _above_zero(number: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in `dtype`, above 0 as torch's are."""
    return number.to(dtype).clamp(min=torch.finfo(dtype).tiny)


@_keyed(torch.poisson)
def _poisson(mode: RandomMode, func: Operation, input: Tensor) -> Tensor:
    """Poisson numbers by their quantile: a bisection around that of Cornish and Fisher, which is at most 11 off."""
    mode.source.chooses(None, "poisson")
    uniform = mode.source.uniform("poisson", None, tuple(input.shape), input.device)
    if _is_at_mean(mode):
        return input.clone()
    rate, normal = input.double(), torch.special.ndtri(uniform)
    about = (rate + rate.sqrt() * normal + (normal.square() - 1) / 6).floor().clamp(min=-1)
    below, enough = (about - 12).clamp(min=-1), about + 4
    for _step in range(4):
        middle = ((below + enough) / 2).floor()
        reached = torch.special.gammaincc(middle.clamp(min=0) + 1, rate) >= uniform
        below, enough = torch.where(reached, below, middle), torch.where(reached, middle, enough)
    return enough.clamp(min=0).to(input.dtype)


def _is_at_mean(mode: RandomMode) -> bool:
    """Whether random numbers are to be replaced by their means."""
    return isinstance(mode.source, Ones) and not mode.source.neutral.spread


def _gammas(mode: RandomMode, shape: Tensor) -> Tensor:
    """Standard gamma numbers: the first accepted of six proposals (Marsaglia and Tsang 2000), of which 95 % are."""
    mode.source.chooses(None, "gamma")
    uniform = mode.source.uniform("gamma", None, (*shape.shape, 13), shape.device)
    if _is_at_mean(mode):
        return shape.double()
    normal, level = torch.special.ndtri(uniform[..., 1:7]), uniform[..., 7:]
    location = (shape.double() + (shape < 1) - 1 / 3).unsqueeze(-1)
    cube = (1 + normal / (9 * location).sqrt()).clamp(min=0) ** 3
    rejected = level.log() >= normal.square() / 2 + location * (1 - cube + cube.log())
    first = rejected.long().cumprod(-1).sum(-1, keepdim=True).clamp(max=5)
    drawn = (location * cube).gather(-1, first).squeeze(-1)
    return torch.where(shape < 1, drawn * uniform[..., 0] ** (1 / shape.double()), drawn).clamp(min=1e-300)


@handles(HANDLERS, nn.init.uniform_, nn.init.normal_)
def _initialiser(
    mode: RandomMode, func: Operation, tensor: Tensor, generator: torch.Generator | None, **numbers: float
) -> Tensor:
    fill = Tensor.uniform_ if func is nn.init.uniform_ else Tensor.normal_
    with mode, torch.no_grad():
        return fill(tensor, *numbers.values(), generator=generator)


@handles(HANDLERS, F.rrelu)
def _rrelu(
    mode: RandomMode, func: Operation, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3,
    training: bool = False, inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training or mode.source.is_off(training):
        return func(input, lower, upper, False, inplace)
    slope = (lower + (upper - lower) * _uniforms(mode, "rrelu", input)).to(input.dtype)
    result = torch.where(input >= 0, input, input * slope)
    return input.copy_(result) if inplace else result


@handles(HANDLERS, draw_or_mean)
def _draw_or_mean(
    mode: RandomMode, func: Operation, sample: Callable[[], Tensor], mean: Tensor, *, training: bool = False
) -> Tensor:
    """A layer of `dropbayes.layers`: it draws its weights on request, with random numbers intercepted here."""
    with mode:
        return func(sample, mean, training=True)
