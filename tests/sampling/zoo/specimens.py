"""What a specimen is: a network that is random by one mechanism, and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Specimen:
    make: Callable[[], tuple[nn.Module, Any]]
    raw: bool = False  # draws bare random numbers, so no mask can be left out
    always: bool = False  # random in evaluation, too
    row_axis: int = 0


ZOO: dict[str, Specimen] = {}


def specimen(**traits: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        ZOO[make.__name__] = Specimen(make, **traits)
        return make

    return register


def flat(n: int = 4, width: int = 6) -> Tensor:
    return torch.randn(n, width)


class Module(nn.Module):
    """A module around a function of itself and its input."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def build(name: str) -> tuple[nn.Module, Any]:
    """The specimen with fixed weights and inputs, in evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        net, x = ZOO[name].make()
    return net.eval(), x
