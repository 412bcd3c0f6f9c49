"""Covariances as functions of the inputs' inner products, which keep their digits for nearly equal or opposite ones."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dropbayes.layers.family import safe_sqrt
from dropbayes.runtime.validation import check_type, finite_tensor


def check_covariance(covariance: object, *others: type) -> None:
    """Raises unless it is a covariance, or of one of the other classes."""
    check_type("covariance", covariance, (Covariance, *others), "be a covariance, such as ReLU(length_scale=1.0)")


def checked_inputs(x: Tensor, name: str) -> Tensor:
    """The inputs `[..., row, input]`, finite; half precision, in which distances cannot be computed, as float32."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"`{name}` must be a floating-point tensor; got {kind}.")
    if x.dim() < 2 or x.shape[-1] == 0 or x.shape[-2] == 0:
        rule = "be [row, input] with at least one of each"
        raise ValueError(f"`{name}` must {rule}; got shape {tuple(x.shape)}. A single input column is x[:, None].")
    return finite_tensor(name, x)


def hypotenuse(a: Tensor, b: Tensor) -> Tensor:
    r"""$\sqrt{a^2 + b^2}$ with the subgradient 0 at the origin, where autograd would give NaN."""
    a, b = torch.broadcast_tensors(a, b)
    origin = (a == 0) & (b == 0)
    return torch.hypot(a.masked_fill(origin, 1.0), b).masked_fill(origin, 0.0)


