r"""Targets learned in a transformed scale: a logarithm for positive ones, an inverse hyperbolic sine for any.

The networks learn $z = g(y)$ with Gaussian noise, and the predictive density of y is $p(y) = p(z)\, g'(y)$. The moments
of y under one draw, where z is Gaussian with mean μ and variance σ², are in closed form:

- $y = e^z$: $\mathbb E\,y = e^{\mu + \sigma^2/2}$ and $\mathbb E\,y^2 = e^{2\mu + 2\sigma^2}$ (the lognormal's);
- $y = a + c \sinh z$: $\mathbb E \sinh z = e^{\sigma^2/2} \sinh \mu$ and
  $\mathbb E \sinh^2 z = \tfrac12 (e^{2\sigma^2} \cosh 2\mu - 1)$.

Student's t of z would have no mean in the units of y, so it is not offered in these scales. Hyperbolic sines are made
of exponentials: the last bits of `torch.sinh` depend on the place of a value in its tensor, so on a row's neighbours.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from dropbayes.predictive import Mixture, draw_mean
from dropbayes.runtime.validation import Array, check_choice, float_tensor

TRANSFORMS = ("none", "log", "arcsinh")  #: The names of the transforms; "none" leaves the targets as they are.

_CRPS_NODES, _CRPS_REACH = 401, 10.0  # besides nodes at jumps and at the outcome; in deviations of z


@dataclass(frozen=True)
class TargetTransform:
    """A monotone map from targets y to the scale z in which they are learned."""

    name: Literal["none", "log", "arcsinh"] = "none"
    centre: float = 0.0  # a of z = arsinh((y - a) / c)
    width: float = 1.0  # c
    jumps: ClassVar[tuple[float, ...]] = ()  # the z at which `inverse` jumps: none

    def __post_init__(self) -> None:
        check_choice("name", self.name, TRANSFORMS)
        if not (math.isfinite(self.centre) and math.isfinite(self.width) and self.width > 0):
            raise ValueError(f"`centre` and `width` must be finite, and `width` positive; got {self.width!r}.")

    @property
    def unit(self) -> str:
        """What is learned of the target, in words."""
        words = {"log": "the logarithm of the target", "arcsinh": "the inverse hyperbolic sine of the target"}
        return words.get(self.name, "the target")

    @classmethod
    def of(cls, name: Any, y: np.ndarray) -> Self:
        """The transform of a name for training targets `[row]`, which must be positive for "log"."""
        if name != "none" and y.ndim > 1:
            raise ValueError(f"`target_transform` must be 'none' for several outputs; got {name!r}.")
        if name == "log" and not bool((y > 0).all()):
            rule = f"needs positive targets; the smallest is {float(y.min()):.4g}"
            raise ValueError(f"`target_transform` 'log' {rule}. Use 'arcsinh', which takes any.")
        if name != "arcsinh":
            return cls(name)
        low, centre, high = (float(value) for value in np.quantile(y, [0.25, 0.5, 0.75]))
        return cls(name, centre, (high - low) / 2 or float(y.std()) or 1.0)

    def forward(self, y: Tensor) -> Tensor:
        """z of targets; minus infinity where a logarithm has none."""
        if self.name == "log":
            return torch.where(y > 0, y, 0.0).log()
        return y if self.name == "none" else torch.asinh((y - self.centre) / self.width)

    def inverse(self, z: Tensor) -> Tensor:
        """The targets y of z."""
        if self.name == "log":
            return z.exp()
        return z if self.name == "none" else self.centre + self.width * (torch.expm1(z) - torch.expm1(-z)) / 2

    def log_derivative(self, y: Tensor) -> Tensor:
        r"""$\log g'(y)$."""
        if self.name == "log":
            return -self.forward(y)
        if self.name == "none":
            return torch.zeros_like(y)
        return -0.5 * torch.log1p(((y - self.centre) / self.width).square()) - math.log(self.width)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y for Gaussian z of the given mean and variance."""
        growth = torch.expm1(variance)  # e^σ² - 1, exact for small variances
        if self.name == "log":
            centre = (mean + variance / 2).exp()
            return centre, centre.square() * growth
        if self.name == "none":
            return mean, variance
        sine = (torch.expm1(mean) - torch.expm1(-mean)) / 2
        # ½(e^{2v} cosh 2μ - 1) - e^v sinh² μ, arranged so that nothing cancels for small v
        spread = growth * (torch.exp(variance) * (0.5 + sine.square()) + 0.5)
        return self.centre + self.width * (variance / 2).exp() * sine, self.width**2 * spread


def candidate_transforms(name: str, y: np.ndarray) -> list[TargetTransform]:
    """The transforms to try: the named one, or for "auto" all that suit the targets."""
    check_choice("target_transform", name, (*TRANSFORMS, "auto"))
    if name != "auto":
        return [TargetTransform.of(name, y)]
    if y.ndim > 1 or len(np.unique(y[:1000])) < 3:  # no scale to choose
        return [TargetTransform()]
    return [TargetTransform.of(one, y) for one in TRANSFORMS if one != "log" or bool((y > 0).all())]


class MappedMixture(Mixture):
    """The predictive distribution of y, from a mixture of z and a monotone map; moments and density are those of z."""

    base: Mixture  # the predictive distribution of z, [draw, row]
    transform: Any  # the map, with `forward` from y to z, `inverse`, and the `jumps` of the latter

    def __init__(self, base: Mixture, transform: Any) -> None:
        super().__init__(base.location, base.scale, base.freedom)
        vars(self).update(base=base, transform=transform)

    def pit(self, y: Array) -> Tensor:
        return self.base.pit(self.transform.forward(float_tensor(y).to(self.location)))

    def quantile(self, level: float) -> Tensor:
        return self.transform.inverse(self.base.quantile(level))

    def crps(self, y: Array) -> Tensor:
        r"""$\int (F(u) - 1_{u \ge y})^2\, du$ by Simpson's rule in z, with nodes at the outcome and the map's jumps."""
        outcome = float_tensor(y).to(self.location).double()
        z = self.transform.forward(outcome)
        centre, reach = self.base.mean.double(), _CRPS_REACH * self.base.std.double()
        z = torch.where(z.isfinite(), z, centre + torch.where(z > 0, reach, -reach))
        low, high = torch.minimum(centre - reach, z), torch.maximum(centre + reach, z)
        shares = torch.linspace(0, 1, _CRPS_NODES, dtype=z.dtype, device=z.device)
        jumps = z.new_tensor(self.transform.jumps)
        jumps = torch.cat([jumps, jumps.nextafter(z.new_tensor(math.inf))])[:, None].expand(-1, len(z))
        nodes = torch.cat([low + shares[:, None] * (high - low), z[None], jumps.clamp(low, high)]).sort(0).values
        total, (before, start) = torch.zeros_like(z), self._at(nodes[0])
        for node, end in itertools.pairwise(nodes):
            (halfway, middle), (after, stop) = self._at((node + end) / 2), self._at(end)
            first, inner, last = ((level - (end > z).double()).square() for level in (before, halfway, after))
            halves = (middle - start) * (first + inner) + (stop - middle) * (inner + last)
            total += (4 * halves - (stop - start) * (first + last)) / 6
            before, start = after, stop
        # An outcome that the map does not take lies in one of its jumps, which the integral counts as above it.
        jumped = (outcome - self.transform.inverse(z)) * (2 * self.base.pit(z).double() - 1)
        return (total + jumped).to(self.location)

    def _at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution function at z, and the outcome there."""
        return self.base.pit(z).double(), self.transform.inverse(z)

    def outcomes(self, values: Tensor) -> Tensor:
        return self.transform.inverse(values)

    def rows(self, index: Any) -> Mixture:
        return type(self)(self.base.rows(index), self.transform)

    def with_noise(self, factor: float) -> Mixture:
        return type(self)(self.base.with_noise(factor), self.transform)


class TransformedMixture(MappedMixture):
    """The predictive distribution of y, with its moments and density, from a mixture of Gaussians of z."""

    @property
    def component_means(self) -> Tensor:
        return self.transform.moments(self.location, self.scale.square())[0]

    @property
    def aleatoric(self) -> Tensor:
        return draw_mean(self.transform.moments(self.location, self.scale.square())[1])

    def log_density(self, y: Array) -> Tensor:
        outcome = float_tensor(y).to(self.location)
        density = self.base.log_density(self.transform.forward(outcome)) + self.transform.log_derivative(outcome)
        return density.nan_to_num(nan=-torch.inf)  # an outcome that the logarithm does not take
