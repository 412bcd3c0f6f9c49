r"""The common base of the estimators: their parameters, and the search over those left to the effort."""

from __future__ import annotations

import numbers
from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, check_X_y, validate_data
from torch import Tensor

from dropbayes.estimators.bins import Bins
from dropbayes.estimators.effort import EFFORTS, Effort
from dropbayes.estimators.ensembles import Ensemble, as_array
from dropbayes.estimators.frames import FrameColumns, is_mixed_frame
from dropbayes.estimators.missing import MissingValues
from dropbayes.population import (
    EnsembleChoice,
    Member,
    Population,
    Task,
    choose_ensemble,
    fit_precision,
    train_in_jobs,
)
from dropbayes.runtime.devices import cpu_threads
from dropbayes.runtime.progress import ProgressBar

# A search on more rows takes longer and rarely changes the choice.
_SEARCH_ROWS = 50_000
# From this many rows on, one split with a fifth held out replaces the folds.
_MANY_ROWS = 2000
_FOLDS = 5
# Larger weights enter the objective: as repeated rows they would cost memory.
_REPEATED_WEIGHT = 10
# The window, in rows, of the running noise estimate of `partial_fit`.
_REMEMBERED_ROWS = 1000


# Operations on fewer values are no faster with a second thread.
_ONE_THREAD_SIZE = 2**18


