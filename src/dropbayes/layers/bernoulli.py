r"""Dropout as a distribution over weights: with a fixed drop probability, and with a learned one."""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from dropbayes.layers.family import DiagonalGaussian, Family, binary_entropy, is_zero, log, normal_like, uniform_like
from dropbayes.runtime.validation import check_keep_prob, check_positive


@dataclass(frozen=True, eq=False)
class Bernoulli(Family):
    r"""The paper's mixture $p\,\mathcal N(\mathbf m_q, \sigma^2 \mathbf I) + (1-p)\,\mathcal N(0, \sigma^2 \mathbf I)$.

    [GG16, eq:variaitonal_dist_1, eq:variaitonal_dist_2]. With $\sigma = 0$ it is dropout,
    $\mathbf W = \mathbf z \mathbf M$.

    Args:
        kept: $\mathbf M$, the weights of a unit that is kept, `[unit, column]`. Torch's dropout divides by $p$, so
            there $\mathbf M$ is the stored weight over $p$.
        keep_prob: $p$ in (0, 1]. To learn it, use `Concrete`.
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
        check_keep_prob(self.keep_prob)
        check_positive("std", self.std, allow_zero=not isinstance(self.std, Tensor))

    @property
    def is_dropout(self) -> bool:
        r"""Whether $\sigma = 0$: two point masses per unit."""
        return is_zero(self.std)

    @property
    def mean(self) -> Tensor:
        return self.keep_prob * self.kept

    @property
    def variance(self) -> Tensor:
        return self.std**2 + self.keep_prob * (1 - self.keep_prob) * self.kept.square()

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        r"""Draws of $\mathbf z(\mathbf M + \sigma\epsilon) + (1 - \mathbf z)\sigma\epsilon$ [GG16, eq:reparam_reg]."""
        masked = self._masks(*n, len(self.kept), 1, generator=generator) * self.kept
        if self.is_dropout:
            return masked
        # Both components have the same σε: z(M + σε) + (1 - z)σε = zM + σε.
        return masked + self.std * normal_like(self.kept, *masked.shape, generator=generator)

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        output = (x * self._masks(*x.shape)) @ self.kept
        if self.is_dropout:
            return output
        return output + self.std * x.norm(dim=-1, keepdim=True) * torch.randn_like(output)

    def _masks(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        return (uniform_like(self.kept, *shape, generator=generator) < self.keep_prob).to(self.kept.dtype)

    def kl_separated(self, length_scale: float | Tensor) -> Tensor:
        r"""Proposition 1 with length-scale $l$ [GG16, prop:KL_mixture_of_Gaussians], every constant kept:

        $$\tfrac{p l^2}{2} \|\mathbf M\|^2 + \tfrac{QK}{2} (l^2\sigma^2 - 1 - \log l^2\sigma^2) - Q\,\mathcal H(p).$$

        A *lower* bound of the KL, below it by `overlap()`. With $\sigma = 0$ the KL is infinite (Hron, Matthews and
        Ghahramani 2018), by terms that contain neither $\mathbf M$ nor $p$ nor $l$: $-QK(\log\sigma + \tfrac12)$ is
        left out.
        """
        check_positive("length_scale", length_scale)
        if self.is_dropout:
            per_weight = -log(length_scale)
        else:
            scaled = length_scale * self.std  # its logarithm is finite where its square underflows
            per_weight = 0.5 * (scaled**2 - 1) - log(scaled)
        constant = self.kept.numel() * per_weight - len(self.kept) * binary_entropy(self.keep_prob)
        return 0.5 * self.keep_prob * length_scale**2 * self.kept.square().sum() + constant

    def overlap(self) -> Tensor:
        r"""The term that proposition 1 omits: $\mathcal H(\mathbf z \mid \mathbf W)$, the uncertainty about the mask.

        The two components differ along $\mathbf m_q$ alone, so a unit's term is an integral over one Gaussian variable,
        a function of $\|\mathbf m_q\| / \sigma$ and $p$, done here by Gauss-Hermite quadrature.
        """
        if self.is_dropout or self.keep_prob == 1:
            return self.kept.new_zeros(())
        nodes, weights = (torch.as_tensor(a).to(self.kept) for a in np.polynomial.hermite_e.hermegauss(64))
        norm = self.kept.norm(dim=1, keepdim=True)
        # Beyond 1e3 standard deviations the entropy is 0 in any precision, and the division could overflow.
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
            raise ValueError("`std` (σ) must be positive for a density: with σ = 0 there are two point masses.")
        constant = -self.kept.shape[1] * (0.5 * math.log(2 * math.pi) + log(self.std))
        kept = -0.5 * ((value - self.kept) / self.std).square().sum(-1) + math.log(self.keep_prob)
        if self.keep_prob == 1:
            return (kept + constant).sum(-1)
        dropped = -0.5 * (value / self.std).square().sum(-1) + math.log1p(-self.keep_prob)
        return (torch.logaddexp(kept, dropped) + constant).sum(-1)

    def at(self, units: Tensor) -> Self:
        return replace(self, kept=self.kept[units])


@dataclass(frozen=True, eq=False)
class Concrete(Family):
    r"""Dropout whose drop probability is learned, by a relaxed Bernoulli mask (Gal, Hron and Kendall 2017).

    A unit's relaxed draw is $(1 - \tilde d)\,\mathbf m$ with $\mathrm{logit}\,\tilde d = (\mathrm{logit}\,d +
    \epsilon)/t$ and $\epsilon$ logistic: differentiable in the drop probability $d$, and $\tilde d$ tends to a
    Bernoulli variable as $t \to 0$. Draws that are not relaxed are dropout itself, and `mean` and `variance` are
    theirs: at $t = 0.1$, the authors' temperature, and $d = 0.1$ a relaxed mask has 0.9 of the variance.
    """

    kept: Tensor  # M, [unit, column]
    drop_logit: Tensor  # a scalar
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
        """Masks of units: 1 keeps a unit, 0 drops it."""
        uniform = uniform_like(self.kept, *shape, generator=generator)
        if not relaxed:
            return (uniform < self.keep_prob).to(self.kept.dtype)
        smallest = torch.finfo(uniform.dtype).tiny  # torch.rand can give 0, whose logit is -inf
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
        constant = -self.kept.numel() * log(length_scale)
        return 0.5 * self.keep_prob * length_scale**2 * self.kept.square().sum() - len(self.kept) * entropy + constant

    def at(self, units: Tensor) -> Self:
        return replace(self, kept=self.kept[units])


def kl_from_density(q: Family, prior: Distribution) -> Tensor:
    r"""$\mathrm{KL}(q \,\|\, \prod p(b))$ of a `Bernoulli` or `DiagonalGaussian` from any density $p(b)$ of an element.

    For the paper's "some distribution $p(b)$" [GG16, sect:gp_approx_model]: the divergence from $\mathcal N(0, 1)$ plus
    $\mathbb E_q[\log \mathcal N(b; 0, 1) - \log p(b)]$, a Gauss-Hermite rule for each component of $q$.

    Example:
        >>> q = DiagonalGaussian(torch.tensor([[0.5]]), torch.tensor(0.1))
        >>> normal = torch.distributions.Normal(0.0, 0.5)
        >>> bool((kl_from_density(q, normal) - q.kl(length_scale=2.0)).abs() < 1e-5)
        True
    """
    match q:
        case DiagonalGaussian():
            components = [(1.0, q.loc)]
        case Bernoulli():
            components = [(q.keep_prob, q.kept), (1 - q.keep_prob, torch.zeros_like(q.kept))]
        case _:
            raise TypeError(f"`q` must be a Bernoulli or a DiagonalGaussian; got {type(q).__name__}.")
    like = components[0][1]
    nodes, weights = (torch.as_tensor(a).to(like) for a in np.polynomial.hermite_e.hermegauss(64))
    offsets = torch.as_tensor(q.std).to(like).expand_as(like)[..., None] * nodes
    divergence = q.kl(1.0)
    for share, loc in components:
        b = loc[..., None] + offsets
        difference = -0.5 * (b.square() + math.log(2 * math.pi)) - prior.log_prob(b)
        divergence = divergence + share * (difference @ weights).sum() / math.sqrt(2 * math.pi)
    return divergence
