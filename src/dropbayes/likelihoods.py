r"""The observation models $p(\mathbf{y} \mid \mathbf{f})$ that turn a network's output into a distribution.

Every likelihood reads the network's output $\widehat{\mathbf y}$ shaped `[..., row, *event]`: axes before the row
axis (draws) broadcast, axes after it belong to one observation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "predictive_covariance",
    "predictive_log_density",
    "predictive_mean",
    "predictive_variance",
]


class Likelihood(ABC):
    r"""A distribution of one observation given the network's output, $p(\mathbf y \mid \widehat{\mathbf y})$."""

    @abstractmethod
    def mean(self, output: Tensor) -> Tensor:
        r"""The conditional mean $\mathbb{E}[\mathbf y \mid \widehat{\mathbf y}]$ (for classes: their probabilities)."""

    @abstractmethod
    def variance(self, output: Tensor) -> Tensor:
        r"""The conditional variance of each element of $\mathbf y$, shaped like `mean(output)`."""

    @abstractmethod
    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        r"""The log-density $\log p(\mathbf y \mid \widehat{\mathbf y})$, one value per (draw,) row: `[..., row]`."""

    @abstractmethod
    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""One observation drawn from $p(\mathbf y \mid \widehat{\mathbf y})$ for each element of `output`."""


def _sum_events(density: Tensor, y: Tensor) -> Tensor:
    """Sums out the event axes: all axes of `y` after its row axis."""
    return density.flatten(start_dim=density.dim() - y.dim() + 1).sum(-1) if y.dim() > 1 else density


def _check_targets(output: Tensor, y: Tensor) -> None:
    # A (rows, 1) output against (rows,) targets would broadcast to rows x rows: refuse it.
    if output.dim() < y.dim() or output.shape[output.dim() - y.dim() :] != y.shape:
        raise ValueError(
            f"`y` must have the shape of the network's output for its rows; got y {tuple(y.shape)} against output "
            f"{tuple(output.shape)}. Reshape y (y[:, None] for a one-column output) or squeeze the output."
        )


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""The Gaussian observation model $\mathcal N(\mathbf y; \widehat{\mathbf y}, \tau^{-1} \mathbf I_D)$.

    [GG16, eq:generative_model_reg].

    Args:
        precision: The model precision $\tau > 0$, in units of 1/y².
    """

    precision: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.precision) and self.precision > 0):
            raise ValueError(f"`precision` (τ) must be a positive number; got {self.precision!r}.")

    def mean(self, output: Tensor) -> Tensor:
        return output

    def variance(self, output: Tensor) -> Tensor:
        return torch.full_like(output, 1.0 / self.precision)

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        _check_targets(output, y)
        per_element = 0.5 * (math.log(self.precision) - math.log(2 * math.pi) - self.precision * (y - output).square())
        return _sum_events(per_element, y)

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
        _check_targets(mean, y)
        per_element = -0.5 * (math.log(2 * math.pi) + log_variance + (y - mean).square() * torch.exp(-log_variance))
        return _sum_events(per_element, y)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        mean, log_variance = self._split(output)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + noise * torch.exp(0.5 * log_variance)


@dataclass(frozen=True)
class Categorical(Likelihood):
    r"""The softmax likelihood of a class, $p(c \mid \widehat{\mathbf y}) \propto \exp(\widehat y_c)$.

    [GG16, eq:generative_model_class].

    Args:
        class_axis: The axis of the classes, counted from the end: -1 for `[row, class]`, -3 for `[row, class, h, w]`.
    """

    class_axis: int = -1

    def __post_init__(self) -> None:
        if self.class_axis >= 0:
            raise ValueError(f"`class_axis` must be negative (counted from the end); got {self.class_axis!r}.")

    def mean(self, output: Tensor) -> Tensor:
        return output.softmax(self.class_axis)

    def variance(self, output: Tensor) -> Tensor:
        probabilities = self.mean(output)
        return probabilities * (1 - probabilities)

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        self._check_labels(output, y)
        log_probabilities = output.log_softmax(self.class_axis)
        labels = y.long().unsqueeze(self.class_axis + 1 + y.dim())
        labels = labels.expand(*output.shape[: output.dim() - labels.dim()], *labels.shape)
        chosen = log_probabilities.gather(self.class_axis, labels).squeeze(self.class_axis)
        return _sum_events(chosen, y)

    def _check_labels(self, output: Tensor, y: Tensor) -> None:
        if y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"`y` must hold class labels (integers); got {y.dtype}. Pass y.argmax(...) for one-hot rows."
            )
        row_axes = output.shape[: self.class_axis] + output.shape[output.dim() + self.class_axis + 1 :]
        fits = y.shape == row_axes[len(row_axes) - y.dim() :] and -self.class_axis <= y.dim() < output.dim()
        if not fits:
            raise ValueError(
                "`y` must have the output's shape less its class axis; got y "
                f"{tuple(y.shape)} against output {tuple(output.shape)} with class_axis={self.class_axis}."
            )

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        probabilities = self.mean(output).movedim(self.class_axis, -1)
        labels = torch.multinomial(
            probabilities.reshape(-1, probabilities.shape[-1]), 1, replacement=True, generator=generator
        )
        return labels.reshape(probabilities.shape[:-1])


