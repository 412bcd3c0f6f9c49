"""Where the randomness of a network comes from while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Handlers", "RandomMode", "RandomSource", "scaled_product"]

Handlers = dict[Callable[..., Any], Callable[..., Any]]
"""What replaces each stochastic operation: a function of the mode, the operation and its arguments."""


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

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
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


class RandomMode(TorchFunctionMode):
    """A mode of torch with a source of randomness, from which the handlers of stochastic operations draw."""

    def __init__(self, source: RandomSource) -> None:
        super().__init__()
        self.source = source


def scaled_product(x: Tensor, keep: Tensor, drop_prob: float, inplace: bool = False) -> Tensor:
    """`x * keep / (1 - drop_prob)`; 0 if `drop_prob` is 1."""
    factor = keep * (1 / (1 - drop_prob)) if drop_prob < 1 else keep
    return x.mul_(factor) if inplace and not isinstance(x, nn.Parameter) else x * factor
