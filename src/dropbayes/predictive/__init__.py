"""The predictive distribution of a network: its moments, the mixture itself, and its evaluation against outcomes."""

from dropbayes.predictive.detection import Detection, detect_outliers
from dropbayes.predictive.evaluation import Evaluation, evaluate
from dropbayes.predictive.mixtures import Mixture
from dropbayes.predictive.moments import Prediction, UncertaintyWarning, check_outputs, outputs_by, predict
from dropbayes.predictive.scoring import CLASS_SCORES, REGRESSION_SCORES, ClassOutcomes, RegressionOutcomes, Score
from dropbayes.predictive.tuning import Tuning, tune_dropout
from dropbayes.predictive.verdict import Verdict, check
from dropbayes.scores.averages import draw_mean

__all__ = [
    "CLASS_SCORES",
    "REGRESSION_SCORES",
    "ClassOutcomes",
    "Detection",
    "Evaluation",
    "Mixture",
    "Prediction",
    "RegressionOutcomes",
    "Score",
    "Tuning",
    "UncertaintyWarning",
    "Verdict",
    "check",
    "check_outputs",
    "detect_outliers",
    "draw_mean",
    "evaluate",
    "outputs_by",
    "predict",
    "tune_dropout",
]