class DropoutEstimator(BaseEstimator, Ensemble):
    """The common base of the regressor and the classifier, which document the parameters."""

    rows_tested_: int

    def __init__(
        self,
        hidden: tuple[int, ...] | Literal["auto"] = "auto",
        *,
        effort: Literal["quick", "standard", "best"] = "standard",
        drop_prob: Any = "search",
        weight_decay: Any = "search",
        learn_drop_prob: bool = False,
        activation: Literal["relu", "tanh"] = "relu",
        missing: Literal["error", "learn"] = "error",
        n_networks: int | Literal["auto"] = "auto",
        n_steps: int | Literal["auto"] = "auto",
        min_epochs: int = 10,
        learning_rate: float | Literal["auto"] = "auto",
        batch_size: int | Literal["auto"] = "auto",
        n_folds: int | Literal["auto"] = "auto",
        n_draws: int = 50,
        warm_start: bool = False,
        n_jobs: int | None = None,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.effort = effort
        self.drop_prob = drop_prob
        self.weight_decay = weight_decay
        self.learn_drop_prob = learn_drop_prob
        self.activation = activation
        self.missing = missing
        self.n_networks = n_networks
        self.n_steps = n_steps
        self.min_epochs = min_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_folds = n_folds
        self.n_draws = n_draws
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # --- settings -------------------------------------------------------------------------------------------------

    @property
    def _effort(self) -> Effort:
        return EFFORTS[self.effort]

    def _check_parameters(self) -> None:
        if self.effort not in EFFORTS:
            raise ValueError(f"`effort` must be one of {', '.join(map(repr, EFFORTS))}; got {self.effort!r}.")
        for name in ("min_epochs", "n_draws"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")
        for name in ("n_networks", "n_steps", "batch_size", "n_folds"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, numbers.Integral) and int(value) >= 1):
                raise ValueError(f"`{name}` must be 'auto' or a positive integer; got {value!r}.")
        rate = self.learning_rate
        if rate != "auto" and not (isinstance(rate, numbers.Real) and rate > 0):
            raise ValueError(f"`learning_rate` must be 'auto' or a positive number; got {rate!r}.")
        for name in ("drop_prob", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "search":
                raise ValueError(f"`{name}` must be 'search', a number, or a list of numbers to try; got {value!r}.")
        if not isinstance(self.hidden, (tuple, list, np.ndarray)) and self.hidden != "auto":
            raise ValueError(f"`hidden` must be 'auto' or a tuple of widths such as (50, 50); got {self.hidden!r}.")

    def _hidden(self, n_rows: int) -> tuple[int, ...]:
        if not isinstance(self.hidden, str):
            return tuple(self.hidden)
        return tuple(width * (2 if n_rows >= self._effort.wide_rows else 1) for width in self._effort.hidden)

    def _batch_size(self, n_rows: int) -> int:
        if self.batch_size != "auto":
            return min(int(self.batch_size), n_rows)
        return min(n_rows, 64 if n_rows < 3000 else 128 if n_rows < 100_000 else 512)

    def _epochs(self, n_rows: int, share: float = 1.0) -> int:
        """The number of epochs that amounts to the number of steps; on large tables at least `min_epochs`."""
        effort, per_epoch = self._effort, -(-n_rows // self._batch_size(n_rows))
        steps = min(effort.steps + effort.steps_per_row * n_rows, effort.most_steps)
        epochs = (steps if self.n_steps == "auto" else int(self.n_steps)) / per_epoch
        return max(1, round(share * max(self.min_epochs, epochs)))

    def _settings(self, n_rows: int, progress: ProgressBar | None = None) -> dict[str, Any]:
        return {
            "hidden": self._hidden(n_rows),
            "likelihood": self._head(),
            "activation": self.activation,
            "batch_size": self._batch_size(n_rows),
            "schedule": "cosine",
            "learn_drop_prob": self.learn_drop_prob,
            "n_jobs": self.n_jobs,
            "device": self.device,
            "progress": progress or (None if self.verbose else False),
        }

    def _grid(self, n_rows: int) -> tuple[list[Member], int]:
        """The candidates, and the number of finalists to train again for all steps."""
        effort, n_layers = self._effort, len(self._hidden(n_rows))
        n_finalists = 0
        if isinstance(self.drop_prob, str):
            n_finalists = effort.n_finalists
            bins = getattr(self, "bins_", None)
            seen = [(candidate, bins and len(bins.edges)) for candidate in effort.candidates]
            seen += [(candidate, None) for candidate in effort.binned if bins]
            tried = [((inputs, *[units] * n_layers), share, n) for (inputs, units, share), n in seen]
        else:
            given = self.drop_prob if isinstance(self.drop_prob, list) else [self.drop_prob]
            tried = [(drop_prob, 1.0, None) for drop_prob in given]
        decay = self.weight_decay
        decays = effort.weight_decays if isinstance(decay, str) else decay if isinstance(decay, list) else [decay]
        rate = effort.learning_rate if self.learning_rate == "auto" else float(self.learning_rate)
        grid = [
            Member(
                drop_prob=drop_prob,
                weight_decay=value,
                learning_rate=rate,
                epochs=self._epochs(n_rows, share),
                n_inputs=n_inputs,
            )
            for drop_prob, share, n_inputs in tried
            for value in decays
        ]
        return grid, n_finalists

    # --- learning -------------------------------------------------------------------------------------------------

    def _is_warm(self) -> bool:
        return bool(self.warm_start) and hasattr(self, "population_")

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, groups: Any, times: Any = None) -> None:
        self._check_parameters()
        if times is not None:
            groups = _time_groups(times, groups, len(x))
        self.__dict__.pop("recalibration", None)  # fitted to the previous networks
        x, y, weight, groups = _canonical_rows(x, y, weight, groups)
        if len(x) < 2:
            raise ValueError(f"Found n_samples={len(x)}: at least 2 rows are needed, to learn and to hold out.")
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        if self._is_warm():
            self._continue_and_test(self._binned(x), y, weight)
            return
        self.bins_ = self._bins(x)
        x = self._binned(x)
        self.rows_tested_ = min(len(x), _REMEMBERED_ROWS)  # in case `partial_fit` follows
        threads = 1 if self._operation_size(len(x)) <= _ONE_THREAD_SIZE else None
        with cpu_threads(threads), self._progress(len(x)) as progress:
            choice = self._search(x, y, weight, groups, forward=times is not None, progress=progress)
            self.search_scores_ = choice.log_likelihood.numpy()
            self.search_edges_ = search_edges(choice)
            self.population_ = self._trained(x, y, weight, choice, progress)
            self._refuse_divergence()
            self._fit_noise(choice)

    def _operation_size(self, n_rows: int) -> int:
        """The number of values in one tensor operation of the search."""
        n_folds = _FOLDS if n_rows < _MANY_ROWS else 1
        return len(self._grid(n_rows)[0]) * n_folds * self._batch_size(n_rows) * max(self._hidden(n_rows), default=1)

    def _progress(self, n_rows: int) -> ProgressBar:
        """One bar, in steps of a network, for the search and the training after it, so that it shows the time left."""
        n_searched = min(n_rows, _SEARCH_ROWS)
        (grid, n_finalists), n_folds = self._grid(n_searched), self._folds(n_searched)
        learned = n_searched * (n_folds - 1) // n_folds if n_folds > 1 else n_searched * (_FOLDS - 1) // _FOLDS
        epochs = sum(member.epochs for member in grid) + n_finalists * self._epochs(n_searched)
        searched = epochs * n_folds * -(-learned // self._batch_size(n_searched))
        trained = self._n_networks() * self._epochs(n_rows) * -(-n_rows // self._batch_size(n_rows))
        show = None if self.verbose else False
        return ProgressBar("fit", searched + trained, unit="network steps", show=show)

    def _folds(self, n_rows: int) -> int:
        return (_FOLDS if n_rows < _MANY_ROWS else 1) if self.n_folds == "auto" else int(self.n_folds)

    def _search(
        self,
        x: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None,
        groups: Any,
        *,
        forward: bool,
        progress: ProgressBar,
    ) -> EnsembleChoice:
        n_rows = min(len(x), _SEARCH_ROWS)
        rows = np.random.RandomState(self.seed_).permutation(len(x))[:n_rows]
        n_folds = self._folds(n_rows)
        grid, n_finalists = self._grid(n_rows)
        n_networks, n_columns = self._n_networks(), None if self.bins_ is None else len(self.bins_.edges)
        return choose_ensemble(
            torch.tensor(x[rows]),
            torch.tensor(y[rows]),
            grid,
            finalists=n_finalists,
            finalist_epochs=self._epochs(n_rows),
            n_places=min(self._effort.n_places, n_networks),
            n_folds=n_folds,
            groups=_row_groups(x[rows, :n_columns], y[rows]) if groups is None else groups[rows],
            forward=forward,
            weight=None if weight is None else torch.as_tensor(weight[rows]),
            n_draws=self._effort.search_draws,
            seed=self.seed_,
            n_classes=self._n_classes(),
            **self._settings(n_rows, progress),
        )

    def _n_networks(self) -> int:
        return self._effort.n_places * self._effort.n_seeds if self.n_networks == "auto" else int(self.n_networks)

    def _trained(
        self, x: np.ndarray, y: np.ndarray, weight: Any, choice: EnsembleChoice, progress: ProgressBar
    ) -> Population:
        """Trains the networks of the ensemble on all rows, cycling through the places, with the τ of their places."""
        n_searched = min(len(x), _SEARCH_ROWS)
        full = self._epochs(n_searched)
        if self.bins_ is not None and all(member.n_inputs is not None for member in choice.members):
            x, self.bins_ = x[:, : len(self.bins_.edges)], None  # no place went to a candidate that sees the bins
        members = []
        for i in range(self._n_networks()):
            member = choice.members[i % len(choice.places)]
            epochs = member.epochs
            if n_searched < len(x):  # the same fraction of a full training
                epochs = max(1, round(self._epochs(len(x)) * member.epochs / full))
            n_inputs = None if self.bins_ is None else member.n_inputs
            members.append(replace(member, task=0, epochs=epochs, seed=self.seed_ + 1000 + i, n_inputs=n_inputs))
        settings = self._settings(len(x), progress)
        trained = train_in_jobs([Task(x, y, weight)], members, n_classes=self._n_classes(), **settings)
        place = torch.arange(len(members)) % len(choice.places)
        return replace(trained, precision=choice.precision[place].to(trained.device) * trained.y_scale**-2)

    def _continue(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, epochs: int, schedule: str) -> None:
        """Continues training from the current weights."""
        start = self.population_
        self.seed_ += 1  # fresh batches and masks
        members = [replace(m, task=0, epochs=epochs, seed=self.seed_ + i) for i, m in enumerate(start.members)]
        settings = self._settings(len(x)) | {"schedule": schedule, "hidden": self.hidden_}
        trained = train_in_jobs([Task(x, y, weight)], members, start=start, n_classes=self._n_classes(), **settings)
        self.population_ = replace(trained, precision=start.precision)
        self._refuse_divergence()

    def _continue_and_test(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        """Continues training twice: without a fifth of the rows, which estimate the noise, then with all rows."""
        held = np.random.RandomState(self.seed_).permutation(len(x)) < max(1, len(x) // 5)
        start = self.population_
        self._continue(x[~held], y[~held], None if weight is None else weight[~held], self._epochs(len(x)), "cosine")
        tested = self._tested_precision(x[held], y[held], None if weight is None else weight[held])
        self.population_ = start
        self._continue(x, y, weight, self._epochs(len(x)), "cosine")
        self._set_precision(tested)

    def _tested_precision(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> Tensor:
        """The precision estimated from rows that the current networks were not trained on."""
        rows = (torch.tensor(x), torch.tensor(y), None if weight is None else torch.tensor(weight))
        return fit_precision(self.population_, rows, n_draws=50, groups=[0] * len(self.population_)).precision

    def _set_precision(self, precision: Tensor) -> None:
        self.population_ = replace(self.population_, precision=precision)

    def _take_in(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        """The step of `partial_fit`: the first rows set up the networks, later ones update τ before their training."""
        if not hasattr(self, "population_"):
            self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
            self.bins_ = None  # the first rows of a stream are too few for bins
            grid, _ = self._grid(len(x))
            member = replace(grid[len(grid) // 2], task=0, epochs=1)
            members = [replace(member, seed=self.seed_ + i) for i in range(self._n_networks())]
            settings = self._settings(len(x))
            self.population_ = train_in_jobs([Task(x, y, weight)], members, n_classes=self._n_classes(), **settings)
            self.rows_tested_ = 1
            self._refuse_divergence()
            return
        x = self._binned(x)
        # A running mean of the noise variance, so that a call with a single row changes it little.
        total = self.rows_tested_ + len(x)
        tested = self._tested_precision(x, y, weight)
        variance = (self.rows_tested_ / self.population_.precision + len(x) / tested) / total
        self._set_precision(1 / variance)
        self.rows_tested_ = min(total, _REMEMBERED_ROWS)
        self._continue(x, y, weight, 1, "constant")

    @abstractmethod
    def _fit_noise(self, choice: EnsembleChoice) -> None:
        """Fits the noise or temperature to the held-out draws of a search."""

    @abstractmethod
    def _n_classes(self) -> int | None:
        """The number of classes; None for regression."""

    def _refuse_divergence(self) -> None:
        if bool(self.population_.diverged.any()):
            rate = self.population_.members[0].learning_rate
            raise FloatingPointError(
                f"Training diverged. Try learning_rate={rate / 10:.3g} instead of {rate:.3g}, and look for extreme "
                "values in X and y."
            )

    # --- prediction -----------------------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "learn"
        return tags

    def _finite_inputs(self) -> bool | Literal["allow-nan"]:
        if self.missing not in ("error", "learn"):
            raise ValueError(f"`missing` must be 'error' or 'learn'; got {self.missing!r}.")
        return "allow-nan" if self.missing == "learn" else True

    def _arrays(self, X: Any, *y: Any, reset: bool, **checks: Any) -> Any:
        """The inputs, and the targets if given, as arrays; a frame's categories and dates as numbers.

        Args:
            X: Inputs.
            y: Targets.
            reset: Whether these rows define the columns that later rows must have.
            checks: As for scikit-learn's `check_X_y`.
        """
        checks |= {"dtype": np.float64, "ensure_all_finite": self._finite_inputs()}
        if reset:
            self.frame_columns_ = FrameColumns.of(X) if is_mixed_frame(X) else None
        try:
            if self.frame_columns_ is None:
                return validate_data(self, as_array(X), *map(as_array, y), reset=reset, **checks)
            validate_data(self, X, skip_check_array=True, reset=reset)  # names and number of columns
            x = self.frame_columns_.encode(X, learn_missing=self.missing == "learn")
            return check_X_y(x, *map(as_array, y), **checks) if y else check_array(x, **checks)
        except ValueError as error:
            if not str(error).startswith("Input X contains NaN"):
                raise
            remedy = 'Set `missing="learn"` to learn from rows with missing inputs, or leave those rows out.'
            raise ValueError(f"Input X contains NaN. {remedy}") from None

    def _encoded(self, x: np.ndarray, *, reset: bool) -> np.ndarray:
        """The inputs of the networks, with missing values filled and flagged if `missing="learn"`."""
        if reset:
            self.missing_values_ = MissingValues.of(x) if self.missing == "learn" else None
        return x if self.missing_values_ is None else self.missing_values_.encode(x)

    def _bins(self, x: np.ndarray) -> Bins | None:
        """The bins available to candidates of the search; None if the user specified the candidates."""
        bins = Bins.of(x, most_inputs=self._effort.bin_inputs) if isinstance(self.drop_prob, str) else None
        return bins if bins and bins.n_inputs else None

    def _inputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        x = self._arrays(X, reset=False)
        return self._encoded(x, reset=False)


def search_edges(choice: EnsembleChoice) -> dict[str, float]:
    """The settings whose best value is the smallest or largest of several tried: a value beyond it may be better.

    A drop probability of zero does not count, since no value lies beyond it.
    """

    def setting(member: Member, name: str) -> float:
        value = getattr(member, name)
        return float(max(value) if isinstance(value, tuple) else value)

    edges = {}
    for name in ("drop_prob", "weight_decay"):
        tried = {setting(member, name) for member in choice.candidates}
        best = setting(choice.members[0], name)
        if len(tried) > 1 and best > 0 and best in (min(tried), max(tried)):
            edges[name] = best
    return edges


def row_weights(sample_weight: Any, x: np.ndarray) -> np.ndarray | None:
    """The validated weights of rows; raises if any is negative or all are zero."""
    if sample_weight is None:
        return None
    return _check_sample_weight(as_array(sample_weight), x, ensure_non_negative=True)


def _time_groups(times: Any, groups: Any, n_rows: int) -> np.ndarray:
    """The rank of each row's time: rows of one time are held out together."""
    if groups is not None:
        raise ValueError("`groups` and `times` are two ways to hold rows out; give one of them.")
    times = np.asarray(as_array(times))
    if times.shape != (n_rows,):
        raise ValueError(f"`times` must hold one time for each of the {n_rows} rows; got {times.shape}.")
    if times.dtype.kind in "fmM" and bool((times != times).any()):
        raise ValueError("`times` must hold a time for every row; some are missing.")
    ranks = np.unique(times, return_inverse=True)[1].reshape(-1)
    if ranks.max() == 0:
        raise ValueError("`times` must hold at least 2 times, to learn from the first and hold out the second; got 1.")
    return ranks


def _canonical_rows(x: Any, y: Any, weight: Any, groups: Any) -> tuple[Any, Any, Any, Any]:
    """The rows in sorted order, with integer weights expanded to repeated rows.

    The fit then does not depend on the order of the rows, and a row of weight 2 equals a row given twice.
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
        counts = weight[rows]
        if len(counts) and np.all(counts == np.round(counts)) and counts.max() <= _REPEATED_WEIGHT:
            rows, weight = np.repeat(rows, counts.astype(np.int64)), None
    order = rows[np.lexsort(np.vstack([x[rows].T, y[rows].reshape(len(rows), -1).T]))]
    return x[order], y[order], *(None if values is None else values[order] for values in (weight, groups))


def _row_groups(x: np.ndarray, y: np.ndarray) -> Any:
    """An index for each distinct row: copies of a row must not be in both the training and the held-out rows."""
    table = np.column_stack([x, y.reshape(len(y), -1)])
    groups = np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)
    return groups if groups.max() > 0 else None  # a single distinct row: its copies must be split
