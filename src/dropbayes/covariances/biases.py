r"""Covariances of hidden units whose bias has any distribution $p(b)$."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from dropbayes.covariances.layers import Covariance, Layer, Quadrature
from dropbayes.covariances.pairs import Pairs

__all__ = ["RandomBias"]


@dataclass(frozen=True)
class RandomBias(Covariance):
    r"""The covariance $\int p(b)\,\mathbb E[\sigma(\mathbf w^T\mathbf x + b)\,\sigma(\mathbf w^T\mathbf y + b)]\,db$.

    [GG16, sect:gp_approx_model], "some distribution $p(b)$". The outer integral is a Gauss-Legendre rule over the
    quantiles of $p(b)$, the inner one a quadrature.

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

    layer: Layer
    distribution: Distribution
    nodes: int = field(default=64, kw_only=True)

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
