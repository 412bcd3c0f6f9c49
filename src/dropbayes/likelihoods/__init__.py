r"""The observation models $p(\mathbf{y} \mid \mathbf{f})$ that turn a network's output into a distribution.

Every likelihood reads the network's output $\widehat{\mathbf y}$ shaped `[..., row, *event]`: axes before the row
axis (draws) broadcast, axes after it belong to one observation.

- A real number: `Gaussian`, or `StudentT` for data with outliers; the network gives its mean.
- A real number whose noise depends on the input: `HeteroscedasticGaussian`; its mean and log-variance.
- A real number of any distribution: `Quantiles`; its quantiles.
- One of several classes: `Categorical`; a logit per class.
- Yes or no, or several labels at once: `Bernoulli`; a logit per label.
- A count: `Poisson`; the logarithm of its rate.

The predictive distribution is the mixture of the draws: its moments and log-density are expectations over them.
"""

import math

import torch
from torch import Tensor

from dropbayes.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, Quantiles, StudentT
from dropbayes.likelihoods.discrete import Bernoulli, Categorical, Poisson
from dropbayes.likelihoods.observation import ClassLikelihood, Likelihood, output_tensor

__all__ = [
    "Bernoulli",
    "Categorical",
    "ClassLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "Quantiles",
    "StudentT",
    "output_tensor",
    "predictive_covariance",
    "predictive_log_density",
    "predictive_mean",
    "predictive_misfit_and_noise",
    "predictive_variance",
]


def predictive_mean(likelihood: Likelihood, draws: Tensor) -> Tensor:
    r"""The predictive mean $\mathbb E[\mathbf y^*]$: the mean of the likelihood's mean over draws.

    [GG16, prop:mean], from the outputs $\widehat{\mathbf y}_t$, `[draw, row, *event]`.

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


def predictive_misfit_and_noise(likelihood: Gaussian, draws: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""The two terms of [GG16, eq:predictive_dist_reg] for each row, whose sum is `predictive_log_density`.

    The misfit $\mathrm{logsumexp}_t(-\tfrac\tau 2 \|\mathbf y^* - \widehat{\mathbf y}_t\|^2) - \log T$ is 0 at best and
    falls with $\tau$: it penalises draws that are surer than they are right. The noise term $-\tfrac D2 \log 2\pi +
    \tfrac D2 \log\tau$ grows with $\tau$: it penalises a large observation noise.

    Example:
        >>> misfit, noise = predictive_misfit_and_noise(Gaussian(1.0), torch.zeros(5, 1, 1), torch.full((1, 1), 2.0))
        >>> misfit, noise
        (tensor([-2.]), tensor([-0.9189]))
    """
    total = predictive_log_density(likelihood, draws, y)
    noise = likelihood.log_density(y, y)  # of an output without error
    return total - noise, noise
