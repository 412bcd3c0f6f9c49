r"""The approximating distributions $q(\mathbf W)$ over a weight matrix: their sampling, moments and KL to the prior.

A matrix $\mathbf W$ is `[row, column]`, $Q \times K$ in the paper, and acts as $\mathbf x \mathbf W$: a row holds the
weights that leave one input unit, and $q(\mathbf W) = \prod_q q(\mathbf w_q)$ for every family
[GG16, eq:variaitonal_dist_1]. The prior is $\mathcal N(0, l^{-2} \mathbf I)$ throughout.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Bernoulli",
    "Concrete",
    "DiagonalGaussian",
    "Family",
    "Mixture",
    "kl_monte_carlo",
    "multiplicative_gaussian",
]

LOG_2_PI = math.log(2 * math.pi)


class Family(ABC):
    r"""A distribution $q(\mathbf W) = \prod_q q(\mathbf w_q)$ over a matrix of `[row, column]`."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        r"""$\mathbb E_q[\mathbf W]$, `[row, column]`."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        r"""The variance of each element of $\mathbf W$, `[row, column]`."""

    @abstractmethod
    def sample(self, *n: int, generator: torch.Generator | None = None) -> Tensor:
        r"""Draws of $\mathbf W$ by the family's reparametrisation, `[*n, row, column]`."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        r"""$\mathbf x_n \mathbf W_n$ with a distinct draw $\mathbf W_n$ for every row $n$ of `x`, `[n, column]`.

        Exact in distribution and without the matrices: given its discrete choices a product is Gaussian, and is drawn
        as such (the local reparametrisation of Kingma, Salimans and Welling 2015).
        """

    @abstractmethod
    def kl(self, length_scale: float) -> Tensor:
        r"""$\mathrm{KL}(q \,\|\, \mathcal N(0, l^{-2} \mathbf I))$, a scalar."""

    @abstractmethod
    def at(self, rows: Tensor) -> Family:
        """The same family for the chosen rows of the matrix (a lookup in an embedding table)."""


def _check_probability(name: str, value: float | Tensor) -> None:
    inside = bool(((value > 0) & (value <= 1)).all()) if isinstance(value, Tensor) else 0 < value <= 1
    if not inside:
        raise ValueError(f"`{name}` must lie in (0, 1]; got {value!r}.")


def _check_std(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"`{name}` (σ) must be a finite number, zero or more; got {value!r}.")


def _check_length_scale(value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"`length_scale` must be a positive finite number; got {value!r}.")


def _entropy(probability: Tensor) -> Tensor:
    """The entropy of a Bernoulli variable, in nats; 0 at both ends."""
    other = 1 - probability
    return -(torch.special.xlogy(probability, probability) + torch.special.xlogy(other, other))


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Family):
    r"""The Gaussian $\mathcal N(\mathbf M, \mathrm{diag}(\sigma^2))$, the paper's $q(\mathbf b)$.

    [GG16, eq:variaitonal_dist_3].

    Args:
        loc: The means $\mathbf M$, `[row, column]`.
        std: $\sigma \ge 0$ of each element, broadcast against `loc`.

    Example:
        >>> q = DiagonalGaussian(torch.zeros(2, 3), torch.ones(()))
        >>> q.kl(length_scale=1.0)
        tensor(0.)
    """

    loc: Tensor
    std: Tensor

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.std.square().expand_as(self.loc)

    def sample(self, *n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.addcmul(self.loc, self.std, _normal(self.loc, *n, *self.loc.shape, generator=generator))

    def product(self, x: Tensor) -> Tensor:
        mean, variance = x @ self.loc, x.square() @ self.variance
        return mean + _sqrt(variance) * torch.randn_like(mean)

    def kl(self, length_scale: float) -> Tensor:
        r"""$\tfrac 12 \sum (l^2 (m^2 + \sigma^2) - 1 - \log l^2\sigma^2)$, exact; infinite where $\sigma = 0$."""
        _check_length_scale(length_scale)
        scaled = length_scale * self.std.expand_as(self.loc)  # its logarithm survives where its square underflows
        return 0.5 * (length_scale**2 * self.loc.square() + scaled.square() - 1 - 2 * scaled.log()).sum()

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., row, column]`."""
        z = (value - self.loc) / self.std
        return -(0.5 * (z.square() + LOG_2_PI) + self.std.log()).sum((-2, -1))

    def at(self, rows: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(self.loc[rows], self.std.expand_as(self.loc)[rows])


def multiplicative_gaussian(loc: Tensor, noise_std: float) -> DiagonalGaussian:
    r"""The distribution of weights multiplied by $\mathcal N(1, \sigma^2)$: $\mathbf m + \mathbf m \sigma \epsilon$.

    [GG16, section "Insights"; Srivastava et al. 2014]. Every weight has its own factor, so this is the diagonal
    Gaussian $\mathcal N(m, \sigma^2 m^2)$, and its KL is exact. A weight of exactly 0 has no variance and an infinite
    KL.

    Args:
        loc: The weights $\mathbf M$, `[row, column]`.
        noise_std: $\sigma$ of the factor. $\sigma^2 = (1-p)/p$ has the variance of dropout with keep probability $p$.
    """
    _check_std("noise_std", noise_std)
    return DiagonalGaussian(loc, noise_std * loc.abs())


@dataclass(frozen=True, eq=False)
class Bernoulli(Family):
    r"""The paper's mixture $p\,\mathcal N(\mathbf m_q, \sigma^2 \mathbf I) + (1-p)\,\mathcal N(0, \sigma^2 \mathbf I)$.

    [GG16, eq:variaitonal_dist_1, eq:variaitonal_dist_2]. With $\sigma = 0$ it is dropout,
    $\mathbf W = \mathbf z \mathbf M$.

    Args:
        kept: $\mathbf M$, the weights of a unit that is kept, `[row, column]`. Torch's dropout divides by $p$, so there
            $\mathbf M$ is the stored weight over $p$.
        keep_prob: $p$ in (0, 1].
        std: $\sigma \ge 0$.

    Example:
        >>> Bernoulli(kept=torch.full((2, 1), 4.0), keep_prob=0.25).mean
        tensor([[1.],
                [1.]])
    """

    kept: Tensor
    keep_prob: float
    std: float = 0.0

    def __post_init__(self) -> None:
        _check_probability("keep_prob", self.keep_prob)
        _check_std("std", self.std)

    @property
    def mean(self) -> Tensor:
        return self.keep_prob * self.kept

    @property
    def variance(self) -> Tensor:
        return self.std**2 + self.keep_prob * (1 - self.keep_prob) * self.kept.square()

    def sample(self, *n: int, generator: torch.Generator | None = None) -> Tensor:
        r"""Draws of $\mathbf z(\mathbf M + \sigma\epsilon) + (1 - \mathbf z)\sigma\epsilon$ [GG16, eq:reparam_reg]."""
        kept = self._masks(*n, len(self.kept), 1, generator=generator) * self.kept
        if self.std == 0:
            return kept
        # Both components have the same σε: z(M + σε) + (1 - z)σε = zM + σε.
        return kept.add(_normal(self.kept, *kept.shape, generator=generator), alpha=self.std)

    def product(self, x: Tensor) -> Tensor:
        output = (x * self._masks(*x.shape)) @ self.kept
        if self.std == 0:
            return output
        return output + self.std * x.norm(dim=-1, keepdim=True) * torch.randn_like(output)

    def _masks(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand(shape, generator=generator, dtype=self.kept.dtype, device=self.kept.device)
        return (uniform < self.keep_prob).to(self.kept.dtype)

    def kl(self, length_scale: float) -> Tensor:
        r"""Proposition 1 with length-scale $l$ [GG16, prop:KL_mixture_of_Gaussians], every constant kept:

        $$\tfrac{p l^2}{2} \|\mathbf M\|^2 + \tfrac{QK}{2} (l^2\sigma^2 - 1 - \log l^2\sigma^2) - Q\,\mathcal H(p).$$

        It is a lower bound, below the exact value by `overlap()`, at most $\mathcal H(p)$ a row. With $\sigma = 0$ the
        second term, infinite and free of $\mathbf M$, is left out.
        """
        _check_length_scale(length_scale)
        entropy = len(self.kept) * _entropy(torch.tensor(self.keep_prob, dtype=torch.float64)).item()
        components = 0.0
        if self.std > 0:
            scaled = length_scale * self.std  # its logarithm survives where its square underflows
            components = 0.5 * self.kept.numel() * (scaled**2 - 1 - 2 * math.log(scaled))
        return 0.5 * self.keep_prob * length_scale**2 * self.kept.square().sum() + (components - entropy)

    def overlap(self) -> Tensor:
        r"""What proposition 1 leaves out: $\mathcal H(\mathbf z \mid \mathbf W)$, the doubt about what was dropped.

        The two components differ along $\mathbf m_q$ alone, so a row's term is an integral over one Gaussian variable,
        a function of $\|\mathbf m_q\| / \sigma$ and $p$, done here by Gauss-Hermite quadrature.
        """
        if self.std == 0 or self.keep_prob == 1:
            return self.kept.new_zeros(())
        nodes, weights = (torch.as_tensor(a).to(self.kept) for a in np.polynomial.hermite_e.hermegauss(64))
        norm = self.kept.norm(dim=1, keepdim=True)
        # Beyond 1e3 standard deviations the doubt is 0 in any precision; left in, the division could overflow.
        distance = norm[norm[:, 0] < 1e3 * self.std] / self.std
        logit = math.log(self.keep_prob) - math.log1p(-self.keep_prob)
        softplus = torch.nn.functional.softplus
        if_kept = softplus(-(logit + distance.square() / 2 + distance * nodes))
        if_dropped = softplus(logit - distance.square() / 2 + distance * nodes)
        doubt = self.keep_prob * if_kept + (1 - self.keep_prob) * if_dropped
        return (doubt @ weights).sum() / math.sqrt(2 * math.pi)

    def kl_exact(self, length_scale: float) -> Tensor:
        r"""The exact KL for $\sigma > 0$: proposition 1 plus the overlap of the two components."""
        return self.kl(length_scale) + self.overlap()

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., row, column]`; needs $\sigma > 0$."""
        if self.std == 0:
            raise ValueError(
                "`std` (σ) must be positive for a density: with σ = 0 the distribution is two point masses."
            )
        columns = self.kept.shape[1]
        constant = -columns * (0.5 * LOG_2_PI + math.log(self.std))
        kept = -0.5 * ((value - self.kept) / self.std).square().sum(-1) + math.log(self.keep_prob)
        if self.keep_prob == 1:
            return (kept + constant).sum(-1)
        dropped = -0.5 * (value / self.std).square().sum(-1) + math.log1p(-self.keep_prob)
        return (torch.logaddexp(kept, dropped) + constant).sum(-1)

    def at(self, rows: Tensor) -> Bernoulli:
        return Bernoulli(self.kept[rows], self.keep_prob, self.std)


@dataclass(frozen=True, eq=False)
class Concrete(Family):
    r"""Dropout whose drop probability is learnt, through the concrete relaxation (Gal, Hron and Kendall 2017).

    A row's draw is $(1 - \tilde d)\,\mathbf m$ with $\mathrm{logit}\,\tilde d = (\mathrm{logit}\,d + \epsilon)/t$ and
    $\epsilon$ logistic: differentiable in the drop probability $d$, and Bernoulli as $t \to 0$. Mean, variance and KL
    are those of that limit.

    Args:
        kept: $\mathbf M$, `[row, column]`.
        drop_logit: $\mathrm{logit}(1 - p)$, a scalar tensor; the logit keeps 1e-6 and 1 - 1e-6 apart from 0 and 1.
        temperature: $t > 0$; the authors take 0.1.
    """

    kept: Tensor
    drop_logit: Tensor
    temperature: float = 0.1

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"`temperature` must be positive; got {self.temperature!r}.")

    @property
    def keep_prob(self) -> Tensor:
        return torch.sigmoid(-self.drop_logit)

    @property
    def mean(self) -> Tensor:
        return self.keep_prob * self.kept

    @property
    def variance(self) -> Tensor:
        return self.keep_prob * torch.sigmoid(self.drop_logit) * self.kept.square()

    def masks(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Relaxed masks in [0, 1], one for a unit: near 1 keeps it, near 0 drops it."""
        uniform = torch.rand(shape, generator=generator, dtype=self.kept.dtype, device=self.kept.device)
        smallest = torch.finfo(uniform.dtype).tiny  # torch.rand can give 0, of which the logit is -inf
        noise = uniform.clamp_min(smallest).log() - torch.log1p(-uniform)
        return torch.sigmoid(-(self.drop_logit + noise) / self.temperature)

    def sample(self, *n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.masks(*n, len(self.kept), 1, generator=generator) * self.kept

    def product(self, x: Tensor) -> Tensor:
        return (x * self.masks(*x.shape)) @ self.kept

    def kl(self, length_scale: float) -> Tensor:
        r"""The terms of proposition 1 in $\mathbf M$ and $p$: $\tfrac{p l^2}{2} \|\mathbf M\|^2 - Q\,\mathcal H(p)$."""
        _check_length_scale(length_scale)
        # H(p) = p·softplus(s) + (1-p)·softplus(-s) with s the drop logit: exact at both ends, with a gradient.
        softplus = torch.nn.functional.softplus
        drop_prob = torch.sigmoid(self.drop_logit)
        entropy = self.keep_prob * softplus(self.drop_logit) + drop_prob * softplus(-self.drop_logit)
        return 0.5 * self.keep_prob * length_scale**2 * self.kept.square().sum() - len(self.kept) * entropy

    def at(self, rows: Tensor) -> Concrete:
        return Concrete(self.kept[rows], self.drop_logit, self.temperature)


@dataclass(frozen=True, eq=False)
class Mixture(Family):
    r"""The mixture $q(\mathbf w_q) = \sum_{i=1}^L p_i \mathcal N(\mu_{iq}, \Sigma_{iq})$ of any number of Gaussians.

    [GG16, prop:KL_mixture_of_Gaussians and section "Applications"]. $\Sigma = \mathrm{diag}(\sigma^2)$, or
    $\mathrm{diag}(\sigma^2) + \mathbf U \mathbf U^T$ with $\mathbf U$ of low rank.
    `Bernoulli` is the case $L = 2$, $\mu = (\mathbf M, 0)$.

    Args:
        probs: $p_i > 0$ with sum 1, `[component]`.
        locs: $\mu$, `[component, row, column]`.
        stds: $\sigma > 0$, broadcast against `locs`.
        factors: $\mathbf U$, `[component, row, column, rank]`, or None.
    """

    probs: Tensor
    locs: Tensor
    stds: Tensor
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        _check_probability("probs", self.probs.detach())
        if self.probs.shape != self.locs.shape[:1] or abs(float(self.probs.detach().sum()) - 1) > 1e-5:
            raise ValueError(
                f"`probs` must hold one probability per component and sum to 1; got {self.probs!r} for "
                f"{self.locs.shape[0]} components."
            )

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

    def _choices(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """The chosen component of each unit, from one uniform each."""
        uniform = torch.rand((*shape, 1), generator=generator, dtype=self.locs.dtype, device=self.locs.device)
        return (uniform >= self.probs.detach().cumsum(0)[:-1]).sum(-1)

    def sample(self, *n: int, generator: torch.Generator | None = None) -> Tensor:
        _, rows, columns = self.locs.shape
        choice, row = self._choices(*n, rows, generator=generator), torch.arange(rows, device=self.locs.device)
        stds = self.stds.expand(len(self.locs), rows, -1)[choice, row]
        draw = torch.addcmul(self.locs[choice, row], stds, _normal(self.locs, *n, rows, columns, generator=generator))
        if self.factors is None:
            return draw
        shared = _normal(self.locs, *n, rows, self.factors.shape[-1], generator=generator)
        for rank, factor in enumerate(self.factors.unbind(-1)):
            draw = torch.addcmul(draw, factor[choice, row], shared[..., rank, None])
        return draw

    def product(self, x: Tensor) -> Tensor:
        chosen = torch.nn.functional.one_hot(self._choices(*x.shape), len(self.probs)).to(x.dtype)
        chosen = (x[..., None] * chosen).movedim(-1, 0)  # component i sees the units that chose it
        mean = (chosen @ self.locs).sum(0)
        variance = (chosen.square() @ self.stds.square().expand_as(self.locs)).sum(0)
        output = mean + _sqrt(variance) * torch.randn_like(mean)
        if self.factors is None:
            return output
        shared = _normal(x, *x.shape, self.factors.shape[-1])
        return output + torch.einsum("lnq,nqr,lqkr->nk", chosen, shared, self.factors)

    def kl(self, length_scale: float) -> Tensor:
        r"""Proposition 1 with length-scale $l$ [GG16, section "Prior Length-scale"], every constant kept:

        $$\sum_q \sum_i \tfrac{p_i}{2} (l^2 \mu_i^T\mu_i + l^2 \mathrm{tr}\,\Sigma_i - K - \log|\Sigma_i|
        + K \log l^{-2}) - Q\,\mathcal H(p).$$

        A lower bound, below the exact value by at most $\mathcal H(p)$ a row.
        """
        _check_length_scale(length_scale)
        columns, rows = self.locs.shape[2], self.locs.shape[1]
        squares = length_scale**2 * (self.locs.square() + self._component_variance).sum(-1)
        divergence = 0.5 * (squares - columns - self._log_determinant() - 2 * columns * math.log(length_scale))
        entropy = -torch.special.xlogy(self.probs, self.probs).sum()
        return torch.einsum("l,lq->", self.probs, divergence) - rows * entropy

    def _log_determinant(self) -> Tensor:
        r"""$\log|\Sigma_{iq}|$, `[component, row]`: $|D + UU^T| = |D|\,|I + U^T D^{-1} U|$."""
        stds = self.stds.expand_as(self.locs)
        log_determinant = 2 * stds.log().sum(-1)
        if self.factors is None:
            return log_determinant
        scaled = self.factors / stds[..., None]
        eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
        return log_determinant + torch.linalg.slogdet(eye + scaled.mT @ scaled).logabsdet

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., row, column]`."""
        stds = self.stds.expand_as(self.locs)
        factors = self.locs.new_zeros(*self.locs.shape, 1) if self.factors is None else self.factors
        normal = torch.distributions.LowRankMultivariateNormal(self.locs, factors, stds.square())
        joint = normal.log_prob(value.unsqueeze(-3)) + self.probs.log()[:, None]
        return joint.logsumexp(-2).sum(-1)

    def at(self, rows: Tensor) -> Mixture:
        factors = None if self.factors is None else self.factors[:, rows]
        return Mixture(self.probs, self.locs[:, rows], self.stds.expand_as(self.locs)[:, rows], factors)


def kl_monte_carlo(
    q: Bernoulli | DiagonalGaussian | Mixture,
    *,
    length_scale: float,
    n_draws: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The Monte Carlo KL $\tfrac 1T \sum_t \log q(\mathbf W_t) - \log p(\mathbf W_t)$ and its standard error.

    Example:
        >>> q = DiagonalGaussian(torch.zeros(1, 2), torch.ones(()))
        >>> kl_monte_carlo(q, length_scale=1.0, n_draws=3)[0].abs() < 1e-6
        tensor(True)
    """
    _check_length_scale(length_scale)
    draws = q.sample(n_draws, generator=generator)
    prior = DiagonalGaussian(torch.zeros_like(draws[0]), torch.full_like(draws[0, :1, :1], 1 / length_scale))
    ratios = q.log_density(draws) - prior.log_density(draws)
    return ratios.mean(), ratios.std() / math.sqrt(n_draws)


def _normal(like: Tensor, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _sqrt(variance: Tensor) -> Tensor:
    """The square root with a gradient of 0, not infinity, at 0 (an input row of zeros)."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
