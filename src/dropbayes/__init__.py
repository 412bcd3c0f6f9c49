"""Dropout networks as distributions over functions: predictive means, variances and log-likelihoods."""

from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood

__version__ = "0.1.0"

__all__ = [
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "__version__",
]
