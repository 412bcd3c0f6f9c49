r"""Covariances of hidden units whose bias has any distribution $p(b)$."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from dropbayes.covariances.layers import Layer, Quadrature
from dropbayes.covariances.pairs import Pairs

__all__ = ["RandomBias"]


@dataclass(frozen=True)
class RandomBias(Layer):
    r"""The covariance $\int p(b)\,\mathbb E[\sigma(\mathbf w^T\mathbf x + b)\,\sigma(\mathbf w^T\mathbf y + b)]\,db$.

    [GG16, sect:gp_approx_model], "some distribution $p(b)$". The outer integral is a Gauss-Legendre rule over the
    quantiles of $p(b)$, the inner one a quadrature. Its features, the finite-rank process, the deep process and the
    evidence of a network draw biases from $p(b)$.

    Args:
        layer: The layer whose $\sigma$ and length-scale are used; its `bias_scale` is not.
        distribution: $p(b)$, with an inverse distribution function (`icdf`).
        nodes: Nodes of the outer rule.

    Example:
        >>> from dropbayes.covariances import Erf
        >>> x = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
        >>> normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
        >>> bool((RandomBias(Erf(), normal)(x) - Erf(bias_scale=1.0)(x)).abs().max() < 1e-6)
        True
    """

    length_scale: float | Tensor = field(init=False, repr=False, default=1.0)
    bias_scale: float | Tensor = field(init=False, repr=False, default=1.0)
    layer: Layer = field(kw_only=False)
    distribution: Distribution
    nodes: int = field(default=64, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length_scale", self.layer.length_scale)
        try:
            self.distribution.icdf(torch.tensor(0.5))
        except NotImplementedError:
            raise ValueError(
                f"`distribution` must have an inverse distribution function; got {type(self.distribution).__name__}, "
                "whose `icdf` torch does not implement. Take another, such as Normal, Laplace, Uniform or Cauchy."
            ) from None

    def nonlinearity(self, u: Tensor) -> Tensor:
        return self.layer.nonlinearity(u)

    def biases(self, normal: Tensor) -> Tensor:
        return self.distribution.icdf(torch.special.ndtr(normal)).to(normal)

    def of_pairs(self, pairs: Pairs) -> Tensor:
        points, weights = np.polynomial.legendre.leggauss(self.nodes)
        like = pairs.product
        levels = torch.as_tensor((points + 1) / 2).to(like)
        biases, shares = self.distribution.icdf(levels).to(like), torch.as_tensor(weights / 2).to(like)
        total = torch.zeros_like(like)
        for bias, share in zip(biases, shares, strict=True):
            shifted = Quadrature(
                self.layer.length_scale, 0.0, function=lambda u, bias=bias: self.layer.nonlinearity(u + bias)
            )
            total = total + share * shifted.of_pairs(pairs)
        return total

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {"length_scale": self.layer.length_scale}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        return replace(self, layer=self.layer.with_scales(values))
