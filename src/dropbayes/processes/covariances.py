r"""Covariance functions that the hidden units of a network imply, in closed form, by quadrature and by Monte Carlo.

A hidden unit with non-linearity $\sigma$, weights $\mathbf w \sim \mathcal N(0, l^{-2} \mathbf I_Q)$ and bias
$b \sim \mathcal N(0, \beta^2)$ defines [GG16, sect:gp_approx_model]

$$\mathbf K(\mathbf x, \mathbf y) = \int p(\mathbf w) p(b) \sigma(\mathbf w^T \mathbf x + b)
\sigma(\mathbf w^T \mathbf y + b) \, d\mathbf w \, db.$$

The pre-activations $u = \mathbf w^T \mathbf x + b$ and $v = \mathbf w^T \mathbf y + b$ are jointly Gaussian, so each
covariance is a function of their standard deviations $s_u$, $s_v$ and of the angle $\theta$ whose cosine is their
correlation.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from dropbayes.processes.pairs import Covariance, Pairs, checked_inputs, hypotenuse
from dropbayes.processes.quadrature import expected_product, normal_rule, quadrature_error
from dropbayes.runtime.validation import check_count, check_positive


@dataclass(frozen=True)
class Layer(Covariance):
    r"""The covariance $\mathbb E[\sigma(u) \sigma(v)]$ of one layer of hidden units [GG16, sect:gp_approx_model].

    Args:
        length_scale: $l > 0$ of the weights, $\mathbf w \sim \mathcal N(0, l^{-2} \mathbf I)$.
        bias_scale: $\beta \ge 0$ of the bias, $b \sim \mathcal N(0, \beta^2)$: the paper's $1 / l'$. Pass scalar
            tensors to differentiate with respect to the scales.
    """

    length_scale: float | Tensor = 1.0
    bias_scale: float | Tensor = 1.0

    periodic: ClassVar[bool] = False
    r"""Whether $\sigma$ has period $2\pi$, so that an infinite `bias_scale` means a uniform phase."""

    def __post_init__(self) -> None:
        check_positive("length_scale", self.length_scale)
        if not (self.periodic and self.bias_scale == math.inf):
            check_positive("bias_scale", self.bias_scale, allow_zero=True)

    @abstractmethod
    def nonlinearity(self, u: Tensor) -> Tensor:
        r"""The non-linearity $\sigma(u)$, elementwise."""

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {"length_scale": self.length_scale, "bias_scale": self.bias_scale}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        return replace(self, **values)

    def features(self, n_inputs: int, width: int, *, seed: int = 0) -> Features:
        r"""`width` Monte Carlo terms of the covariance, $\mathbf w_k \sim p(\mathbf w)$, $b_k \sim p(b)$.

        [GG16, eq:generative_model_approx]. A unit has $Q$ = `n_inputs` inputs.

        Example:
            >>> x = torch.linspace(-1, 1, 3, dtype=torch.float64)[:, None]
            >>> phi = ReLU().features(1, width=100_000)(x)
            >>> bool(((phi @ phi.T - ReLU()(x)).abs() < 0.02).all())
            True
        """
        check_count("n_inputs", n_inputs)
        check_count("width", width)
        generator = torch.Generator().manual_seed(seed)
        shapes = (n_inputs, width), (width,)
        weights, bias = (torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") for s in shapes)
        return Features(self, weights / self.length_scale, self.biases(bias))

    def biases(self, normal: Tensor) -> Tensor:
        r"""Biases $b \sim p(b)$ as a function of standard normal numbers."""
        if self.bias_scale == math.inf:
            return 2 * math.pi * torch.special.ndtr(normal)
        return normal * self.bias_scale

    def of_vectors(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        r"""The covariance of given vectors of hidden units, `[x row, y row]` [GG16, sect:going_deep]:

        $$\mathbf K_2(\mathbf x, \mathbf y) = \frac1{K_2} \int p(\mathbf b_2)\, \sigma_2(\mathbf x + \mathbf b_2)^T
        \sigma_2(\mathbf y + \mathbf b_2)\, d\mathbf b_2,$$

        by Gauss-Legendre quadrature, of values of the layer below, `[row, unit]`, which contain the weights.
        """
        x = checked_inputs(x, "x")
        y = x if y is None else checked_inputs(y, "y")
        points, weights = (torch.as_tensor(z).to(x) for z in normal_rule())
        bias = self.biases(points)
        units_x, units_y = (self.nonlinearity(z[..., None] + bias) for z in (x, y))
        return torch.einsum("nkb,mkb,b->nm", units_x, units_y, weights) / x.shape[-1]

    def of_pairs(self, pairs: Pairs) -> Tensor:
        pairs = pairs.affine(self.length_scale, self.bias_scale)
        both = pairs.norm_x * pairs.norm_y
        constant = both == 0  # u or v: the angle is then a right one
        both = both.masked_fill(constant, 1.0)
        sine, cosine = (pairs.area / both).masked_fill(constant, 1.0), (pairs.product / both).masked_fill(constant, 0.0)
        return self.expectation(pairs.norm_x, pairs.norm_y, sine, cosine)

    def expectation(self, std_u: Tensor, std_v: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        r"""$\mathbb E[\sigma(u) \sigma(v)]$ of $s_u$, $s_v$ and θ: by quadrature, which suits bounded smooth units."""
        return expected_product(self.nonlinearity, std_u, std_v, torch.atan2(sine, cosine))

    def units(self, pairs: Pairs) -> Pairs:
        """The pairs of the units' values, which the next layer reads [GG16, sect:going_deep]."""
        variance_x, variance_y = (self.of_pairs(Pairs.of_identical(norm)) for norm in (pairs.norm_x, pairs.norm_y))
        return Pairs.of_process(variance_x, self.of_pairs(pairs), variance_y)


