r"""Dropout networks as scikit-learn estimators, with defaults that need no tuning and calibrated uncertainty."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dropbayes.estimators.classifier import DropoutClassifier
    from dropbayes.estimators.regressor import DropoutRegressor

__all__ = ["DropoutClassifier", "DropoutRegressor"]

# Loaded on first use: scikit-learn takes as long to import as torch, and a fitted ensemble predicts without it.
_HOME = {"DropoutClassifier": "classifier", "DropoutRegressor": "regressor"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dropbayes.estimators' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"dropbayes.estimators.{_HOME[name]}"), name)
    return globals()[name]
