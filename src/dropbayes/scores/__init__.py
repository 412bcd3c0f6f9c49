r"""Scores of predictions against outcomes: regression, classification, and ranking by uncertainty.

A per-row score is returned as `[row]` (take `.mean()`), a score of a whole set as a scalar, in which `sample_weight`
counts a row of weight 2 twice. `y` is the observed target, `mean`, `std` and `variance` are predictive, `[row, ...]`;
`probabilities` are predictive, `[row, class]`, `labels` class indices, `[row]`. Draws are axis 0. Arrays are accepted,
tensors returned. NaN, infinite, empty and misshaped input is an error: a column `[row, 1]` is not a vector `[row]`.
"""

from dropbayes.scores.classification import (
    accuracy,
    adaptive_calibration_error,
    brier_score,
    class_log_likelihood,
    confidence_and_correctness,
    expected_calibration_error,
)
from dropbayes.scores.decomposition import Decomposition, brier_decomposition, crps_decomposition
from dropbayes.scores.distributions import crps, energy_score, fair_crps, variogram_score
from dropbayes.scores.ranking import RiskCoverage, auroc, average_precision, fpr_at_tpr, risk_coverage
from dropbayes.scores.regression import (
    coverage,
    gaussian_log_likelihood,
    gaussian_mixture_log_likelihood,
    interval_score,
    mae,
    mixture_log_likelihood,
    quantile_score,
    rmse,
    sharpness,
)

__all__ = [
    "Decomposition",
    "RiskCoverage",
    "accuracy",
    "adaptive_calibration_error",
    "auroc",
    "average_precision",
    "brier_decomposition",
    "brier_score",
    "class_log_likelihood",
    "confidence_and_correctness",
    "coverage",
    "crps",
    "crps_decomposition",
    "energy_score",
    "expected_calibration_error",
    "fair_crps",
    "fpr_at_tpr",
    "gaussian_log_likelihood",
    "gaussian_mixture_log_likelihood",
    "interval_score",
    "mae",
    "mixture_log_likelihood",
    "quantile_score",
    "risk_coverage",
    "rmse",
    "sharpness",
    "variogram_score",
]
