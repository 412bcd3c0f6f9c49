"""Dropout networks as distributions over functions: predictive means, variances and log-likelihoods.

import dropbayes as db

prediction = db.predict(net, x)          # any trained network with dropout, unchanged by the call
prediction.mean, prediction.std
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from dropbayes.runtime import __version__

if TYPE_CHECKING:
    from dropbayes.app import Predictor, load
    from dropbayes.calibration import conformal as conformal
    from dropbayes.decisions import acquisition as acquisition
    from dropbayes.estimators import DropoutClassifier, DropoutRegressor
    from dropbayes.guests import doctor
    from dropbayes.layers import Prior, add_dropout, model_precision, weight_decay
    from dropbayes.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, Quantiles, StudentT
    from dropbayes.likelihoods.discrete import Bernoulli, Categorical, Poisson
    from dropbayes.linear import explain
    from dropbayes.predictive import check, evaluate, predict, tune_dropout
    from dropbayes.sampling import Sampling, draws, function_draw
    from dropbayes.sampling import sites as sites
    from dropbayes.scores import information as information
    from dropbayes.training import fit, negative_elbo

__all__ = [
    "Bernoulli",
    "Categorical",
    "DropoutClassifier",
    "DropoutRegressor",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Poisson",
    "Predictor",
    "Prior",
    "Quantiles",
    "Sampling",
    "StudentT",
    "__version__",
    "add_dropout",
    "check",
    "doctor",
    "draws",
    "evaluate",
    "explain",
    "fit",
    "function_draw",
    "load",
    "model_precision",
    "negative_elbo",
    "predict",
    "tune_dropout",
    "weight_decay",
]

# Loaded on first use: the command line answers `--help` before torch could be imported, and scikit-learn takes longer
# to import than all of this. `sites` stands beside `doctor`, which tells more. No module bears the name of a public
# function, so importing one hides none.
_HOME = {
    "app.models.model": ("load",),
    "app.models.predictor": ("Predictor",),
    "estimators": ("DropoutClassifier", "DropoutRegressor"),
    "guests": ("doctor",),
    "layers": ("Prior", "add_dropout", "model_precision", "weight_decay"),
    "likelihoods": (
        "Bernoulli",
        "Categorical",
        "Gaussian",
        "HeteroscedasticGaussian",
        "Poisson",
        "Quantiles",
        "StudentT",
    ),
    "linear": ("explain",),
    "predictive": ("check", "evaluate", "predict", "tune_dropout"),
    "sampling": ("Sampling", "draws", "function_draw", "sites"),
    "training": ("fit", "negative_elbo"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is not None:
        globals()[name] = value = getattr(importlib.import_module(f"dropbayes.{home}"), name)
        return value
    # Some modules inside a package are names of the library, too.
    package = {"acquisition": "decisions.", "conformal": "calibration.", "information": "scores."}.get(name, "")
    module = f"dropbayes.{package}{name}"
    if not name.startswith("_") and importlib.util.find_spec(module):
        return importlib.import_module(module)
    raise AttributeError(f"module 'dropbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
