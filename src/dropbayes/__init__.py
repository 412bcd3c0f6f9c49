"""Dropout networks as distributions over functions: predictive means, variances and log-likelihoods.

import dropbayes as db

prediction = db.predict(net, x)          # any trained network with dropout, unchanged by the call
prediction.mean, prediction.std
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dropbayes.conversion import add_dropout
from dropbayes.evaluation import Evaluation, evaluate
from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dropbayes.objective import negative_elbo
from dropbayes.precision import Prior, model_precision, parameter_groups, weight_decay
from dropbayes.predictive import Prediction, UncertaintyWarning, predict
from dropbayes.sampling import draws, function_draw
from dropbayes.sites import Site, Sites, sites

if TYPE_CHECKING:
    from dropbayes.estimators import DropoutClassifier, DropoutRegressor
    from dropbayes.training import fit

__version__ = "0.1.0"

__all__ = [
    "Categorical",
    "DropoutClassifier",
    "DropoutRegressor",
    "Evaluation",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Prediction",
    "Prior",
    "Site",
    "Sites",
    "UncertaintyWarning",
    "__version__",
    "add_dropout",
    "draws",
    "evaluate",
    "fit",
    "function_draw",
    "model_precision",
    "negative_elbo",
    "parameter_groups",
    "predict",
    "sites",
    "weight_decay",
]

# Loaded on first use: scikit-learn alone takes longer to import than all of this.
_LAZY = {"DropoutClassifier": "estimators", "DropoutRegressor": "estimators", "fit": "training"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"dropbayes.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'dropbayes' has no attribute {name!r}")
