"""The regressor as an entry of ScoringBench (arXiv 2603.29928): a histogram from the exact distribution function.

In a checkout of ScoringBench, a wrapper of its own is this file's class beside its `ProbabilisticWrapper`:

    from benchmarks.scoringbench import DropoutWrapper
    models = {"dropbayes": DropoutWrapper}
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from dropbayes.estimators import DropoutRegressor
from dropbayes.predictive.mixtures import Mixture

N_BINS = 400
_TAIL = 1e-4  # The probability beyond either end of the grid, which its outer bins take.


def histogram(mixture: Mixture, n_bins: int = N_BINS) -> tuple[np.ndarray, np.ndarray]:
    """The edges `[row, bin + 1]` of a regular grid for each row and the probability `[row, bin]` of each bin.

    Example:
        >>> edges, mass = histogram(Mixture(torch.zeros(1, 2).double(), torch.tensor(1.0)), n_bins=4)
        >>> edges.shape, mass.round(3).tolist()[0]
        ((2, 5), [0.031, 0.469, 0.469, 0.031])
    """
    low, high = mixture.quantile(_TAIL), mixture.quantile(1 - _TAIL)
    share = torch.linspace(0, 1, n_bins + 1, dtype=low.dtype)
    edges = low[:, None] + (high - low).clamp_min(1e-9)[:, None] * share
    below = torch.stack([mixture.pit(edge) for edge in edges.T[1:-1]], 1)
    ends = torch.zeros_like(below[:, :1]), torch.ones_like(below[:, :1])
    return edges.numpy(), torch.cat([ends[0], below, ends[1]], 1).diff(dim=1).numpy()


class DropoutWrapper:
    """`DropoutRegressor()` with ScoringBench's `fit`, `predict` and `predict_distribution`."""

    def __init__(self, **parameters: Any) -> None:
        self.model = DropoutRegressor(**{"random_state": 0, **parameters})

    def fit(self, X: Any, y: Any) -> DropoutWrapper:
        targets = np.asarray(y, dtype=np.float64)
        self.model.fit(X, targets)
        self.train_range = float(targets.min()), float(targets.max())
        return self

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(self.model.predict(X))

    def predict_distribution(self, X: Any) -> Any:
        prediction = importlib.import_module("scoringbench.univariate.wrappers.base").DistributionPrediction
        mixture = self.model.predictive(X)
        edges, mass = histogram(mixture)
        # The histogram is that of a density known everywhere, so no smoother one is made from it.
        settings = {"train_range": self.train_range, "is_grid_native": True}
        return prediction.from_histogram(edges, mass, mixture.mean.numpy(), **settings)