# --- expectations over draws ---------------------------------------------------------------------------------------


def predictive_mean(likelihood: Likelihood, draws: Tensor) -> Tensor:
    r"""The predictive mean $\mathbb E[\mathbf y^*]$: the mean of the likelihood's mean over draws.

    [GG16, prop:mean]: MC dropout's estimate. Weight averaging ("standard dropout") is the network in evaluation mode.

    Args:
        likelihood: $p(\mathbf y \mid \widehat{\mathbf y})$.
        draws: The network's outputs $\widehat{\mathbf y}_t$, `[draw, row, *event]`.

    Example:
        >>> predictive_mean(Gaussian(1.0), torch.tensor([[[1.0]], [[4.0]]]))
        tensor([[2.5000]])
    """
    return likelihood.mean(draws).mean(0)


def predictive_variance(likelihood: Likelihood, draws: Tensor) -> Tensor:
    r"""The predictive variance of each element: epistemic, over draws, plus the mean aleatoric.

    The diagonal of $\tau^{-1}\mathbf I_D + \tfrac 1T \sum_t \widehat{\mathbf y}_t^T \widehat{\mathbf y}_t -
    \mathbb E[\mathbf y^*]^T \mathbb E[\mathbf y^*]$ [GG16, prop:var] for a Gaussian; the law of total variance for
    any other. The sum of squares is centred, so a large mean costs no accuracy.

    Example:
        >>> predictive_variance(Gaussian(precision=2.0), torch.tensor([[[1.0]], [[4.0]]]))
        tensor([[2.7500]])
    """
    return likelihood.mean(draws).var(0, correction=0) + likelihood.variance(draws).mean(0)


def predictive_covariance(draws: Tensor, *, precision: float) -> Tensor:
    r"""The predictive covariance $\tau^{-1}\mathbf I_D + \mathbb E[\widehat{\mathbf y}^T\widehat{\mathbf y}] - \ldots$.

    [GG16, prop:var] with row vectors $\widehat{\mathbf y}$: `[row, D, D]` for draws `[draw, row, D]`.

    Example:
        >>> predictive_covariance(torch.tensor([[[1.0, 0.0]], [[3.0, 2.0]]]), precision=2.0)
        tensor([[[1.5000, 1.0000],
                 [1.0000, 1.5000]]])
    """
    noise = Gaussian(precision).variance(draws[0])  # raises for an impossible precision
    centred = draws - draws.mean(0)
    return torch.einsum("trd,tre->rde", centred, centred) / len(draws) + torch.diag_embed(noise)


def predictive_log_density(likelihood: Likelihood, draws: Tensor, y: Tensor) -> Tensor:
    r"""The predictive log-likelihood $\log \tfrac 1T \sum_t p(\mathbf y^* \mid \widehat{\mathbf y}_t)$ of each row.

    For a Gaussian with $D$ outputs [GG16, eq:predictive_dist_reg] reads
    $\mathrm{logsumexp}_t(-\tfrac\tau 2 \|\mathbf y^* - \widehat{\mathbf y}_t\|^2) - \log T - \tfrac D2 \log 2\pi -
    \tfrac D2 \log \tau^{-1}$; the paper's text has $D = 1$.

    Example:
        >>> predictive_log_density(Gaussian(1.0), torch.zeros(5, 1, 2), torch.zeros(1, 2))
        tensor([-1.8379])
    """
    return likelihood.log_density(draws, y).logsumexp(0) - math.log(len(draws))
