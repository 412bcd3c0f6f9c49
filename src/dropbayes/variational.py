r"""The approximating distributions $q(\mathbf W)$ over a weight matrix: their sampling, moments and KL to the prior.

A matrix $\mathbf W$ is `[unit, column]`, $Q \times K$ in the paper, and acts as $\mathbf x \mathbf W$: a unit of the
input owns the weights $\mathbf w_q$ that leave it, and $q(\mathbf W) = \prod_q q(\mathbf w_q)$ for every family [GG16,
eq:variaitonal_dist_1]. The prior is $\mathcal N(0, l^{-2} \mathbf I)$ throughout. What `kl` returns is exact or an
upper bound, so that a bound of the evidence made of it is one. $\sigma$ and $l$ may be scalar tensors, and are then
differentiated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dropbayes.runtime.validation import check_positive

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

SMALLEST_WEIGHT = 1e-6
r"""Multiplicative noise on a weight below this is that of a weight of this size: at 0 its KL would be infinite."""


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

        Args:
            *n: The leading axes.
            generator: The source of randomness.
            relaxed: Whether discrete choices with learned probabilities are smoothed, so that the probabilities get a
                gradient; the draws are then close to $q$'s but not its own.
        """

    @abstractmethod
    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        r"""$\mathbf x_n \mathbf W_n$ with a distinct draw $\mathbf W_n$ for every row $n$ of `x`, `[n, column]`.

        Exact in distribution and without the matrices: given its discrete choices a product is Gaussian, and is drawn
        as such (the local reparametrisation of Kingma, Salimans and Welling 2015).
        """

    @abstractmethod
    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""$\mathrm{KL}(q \,\|\, \mathcal N(0, l^{-2} \mathbf I))$, a scalar: exact, or an upper bound of it."""

    @abstractmethod
    def at(self, units: Tensor) -> Family:
        """The same family for the chosen units of the matrix (a lookup in an embedding table)."""


def _check_probability(name: str, value: float | Tensor) -> None:
    inside = bool(((value > 0) & (value <= 1)).all()) if isinstance(value, Tensor) else 0 < value <= 1
    if not inside:
        raise ValueError(f"`{name}` must lie in (0, 1]; got {value!r}.")


def _check_stds(name: str, value: Tensor, *, allow_zero: bool) -> None:
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a look at the values would break the capture, which repeats a step that was checked
    smallest = value.detach().min() if value.numel() else torch.ones(())
    if not (smallest > 0 or (allow_zero and smallest == 0)):
        rule = "zero or more" if allow_zero else "positive"
        raise ValueError(f"`{name}` (σ) must be {rule}; got {smallest.item()!r} among them.")


def _log(value: float | Tensor) -> float | Tensor:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _entropy(probability: float) -> float:
    """The entropy of a Bernoulli variable, in nats; 0 at both ends."""
    other = 1 - probability
    return -sum(p * math.log(p) for p in (probability, other) if p > 0)


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Family):
    r"""The Gaussian $\mathcal N(\mathbf M, \mathrm{diag}(\sigma^2))$, the paper's $q(\mathbf b)$.

    [GG16, eq:variaitonal_dist_3].

    Args:
        loc: The means $\mathbf M$, `[unit, column]`.
        std: $\sigma \ge 0$ of each element, broadcast against `loc`.

    Example:
        >>> q = DiagonalGaussian(torch.zeros(2, 3), torch.ones(()))
        >>> q.kl(length_scale=1.0)
        tensor(0.)
    """

    loc: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        _check_stds("std", self.std, allow_zero=True)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.std.square().expand_as(self.loc)

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        del relaxed  # nothing here is discrete
        return torch.addcmul(self.loc, self.std, _normal(self.loc, *n, *self.loc.shape, generator=generator))

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        del relaxed
        mean, variance = x @ self.loc, x.square() @ self.variance
        return mean + _sqrt(variance) * torch.randn_like(mean)

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""$\tfrac 12 \sum (l^2 (m^2 + \sigma^2) - 1 - \log l^2\sigma^2)$, exact; infinite where $\sigma = 0$."""
        check_positive("length_scale", length_scale)
        scaled = length_scale * self.std.expand_as(self.loc)  # its logarithm survives where its square underflows
        return 0.5 * (length_scale**2 * self.loc.square() + scaled.square() - 1 - 2 * scaled.log()).sum()

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., unit, column]`."""
        z = (value - self.loc) / self.std
        return -(0.5 * (z.square() + LOG_2_PI) + self.std.log()).sum((-2, -1))

    def at(self, units: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(self.loc[units], self.std.expand_as(self.loc)[units])


def multiplicative_gaussian(loc: Tensor, noise_std: float | Tensor) -> DiagonalGaussian:
    r"""The distribution of weights multiplied by $\mathcal N(1, \sigma^2)$: $\mathbf m + \mathbf m \sigma \epsilon$.

    [GG16, section "Insights"; Srivastava et al. 2014]. Every weight has its own factor, so this is the diagonal
    Gaussian $\mathcal N(m, \sigma^2 m^2)$, and its KL is exact. It is infinite at $m = 0$; the deviation here is
    $\sigma\sqrt{m^2 + 10^{-12}}$, in draws and KL alike, so that a weight of 0 costs much but finitely.

    Args:
        loc: The weights $\mathbf M$, `[unit, column]`.
        noise_std: $\sigma$ of the factor. $\sigma^2 = (1-p)/p$ has the variance of dropout with keep probability $p$.
    """
    check_positive("noise_std", noise_std, allow_zero=True)
    return DiagonalGaussian(loc, noise_std * (loc.square() + SMALLEST_WEIGHT**2).sqrt())


@dataclass(frozen=True, eq=False)
class Bernoulli(Family):
    r"""The paper's mixture $p\,\mathcal N(\mathbf m_q, \sigma^2 \mathbf I) + (1-p)\,\mathcal N(0, \sigma^2 \mathbf I)$.

    [GG16, eq:variaitonal_dist_1, eq:variaitonal_dist_2]. With $\sigma = 0$ it is dropout,
    $\mathbf W = \mathbf z \mathbf M$.

    Args:
        kept: $\mathbf M$, the weights of a unit that is kept, `[unit, column]`. Torch's dropout divides by $p$, so
            there $\mathbf M$ is the stored weight over $p$.
        keep_prob: $p$ in (0, 1]. To learn it, take `Concrete`.
        std: $\sigma \ge 0$, a number or a scalar tensor.

    Example:
        >>> Bernoulli(kept=torch.full((2, 1), 4.0), keep_prob=0.25).mean
        tensor([[1.],
                [1.]])
    """

    kept: Tensor
    keep_prob: float
    std: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.keep_prob, Tensor):
            raise TypeError("`keep_prob` must be a number; got a tensor. A learned keep probability is `Concrete`.")
        _check_probability("keep_prob", self.keep_prob)
        check_positive("std", self.std, allow_zero=not isinstance(self.std, Tensor))

    @property
    def is_dropout(self) -> bool:
        r"""Whether $\sigma = 0$: two point masses per unit."""
        return not isinstance(self.std, Tensor) and self.std == 0

    @property
    def mean(self) -> Tensor:
        return self.keep_prob * self.kept

    @property
    def variance(self) -> Tensor:
        return self.std**2 + self.keep_prob * (1 - self.keep_prob) * self.kept.square()

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        r"""Draws of $\mathbf z(\mathbf M + \sigma\epsilon) + (1 - \mathbf z)\sigma\epsilon$ [GG16, eq:reparam_reg]."""
        del relaxed  # the probability is fixed
        kept = self._masks(*n, len(self.kept), 1, generator=generator) * self.kept
        if self.is_dropout:
            return kept
        # Both components have the same σε: z(M + σε) + (1 - z)σε = zM + σε.
        return kept + self.std * _normal(self.kept, *kept.shape, generator=generator)

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        del relaxed
        output = (x * self._masks(*x.shape)) @ self.kept
        if self.is_dropout:
            return output
        return output + self.std * x.norm(dim=-1, keepdim=True) * torch.randn_like(output)

    def _masks(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        return (_uniform(self.kept, *shape, generator=generator) < self.keep_prob).to(self.kept.dtype)

    def kl_separated(self, length_scale: float | Tensor) -> Tensor:
        r"""Proposition 1 with length-scale $l$ [GG16, prop:KL_mixture_of_Gaussians], every constant kept:

        $$\tfrac{p l^2}{2} \|\mathbf M\|^2 + \tfrac{QK}{2} (l^2\sigma^2 - 1 - \log l^2\sigma^2) - Q\,\mathcal H(p).$$

        A *lower* bound of the KL, below it by `overlap()`. With $\sigma = 0$ the KL is infinite (Hron, Matthews and
        Ghahramani 2018), by terms that contain neither $\mathbf M$ nor $p$ nor $l$: $-QK(\log\sigma + \tfrac12)$ is
        left out.
        """
        check_positive("length_scale", length_scale)
        if self.is_dropout:
            per_weight = -_log(length_scale)
        else:
            scaled = length_scale * self.std  # its logarithm survives where its square underflows
            per_weight = 0.5 * (scaled**2 - 1) - _log(scaled)
        constant = self.kept.numel() * per_weight - len(self.kept) * _entropy(self.keep_prob)
        return 0.5 * self.keep_prob * length_scale**2 * self.kept.square().sum() + constant

    def overlap(self) -> Tensor:
        r"""What proposition 1 leaves out: $\mathcal H(\mathbf z \mid \mathbf W)$, the doubt about what was dropped.

        The two components differ along $\mathbf m_q$ alone, so a unit's term is an integral over one Gaussian variable,
        a function of $\|\mathbf m_q\| / \sigma$ and $p$, done here by Gauss-Hermite quadrature.
        """
        if self.is_dropout or self.keep_prob == 1:
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

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""The exact KL: proposition 1 plus the overlap of the two components; see `kl_separated` for $\sigma = 0$."""
        return self.kl_separated(length_scale) + self.overlap()

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., unit, column]`; needs $\sigma > 0$."""
        if self.is_dropout:
            raise ValueError(
                "`std` (σ) must be positive for a density: with σ = 0 the distribution is two point masses."
            )
        columns = self.kept.shape[1]
        constant = -columns * (0.5 * LOG_2_PI + _log(self.std))
        kept = -0.5 * ((value - self.kept) / self.std).square().sum(-1) + math.log(self.keep_prob)
        if self.keep_prob == 1:
            return (kept + constant).sum(-1)
        dropped = -0.5 * (value / self.std).square().sum(-1) + math.log1p(-self.keep_prob)
        return (torch.logaddexp(kept, dropped) + constant).sum(-1)

    def at(self, units: Tensor) -> Bernoulli:
        return Bernoulli(self.kept[units], self.keep_prob, self.std)


@dataclass(frozen=True, eq=False)
class Concrete(Family):
    r"""Dropout whose drop probability is learned, by a relaxed Bernoulli mask (Gal, Hron and Kendall 2017).

    A unit's relaxed draw is $(1 - \tilde d)\,\mathbf m$ with $\mathrm{logit}\,\tilde d = (\mathrm{logit}\,d +
    \epsilon)/t$ and $\epsilon$ logistic: differentiable in the drop probability $d$, and $\tilde d$ tends to a
    Bernoulli variable as $t \to 0$. Draws that are not relaxed are dropout itself, and `mean` and `variance` are
    theirs: at $t = 0.1$ and $d = 0.1$ a relaxed mask has 0.9 of the variance.

    Args:
        kept: $\mathbf M$, `[unit, column]`.
        drop_logit: $\mathrm{logit}\,d$, a scalar.
        temperature: $t > 0$; the authors take 0.1.
    """

    kept: Tensor
    drop_logit: Tensor
    temperature: float = 0.1

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    @property
    def keep_prob(self) -> Tensor:
        return torch.sigmoid(-self.drop_logit)

    @property
    def mean(self) -> Tensor:
        return self.keep_prob * self.kept

    @property
    def variance(self) -> Tensor:
        return self.keep_prob * torch.sigmoid(self.drop_logit) * self.kept.square()

    def masks(self, *shape: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        """Masks of units: 1 keeps a unit, 0 drops it; anything between when `relaxed`."""
        uniform = _uniform(self.kept, *shape, generator=generator)
        if not relaxed:
            return (uniform < self.keep_prob).to(self.kept.dtype)
        smallest = torch.finfo(uniform.dtype).tiny  # torch.rand can give 0, of which the logit is -inf
        noise = uniform.clamp_min(smallest).log() - torch.log1p(-uniform)
        return torch.sigmoid(-(self.drop_logit + noise) / self.temperature).to(self.kept.dtype)

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        return self.masks(*n, len(self.kept), 1, generator=generator, relaxed=relaxed) * self.kept

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        return (x * self.masks(*x.shape, relaxed=relaxed)) @ self.kept

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""That of `Bernoulli` with $\sigma = 0$: $\tfrac{p l^2}{2} \|\mathbf M\|^2 - QK \log l - Q\,\mathcal H(p)$."""
        check_positive("length_scale", length_scale)
        # H(p) = p·softplus(s) + (1-p)·softplus(-s) with s the drop logit: exact at both ends, with a gradient.
        softplus = torch.nn.functional.softplus
        drop_prob = torch.sigmoid(self.drop_logit)
        entropy = self.keep_prob * softplus(self.drop_logit) + drop_prob * softplus(-self.drop_logit)
        constant = -self.kept.numel() * _log(length_scale)
        return 0.5 * self.keep_prob * length_scale**2 * self.kept.square().sum() - len(self.kept) * entropy + constant

    def at(self, units: Tensor) -> Concrete:
        return Concrete(self.kept[units], self.drop_logit, self.temperature)


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
        _check_probability("probs", self.probs.detach())
        _check_stds("stds", self.stds, allow_zero=False)
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

    def _choices(self, *shape: int, generator: torch.Generator | None, relaxed: bool) -> Tensor:
        """The component of each unit; when `relaxed` the weights of all on a last axis, near one-hot."""
        if relaxed:
            uniform = _uniform(self.locs, *shape, len(self.probs), generator=generator)
            gumbel = -torch.log(-torch.log(uniform.clamp(torch.finfo(uniform.dtype).tiny, 1 - 2**-24)))
            return ((self.probs.log() + gumbel) / self.temperature).softmax(-1).to(self.locs.dtype)
        # One uniform for each unit, so that a sampler can stratify the choice.
        uniform = _uniform(self.locs, *shape, 1, generator=generator)
        return (uniform >= self.probs.detach().cumsum(0)[:-1]).sum(-1)

    def _mixed(self, choices: Tensor, parameter: Tensor) -> Tensor:
        """A parameter `[component, unit, column]` of each unit's component, or its mean under relaxed weights."""
        if choices.is_floating_point():
            return torch.einsum("...ql,lqk->...qk", choices, parameter)
        return parameter[choices, torch.arange(parameter.shape[1], device=parameter.device)]

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        _, units, columns = self.locs.shape
        choices = self._choices(*n, units, generator=generator, relaxed=relaxed)
        stds = self.stds.expand(len(self.locs), units, self.stds.shape[-1])
        std = self._mixed(choices, stds.square()).sqrt() if relaxed else self._mixed(choices, stds)
        noise = _normal(self.locs, *n, units, columns, generator=generator)
        draw = torch.addcmul(self._mixed(choices, self.locs), std, noise)
        if self.factors is None:
            return draw
        shared = _normal(self.locs, *n, units, self.factors.shape[-1], generator=generator)
        for rank, factor in enumerate(self.factors.unbind(-1)):
            draw = torch.addcmul(draw, self._mixed(choices, factor), shared[..., rank, None])
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
        output = mean + _sqrt(variance) * torch.randn_like(mean)
        if self.factors is None:
            return output
        shared = _normal(x, *x.shape, self.factors.shape[-1])
        return output + torch.einsum("lnq,nqr,lqkr->nk", chosen, shared, self.factors)

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""The upper bound $\sum_q \sum_i p_i \mathrm{KL}(\mathcal N(\mu_{iq}, \Sigma_{iq}) \| p)$, by convexity.

        Above the exact value by at most $\mathcal H(p)$ per unit, which components that do not overlap reach.
        """
        check_positive("length_scale", length_scale)
        columns = self.locs.shape[2]
        squares = length_scale**2 * (self.locs.square() + self._component_variance).sum(-1)
        divergence = 0.5 * (squares - columns - self._log_determinant()) - columns * _log(length_scale)
        return torch.einsum("l,lq->", self.probs, divergence)

    def kl_separated(self, length_scale: float | Tensor) -> Tensor:
        r"""Proposition 1 with length-scale $l$ [GG16, section "Prior Length-scale"], every constant kept:

        $$\sum_q \sum_i \tfrac{p_i}{2} (l^2 \mu_i^T\mu_i + l^2 \mathrm{tr}\,\Sigma_i - K - \log|\Sigma_i|
        + K \log l^{-2}) - Q\,\mathcal H(p).$$

        A *lower* bound, below the exact value by at most $\mathcal H(p)$ per unit.
        """
        entropy = -torch.special.xlogy(self.probs, self.probs).sum()
        return self.kl(length_scale) - self.locs.shape[1] * entropy

    def kl_sampled(
        self, length_scale: float | Tensor, *, n_draws: int = 1, generator: torch.Generator | None = None
    ) -> Tensor:
        r"""An unbiased estimate of the KL, $\sum_i p_i \tfrac 1T \sum_t \log q(\mathbf w_{it}) / p(\mathbf w_{it})$.

        With $\mathbf w_{it}$ drawn from component $i$: no choice is drawn, so the estimate has the gradient of the KL
        in the probabilities too.
        """
        check_positive("length_scale", length_scale)
        noise = _normal(self.locs, n_draws, *self.locs.shape, generator=generator)
        draws = torch.addcmul(self.locs, self.stds.expand_as(self.locs), noise)  # [draw, component, unit, column]
        if self.factors is not None:
            shared = _normal(self.locs, n_draws, *self.locs.shape[:2], self.factors.shape[-1], generator=generator)
            draws = draws + torch.einsum("lqkr,tlqr->tlqk", self.factors, shared)
        columns = self.locs.shape[2]
        log_prior = columns * (_log(length_scale) - 0.5 * LOG_2_PI) - 0.5 * (length_scale * draws).square().sum(-1)
        return torch.einsum("l,tlq->", self.probs, self._unit_log_density(draws) - log_prior) / n_draws

    def _log_determinant(self) -> Tensor:
        r"""$\log|\Sigma_{iq}|$, `[component, unit]`: $|D + UU^T| = |D|\,|I + U^T D^{-1} U|$."""
        stds = self.stds.expand_as(self.locs)
        log_determinant = 2 * stds.log().sum(-1)
        if self.factors is None:
            return log_determinant
        scaled = self.factors / stds[..., None]
        eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
        return log_determinant + torch.linalg.slogdet(eye + scaled.mT @ scaled).logabsdet

    def _unit_log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf w_q)$ of `[..., unit, column]`, `[..., unit]`."""
        stds = self.stds.expand_as(self.locs)
        factors = self.locs.new_zeros(*self.locs.shape, 1) if self.factors is None else self.factors
        normal = torch.distributions.LowRankMultivariateNormal(self.locs, factors, stds.square())
        return (normal.log_prob(value.unsqueeze(-3)) + self.probs.log()[:, None]).logsumexp(-2)

    def log_density(self, value: Tensor) -> Tensor:
        r"""$\log q(\mathbf W)$ of `[..., unit, column]`."""
        return self._unit_log_density(value).sum(-1)

    def at(self, units: Tensor) -> Mixture:
        factors = None if self.factors is None else self.factors[:, units]
        stds = self.stds.expand_as(self.locs)[:, units]
        return Mixture(self.probs, self.locs[:, units], stds, factors, self.temperature)


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
    check_positive("length_scale", length_scale)
    draws = q.sample(n_draws, generator=generator)
    prior = DiagonalGaussian(torch.zeros_like(draws[0]), torch.full_like(draws[0, :1, :1], 1 / length_scale))
    ratios = q.log_density(draws) - prior.log_density(draws)
    return ratios.mean(), ratios.std() / math.sqrt(n_draws)


def _normal(like: Tensor, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _uniform(like: Tensor, *shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Uniforms of at least float32: those of bfloat16 come in steps of 1/256, and would never drop with 1 in 1000."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.rand(shape, generator=generator, dtype=dtype, device=like.device)


def _sqrt(variance: Tensor) -> Tensor:
    """The square root with a gradient of 0, not infinity, at 0 (an input row of zeros)."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