@dataclass(frozen=True)
class Pairs:
    r"""The inner products of two sets of inputs: all that an isotropic Gaussian over the weights depends on.

    The distance $\|\mathbf x - \mathbf y\|$ and the area $(\|\mathbf x\|^2 \|\mathbf y\|^2 - (\mathbf x^T \mathbf
    y)^2)^{1/2}$ follow from the other fields, but not to machine precision when $\mathbf x \approx \pm\mathbf y$.
    """

    norm_x: Tensor  # [..., x row, 1]
    norm_y: Tensor  # [..., 1, y row]
    product: Tensor  # [..., x row, y row], as the next two
    distance: Tensor
    area: Tensor

    @classmethod
    def of_inputs(cls, x: Tensor, y: Tensor) -> Self:
        """The pairs of every row of `x` with every row of `y`."""
        norm_x, norm_y = (torch.linalg.vector_norm(z, dim=-1, keepdim=True) for z in (x, y))
        unit_x, unit_y = (z / norm.masked_fill(norm == 0, 1.0) for z, norm in ((x, norm_x), (y, norm_y)))
        # Distances by differences: the matrix-product form loses half the digits of nearly equal inputs.
        distance = functools.partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
        # sin θ = 2 sin(θ/2) cos(θ/2), and the two halves are the half-distances of the unit vectors.
        area = 0.5 * distance(unit_x, unit_y) * distance(unit_x, -unit_y) * norm_x * norm_y.mT
        return cls(norm_x, norm_y.mT, x @ y.mT, distance(x, y), area)

    @classmethod
    def of_process(cls, variance_x: Tensor, covariance: Tensor, variance_y: Tensor) -> Self:
        """The pairs of a Gaussian process's values at x and y: its covariances are their inner products."""
        return cls(
            norm_x=safe_sqrt(variance_x),
            norm_y=safe_sqrt(variance_y),
            product=covariance,
            distance=safe_sqrt(variance_x + variance_y - 2 * covariance),
            area=safe_sqrt(variance_x * variance_y - covariance.square()),
        )

    @classmethod
    def of_identical(cls, norm: Tensor) -> Self:
        """The pairs of inputs with themselves, elementwise."""
        return cls(norm, norm, norm.square(), torch.zeros_like(norm), torch.zeros_like(norm))

    def affine(self, length_scale: float | Tensor, bias_scale: float | Tensor) -> Self:
        r"""The pairs of $\mathbf w^T \mathbf x + b$, with weights of scale $1/l$ and a bias of scale $\beta$.

        Lagrange's identity for the inputs extended by the bias: sums of squares only, nothing cancels.
        """
        bias = torch.as_tensor(bias_scale, dtype=self.product.dtype, device=self.product.device)
        return type(self)(
            norm_x=hypotenuse(self.norm_x / length_scale, bias),
            norm_y=hypotenuse(self.norm_y / length_scale, bias),
            product=self.product / length_scale**2 + bias**2,
            distance=self.distance / length_scale,
            area=hypotenuse(self.area / length_scale**2, bias * self.distance / length_scale),
        )

    def through(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """The pairs of a process whose covariances are a function of these pairs' (and of others')."""
        given = ((one.norm_x.square(), one.product, one.norm_y.square()) for one in (self, *others))
        return self.of_process(*(function(*products) for products in zip(*given, strict=True)))


class Covariance(ABC):
    r"""A covariance function $\mathbf K(\mathbf x, \mathbf y)$ of the inner products of the inputs alone."""

    @abstractmethod
    def of_pairs(self, pairs: Pairs) -> Tensor:
        """The covariance of each pair, in the pairs' shape."""

    @property
    @abstractmethod
    def scales(self) -> dict[str, float | Tensor]:
        """The parameters a search may change, by name."""

    @abstractmethod
    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        """A copy with the named parameters replaced."""

    def with_own_scales(self, values: Mapping[str, float | Tensor], prefix: str = "") -> Self:
        """A copy with those of the values that belong to it, whose names have a prefix."""
        return self.with_scales({name: values.get(f"{prefix}{name}", value) for name, value in self.scales.items()})

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        r"""The covariance matrix $\mathbf K(\mathbf X, \mathbf Y)$, `[..., x row, y row]`; `y` is `x` by default."""
        x = self.parts(checked_inputs(x, "x"), "x")
        y = x if y is None else self.parts(checked_inputs(y, "y"), "y")
        if x.shape[-1] != y.shape[-1] or x.dtype != y.dtype:
            got = f"{tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
            raise ValueError(f"`x` and `y` must agree in their number of inputs (last axis) and dtype; got {got}.")
        matrix = self.of_pairs(Pairs.of_inputs(x, y))
        if matrix.isnan().any():
            why = "the inputs are too large for the length-scale"
            raise ValueError(f"The covariance overflows {x.dtype}: {why}. Use float64, or standardise the inputs.")
        return matrix

    def parts(self, x: Tensor, name: str) -> Tensor:
        """The inputs as `[..., row, input]`, parts of a sequence or of an image first; `name` is for errors."""
        return x

    def diagonal(self, x: Tensor) -> Tensor:
        r"""The prior variances $\mathbf K(\mathbf x_n, \mathbf x_n)$, `[..., row]`, without the matrix."""
        norm = torch.linalg.vector_norm(self.parts(checked_inputs(x, "x"), "x"), dim=-1, keepdim=True)
        return self.of_pairs(Pairs.of_identical(norm)).squeeze(-1)

    def of_covariance(self, matrix: Tensor) -> Tensor:
        r"""The covariance matrix of this layer when its inputs are a process's values [GG16, sect:going_deep].

        With $\mathbf F \sim \mathcal N(0, \mathbf K_1)$ of the given `matrix` feeding the layer, the matrix of
        $\mathbb E[\sigma(f_n / l + b) \sigma(f_m / l + b)]$: one step of the deep recursion.
        """
        matrix = checked_inputs(matrix, "matrix")
        if matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(f"`matrix` must be a square covariance matrix; got shape {tuple(matrix.shape)}.")
        scale = float(matrix.detach().abs().max())
        if not torch.allclose(matrix, matrix.mT, rtol=0.0, atol=scale * torch.finfo(matrix.dtype).eps ** 0.5):
            raise ValueError("`matrix` must be symmetric; got a matrix that differs from its transpose.")
        variance = matrix.diagonal(dim1=-2, dim2=-1)
        if (variance < 0).any():
            raise ValueError(f"`matrix` must have variances on its diagonal; got {float(variance.min()):.3g} < 0.")
        return self.of_pairs(Pairs.of_process(variance.unsqueeze(-1), matrix, variance.unsqueeze(-2)))