class ReLU(Layer):
    r"""The covariance of rectified linear units, $\sigma(u) = \max(u, 0)$: the arc-cosine kernel of order 1.

    $$\mathbf K = s_u s_v \big( \sin\theta + (\pi - \theta) \cos\theta \big) / 2\pi$$

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> (2 * math.pi * ReLU(bias_scale=0.0)(x)).round(decimals=4)
        tensor([[3.1416, 1.0000],
                [1.0000, 3.1416]], dtype=torch.float64)
    """

    def nonlinearity(self, u: Tensor) -> Tensor:
        return torch.relu(u)

    def expectation(self, std_u: Tensor, std_v: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        return std_u * std_v * (sine + (math.pi - torch.atan2(sine, cosine)) * cosine) / (2 * math.pi)


class Step(Layer):
    r"""The covariance of threshold units, $\sigma(u) = [u > 0]$: the arc-cosine kernel of order 0.

    $$\mathbf K = \frac{\pi - \theta}{2\pi}, \text{ and 0 where a pre-activation is constantly zero.}$$
    """

    def nonlinearity(self, u: Tensor) -> Tensor:
        return (u > 0).to(u.dtype)

    def expectation(self, std_u: Tensor, std_v: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        probability = (math.pi - torch.atan2(sine, cosine)) / (2 * math.pi)
        return probability.masked_fill((std_u == 0) | (std_v == 0), 0.0)


class Erf(Layer):
    r"""The covariance of error-function units, $\sigma(u) = \operatorname{erf}(u)$: the arc-sine kernel.

    $$\mathbf K = \frac{2}{\pi} \arcsin \frac{2 s_u s_v \cos\theta}{\sqrt{(1 + 2 s_u^2)(1 + 2 s_v^2)}}$$
    """

    def nonlinearity(self, u: Tensor) -> Tensor:
        return torch.erf(u)

    def expectation(self, std_u: Tensor, std_v: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        root_u, root_v = ((1 + 2 * std.square()).sqrt() for std in (std_u, std_v))
        ratio_u, ratio_v = std_u / root_u, std_v / root_v
        # arcsin r = atan2(r, √(1 - r²)), the root written as a sum: arcsin's own slope is infinite at ±1.
        first = hypotenuse(1 / root_u, math.sqrt(2) * ratio_u) / root_v
        adjacent = hypotenuse(hypotenuse(first, math.sqrt(2) * ratio_v / root_u), 2 * ratio_u * ratio_v * sine)
        return 2 / math.pi * torch.atan2(2 * ratio_u * ratio_v * cosine, adjacent)


@dataclass(frozen=True)
class Cosine(Layer):
    r"""The covariance of cosine units, $\sigma(u) = \sqrt2 \cos u$: squared exponential for a uniform phase.

    $$\mathbf K = e^{-\|\mathbf x - \mathbf y\|^2 / 2 l^2} + e^{-\|\mathbf x + \mathbf y\|^2 / 2 l^2 - 2 \beta^2}$$

    The default $\beta = \infty$ stands for $b \sim \mathcal U(0, 2\pi)$, and the second term vanishes.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
        >>> Cosine(length_scale=2.0)(x).round(decimals=4)
        tensor([[1.0000, 0.6065],
                [0.6065, 1.0000]], dtype=torch.float64)
    """

    bias_scale: float | Tensor = math.inf

    periodic: ClassVar[bool] = True

    def nonlinearity(self, u: Tensor) -> Tensor:
        return math.sqrt(2) * torch.cos(u)

    def of_pairs(self, pairs: Pairs) -> Tensor:
        stationary = torch.exp(-0.5 * (pairs.distance / self.length_scale).square())
        if not torch.is_tensor(self.bias_scale) and self.bias_scale == math.inf:
            return stationary
        # |x + y|² = (|x| - |y|)² + 2(|x||y| + x'y), whose last term cancels for opposite inputs: there it is the
        # squared area over |x||y| - x'y.
        both = pairs.norm_x * pairs.norm_y
        opposite = pairs.product < 0
        gap = torch.where(opposite, both - pairs.product, torch.ones_like(both))
        remainder = torch.where(opposite, (pairs.area / gap.sqrt()).square(), both + pairs.product)
        squared_sum = ((pairs.norm_x - pairs.norm_y).square() + 2 * remainder) / self.length_scale**2
        return stationary + torch.exp(-0.5 * squared_sum - 2 * self.bias_scale**2)


class Identity(Layer):
    r"""The covariance of linear units, $\sigma(u) = u$: $\mathbf K = \mathbf x^T \mathbf y / l^2 + \beta^2$."""

    def nonlinearity(self, u: Tensor) -> Tensor:
        return u

    def of_pairs(self, pairs: Pairs) -> Tensor:
        return pairs.product / self.length_scale**2 + self.bias_scale**2


class TanH(Layer):
    r"""The covariance of hyperbolic tangent units, $\sigma(u) = \tanh u$, by quadrature (see `Quadrature`)."""

    def nonlinearity(self, u: Tensor) -> Tensor:
        return torch.tanh(u)


class Sigmoid(Layer):
    r"""The covariance of logistic units, $\sigma(u) = 1 / (1 + e^{-u})$, by quadrature (see `Quadrature`)."""

    def nonlinearity(self, u: Tensor) -> Tensor:
        return torch.sigmoid(u)


@dataclass(frozen=True)
class Quadrature(Layer):
    r"""The covariance of units with any non-linearity, by Gaussian quadrature.

    For an elementwise `function` $\sigma$ that is bounded or grows linearly, smooth except for a kink or jump at zero,
    exact to about 1e-9 of the prior variance while the pre-activations' standard deviations are below 10; to 1e-6 for a
    sigmoid at any scale. A kink elsewhere, oscillations or exponential growth lose accuracy: a warning says where the
    error, estimated on the prior variances, exceeds 1e-5 of them. There are `nodes` along the radius and each arc.

    Example:
        >>> x = torch.tensor([[0.3], [-1.0]], dtype=torch.float64)
        >>> bool(((Quadrature(function=torch.relu)(x) - ReLU()(x)).abs() < 1e-12).all())
        True
    """

    function: Callable[[Tensor], Tensor] = field(kw_only=True)
    nodes: int = field(default=48, kw_only=True)

    def nonlinearity(self, u: Tensor) -> Tensor:
        return self.function(u)

    def expectation(self, std_u: Tensor, std_v: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        error = quadrature_error(self.nonlinearity, torch.cat([std_u.flatten(), std_v.flatten()]), nodes=self.nodes)
        if not error < 1e-5:
            what = f"Quadrature of {getattr(self.function, '__name__', self.function)} loses digits"
            size = f"its prior variances are off by about {error:.0e} of their size"
            why = "A kink away from zero or fast growth does this; raise `nodes`, or scale the inputs down"
            warnings.warn(f"{what}: {size}. {why}.", stacklevel=4)
        return expected_product(self.nonlinearity, std_u, std_v, torch.atan2(sine, cosine), nodes=self.nodes)


@dataclass(frozen=True)
class Features:
    r"""The features of a finite-rank covariance, $\widehat{\mathbf K}(\mathbf x, \mathbf y) = \Phi\Phi^T$.

    $$\boldsymbol\phi(\mathbf x) = \sqrt{1/K} \, \sigma(\mathbf W_1^T \mathbf x + \mathbf b)$$

    [GG16, sect:gp_approx_model]: the hidden layer of a network of width $K$, with the $\sigma$ of the covariance that
    it approximates, $\mathbf W_1$ `[input, unit]` and $\mathbf b$ `[unit]`.
    """

    layer: Layer
    weights: Tensor
    bias: Tensor

    @property
    def width(self) -> int:
        """The number of units, $K$."""
        return self.bias.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        r"""The feature matrix $\Phi$, `[row, unit]`, on the device of `x` and in its dtype, at least float32."""
        x = checked_inputs(x, "x")
        if x.shape[-1] != self.weights.shape[0]:
            rule = f"have the {self.weights.shape[0]} inputs the features were drawn for"
            raise ValueError(f"`x` must {rule}; got {tuple(x.shape)}.")
        return self.layer.nonlinearity(x @ self.weights.to(x) + self.bias.to(x)) * self.width**-0.5


@dataclass(frozen=True)
class RandomBias(Layer):
    r"""The covariance $\int p(b)\,\mathbb E[\sigma(\mathbf w^T\mathbf x + b)\,\sigma(\mathbf w^T\mathbf y + b)]\,db$.

    [GG16, sect:gp_approx_model], "some distribution $p(b)$" with an inverse distribution function (`icdf`). The outer
    integral is a Gauss-Legendre rule of some `nodes` over its quantiles, the inner one a quadrature of the layer's
    $\sigma$ and length-scale. Its features, the finite-rank process, the deep process and the evidence of a network
    draw biases from $p(b)$.

    Example:
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
            rule = "have an inverse distribution function"
            got = f"{type(self.distribution).__name__}, whose `icdf` torch does not implement"
            remedy = "Take another, such as Normal, Laplace, Uniform or Cauchy"
            raise ValueError(f"`distribution` must {rule}; got {got}. {remedy}.") from None

    def nonlinearity(self, u: Tensor) -> Tensor:
        return self.layer.nonlinearity(u)

    def biases(self, normal: Tensor) -> Tensor:
        return self.distribution.icdf(torch.special.ndtr(normal)).to(normal)

    def of_pairs(self, pairs: Pairs) -> Tensor:
        points, weights = np.polynomial.legendre.leggauss(self.nodes)
        levels, shares = (torch.as_tensor(z).to(pairs.product) for z in ((points + 1) / 2, weights / 2))
        total = torch.zeros_like(pairs.product)
        for bias, share in zip(self.distribution.icdf(levels).to(levels), shares, strict=True):
            shifted = Quadrature(self.length_scale, 0.0, function=lambda u, bias=bias: self.nonlinearity(u + bias))
            total = total + share * shifted.of_pairs(pairs)
        return total

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {"length_scale": self.layer.length_scale}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        return replace(self, layer=self.layer.with_scales(values))
