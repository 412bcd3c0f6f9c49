"""A model as a pure function from columns to predictions: what engines and servers call."""

from dropbayes.predictor.columns import MATRIX
from dropbayes.predictor.function import Predictor, check_finite, uncertainty, uncertainty_percentiles

__all__ = ["MATRIX", "Predictor", "check_finite", "uncertainty", "uncertainty_percentiles"]
