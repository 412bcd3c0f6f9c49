r"""The predictive distribution as an object: an equally weighted mixture over the draws [GG16, eq:predictive_dist].

Each draw contributes noise around its function value: Gaussian, or Student's t for outcomes with heavier tails.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, check_probability, float_tensor
from dropbayes.scores import crps, mixture_log_likelihood
from dropbayes.scores.averages import draw_mean, last_axis_mean

# Cells of the tabulated distribution function of Student's t. Its error is below 1e-9 up to these degrees of freedom;
# beyond them a Gaussian is used (they differ by at most 1/(4ν)).
_CELLS, _MAX_FREEDOM = 4096, 1000.0


@dataclass(frozen=True, eq=False)
class Mixture:
    r"""The predictive distribution $p(y) = \tfrac1T \sum_t \tfrac1{\sigma_t} \, g\big((y - \mu_t) / \sigma_t\big)$.

    The density g is the standard Gaussian's, or Student's t with ν degrees of freedom. Axis 0 of all tensors is the
    draw. With Gaussian noise of constant $\sigma_t^2 = \tau^{-1}$ it is [GG16, eq:predictive_dist_reg].

    Args:
        location: The function value of each draw $\mu_t$, `[draw, row]` or `[draw, row, output]`.
        scale: The scale of the noise $\sigma_t > 0$, of a shape that broadcasts to that of `location`.
        freedom: The degrees of freedom ν > 2 of Student's t, one number or one per output; infinite for the Gaussian.

    Example:
        >>> mixture = Mixture(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
        >>> mixture.mean, mixture.epistemic, mixture.aleatoric, mixture.epistemic_share
        (tensor([0.]), tensor([1.]), tensor([0.2500]), tensor([0.8000]))
    """

    location: Tensor
    scale: Tensor
    freedom: tuple[float, ...] | float = math.inf

    def __post_init__(self) -> None:
        location, scale = float_tensor(self.location), float_tensor(self.scale)
        freedom = self.freedom if isinstance(self.freedom, tuple) else (float(self.freedom),)
        if location.dim() not in (2, 3):
            got = f"the shape {tuple(location.shape)}. A single function is one draw: location[None]"
            raise ValueError(f"`location` must be [draw, row] or [draw, row, output]; got {got}.")
        if not bool((scale > 0).all()):
            raise ValueError(f"`scale` must be positive; its smallest value is {float(scale.min()):.3g}.")
        if not all(nu > 2 for nu in freedom):
            raise ValueError(f"`freedom` must be greater than 2, for a finite variance; got {min(freedom):.3g}.")
        n_outputs = location.shape[2] if location.dim() == 3 else 1
        if len(freedom) not in (1, n_outputs):
            raise ValueError(f"`freedom` must be one number or one per output ({n_outputs}); got {len(freedom)}.")
        shared = freedom[0] if len(set(freedom)) == 1 else freedom
        object.__setattr__(self, "location", location)
        object.__setattr__(self, "scale", scale.to(location).expand_as(location))
        object.__setattr__(self, "freedom", shared)

    @property
    def n_draws(self) -> int:
        """The number of components T."""
        return len(self.location)

    @property
    def component_means(self) -> Tensor:
        """The mean of the outcome under each draw: the function value."""
        return self.location

    @property
    def mean(self) -> Tensor:
        """The predictive mean, that of the draws [GG16, prop:mean]."""
        return draw_mean(self.component_means)

    @property
    def epistemic(self) -> Tensor:
        """The variance over draws of the function value: the uncertainty about the function."""
        means = self.component_means
        return draw_mean((means - draw_mean(means)).square())

    @property
    def aleatoric(self) -> Tensor:
        r"""The mean over draws of the variance of the noise: $\sigma_t^2$, for Student's t times $\nu / (\nu - 2)$."""
        factor = 1 / (1 - 2 / self.location.new_tensor(self.freedom, dtype=torch.float64))
        return draw_mean(self.scale.square()) * factor.to(self.location)

    @property
    def variance(self) -> Tensor:
        """The predictive variance: epistemic plus aleatoric [GG16, prop:var]."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """The predictive standard deviation."""
        return self.variance.sqrt()

    @property
    def epistemic_share(self) -> Tensor:
        """The fraction of the predictive variance that is epistemic."""
        return self.epistemic / self.variance

    def log_density(self, y: Array) -> Tensor:
        r"""$\log p(\mathbf y)$ of rows at outcomes `[row]` or `[row, output]`: of all outputs together, `[row]`."""
        density = self._by_output(_log_density, y) - self.scale.log()
        return mixture_log_likelihood(density.sum(-1) if density.dim() == 3 else density)

    def pit(self, y: Array) -> Tensor:
        """The probability integral transform: the distribution function at y, uniform for a calibrated prediction."""
        return draw_mean(self._by_output(_distribution, y))

    def quantile(self, level: float) -> Tensor:
        """The quantile of each row and output: the root of the distribution function minus `level`.

        Example:
            >>> Mixture(torch.zeros(3, 1, dtype=torch.float64), torch.tensor(1.0)).quantile(0.975)
            tensor([1.9600], dtype=torch.float64)
        """
        check_probability("level", level)
        if isinstance(self.freedom, tuple):
            return torch.stack([self.output(k).quantile(level) for k in range(self.location.shape[2])], -1)
        shape, centre, unit = self.location.shape[1:], self.mean.flatten(), self.std.flatten()
        location = ((self.location.flatten(1) - centre) / unit).T.contiguous()  # [row, draw]
        scale = (self.scale.flatten(1) / unit).T.contiguous()
        # Solved in units of the predictive deviation, first in single precision, which is four times as fast.
        start = torch.special.ndtri(torch.full_like(unit, level)).float()  # that of a Gaussian
        rough = _root(location.float(), scale.float(), level, self.freedom, start)
        root = _root(location.double(), scale.double(), level, self.freedom, rough.double())
        return (centre + unit * root).to(self.location).view(shape)

    def interval(self, coverage: float) -> tuple[Tensor, Tensor]:
        """The ends of the central interval that holds the outcome with probability `coverage`."""
        check_probability("coverage", coverage)
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def crps(self, y: Array) -> Tensor:
        r"""The continuous ranked probability score of each outcome, in the units of y; smaller is better.

        $\mathbb E|Y - y| - \int F(z)\,(1 - F(z))\,dz$ with $Y \sim F$: in closed form for the Gaussian
        (`dropbayes.scores.crps`), the integral by quadrature for Student's t.
        """
        if isinstance(self.freedom, tuple):
            outcome = float_tensor(y)
            return torch.stack([self.output(k).crps(outcome[:, k]) for k in range(self.location.shape[2])], -1)
        z = self._standardise(y)
        if self.freedom > _MAX_FREEDOM:
            outcome = float_tensor(y).to(self.location)
            score = crps(self.location.flatten(1), outcome.flatten(), noise_variance=self.scale.square().flatten(1))
            return score.view(outcome.shape)
        # E|t - z| of Student's t: z (2 F(z) - 1) + 2 f(z) (ν + z²) / (ν - 1)
        density, nu = _log_density(z, self.freedom).exp(), self.freedom
        distance = z * (2 * _distribution(z, nu) - 1) + 2 * density * (nu + z.square()) / (nu - 1)
        # The integral of F (1 - F) by the trapezoidal rule in arsinh z, in units of the deviation: a draw may lie √T of
        # them out, or be as wide; from there on the integrand falls off as z to the power 1 - ν.
        centre, unit, integral = self.location.mean(0), self.std, torch.zeros_like(self.std)
        step, last = 1 / 32, round(32 * min(12, math.asinh(self.n_draws**0.5) + 2 + 28 / (nu - 1)))
        for node in (step * number for number in range(-last, last + 1)):
            scale = self.scale if node < 0 else -self.scale  # the smaller of F and 1 - F, which cancels nowhere
            tail = _distribution((centre + unit * math.sinh(node) - self.location) / scale, nu).mean(0)
            integral += tail * (1 - tail) * math.cosh(node)
        return (self.scale * distance).mean(0) - integral * unit * step

    def output(self, index: int) -> Mixture:
        """The marginal distribution of one output, `[draw, row]`."""
        freedom = self.freedom[index] if isinstance(self.freedom, tuple) else self.freedom
        return Mixture(self.location[..., index], self.scale[..., index], freedom)

    def rows(self, index: Tensor | slice) -> Mixture:
        """The distributions of some rows."""
        return replace(self, location=self.location[:, index], scale=self.scale[:, index])

    def with_noise(self, factor: float) -> Mixture:
        """The mixture with its noise multiplied by a factor."""
        return replace(self, scale=self.scale * factor)

    def outcomes(self, values: Tensor) -> Tensor:
        """Outcomes from function values with noise added, which here are outcomes already."""
        return values

    def _standardise(self, y: Array) -> Tensor:
        """The outcomes in units of each draw's noise."""
        outcome = float_tensor(y).to(self.location)
        if outcome.shape != self.location.shape[1:]:
            expected, got = tuple(self.location.shape[1:]), tuple(outcome.shape)
            raise ValueError(f"`y` must have the shape {expected} of the prediction; got {got}.")
        return (outcome - self.location) / self.scale

    def _by_output(self, function: Callable[[Tensor, float], Tensor], y: Array) -> Tensor:
        """A function of the standard noise at the outcomes, of each output with its degrees of freedom."""
        z = self._standardise(y)
        if not isinstance(self.freedom, tuple):
            return function(z, self.freedom)
        return torch.stack([function(z[..., k], nu) for k, nu in enumerate(self.freedom)], -1)


def _log_density(z: Tensor, freedom: float) -> Tensor:
    """The log-density of the standard noise: Gaussian, or Student's t."""
    if math.isinf(freedom):
        return -0.5 * (z.square() + math.log(2 * math.pi))
    half = (freedom + 1) / 2
    constant = math.lgamma(half) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return constant - half * torch.log1p(z.square() / freedom)


def _distribution(z: Tensor, freedom: float) -> Tensor:
    """Its distribution function."""
    if freedom > _MAX_FREEDOM:
        return torch.special.ndtr(z)
    cell = (torch.atan(z / math.sqrt(freedom)) / math.pi + 0.5) * _CELLS
    index = cell.floor().clamp(0, _CELLS - 1).nan_to_num(nan=0.0)
    cubics = torch.nn.functional.embedding(index.long(), _student_table(freedom, z.dtype, z.device))
    value, slope, square, cube = cubics.unbind(-1)
    step = cell - index
    return value + step * (slope + step * (square + step * cube))


@functools.lru_cache(maxsize=32)
def _student_table(freedom: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""Cubics in each cell of θ that match the values and slopes of the distribution function, `[cell, power]`.

    With $z = \sqrt\nu \tan\theta$ the density of θ is $\tfrac{\Gamma((\nu+1)/2)}{\sqrt\pi\,\Gamma(\nu/2)}
    \cos^{\nu-1}\theta$: smooth on a finite interval, whatever the tails. SciPy's `stdtr` takes seven times as long.
    """
    import scipy.special

    edges = torch.linspace(-math.pi / 2, math.pi / 2, _CELLS + 1, dtype=torch.float64, device="cpu")
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    slope = math.pi / _CELLS * constant * torch.cos(edges).clamp_min(0) ** (freedom - 1)
    value = torch.from_numpy(scipy.special.stdtr(freedom, math.sqrt(freedom) * torch.tan(edges).numpy()))
    low, area, left, right = value[:-1], value.diff(), slope[:-1], slope[1:]
    return torch.stack([low, left, 3 * area - 2 * left - right, left + right - 2 * area], -1).to(device, dtype)


def _root(location: Tensor, scale: Tensor, level: float, freedom: float, start: Tensor) -> Tensor:
    """The quantile of each row by Newton's method inside a bracket; a step that would leave it bisects instead."""
    import scipy.special

    quantile = scipy.special.stdtrit(freedom, level) if freedom <= _MAX_FREEDOM else scipy.special.ndtri(level)
    ends = location + float(quantile) * scale
    low, high = ends.amin(1), ends.amax(1)  # a mixture's quantile lies between those of its components
    root = start.clamp(low, high)
    rows = torch.arange(len(root), device=root.device)  # those not yet converged
    tolerance = 1e-7 if root.dtype == torch.float64 else 1e-4  # Newton's next step squares it
    for _ in range(60):
        current = root[rows]
        z = (current[:, None] - location) / scale
        excess = last_axis_mean(_distribution(z, freedom)) - level
        slope = last_axis_mean(_log_density(z, freedom).exp() / scale)
        low, high = torch.where(excess < 0, current, low), torch.where(excess < 0, high, current)
        step = current - excess / slope
        step = torch.where((step >= low) & (step <= high), step, 0.5 * (low + high))  # also where it is NaN
        root[rows] = step
        moving = ((step - current).abs() > tolerance).nonzero()[:, 0]
        if not len(moving):
            break
        if len(moving) < len(rows):
            rows, low, high = rows[moving], low[moving], high[moving]
            location, scale = location[moving], scale[moving]
    return root
