"""Dropout networks as distributions over functions: predictive means, variances and log-likelihoods.

import dropbayes as db

prediction = db.predict(net, x)          # any trained network with dropout, unchanged by the call
prediction.mean, prediction.std
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from dropbayes.runtime.version import __version__

if TYPE_CHECKING:
    from dropbayes.conversion import add_dropout
    from dropbayes.estimators import DropoutClassifier, DropoutRegressor
    from dropbayes.evaluation import Evaluation, evaluate
    from dropbayes.folders import Model, load
    from dropbayes.likelihoods import (
        Bernoulli,
        Categorical,
        Gaussian,
        HeteroscedasticGaussian,
        Likelihood,
        Poisson,
        Quantiles,
        StudentT,
    )
    from dropbayes.objective import negative_elbo
    from dropbayes.precision import Prior, model_precision, weight_decay
    from dropbayes.predictive import Prediction, UncertaintyWarning, predict
    from dropbayes.predictor import Predictor
    from dropbayes.sampling import Site, Sites, draws, function_draw, sites
    from dropbayes.training import fit
    from dropbayes.verdict import DropoutChoice, Verdict, check, choose_dropout
    from dropbayes.weight_layers import parameter_groups

__all__ = [
    "Bernoulli",
    "Categorical",
    "DropoutChoice",
    "DropoutClassifier",
    "DropoutRegressor",
    "Evaluation",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Model",
    "Poisson",
    "Prediction",
    "Predictor",
    "Prior",
    "Quantiles",
    "Site",
    "Sites",
    "StudentT",
    "UncertaintyWarning",
    "Verdict",
    "__version__",
    "add_dropout",
    "check",
    "choose_dropout",
    "draws",
    "evaluate",
    "fit",
    "function_draw",
    "load",
    "model_precision",
    "negative_elbo",
    "parameter_groups",
    "predict",
    "sites",
    "weight_decay",
]

# Loaded on first use: the command line answers `--help` before torch could be imported, and scikit-learn takes
# longer to import than all of this. No module bears the name of a public function, so importing one hides none.
_HOME = {
    "conversion": ("add_dropout",),
    "estimators": ("DropoutClassifier", "DropoutRegressor"),
    "evaluation": ("Evaluation", "evaluate"),
    "folders": ("Model", "load"),
    "likelihoods": (
        "Bernoulli",
        "Categorical",
        "Gaussian",
        "HeteroscedasticGaussian",
        "Likelihood",
        "Poisson",
        "Quantiles",
        "StudentT",
    ),
    "objective": ("negative_elbo",),
    "precision": ("Prior", "model_precision", "weight_decay"),
    "predictive": ("Prediction", "UncertaintyWarning", "predict"),
    "predictor": ("Predictor",),
    "sampling": ("Site", "Sites", "draws", "function_draw", "sites"),
    "training": ("fit",),
    "verdict": ("DropoutChoice", "Verdict", "check", "choose_dropout"),
    "weight_layers": ("parameter_groups",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            found = getattr(importlib.import_module(f"dropbayes.{module}"), name)
            globals()[name] = found
            return found
    if not name.startswith("_") and importlib.util.find_spec(f"dropbayes.{name}"):
        return importlib.import_module(f"dropbayes.{name}")
    raise AttributeError(f"module 'dropbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
