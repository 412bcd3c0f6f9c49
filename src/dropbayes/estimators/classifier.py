r"""The scikit-learn classifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor

from dropbayes.estimators.learning import DropoutEstimator, as_array
from dropbayes.mixtures import draw_mean


class DropoutClassifier(ClassifierMixin, DropoutEstimator):
    """Classification by a dropout network whose probabilities are averaged over draws [GG16].

    The parameters are those of `DropoutRegressor`, without `noise`; the weight decay stands beside the mean
    cross-entropy.

    Attributes:
        classes_: The labels, sorted.
        population_: The trained networks.
        search_scores_: The held-out log-likelihood of each candidate.

    Example:
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutClassifier(drop_prob=0.05, weight_decay=1e-4, n_steps=50, random_state=0)
        >>> model.fit(x, x[:, 0] > 0).predict_proba(x).shape
        (40, 2)
    """

    _likelihood: str = "categorical"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DropoutClassifier:
        """Searches and trains; see `DropoutRegressor.fit`."""
        x, labels, weight = self._validated(X, y, sample_weight, reset=True)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        present = codes if weight is None else codes[weight > 0]
        if len(np.unique(present)) < 2:
            raise ValueError(f"`y` must have at least 2 classes; got {len(np.unique(present))} class.")
        self._learn(x, codes.astype(np.int64), weight, len(self.classes_))
        return self

    def _validated(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Any, Any]:
        x, y = validate_data(self, as_array(X), as_array(y), reset=reset, dtype=np.float64)
        check_classification_targets(y)
        labels = column_or_1d(y, warn=True)
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, x)
        return x, labels, weight

    def _n_classes(self) -> int | None:
        return len(self.classes_)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> DropoutClassifier:
        """One pass over more rows from the present weights; the first call needs all `classes` and does not search."""
        first = not hasattr(self, "population_")
        x, labels, weight = self._validated(X, y, sample_weight, reset=first)
        self._check_parameters()
        if first:
            if classes is None:
                raise ValueError("`classes` must be passed on the first call to partial_fit.")
            self.classes_ = np.unique(np.asarray(classes))
        elif classes is not None and not np.array_equal(np.unique(np.asarray(classes)), self.classes_):
            raise ValueError(f"`classes` must be those of the first call, {self.classes_}; got {classes}.")
        self._take_in(x, self._codes(labels, len(x)), weight)
        return self

    def draws(self, X: Any) -> Tensor:
        """The class probabilities of every draw, `[draw, row, class]`: one function each."""
        return torch.cat([probabilities for _, probabilities in self.draw_blocks(X)], 1)

    def draw_blocks(self, X: Any, *, block_rows: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The rows and `draws` of one block of rows after the other, so that the memory stays bounded.

        Args:
            X: Inputs `[row, feature]`.
            block_rows: Rows per block; chosen from the number of draws by default.
        """
        for rows, probabilities, _ in self._draw_blocks(self._inputs(X), block_rows):
            yield rows, probabilities

    def predict_proba(self, X: Any) -> np.ndarray:
        """The class probabilities, a mean over draws, `[row, class]`."""
        return torch.cat([draw_mean(probabilities) for _, probabilities in self.draw_blocks(X)]).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    def log_likelihood(self, X: Any, y: Any) -> float:
        """The mean log-probability of the true classes."""
        probabilities = self.predict_proba(X)
        codes = self._codes(y, len(probabilities))
        return float(np.log(probabilities[np.arange(len(codes)), codes]).mean())

    def _codes(self, y: Any, n_rows: int) -> np.ndarray:
        """The class numbers of outcomes."""
        labels = np.asarray(as_array(y))
        if labels.shape != (n_rows,):
            raise ValueError(f"`y` must hold one class for each of the {n_rows} rows; got the shape {labels.shape}.")
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(f"`y` must hold only the classes {self.classes_.tolist()}; got {unknown.tolist()[0]!r}.")
        return np.searchsorted(self.classes_, labels)

    def _own_state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "classes_dtype": self.classes_.dtype.str}

    def _set_own_state(self, settings: dict[str, Any]) -> None:
        dtype = np.dtype(settings["classes_dtype"])
        self.classes_ = np.asarray(settings["classes"], dtype=dtype)
