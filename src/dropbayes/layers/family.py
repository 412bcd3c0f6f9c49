r"""The approximating distributions $q(\mathbf W)$ over a weight matrix: their interface and common formulas.

A matrix $\mathbf W$ is `[unit, column]`, $Q \times K$ in the paper, and acts as $\mathbf x \mathbf W$: a unit of the
input owns the weights $\mathbf w_q$ that leave it, and $q(\mathbf W) = \prod_q q(\mathbf w_q)$ for every family [GG16,
eq:variaitonal_dist_1]. The prior is $\mathcal N(0, l^{-2} \mathbf I)$ throughout. `kl` is exact or an upper
bound, so that the evidence lower bound computed from it remains a bound. $\sigma$ and $l$ may be scalar tensors, and
are then differentiated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

LOG_2_PI = math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Family(ABC):
    r"""A distribution $q(\mathbf W) = \prod_q q(\mathbf w_q)$ over a matrix of `[unit, column]`."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        r"""$\mathbb E_q[\mathbf W]$, `[unit, column]`."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        r"""The variance of each element of $\mathbf W$, `[unit, column]`."""

    @abstractmethod
    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        r"""Draws of $\mathbf W$ by the family's reparametrisation, `[*n, unit, column]`.

        When `relaxed`, discrete choices with learned probabilities are smoothed, so that the probabilities get a
        gradient; the draws are then only approximately from $q$.
        """

    @abstractmethod
    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        r"""$\mathbf x_n \mathbf W_n$ with a distinct draw $\mathbf W_n$ for every row $n$ of `x`, `[n, column]`.

        Exact in distribution, without forming the matrices: given its discrete choices a product is Gaussian and is
        drawn directly (the local reparametrisation of Kingma, Salimans and Welling 2015).
        """

    @abstractmethod
    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""$\mathrm{KL}(q \,\|\, \mathcal N(0, l^{-2} \mathbf I))$, a scalar: exact or an upper bound."""

    @abstractmethod
    def at(self, units: Tensor) -> Family:
        """The same family for the chosen units of the matrix (a lookup in an embedding table)."""

    def in_full_precision(self) -> Self:
        """The same distribution with half-precision parameters as float32: its KL sums over all weights."""
        parameters = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: in_full_precision(value) for name, value in parameters.items()})


def check_stds(name: str, value: Tensor, *, allow_zero: bool) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` (σ) must be a tensor; got {value!r}. Pass torch.tensor({name}).")
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # reading values would break the capture, which repeats a checked step
    smallest = value.detach().min() if value.numel() else torch.ones(())
    if not (smallest > 0 or (allow_zero and smallest == 0)):
        rule = "zero or more" if allow_zero else "positive"
        raise ValueError(f"`{name}` (σ) must be {rule}; got {smallest.item()!r} among them.")


def log(value: float | Tensor) -> float | Tensor:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def binary_entropy(probability: float) -> float:
    """The entropy of a Bernoulli variable, in nats; 0 at both ends."""
    return -sum(p * math.log(p) for p in (probability, 1 - probability) if p > 0)


def in_full_precision(value: Tensor) -> Tensor:
    """The tensor in float32 or better: a sum of a million squares overflows float16 and loses digits in bfloat16."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def normal_like(like: Tensor, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def uniform_like(like: Tensor, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Uniforms of at least float32: bfloat16 has steps of 1/256, and would never drop with probability 1/1000."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.rand(shape, generator=generator, dtype=dtype, device=like.device)


def safe_sqrt(square: Tensor) -> Tensor:
    """The square root; 0 with a subgradient of 0, not infinity, where the square is 0 or rounded to below it."""
    return square.masked_fill(square <= 0, 1.0).sqrt().masked_fill(square <= 0, 0.0)
