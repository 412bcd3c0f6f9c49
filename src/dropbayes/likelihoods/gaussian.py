r"""Real numbers with noise around the output: a Gaussian of constant or predicted variance, and Student's t."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.likelihoods.observation import Likelihood, check_targets, sum_events
from dropbayes.runtime.validation import check_positive


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""The Gaussian observation model $\mathcal N(\mathbf y; \widehat{\mathbf y}, \tau^{-1} \mathbf I_D)$.

    [GG16, eq:generative_model_reg].

    Args:
        precision: The model precision $\tau > 0$, in units of 1/y²; a scalar tensor if it is to be learned, a tensor
            `[output]` for a $\tau_d$ of each output along the last axis (the paper has one).
    """

    precision: float | Tensor

    def __post_init__(self) -> None:
        by_output = isinstance(self.precision, Tensor) and self.precision.dim() == 1
        for tau in self.precision.tolist() if by_output else [self.precision]:  # type: ignore[union-attr]
            check_positive("precision", tau)

    def _check_outputs(self, output: Tensor) -> None:
        if isinstance(self.precision, Tensor) and self.precision.dim() and len(self.precision) != output.shape[-1]:
            raise ValueError(
                f"`precision` must be one number or one for each output; got {len(self.precision)} for outputs of "
                f"shape {tuple(output.shape)}."
            )

    def mean(self, output: Tensor) -> Tensor:
        return output

    def variance(self, output: Tensor) -> Tensor:
        self._check_outputs(output)
        return torch.ones_like(output) / self.precision

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        check_targets(output, y)
        self._check_outputs(output)
        tau = self.precision
        log_tau = tau.log() if isinstance(tau, Tensor) else math.log(tau)
        return sum_events(0.5 * (log_tau - math.log(2 * math.pi) - tau * (y - output).square()), y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return output + noise * self.precision**-0.5


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""The Gaussian whose variance the network predicts: outputs $(\mu, \log \sigma^2)$, halves of the last axis."""

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        if output.dim() < 1 or output.shape[-1] % 2:
            raise ValueError(
                "`likelihood` HeteroscedasticGaussian needs an even last axis (means, then log-variances); "
                f"got an output of shape {tuple(output.shape)}. Double the width of the network's last layer."
            )
        mean, log_variance = output.chunk(2, dim=-1)
        return mean, log_variance

    def mean(self, output: Tensor) -> Tensor:
        return self._split(output)[0]

    def variance(self, output: Tensor) -> Tensor:
        return self._split(output)[1].exp()

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self._split(output)
        check_targets(mean, y)
        per_element = -0.5 * (math.log(2 * math.pi) + log_variance + (y - mean).square() * torch.exp(-log_variance))
        return sum_events(per_element, y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        mean, log_variance = self._split(output)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + noise * torch.exp(0.5 * log_variance)


@dataclass(frozen=True)
class StudentT(Likelihood):
    r"""Student's t around the network's output, for data with outliers.

    $$p(y \mid \widehat y) = \frac{\Gamma(\frac{\nu + 1}2)}{\Gamma(\frac\nu2) \sqrt{\nu \pi} s}
    \Big(1 + \frac1\nu \big(\tfrac{y - \widehat y}s\big)^2\Big)^{-\frac{\nu + 1}2}$$

    The loss of a large error grows like its logarithm, not its square. As $\nu \to \infty$ it is the Gaussian of
    precision $s^{-2}$.

    Args:
        scale: The scale $s > 0$, in units of y.
        degrees_of_freedom: The degrees of freedom $\nu > 2$, below which there is no variance.

    Example:
        >>> StudentT(scale=2.0, degrees_of_freedom=4.0).variance(torch.zeros(1, 1))  # s² ν / (ν - 2)
        tensor([[8.]])
    """

    scale: float
    degrees_of_freedom: float = 4.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        if not (math.isfinite(self.degrees_of_freedom) and self.degrees_of_freedom > 2):
            raise ValueError(
                "`degrees_of_freedom` must be greater than 2, below which the variance is infinite; got "
                f"{self.degrees_of_freedom!r}."
            )

    def mean(self, output: Tensor) -> Tensor:
        return output

    def variance(self, output: Tensor) -> Tensor:
        return torch.full_like(output, self.scale**2 * self.degrees_of_freedom / (self.degrees_of_freedom - 2))

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        check_targets(output, y)
        nu = self.degrees_of_freedom
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi) - math.log(self.scale)
        return sum_events(constant - 0.5 * (nu + 1) * torch.log1p(((y - output) / self.scale).square() / nu), y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        # Bailey's polar method (Mathematics of Computation 62, 1994): sqrt(ν (u^(-2/ν) - 1)) cos(2πv) for uniform u, v.
        u, v = (
            torch.rand(output.shape, generator=generator, dtype=output.dtype, device=output.device) for _ in range(2)
        )
        nu = self.degrees_of_freedom
        radius = (nu * torch.expm1(-2 / nu * torch.log1p(-u))).sqrt()  # 1 - u is uniform too, and never 0
        return output + self.scale * radius * torch.cos(2 * math.pi * v)
