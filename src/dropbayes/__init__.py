"""Dropout networks as distributions over functions: predictive means, variances and log-likelihoods."""

from dropbayes.evaluation import Evaluation, evaluate
from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dropbayes.predictive import Prediction, UncertaintyWarning, predict
from dropbayes.sampling import draws, function_draw
from dropbayes.sites import sites

__version__ = "0.1.0"

__all__ = [
    "Categorical",
    "Evaluation",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Prediction",
    "UncertaintyWarning",
    "__version__",
    "draws",
    "evaluate",
    "function_draw",
    "predict",
    "sites",
]
