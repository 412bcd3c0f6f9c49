"""The predictive distribution of a network: its moments, the mixture itself, and how it fares against outcomes."""

from dropbayes.predictive.evaluation import COVERAGES, Evaluation, evaluate
from dropbayes.predictive.mixtures import Mixture, draw_mean
from dropbayes.predictive.moments import Gaussian, Prediction, UncertaintyWarning, batches, predict
from dropbayes.predictive.verdict import DropoutChoice, Verdict, check, choose_dropout

__all__ = [
    "COVERAGES",
    "DropoutChoice",
    "Evaluation",
    "Gaussian",
    "Mixture",
    "Prediction",
    "UncertaintyWarning",
    "Verdict",
    "batches",
    "check",
    "choose_dropout",
    "draw_mean",
    "evaluate",
    "predict",
]
