r"""Dropout networks as scikit-learn estimators: good without tuning, honest about what they do not know."""

from dropbayes.estimators.classifier import DropoutClassifier
from dropbayes.estimators.regressor import DropoutRegressor

__all__ = ["DropoutClassifier", "DropoutRegressor"]
