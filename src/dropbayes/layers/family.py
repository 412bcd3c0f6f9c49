r"""The approximating distributions $q(\mathbf W)$ over a weight matrix: their interface, Gaussians and mixtures.

A matrix $\mathbf W$ is `[unit, column]`, $Q \times K$ in the paper, and acts as $\mathbf x \mathbf W$: a unit of the
input owns the weights $\mathbf w_q$ that leave it, and $q(\mathbf W) = \prod_q q(\mathbf w_q)$ for every family [GG16,
eq:variaitonal_dist_1]. The prior is $\mathcal N(0, l^{-2} \mathbf I)$ throughout. `kl` is exact or an upper
bound, so that the evidence lower bound computed from it remains a bound. $\sigma$ and $l$ may be scalar tensors, and
are then differentiated.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dropbayes.runtime.validation import check_positive, check_type


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
    def at(self, units: Tensor) -> Self:
        """The same family for the chosen units of the matrix (a lookup in an embedding table)."""

    def in_full_precision(self) -> Self:
        """The same distribution with half-precision parameters as float32: its KL sums over all weights."""
        parameters = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: in_full_precision(value) for name, value in parameters.items()})


def check_stds(name: str, value: Tensor, *, allow_zero: bool) -> None:
    check_type(name, value, Tensor, f"be a tensor of σ: torch.tensor({name})")
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # reading values would break the capture, which repeats a checked step
    smallest = value.detach().min() if value.numel() else torch.ones(())
    if not (smallest > 0 or (allow_zero and smallest == 0)):
        rule = "zero or more" if allow_zero else "positive"
        raise ValueError(f"`{name}` (σ) must be {rule}; got {smallest.item()!r} among them.")


def log(value: float | Tensor) -> float | Tensor:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def is_zero(value: float | Tensor) -> bool:
    """Whether a scale is the number 0. One that is learned, a tensor, is positive: its value is not read."""
    return not isinstance(value, Tensor) and value == 0


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


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Family):
    r"""The Gaussian $\mathcal N(\mathbf M, \mathrm{diag}(\sigma^2))$, the paper's $q(\mathbf b)$.

    [GG16, eq:variaitonal_dist_3], with $\sigma \ge 0$ of each element, broadcast against `loc`, `[unit, column]`.

    Example:
        >>> q = DiagonalGaussian(torch.zeros(2, 3), torch.ones(()))
        >>> q.kl(length_scale=1.0)
        tensor(0.)
    """

    loc: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        check_stds("std", self.std, allow_zero=True)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.std.square().expand_as(self.loc)

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        return torch.addcmul(self.loc, self.std, normal_like(self.loc, *n, *self.loc.shape, generator=generator))

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        mean, variance = x @ self.loc, x.square() @ self.variance
        return mean + safe_sqrt(variance) * torch.randn_like(mean)

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""$\tfrac 12 \sum (l^2 (m^2 + \sigma^2) - 1 - \log l^2\sigma^2)$, exact; infinite where $\sigma = 0$."""
        check_positive("length_scale", length_scale)
        scaled = length_scale * self.std.expand_as(self.loc)  # its logarithm is finite where its square underflows
        return 0.5 * (length_scale**2 * self.loc.square() + scaled.square() - 1 - 2 * scaled.log()).sum()

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., unit, column]`."""
        return torch.distributions.Normal(self.loc, self.std).log_prob(value).sum((-2, -1))

    def at(self, units: Tensor) -> Self:
        return replace(self, loc=self.loc[units], std=self.std.expand_as(self.loc)[units])


def multiplicative_gaussian(loc: Tensor, noise_std: float | Tensor) -> DiagonalGaussian:
    r"""The distribution of weights multiplied by $\mathcal N(1, \sigma^2)$: $\mathbf m + \mathbf m \sigma \epsilon$.

    [GG16, section "Insights"; Srivastava et al. 2014]. Every weight has its own factor, so this is the diagonal
    Gaussian $\mathcal N(m, \sigma^2 m^2)$, and its KL is exact. It is infinite at $m = 0$; the deviation here is
    $\sigma\sqrt{m^2 + 10^{-12}}$, in draws and KL alike, so that a weight of 0 costs much but finitely. A `noise_std`
    of $\sigma^2 = (1-p)/p$ has the variance of dropout with keep probability $p$.
    """
    check_positive("noise_std", noise_std, allow_zero=True)
    return DiagonalGaussian(loc, noise_std * (loc.square() + 1e-12).sqrt())


@dataclass(frozen=True, eq=False)
class Mixture(Family):
    r"""The mixture $q(\mathbf w_q) = \sum_{i=1}^L p_i \mathcal N(\mu_{iq}, \Sigma_{iq})$ of any number of Gaussians.

    [GG16, prop:KL_mixture_of_Gaussians and section "Applications"]. $\Sigma = \mathrm{diag}(\sigma^2)$, or
    $\mathrm{diag}(\sigma^2) + \mathbf U \mathbf U^T$ with $\mathbf U$ of low rank.
    `Bernoulli` is the case $L = 2$, $\mu = (\mathbf M, 0)$. A relaxed draw mixes the components' means, variances and
    factors with weights from a Gumbel-softmax (Jang, Gu and Poole 2017; Maddison, Mnih and Teh 2017), through which the
    probabilities get their gradient.

    Args:
        probs: $p_i > 0$ with sum 1, `[component]`.
        locs: $\mu$, `[component, unit, column]`.
        stds: $\sigma > 0$, broadcast against `locs`.
        factors: $\mathbf U$, `[component, unit, column, rank]`, or None.
        temperature: $t > 0$ of relaxed draws.
    """

    probs: Tensor
    locs: Tensor
    stds: Tensor
    factors: Tensor | None = None
    temperature: float = 0.1

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        check_stds("stds", self.stds, allow_zero=False)
        probs = self.probs.detach()
        if probs.shape != self.locs.shape[:1] or not bool((probs > 0).all()) or abs(float(probs.sum()) - 1) > 1e-5:
            got = f"{self.probs!r} for {self.locs.shape[0]} components"
            raise ValueError(f"`probs` must hold one positive probability per component and sum to 1; got {got}.")

    @property
    def _component_variance(self) -> Tensor:
        diagonal = self.stds.square().expand_as(self.locs)
        return diagonal if self.factors is None else diagonal + self.factors.square().sum(-1)

    @property
    def mean(self) -> Tensor:
        return torch.einsum("l,lqk->qk", self.probs, self.locs)

    @property
    def variance(self) -> Tensor:
        return torch.einsum("l,lqk->qk", self.probs, self._component_variance + (self.locs - self.mean).square())

    def _choices(self, *shape: int, generator: torch.Generator | None, relaxed: bool) -> Tensor:
        """The component of each unit; when `relaxed` the weights of all on a last axis, nearly one-hot."""
        if relaxed:
            uniform = uniform_like(self.locs, *shape, len(self.probs), generator=generator)
            gumbel = -torch.log(-torch.log(uniform.clamp(torch.finfo(uniform.dtype).tiny, 1 - 2**-24)))
            return ((self.probs.log() + gumbel) / self.temperature).softmax(-1).to(self.locs.dtype)
        # One uniform for each unit, so that a sampler can stratify the choice.
        uniform = uniform_like(self.locs, *shape, 1, generator=generator)
        return (uniform >= self.probs.detach().cumsum(0)).sum(-1).clamp(max=len(self.probs) - 1)  # the sum is rounded

    def _component_parameter(self, choices: Tensor, parameter: Tensor) -> Tensor:
        """A parameter `[component, unit, column]` of each unit's component, or its mean under relaxed weights."""
        if choices.is_floating_point():
            return torch.einsum("...ql,lqk->...qk", choices, parameter)
        return parameter[choices, torch.arange(parameter.shape[1], device=parameter.device)]

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        _, units, columns = self.locs.shape
        choices = self._choices(*n, units, generator=generator, relaxed=relaxed)
        stds = self.stds.expand(len(self.locs), units, self.stds.shape[-1] if self.stds.dim() else 1)
        std = self._component_parameter(choices, stds.square()).sqrt()  # a relaxed choice mixes variances
        noise = normal_like(self.locs, *n, units, columns, generator=generator)
        draw = torch.addcmul(self._component_parameter(choices, self.locs), std, noise)
        if self.factors is None:
            return draw
        shared = normal_like(self.locs, *n, units, self.factors.shape[-1], generator=generator)
        for rank, factor in enumerate(self.factors.unbind(-1)):
            draw = torch.addcmul(draw, self._component_parameter(choices, factor), shared[..., rank, None])
        return draw

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        if x.dim() == 1:
            return self.product(x[None], relaxed=relaxed)[0]
        choices = self._choices(*x.shape, generator=None, relaxed=relaxed)
        if not relaxed:
            choices = torch.nn.functional.one_hot(choices, len(self.probs)).to(self.locs.dtype)
        choices = choices.movedim(-1, 0)
        chosen = x * choices  # component i sees the units that chose it
        mean = (chosen @ self.locs).sum(0)
        variance = ((x.square() * choices) @ self.stds.square().expand_as(self.locs)).sum(0)
        output = mean + safe_sqrt(variance) * torch.randn_like(mean)
        if self.factors is None:
            return output
        shared = normal_like(x, *x.shape, self.factors.shape[-1])
        return output + torch.einsum("lnq,nqr,lqkr->nk", chosen, shared, self.factors)

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""The upper bound $\sum_q \sum_i p_i \mathrm{KL}(\mathcal N(\mu_{iq}, \Sigma_{iq}) \| p)$, by convexity.

        Above the exact value by at most $\mathcal H(p)$ per unit, attained when the components do not overlap.
        """
        check_positive("length_scale", length_scale)
        columns = self.locs.shape[2]
        squares = length_scale**2 * (self.locs.square() + self._component_variance).sum(-1)
        stds = self.stds.expand_as(self.locs)
        log_determinant = 2 * stds.log().sum(-1)
        if self.factors is not None:  # |D + UUᵀ| = |D| |I + Uᵀ D⁻¹ U|
            scaled = self.factors / stds[..., None]
            eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
            log_determinant = log_determinant + torch.linalg.slogdet(eye + scaled.mT @ scaled).logabsdet
        divergence = 0.5 * (squares - columns - log_determinant) - columns * log(length_scale)
        return torch.einsum("l,lq->", self.probs, divergence)

    def kl_separated(self, length_scale: float | Tensor) -> Tensor:
        r"""Proposition 1 with length-scale $l$ [GG16, section "Prior Length-scale"], every constant kept:

        $$\sum_q \sum_i \tfrac{p_i}{2} (l^2 \mu_i^T\mu_i + l^2 \mathrm{tr}\,\Sigma_i - K - \log|\Sigma_i|
        + K \log l^{-2}) - Q\,\mathcal H(p).$$

        A *lower* bound, below the exact value by at most $\mathcal H(p)$ per unit.
        """
        return self.kl(length_scale) - self.locs.shape[1] * torch.special.entr(self.probs).sum()

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., unit, column]`."""
        stds = self.stds.expand_as(self.locs)
        factors = self.locs.new_zeros(*self.locs.shape, 1) if self.factors is None else self.factors
        normal = torch.distributions.LowRankMultivariateNormal(self.locs, factors, stds.square())
        by_component = normal.log_prob(value.unsqueeze(-3)) + self.probs.log()[:, None]
        return by_component.logsumexp(-2).sum(-1)

    def at(self, units: Tensor) -> Self:
        factors = None if self.factors is None else self.factors[:, units]
        stds = self.stds.expand_as(self.locs)[:, units]
        return replace(self, locs=self.locs[:, units], stds=stds, factors=factors)
