r"""The scikit-learn classifier."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from dropbayes.estimators.ensembles import ClassEnsemble
from dropbayes.estimators.frames import as_array
from dropbayes.estimators.learning import DropoutEstimator
from dropbayes.estimators.process import Offset
from dropbayes.estimators.recalibration import pool_weights
from dropbayes.estimators.rows import missing_rows
from dropbayes.estimators.trees import Trees, grow_trees
from dropbayes.population import EnsembleChoice
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import row_weights


@dataclass(eq=False, repr=False)
class DropoutClassifier(ClassifierMixin, ClassEnsemble, DropoutEstimator):
    r"""Classification by an ensemble of dropout networks whose probabilities are averaged over draws [GG16].

    The parameters are those of `DropoutRegressor`, without `noise` and `target_transform`; the weight decay is relative
    to the mean cross-entropy. The logits of every draw, relative to the class shares, are divided by a temperature
    fitted to held-out rows: where these show the networks to be over-confident, probabilities move towards the shares.
    Where they show trees to know more, the log-probabilities of randomised and boosted trees are added with weights.

    Args:
        class_weight: The weight of each class, as a mapping from label to weight, or "balanced" for weights inversely
            proportional to the classes' frequencies. Probabilities are then those of the weighted population.

    Attributes:
        classes_: The labels, sorted.
        population_: The trained networks.
        class_shares_: The share of each class in the training rows, with one row of each class added.
        temperature_: The divisor of the logits, relative to those of the class shares; above 1 if the networks were
            over-confident.
        forest_, boosted_: Trees beside the networks (`dropbayes.estimators.trees`), each with its weight; None where
            held-out rows do not ask for them.
        search_scores_: The held-out log-likelihood of each candidate.
        held_out_score_: That of the ensemble, at its temperature.
        baseline_score_: That of the class shares alone.

    Example:
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutClassifier(drop_prob=0.05, weight_decay=1e-4, n_steps=50, random_state=0)
        >>> model.fit(x, x[:, 0] > 0).predict_proba(x).shape
        (40, 2)
    """

    _: KW_ONLY
    class_weight: Any = None

    @on_cpu
    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None, times: Any = None) -> Self:
        """Searches, trains and fits the temperature; see `DropoutRegressor.fit`."""
        with self._all_or_nothing():
            warm = self._is_warm()
            x, labels, weight = self._training_data(X, y, sample_weight, reset=not warm)
            classes, codes = np.unique(labels, return_inverse=True)
            codes = self._codes(labels, len(x)) if warm else codes
            if (n_present := len(np.unique(codes[weight > 0]))) < 2:
                raise ValueError(f"`y` must have at least 2 classes; got {n_present} class.")
            if not warm:
                self.classes_, self.temperature_ = classes, 1.0
                self.class_shares_ = _class_shares(codes, weight, len(classes))
            self._learn(x, codes.astype(np.int64), weight, groups, times)
        if not warm:
            self._warn_below_baseline("the class shares")
        return self

    def _fit_noise(self, choice: EnsembleChoice, offset: Offset | None, *, forward: bool) -> None:
        _, codes, weight = choice.held_out_rows()
        draws = choice.held_out_draws(self._effort.noise_draws).double().cpu()
        grown: tuple[Trees, ...] = ()
        rows, evidence = self._rows_and_parts(choice), draws.new_zeros(0, *draws.shape[1:])
        _, y, _, part = rows
        knows_classes = all(len(np.unique(y[part != number])) > 1 for number in np.unique(part))
        if self._n_trees and knows_classes and not forward:
            grown, evidence = grow_trees(rows, len(codes), self._n_trees, self.class_shares_, self.seed_)
        fitted = pool_weights(draws, codes, weight, self.class_shares_, evidence)
        self.temperature_, weights, self.held_out_score_ = fitted
        pairs = zip(grown, weights, strict=True)
        used = [replace(trees, weight=torch.tensor(a)) if a > 0 else None for trees, a in pairs]
        self.forest_, self.boosted_ = used or (None, None)
        shares = torch.from_numpy(self.class_shares_).log()[codes]
        self.baseline_score_ = float((shares * weight).sum() / weight.sum())

    def _training_data(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[np.ndarray, ...]:
        given = as_array(y, "y")
        if given is not None and len(missing := missing_rows(given, none=True)):
            raise ValueError(f"`y` must hold a label for every row; row {missing[0]} has none. Leave out such rows.")
        x, y = self._arrays(X, given, reset=reset)
        x = self._encode(x, reset=reset)
        labels = column_or_1d(y, warn=True)
        if len({isinstance(label, str) for label in labels}) > 1:
            raise ValueError("`y` must hold labels of one kind; got texts and others. Make all of them texts with str.")
        check_classification_targets(y)
        weight = row_weights(as_array(sample_weight), len(x)).numpy()
        if self.class_weight is not None:
            if (by_class := compute_sample_weight(self.class_weight, labels)).min() < 0:
                raise ValueError(f"`class_weight` must not be negative; got {self.class_weight}.")
            weight = row_weights(weight * by_class, len(x)).numpy()
        return x, labels, weight

    @on_cpu
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One pass over more rows from the current weights; the first call needs all `classes` and does not search."""
        first = not hasattr(self, "population_")
        with self._all_or_nothing():
            x, labels, weight = self._training_data(X, y, sample_weight, reset=first)
            self._check_parameters()
            if first:
                if classes is None:
                    raise ValueError("`classes` must be passed on the first call to partial_fit.")
                self.classes_, self.temperature_ = np.unique(np.asarray(classes)), 1.0
                self.class_shares_ = _class_shares(self._codes(labels, len(x)), weight, len(self.classes_))
            elif classes is not None and not np.array_equal(np.unique(np.asarray(classes)), self.classes_):
                raise ValueError(f"`classes` must be those of the first call, {self.classes_}; got {classes}.")
            self._partial_fit(x, self._codes(labels, len(x)), weight)
        return self


def _class_shares(codes: np.ndarray, weight: np.ndarray, n_classes: int) -> np.ndarray:
    """The share of each class, with one row of each added, so that none is zero."""
    counts = np.bincount(codes, weights=weight, minlength=n_classes) + 1.0
    return counts / counts.sum()
