"""Dropout networks as distributions over functions: predictive means, variances and log-likelihoods.

import dropbayes as db

prediction = db.predict(net, x)          # any trained network with dropout, unchanged by the call
prediction.mean, prediction.std
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from dropbayes.runtime.renames import RenamedModules
from dropbayes.runtime.version import __version__

if TYPE_CHECKING:
    from dropbayes.estimators import DropoutClassifier, DropoutRegressor
    from dropbayes.language import Generation, generate, score, semantic_entropy
    from dropbayes.layers import add_dropout
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
    from dropbayes.models.model import Model, load
    from dropbayes.models.predictor import Predictor
    from dropbayes.predictive import (
        DropoutChoice,
        Evaluation,
        Prediction,
        UncertaintyWarning,
        Verdict,
        check,
        choose_dropout,
        evaluate,
        predict,
    )
    from dropbayes.sampling import Site, Sites, draws, function_draw, sites
    from dropbayes.training import fit, negative_elbo
    from dropbayes.weight_layers import Prior, model_precision, parameter_groups, weight_decay

__all__ = [
    "Bernoulli",
    "Categorical",
    "DropoutChoice",
    "DropoutClassifier",
    "DropoutRegressor",
    "Evaluation",
    "Gaussian",
    "Generation",
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
    "generate",
    "load",
    "model_precision",
    "negative_elbo",
    "parameter_groups",
    "predict",
    "score",
    "semantic_entropy",
    "sites",
    "weight_decay",
]

# Loaded on first use: the command line answers `--help` before torch could be imported, and scikit-learn takes
# longer to import than all of this. No module bears the name of a public function, so importing one hides none.
_HOME = {
    "estimators": ("DropoutClassifier", "DropoutRegressor"),
    "layers": ("add_dropout",),
    "language": ("Generation", "generate", "score", "semantic_entropy"),
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
    "models.model": ("Model", "load"),
    "models.predictor": ("Predictor",),
    "predictive": (
        "DropoutChoice",
        "Evaluation",
        "Prediction",
        "UncertaintyWarning",
        "Verdict",
        "check",
        "choose_dropout",
        "evaluate",
        "predict",
    ),
    "sampling": ("Site", "Sites", "draws", "function_draw", "sites"),
    "training": ("fit", "negative_elbo"),
    "weight_layers": ("Prior", "model_precision", "parameter_groups", "weight_decay"),
}

# Earlier names of modules, under which they can still be imported.
sys.meta_path.insert(
    0,
    RenamedModules(
        "dropbayes",
        {
            "conversion": "layers.conversion",
            "evaluation": "predictive.evaluation",
            "folders": "models.model",
            "mixtures": "predictive.mixtures",
            "objective": "training.objective",
            "precision": "weight_layers.precision",
            "predictor": "models.predictor",
            "recurrent": "layers.recurrent",
            "theory": "processes.theory",
            "verdict": "predictive.verdict",
        },
    ),
)


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(f"dropbayes.{module}"), name)
            globals()[name] = value
            return value
    if not name.startswith("_") and importlib.util.find_spec(f"dropbayes.{name}"):
        return importlib.import_module(f"dropbayes.{name}")
    raise AttributeError(f"module 'dropbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
