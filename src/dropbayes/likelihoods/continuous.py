r"""Real numbers: a Gaussian of constant or predicted variance, Student's t, and what quantiles describe."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.likelihoods.observation import Likelihood, checked_targets, sum_events
from dropbayes.runtime.validation import check_positive, to_tensor


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""The Gaussian observation model $\mathcal N(\mathbf y; \widehat{\mathbf y}, \tau^{-1} \mathbf I_D)$.

    [GG16, eq:generative_model_reg]. The `precision` $\tau > 0$ is in units of 1/y²; a scalar tensor if it is to be
    learned, a tensor `[output]` for a $\tau_d$ of each output along the last axis (the paper has one).
    """

    precision: float | Tensor

    def __post_init__(self) -> None:
        by_output = isinstance(self.precision, Tensor) and self.precision.dim() == 1
        for tau in self.precision.tolist() if by_output else [self.precision]:  # type: ignore[union-attr]
            check_positive("precision", tau)

    def _precision_of(self, output: Tensor) -> float | Tensor:
        if not isinstance(self.precision, Tensor):
            return self.precision
        if self.precision.dim() and len(self.precision) != output.shape[-1]:
            got = f"{len(self.precision)} for outputs of shape {tuple(output.shape)}"
            raise ValueError(f"`precision` must be one number or one for each output; got {got}.")
        return self.precision.to(output.device)

    def mean(self, output: Tensor) -> Tensor:
        return output

    def variance(self, output: Tensor) -> Tensor:
        return torch.ones_like(output) / self._precision_of(output)

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        y = checked_targets(output, y)
        tau = self._precision_of(output)
        log_tau = tau.log() if isinstance(tau, Tensor) else math.log(tau)
        return sum_events(0.5 * (log_tau - math.log(2 * math.pi) - tau * (y - output).square()), y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return output + noise * self._precision_of(output) ** -0.5


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""The Gaussian whose variance the network predicts: outputs $(\mu, \log \sigma^2)$, halves of the last axis."""

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        if output.dim() < 1 or output.shape[-1] % 2:
            rule = "HeteroscedasticGaussian needs an even last axis (means, then log-variances)"
            got = f"an output of shape {tuple(output.shape)}"
            raise ValueError(f"`likelihood` {rule}; got {got}. Double the width of the network's last layer.")
        mean, log_variance = output.chunk(2, dim=-1)
        return mean, log_variance

    def mean(self, output: Tensor) -> Tensor:
        return self._split(output)[0]

    def variance(self, output: Tensor) -> Tensor:
        return self._split(output)[1].exp()

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self._split(output)
        y = checked_targets(mean, y)
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

    The loss of a large error grows like its logarithm, not its square. As the degrees of freedom $\nu > 2$ grow it
    becomes the Gaussian of precision $s^{-2}$; the scale $s$ is in units of y.

    Example:
        >>> StudentT(scale=2.0, degrees_of_freedom=4.0).variance(torch.zeros(1, 1))  # s² ν / (ν - 2)
        tensor([[8.]])
    """

    scale: float
    degrees_of_freedom: float = 4.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        nu = self.degrees_of_freedom
        if not (hasattr(nu, "__float__") and 2 < nu < math.inf):
            raise ValueError(f"`degrees_of_freedom` must be greater than 2, for a finite variance; got {nu!r}.")

    def mean(self, output: Tensor) -> Tensor:
        return output

    def variance(self, output: Tensor) -> Tensor:
        return torch.full_like(output, self.scale**2 * self.degrees_of_freedom / (self.degrees_of_freedom - 2))

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        y = checked_targets(output, y)
        nu = self.degrees_of_freedom
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi) - math.log(self.scale)
        return sum_events(constant - 0.5 * (nu + 1) * torch.log1p(((y - output) / self.scale).square() / nu), y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        # Bailey's polar method (Mathematics of Computation 62, 1994): sqrt(ν (u^(-2/ν) - 1)) cos(2πv) for uniform u, v.
        u, v = torch.rand(2, *output.shape, generator=generator, dtype=output.dtype, device=output.device)
        nu = self.degrees_of_freedom
        radius = (nu * torch.expm1(-2 / nu * torch.log1p(-u))).sqrt()  # 1 - u is uniform too, and never 0
        return output + self.scale * radius * torch.cos(2 * math.pi * v)


@dataclass(frozen=True)
class Quantiles(Likelihood):
    r"""A network that gives quantiles $q_1 \dots q_K$ of y at levels $\alpha_1 \dots \alpha_K$, the last axis.

    Such a network is trained with `pinball_loss`, by `fit` too. There are at least two `levels`, increasing in (0, 1).
    Between them the simplest consistent distribution is used: the density is $(\alpha_{k+1} - \alpha_k) / (q_{k+1} -
    q_k)$ between two quantiles, and decays exponentially, without a jump, beyond the outer ones. Crossing quantiles are
    sorted (Chernozhukov, Fernández-Val and Galichon 2010). `y` has the output's shape without its last axis.

    Example:
        >>> likelihood = Quantiles((0.1, 0.5, 0.9))
        >>> likelihood.mean(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([2.])
        >>> likelihood.pinball_loss(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([4.0]))
        tensor([2.2000])
    """

    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        levels = tuple(to_tensor(self.levels, name="levels").flatten().tolist())
        rising = all(a < b for a, b in zip((0.0, *levels), (*levels, 1.0), strict=True))
        if len(levels) < 2 or not rising:
            rule = "hold at least two rising numbers in (0, 1), such as (0.05, 0.5, 0.95)"
            raise ValueError(f"`levels` must {rule}; got {levels}.")
        object.__setattr__(self, "levels", levels)

    def _targets(self, output: Tensor, y: Tensor) -> Tensor:
        """The target of every row of the output, whose draws share it: a column would broadcast to rows x rows."""
        if output.shape[-1 - y.dim() :] != (*y.shape, len(self.levels)):
            rule = f"have the output's shape without its axis of levels, {len(self.levels)} here"
            raise ValueError(f"`y` must {rule}; got y {tuple(y.shape)} against output {tuple(output.shape)}.")
        return y.to(output.dtype).expand(output.shape[:-1])

    def _pieces(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The ordered quantiles, the probability between them, and the scales of the tails below and above."""
        if output.dim() < 1 or output.shape[-1] != len(self.levels):
            rule = f"Quantiles needs a last axis of {len(self.levels)} outputs, one per level"
            raise ValueError(f"`likelihood` {rule}; got an output of shape {tuple(output.shape)}.")
        ordered = output.sort(-1).values
        # Coincident quantiles have no width for their probability: give them the least whose square is positive.
        kind = torch.finfo(output.dtype)
        least = (kind.eps * ordered.abs().amax(-1, keepdim=True)).clamp(min=min(kind.eps, kind.tiny**0.5))
        widths = torch.maximum(ordered.diff(dim=-1), least)
        ordered = torch.cat([ordered[..., :1], ordered[..., :1] + widths.cumsum(-1)], -1)
        masses = output.new_tensor(self.levels).diff()
        below = self.levels[0] * widths[..., 0] / masses[0]
        above = (1 - self.levels[-1]) * widths[..., -1] / masses[-1]
        return ordered, masses, below, above

    def mean(self, output: Tensor) -> Tensor:
        q, masses, below, above = self._pieces(output)
        inside = (masses * (q[..., :-1] + q[..., 1:]) / 2).sum(-1)
        return inside + self.levels[0] * (q[..., 0] - below) + (1 - self.levels[-1]) * (q[..., -1] + above)

    def variance(self, output: Tensor) -> Tensor:
        q, masses, below, above = self._pieces(output)
        q = q - self.mean(output)[..., None]  # squares of deviations, so that a large mean costs no accuracy
        low, high = q[..., :-1], q[..., 1:]
        inside = (masses * (low.square() + low * high + high.square()) / 3).sum(-1)
        lower = (q[..., 0] - below).square() + below.square()  # a shifted exponential: its mean's square and variance
        upper = (q[..., -1] + above).square() + above.square()
        return inside + self.levels[0] * lower + (1 - self.levels[-1]) * upper

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        (q, masses, below, above), at = self._pieces(output), self._targets(output, y)
        piece = (torch.searchsorted(q.contiguous(), at[..., None].contiguous()) - 1).clamp(0, len(self.levels) - 2)
        density = (masses.log() - q.diff(dim=-1).log()).gather(-1, piece).squeeze(-1)
        beyond = (q[..., 0] - at).clamp(min=0) / below + (at - q[..., -1]).clamp(min=0) / above
        return sum_events(density - beyond, y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        q, _, below, above = self._pieces(output)
        u = torch.rand(output.shape[:-1], generator=generator, dtype=output.dtype, device=output.device)
        levels = output.new_tensor(self.levels)
        piece = (torch.searchsorted(levels, u) - 1).clamp(0, len(self.levels) - 2)
        share = ((u - levels[piece]) / levels.diff()[piece]).clamp(0, 1)
        low = q.gather(-1, piece[..., None]).squeeze(-1)
        high = q.gather(-1, piece[..., None] + 1).squeeze(-1)
        # Beyond the outer levels the quantile function is a logarithm, of u below and of 1 - u above.
        lower = below * (u / levels[0]).clamp(max=1).clamp_min(torch.finfo(u.dtype).tiny).log()
        upper = -above * ((1 - u) / (1 - levels[-1])).clamp(max=1).log()
        return low + share * (high - low) + lower + upper

    def pinball_loss(self, output: Tensor, y: Tensor) -> Tensor:
        r"""The loss $\sum_k \max(\alpha_k (y - q_k), (\alpha_k - 1)(y - q_k))$ of each row, least at the quantiles."""
        levels = output.new_tensor(self.levels)
        excess = self._targets(output, y)[..., None] - output
        return sum_events(torch.maximum(levels * excess, (levels - 1) * excess).sum(-1), y)
