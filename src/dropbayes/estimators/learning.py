r"""What the estimators share: their settings, the search that sets the rest, and the draws they predict from."""

from __future__ import annotations

import copy
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from dropbayes import sampling
from dropbayes.estimators import files
from dropbayes.population import Choice, Member, Population, Task, candidates, choose, fit_precision, network, train
from dropbayes.population.evaluation import in_units
from dropbayes.population.records import Head

# The search of the defaults: drop probabilities around those the reference implementation of [GG16] chose on the UCI
# sets, and a weak and a stronger prior.
_DROP_PROBS = (0.005, 0.05, 0.1)
_WEIGHT_DECAYS = (1e-6, 1e-4)
# Searching on more rows than this changes the choice little and the time much.
_SEARCH_ROWS = 50_000
# Larger weights are left to the objective: written out as repetitions they would cost memory.
_REPEATED_WEIGHT = 10
# Rows whose noise a stream remembers.
_REMEMBERED_ROWS = 1000
# Rows predicted at a time, and numbers of draws held for them: bounds of the memory.
_BLOCK_ROWS, _BLOCK_ELEMENTS = 4096, 2**20


class DropoutEstimator(BaseEstimator, ABC):
    """What the regressor and the classifier share; see them for the parameters."""

    _likelihood: Head
    population_: Population
    seed_: int
    rows_tested_: int

    def __init__(
        self,
        hidden: tuple[int, ...] = (50, 50),
        *,
        drop_prob: Any = "search",
        weight_decay: Any = "search",
        learn_drop_prob: bool = False,
        activation: Literal["relu", "tanh"] = "relu",
        n_networks: int = 4,
        n_steps: int = 4000,
        min_epochs: int = 10,
        learning_rate: float = 0.01,
        batch_size: int | Literal["auto"] = "auto",
        n_folds: int | Literal["auto"] = "auto",
        n_draws: int = 50,
        warm_start: bool = False,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.drop_prob = drop_prob
        self.weight_decay = weight_decay
        self.learn_drop_prob = learn_drop_prob
        self.activation = activation
        self.n_networks = n_networks
        self.n_steps = n_steps
        self.min_epochs = min_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_folds = n_folds
        self.n_draws = n_draws
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # --- learning -------------------------------------------------------------------------------------------------

    def _batch_size(self, n_rows: int) -> int:
        if self.batch_size != "auto":
            return min(int(self.batch_size), n_rows)
        return min(n_rows, 64 if n_rows < 3000 else 128 if n_rows < 100_000 else 512)

    def _epochs(self, n_rows: int) -> int:
        per_epoch = -(-n_rows // self._batch_size(n_rows))
        return max(self.min_epochs, round(self.n_steps / per_epoch))

    def _settings(self, n_rows: int) -> dict[str, Any]:
        return {
            "hidden": tuple(self.hidden),
            "likelihood": self._head(),
            "activation": self.activation,
            "batch_size": self._batch_size(n_rows),
            "schedule": "cosine",
            "learn_drop_prob": self.learn_drop_prob,
            "device": self.device,
            "progress": None if self.verbose else False,
        }

    def _head(self) -> Head:
        return self._likelihood

    def _check_parameters(self) -> None:
        for name in ("n_networks", "n_steps", "min_epochs", "n_draws"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")
        if not (isinstance(self.learning_rate, numbers.Real) and self.learning_rate > 0):
            raise ValueError(f"`learning_rate` must be a positive number; got {self.learning_rate!r}.")
        for name in ("batch_size", "n_folds"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, numbers.Integral) and value >= 1):
                raise ValueError(f"`{name}` must be 'auto' or a positive integer; got {value!r}.")
        for name in ("drop_prob", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "search":
                raise ValueError(f"`{name}` must be 'search', a number, or a list of numbers to try; got {value!r}.")

    def _grid(self, n_rows: int) -> list[Member]:
        def values(setting: Any, default: tuple[float, ...]) -> list[Any]:
            if isinstance(setting, str):
                return list(default)
            return list(setting) if isinstance(setting, list) else [setting]

        return candidates(
            drop_prob=values(self.drop_prob, _DROP_PROBS),
            weight_decay=values(self.weight_decay, _WEIGHT_DECAYS),
            learning_rate=[float(self.learning_rate)],
            epochs=[self._epochs(n_rows)],
        )

    def _learn(
        self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, n_classes: int | None = None, groups: Any = None
    ) -> None:
        self._check_parameters()
        x, y, weight, groups = _canonical_rows(x, y, weight, groups)
        if len(x) < 2:
            raise ValueError(f"Found n_samples={len(x)}: at least 2 rows are needed, to learn and to hold out.")
        warm = self.warm_start and hasattr(self, "population_")
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        if warm:
            self._continue(x, y, weight, self._epochs(len(x)), "cosine")  # and the τ of the first search
            return
        self.rows_tested_ = min(len(x), _REMEMBERED_ROWS)  # should rows be streamed in later
        searched = self._search(x, y, weight, n_classes, groups)
        self.search_scores_ = searched.log_likelihood.numpy()
        self.population_ = searched.population
        if len(x) > _SEARCH_ROWS:
            member = replace(searched.best, epochs=self._epochs(len(x)))
            self.population_ = self._trained(x, y, weight, member, n_classes)
            tau = searched.precision[searched.log_likelihood.argmax()].to(self.population_.device)
            self.population_ = replace(self.population_, precision=tau * self.population_.y_scale**-2)
        self._refuse_divergence()

    def _search(
        self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, n_classes: int | None, groups: Any
    ) -> Choice:
        n_rows = min(len(x), _SEARCH_ROWS)
        rows = np.random.RandomState(self.seed_).permutation(len(x))[:n_rows]
        n_folds = (5 if n_rows < 3000 else 1) if self.n_folds == "auto" else int(self.n_folds)
        return choose(
            torch.tensor(x[rows]),
            torch.tensor(y[rows]),
            self._grid(n_rows),
            n_folds=n_folds,
            groups=_row_groups(x[rows], y[rows]) if groups is None else groups[rows],
            weight=None if weight is None else torch.as_tensor(weight[rows]),
            n_members=int(self.n_networks) if len(x) <= _SEARCH_ROWS else 0,
            n_draws=100,
            seed=self.seed_,
            n_classes=n_classes,
            **self._settings(n_rows),
        )

    def _trained(self, x: np.ndarray, y: np.ndarray, weight: Any, member: Member, n_classes: int | None) -> Population:
        members = [replace(member, task=0, seed=self.seed_ + i) for i in range(int(self.n_networks))]
        return train([Task(x, y, weight)], members, n_classes=n_classes, **self._settings(len(x)))

    def _continue(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, epochs: int, schedule: str) -> None:
        """More steps from the present weights."""
        start = self.population_
        self.seed_ += 1  # fresh batches and masks
        members = [replace(m, epochs=epochs, seed=self.seed_ + i) for i, m in enumerate(start.members)]
        settings = self._settings(len(x)) | {"schedule": schedule}
        going_on = train([Task(x, y, weight)], members, start=start, n_classes=self._n_classes(), **settings)
        self.population_ = replace(going_on, precision=start.precision)
        self._refuse_divergence()

    def _take_in(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        """The step of `partial_fit`: the first rows set up the networks, later ones test τ before they are learned."""
        if not hasattr(self, "population_"):
            self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
            member = replace(_middle(self._grid(len(x))), epochs=1)
            self.population_, self.rows_tested_ = self._trained(x, y, weight, member, self._n_classes()), 1
            self._refuse_divergence()
            return
        rows, one_noise = (torch.tensor(x), torch.tensor(y)), [0] * len(self.population_)
        ahead = fit_precision(self.population_, rows, n_draws=50, groups=one_noise)
        # A running mean of the noise variance, so that a call with a single row cannot upset it.
        total = self.rows_tested_ + len(x)
        variance = (self.rows_tested_ / self.population_.precision + len(x) / ahead.precision) / total
        self.population_ = replace(self.population_, precision=1 / variance)
        self.rows_tested_ = min(total, _REMEMBERED_ROWS)
        self._continue(x, y, weight, 1, "constant")

    def _n_classes(self) -> int | None:
        return None

    def _refuse_divergence(self) -> None:
        if bool(self.population_.diverged.any()):
            raise FloatingPointError(
                f"Training diverged. Try learning_rate={self.learning_rate / 10:.3g} instead of "
                f"{self.learning_rate:.3g}, and look for extreme values in X and y."
            )

    # --- prediction -----------------------------------------------------------------------------------------------

    def with_draws(self, *, n_draws: int | None = None, seed: int | None = None) -> Any:
        """A view of this fitted estimator that predicts from another number of draws, or from those of another seed.

        Args:
            n_draws: The draws of each network.
            seed: The seed of the draws.
        """
        check_is_fitted(self)
        view = copy.copy(self)
        view.n_draws = self.n_draws if n_draws is None else n_draws
        view.seed_ = self.seed_ if seed is None else seed
        return view

    def _inputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, as_array(X), reset=False, dtype=np.float64)

    def _draw_blocks(self, x: np.ndarray, block_rows: int | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Draws of all networks for some rows at a time: their means and noise variances, `[draw, row, output]`.

        In the units of y. A draw is a function, the same whatever rows it is asked for.
        """
        population = self.population_
        nets = [network(population, i) for i in range(len(population))]
        random = bool((population.drop_prob > 0).any())  # else only the choice of the network is
        n_rows = block_rows or self.block_rows
        for start in range(0, len(x), n_rows):
            rows = slice(start, min(start + n_rows, len(x)))
            inputs = torch.tensor(x[rows]).to(population.device)
            sampled = []
            with torch.no_grad():
                for i, net in enumerate(nets):
                    standard = ((inputs - population.x_mean[i]) / population.x_scale[i]).to(population.weights[0].dtype)
                    if random:
                        output = sampling.draws(net, standard, n_draws=int(self.n_draws), seed=self.seed_ + i)
                    else:
                        output = net.eval()(standard)[None]
                    sampled.append(output)
            mean, variance = in_units(population, torch.stack(sampled, 1))
            yield rows, mean.flatten(0, 1).cpu(), variance.flatten(0, 1).cpu()

    @property
    def block_rows(self) -> int:
        """The rows predicted at once: from the model and its draws alone, so that a row is always in the same block."""
        per_row = int(self.n_draws) * len(self.population_) * self.population_.weights[-1].shape[-1]
        return max(16, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // per_row))

    # --- storage --------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator to one file (see `dropbayes.runtime.storage`); `load` reads it back."""
        check_is_fitted(self)
        files.save(self, path, own=self._own_state())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """The estimator a file holds, fitted.

        Raises:
            ValueError: The file is damaged, or holds something else.
        """
        estimator, settings = files.load(cls, path)
        estimator._set_own_state(settings)
        return estimator

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """What a file must hold besides what all estimators have, as JSON values."""

    @abstractmethod
    def _set_own_state(self, settings: dict[str, Any]) -> None:
        """Takes back what `_own_state` gave."""


def as_array(values: Any) -> Any:
    """Torch tensors as numpy arrays; everything else scikit-learn reads itself."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _canonical_rows(x: Any, y: Any, weight: Any, groups: Any) -> tuple[Any, Any, Any, Any]:
    """The rows sorted, whole-number weights written out as repetitions.

    So what is learned does not depend on the order of the rows, and a row of weight 2 is exactly a row given twice.
    """
    if groups is not None:
        groups = np.asarray(groups)
        if groups.shape != (len(x),):
            raise ValueError(f"`groups` must name one group for each of the {len(x)} rows; got {groups.shape}.")
        groups = np.unique(groups, return_inverse=True)[1].reshape(-1)
        if groups.max() == 0:
            raise ValueError("`groups` must name at least 2 groups, to learn from one and hold out another; got 1.")
    rows = np.arange(len(x))
    if weight is not None:
        rows = rows[weight > 0]
        kept = weight[rows]
        if len(kept) and np.all(kept == np.round(kept)) and kept.max() <= _REPEATED_WEIGHT:
            rows, weight = np.repeat(rows, kept.astype(np.int64)), None
    order = rows[np.lexsort(np.vstack([x[rows].T, y[rows].reshape(len(rows), -1).T]))]
    return x[order], y[order], *(None if values is None else values[order] for values in (weight, groups))


def _row_groups(x: np.ndarray, y: np.ndarray) -> Any:
    """A number for each distinct row: copies of a row must not be learned from and held out at once."""
    table = np.column_stack([x, y.reshape(len(y), -1)])
    groups = np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)
    return groups if groups.max() > 0 else None  # one distinct row alone: nothing better than to split its copies


def _middle(grid: list[Member]) -> Member:
    return grid[len(grid) // 2]
