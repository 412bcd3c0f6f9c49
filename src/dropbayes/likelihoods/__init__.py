r"""The observation models $p(\mathbf{y} \mid \mathbf{f})$ that turn a network's output into a distribution.

Every likelihood reads the network's output $\widehat{\mathbf y}$ shaped `[..., row, *event]`: axes before the row
axis (draws) broadcast, axes after it belong to one observation.

- A real number: `Gaussian`, or `StudentT` for data with outliers; the network gives its mean.
- A real number whose noise depends on the input: `HeteroscedasticGaussian`; its mean and log-variance.
- A real number of any distribution: `Quantiles`; its quantiles.
- One of several classes: `Categorical`; a logit per class.
- Yes or no, or several labels at once: `Bernoulli`; a logit per label.
- A count: `Poisson`; the logarithm of its rate.
"""

from dropbayes.likelihoods.discrete import Bernoulli, Categorical, Poisson
from dropbayes.likelihoods.expectations import (
    predictive_covariance,
    predictive_log_density,
    predictive_mean,
    predictive_misfit_and_noise,
    predictive_variance,
)
from dropbayes.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian, StudentT
from dropbayes.likelihoods.observation import ClassLikelihood, Likelihood
from dropbayes.likelihoods.quantiles import Quantiles

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
    "predictive_covariance",
    "predictive_log_density",
    "predictive_mean",
    "predictive_misfit_and_noise",
    "predictive_variance",
]
