"""Where the randomness of a network comes from while it runs: the one place that knows a site's mask.

A stochastic operation asks its *source* for the mask of the next site, in the order of execution. `Ones` gives the
network without its masks, `Given` masks that the caller holds; `sampling.source` makes those of a seed.
"""

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import PyTree

from dropbayes.tracing.operations import Arguments, NamedArguments, Operation
from dropbayes.tracing.transforms import all_members, divided

Handlers = dict[Callable[..., Any], Callable[..., Any]]
"""What replaces each stochastic operation: a function of the mode, the operation and its arguments."""
Handler = TypeVar("Handler", bound=Callable[..., Any])


def handles(handlers: Handlers, *operations: Operation) -> Callable[[Handler], Handler]:
    """Makes a function the handler of some operations."""

    def enter(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(operations, handler))
        return handler

    return enter


class UnsupportedStrategy(Exception):
    """A way to run a network that cannot give it these masks; another can."""


class Source(ABC):
    """The source of randomness of one run of a network, asked once per site, in the order of execution."""

    freezes_statistics = False  #: Whether normalisation uses its running statistics, whatever its training flag says.
    maps = False  #: Whether rows or draws are mapped over by `torch.func.vmap`, which has errors of its own.
    rows_mapped = False  #: Whether the rows are.
    like: Tensor | None = None  #: The tensor of whose form random numbers are asked for, if there is one.

    @abstractmethod
    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """The 0/1 mask of the next site, broadcastable to `shape`; None to keep everything, unscaled."""

    @abstractmethod
    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The uniforms of the next site, in float64."""

    def bernoulli(self, probability: Tensor, drop_prob: float | None) -> Tensor:
        """Ones with the given probabilities, else zeros: the values of the next site."""
        uniform = self.uniform("bernoulli", drop_prob, tuple(probability.shape), probability.device)
        return (uniform < probability).to(probability.dtype)

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        """`x` with the mask of the next site, scaled by 1 / keep probability: the result of dropout."""
        keep = self.keep(kind, drop_prob, shape, x)
        if keep is None:  # in place, it is seen to write into its input
            return x.mul_(1) if inplace and not isinstance(x, nn.Parameter) else x.clone()
        return scaled_product(x, keep, drop_prob, inplace)

    def is_off(self, training: bool) -> bool:
        """Whether the next dropout is switched off; `training` is the argument that the network passed."""
        return not training

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        """Whether random numbers from `generator` (None: torch's own) are the same in every forward pass."""
        return generator is not None

    def integrate(self, x: Tensor, drop_prob: float, inplace: bool) -> Tensor | None:
        """The input of a last layer whose mask is integrated out; None to draw the mask."""
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The expected output of the layer that takes `x` from `integrate`; None for any other layer."""
        return None

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        drop_prob: float,
        *,
        is_causal: bool,
        scale: float,
    ) -> Tensor | None:
        """Attention whose weights have the mask of the next site, by a fused kernel; None without one."""
        return None

    def read(self, tensor: Tensor) -> Tensor:
        """The one value that all members of a mapped tensor have."""
        tensor = all_members(tensor)
        value = tensor.reshape(-1)[0]
        if not bool((tensor == value).all()):
            raise UnsupportedStrategy("a branch on a value that differs between rows or draws")
        return value

    def drawn(self) -> Any:
        """The site whose uniforms, or ones and zeros, the last operation has drawn; None for any other operation."""
        return None

    def gate(self, site: Any, chance: Tensor) -> Tensor:
        """The gate that a network makes of a site's uniforms, true with these probabilities, at its mean."""
        return chance

    def chooses(self, site: Any, operation: str) -> None:
        """Called when random numbers go into an operation, such as an index, of which their means say nothing."""
        return

    def after(self, func: Callable[..., Any], args: Arguments, kwargs: NamedArguments, result: Any) -> None:
        """Called after every operation with its arguments and result; most sources ignore it."""
        return


@dataclass(frozen=True)
class Neutral:
    """The numbers that stand for no noise. A network's own use of them decides which ones do."""

    uniform: float
    bernoulli: float | None  # None for the probability itself
    gates: bool = False  # comparisons of random numbers are held at their probability
    spread: bool = False  # no two numbers are alike, of any kind: noise, and not its absence


_MAX_UNIFORM = 1 - 2.0**-24
NEUTRAL = (
    Neutral(_MAX_UNIFORM, None),  # a gate rand() < drop_prob, floor(keep_prob + rand()), a mask over its mean
    Neutral(0.5, None, gates=True),  # a mask of comparisons over its mean
    Neutral(_MAX_UNIFORM, 1.0),  # a mask that is not scaled
    Neutral(2.0**-24, 0.0),  # a mask of what is dropped
    Neutral(0.5, None),  # noise around the middle
)
"""The candidates, the most common first."""


class Ones(Source):
    """Nothing is dropped and no noise is added: the network in evaluation mode, if its flags only gate dropout."""

    neutral = NEUTRAL[0]

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> None:
        return None

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return neutral_uniform(kind, shape, device, self.neutral)

    def bernoulli(self, probability: Tensor, drop_prob: float | None) -> Tensor:
        number = self.neutral.bernoulli
        return probability if number is None else torch.full_like(probability, number)


class Given(Source):
    """Multiplicative masks that the caller holds, one for each site: `factors` are multiplied in, not scaled.

    Args:
        factors: A tensor for each site in the order of execution, broadcastable to the tensor it multiplies.
    """

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self._factors: Iterator[Tensor] = iter(factors)

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._next(kind) * (1 - drop_prob)  # its caller divides by the keep probability

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        return x * self._next(kind)

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        raise NotImplementedError(f"`net` draws {kind} numbers, which are no multiplicative mask.")

    def _next(self, kind: str) -> Tensor:
        if (factor := next(self._factors, None)) is None:
            raise ValueError(f"`factors` must hold one mask for each site of the network; there is none for a {kind}.")
        return factor


def neutral_uniform(kind: str, shape: tuple[int, ...], device: torch.device, neutral: Neutral = NEUTRAL[-1]) -> Tensor:
    """Uniforms that change nothing where that is possible: for a normal number, its median."""
    number = neutral.uniform if kind == "rand" or neutral.spread else 0.5
    uniforms = torch.full(shape, number, dtype=torch.float64, device=device)
    if not neutral.spread:
        return uniforms
    return (uniforms + 0.618034 * torch.arange(uniforms.numel(), device=device).view(shape)).frac()


class RandomMode(TorchFunctionMode):
    """A mode of torch with a source of randomness, from which the handlers of stochastic operations draw."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.own: set[int] = set()  # the ids of tensors that nothing but this pass holds, where members are mapped over

    def divides(self, tensor: Tensor) -> bool:
        """Makes a tensor of this pass alone one for each member that is mapped over; whether it was one for all."""
        base = tensor if tensor._base is None else tensor._base
        return id(base) in self.own and divided(tensor)


def scaled_product(x: Tensor, keep: Tensor, drop_prob: float, inplace: bool = False) -> Tensor:
    """`x * keep / (1 - drop_prob)`; 0 if `drop_prob` is 1."""
    factor = keep * (1 / (1 - drop_prob)) if drop_prob < 1 else keep
    return x.mul_(factor) if inplace and not isinstance(x, nn.Parameter) else x * factor


# Functions of torch that are written in Python ------------------------------------------------------------------------


def _without_dispatch(func: Operation) -> Operation:
    """The Python function of torch without its dispatch to modes, so that they intercept the calls inside it."""
    scope = {**func.__globals__}
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = lambda *_: False
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_COMPOSITES = {func: _without_dispatch(func) for func in (F.multi_head_attention_forward, F.gumbel_softmax)}


def run_intercepted(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> PyTree:
    """A composite function of torch: run with the mode on, so that its random calls are intercepted."""
    with mode:
        return _COMPOSITES[func](*args, **kwargs)
