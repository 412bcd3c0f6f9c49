r"""The diagonal Gaussian, additive or multiplicative."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.runtime.validation import check_positive
from dropbayes.variational.family import LOG_2_PI, Family, check_stds, normal_like, safe_sqrt

__all__ = ["DiagonalGaussian", "multiplicative_gaussian"]

SMALLEST_WEIGHT = 1e-6
r"""Multiplicative noise on a weight below this is that of a weight of this size: at 0 its KL would be infinite."""


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
        check_stds("std", self.std, allow_zero=True)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.std.square().expand_as(self.loc)

    def sample(self, *n: int, generator: torch.Generator | None = None, relaxed: bool = False) -> Tensor:
        del relaxed  # nothing here is discrete
        return torch.addcmul(self.loc, self.std, normal_like(self.loc, *n, *self.loc.shape, generator=generator))

    def product(self, x: Tensor, *, relaxed: bool = False) -> Tensor:
        del relaxed
        mean, variance = x @ self.loc, x.square() @ self.variance
        return mean + safe_sqrt(variance) * torch.randn_like(mean)

    def kl(self, length_scale: float | Tensor) -> Tensor:
        r"""$\tfrac 12 \sum (l^2 (m^2 + \sigma^2) - 1 - \log l^2\sigma^2)$, exact; infinite where $\sigma = 0$."""
        check_positive("length_scale", length_scale)
        scaled = length_scale * self.std.expand_as(self.loc)  # its logarithm is finite where its square underflows
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
