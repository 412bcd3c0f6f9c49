r"""The common base of the estimators: the search over what is left to the effort, and the training after it."""

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data
from torch import Tensor

from dropbayes.estimators.ensembles import Ensemble
from dropbayes.estimators.extrapolation import Gap
from dropbayes.estimators.frames import as_array, check_names, frame_inputs, frame_schema, is_mixed_frame
from dropbayes.estimators.inputs import Bins, MissingValues
from dropbayes.estimators.parameters import FOLDS, MANY_ROWS, Parameters
from dropbayes.estimators.process import Offset
from dropbayes.estimators.rows import canonical_rows, group_numbers, row_groups
from dropbayes.population import EnsembleChoice, Population, Task, choose_ensemble, fit_precision, select, train_in_jobs
from dropbayes.runtime.devices import cpu_threads
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import check_choice

_SEARCH_ROWS = 50_000  # a search on more takes longer and rarely changes the choice
_REMEMBERED_ROWS = 1000  # the window of the running noise estimate of `partial_fit`
_ONE_THREAD_SIZE = 2**18  # tensor operations of the search on fewer values are no faster with a second thread
_REMEDY = 'Set `missing="learn"` to learn from rows with missing inputs, or leave those rows out.'


class DropoutEstimator(Parameters, Ensemble):
    """The common base of the regressor and the classifier, which document the parameters."""

    rows_tested_: int
    held_out_score_: float
    baseline_score_: float

    def _settings(self, n_rows: int, progress: ProgressBar | None = None) -> dict[str, Any]:
        return {
            "hidden": self._hidden_widths(n_rows),
            "likelihood": self._head(),
            "activation": self.activation,
            "batch_size": self._batch_size(n_rows),
            "schedule": "cosine",
            "betas": self._effort.betas,
            "learn_drop_prob": self.learn_drop_prob,
            "n_classes": self._n_classes,
            "n_jobs": self.n_jobs,
            "device": self.device,
            "progress": progress or (None if self.verbose else False),
        }

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After a failure or an interruption the estimator is as it was, never half of two fits."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException:
            self.__dict__ = before
            raise

    def _is_warm(self) -> bool:
        return bool(self.warm_start) and hasattr(self, "population_")

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray, groups: Any, times: Any = None) -> None:
        self._check_parameters()
        if times is not None:
            if groups is not None:
                raise ValueError("`groups` and `times` are two ways to hold rows out; give one of them.")
            groups = group_numbers("times", as_array(times, "times"), len(x), ordered=True)
        self.__dict__.pop("recalibration", None)  # fitted to the previous networks
        x, y, weight, groups = canonical_rows(x, y, weight, groups)
        if len(x) < 2:
            raise ValueError(f"Found n_samples={len(x)}: at least 2 rows are needed, to learn and to hold out.")
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        if self._is_warm():
            self._continue_and_test(self._with_bins(x), y, weight)
            return
        bins = Bins.of(x, max_inputs=self._effort.bin_inputs) if self._is_searched else None
        self.bins_ = bins if bins and bins.n_inputs else None
        self.process_ = self.forest_ = self.boosted_ = None  # of an earlier fit
        offset, gap = self._offset_and_gap(Task(x, y, weight), in_groups=groups is not None)
        x = self._with_bins(x)
        self.rows_tested_ = min(len(x), _REMEMBERED_ROWS)  # in case `partial_fit` follows
        n_stacked = len(self._grid(len(x))[0]) * (FOLDS if len(x) < MANY_ROWS else 1)
        operation = n_stacked * self._batch_size(len(x)) * max(self._hidden_widths(len(x)), default=1)
        with cpu_threads(1 if operation <= _ONE_THREAD_SIZE else None), self._progress(len(x)) as progress:
            data = Task(x, y, weight)
            choice = self._search(data, groups, offset, forward=times is not None, progress=progress)
            self.search_scores_ = choice.log_likelihood.numpy()
            self.search_edges_ = search_edges(choice)
            if self.weight_decay == "search":  # candidates have decays of their own
                self.search_edges_.pop("weight_decay", None)
            if not any(member.offset for member in choice.members):
                offset = self.process_ = None
            self.population_, without_gap = self._train_ensemble(data, choice, offset, gap, progress)
            self._refuse_divergence()
            self._fit_noise(choice, offset, forward=times is not None)
            if gap is not None:
                self._fit_extrapolation(gap, without_gap, data)

    def _warn_below_baseline(self, baseline: str) -> None:
        if self.held_out_score_ < self.baseline_score_:
            scores = f"{self.held_out_score_:.4g}, is below that of {baseline} alone, {self.baseline_score_:.4g}"
            meaning = "these inputs, or this training, do not help to predict the target."
            # Its level is that of `fit`'s caller: between are `fit`, and what keeps it on the CPU.
            warnings.warn(f"The held-out log-likelihood, {scores}: {meaning}", UserWarning, stacklevel=4)

    def _progress(self, n_rows: int) -> ProgressBar:
        """One bar, in steps of a network, for the search and the training after it, so that it shows the time left."""
        n_searched = min(n_rows, _SEARCH_ROWS)
        (grid, n_finalists), n_folds = self._grid(n_searched), self._folds(n_searched)
        n_finalists += bool(n_finalists and self._n_classes)  # one more for classes, regularised
        learned = n_searched * (n_folds - 1) // n_folds if n_folds > 1 else n_searched * (FOLDS - 1) // FOLDS
        epochs = sum(member.epochs for member in grid) + n_finalists * self._epochs(n_searched)
        searched = epochs * n_folds * -(-learned // self._batch_size(n_searched))
        trained = self._n_networks(n_rows) * self._epochs(n_rows) * -(-n_rows // self._batch_size(n_rows))
        return ProgressBar("fit", searched + trained, unit="network steps", show=None if self.verbose else False)

    def _search(
        self, data: Task, groups: Any, offset: Offset | None, *, forward: bool, progress: ProgressBar
    ) -> EnsembleChoice:
        rows = np.random.RandomState(self.seed_).permutation(len(data.x))[:_SEARCH_ROWS]
        x, y, n_rows = data.x[rows], data.y[rows], len(rows)
        grid, n_finalists = self._grid(n_rows)
        n_columns = None if self.bins_ is None else len(self.bins_.edges)
        choice = choose_ensemble(
            torch.tensor(x),
            torch.tensor(y),
            grid,
            finalists=n_finalists,
            finalist_epochs=self._epochs(n_rows),
            n_members=min(self._effort.n_members, self._n_networks(len(data.x))),
            n_folds=self._folds(n_rows),
            groups=row_groups(x[:, :n_columns], y) if groups is None else groups[rows],
            forward=forward,
            weight=torch.tensor(data.weight[rows]),
            offset=None if offset is None else offset.mean[rows].reshape(y.shape),
            trust=None if offset is None else offset.trust[rows].reshape(y.shape),
            n_draws=self._effort.search_draws,
            seed=self.seed_,
            **self._settings(n_rows, progress),
        )
        return replace(choice, held_out=tuple(torch.from_numpy(rows)[held] for held in choice.held_out))

    def _train_ensemble(
        self, data: Task, choice: EnsembleChoice, offset: Offset | None, gap: Gap | None, progress: ProgressBar
    ) -> tuple[Population, Population]:
        """The networks, with the members in turn, trained on all rows; and one trained without the rows of a gap."""
        x, y, weight = data.x, data.y, data.weight
        full = self._epochs(min(len(x), _SEARCH_ROWS))
        if self.bins_ is not None and all(member.n_inputs is not None for member in choice.members):
            x, self.bins_ = x[:, : len(self.bins_.edges)], None  # no member sees the bins
        members = []
        for i in range(self._n_networks(len(x))):
            member = choice.members[i % len(choice.selection)]
            epochs = max(1, round(self._epochs(len(x)) * member.epochs / full))  # the same fraction of a full training
            n_inputs = None if self.bins_ is None else member.n_inputs
            seed = self.seed_ + 1000 + i
            members.append(replace(member, task=int(member.offset), epochs=epochs, seed=seed, n_inputs=n_inputs))
        tasks, n_networks = [Task(x, y, weight)], len(members)
        if offset is not None:
            left = (torch.tensor(y).reshape(-1) - offset.mean) * offset.trust
            tasks.append(Task(x, left.reshape(y.shape), weight))
        if gap is not None:
            outside = ~gap.rows.numpy()
            tasks.append(Task(x[outside], y[outside], weight[outside]))
            # Also where all networks learn what a process leaves: nobody knows how smooth a gap is, which they rely on.
            plain = next((member for member in members if not member.offset), members[0])
            members.append(replace(plain, offset=False, task=len(tasks) - 1, seed=self.seed_ + 999))
        # On the CPU they predict the same as when they are loaded; a GPU is faster for very many rows alone.
        trained = train_in_jobs(tasks, members, **self._settings(len(x), progress)).cpu()
        index = torch.arange(len(members)) % len(choice.selection)
        trained = replace(trained, precision=choice.precision[index].cpu() * trained.y_scale**-2)
        return select(trained, range(n_networks)), select(trained, range(n_networks, len(members)))

    @property
    def _n_trees(self) -> int:
        """The number of trees of each fold beside the networks; none where the caller names the networks."""
        return self._effort.n_trees if self._is_searched and not self.warm_start else 0

    def _rows_and_parts(self, choice: EnsembleChoice) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Inputs without bins, targets, weights and fold of all rows of a search, the held-out rows first."""
        x, y, weight = choice.held_out_rows()
        sizes = torch.tensor([len(rows) for rows in choice.held_out])
        part = torch.arange(len(sizes)).repeat_interleave(sizes)
        if len(sizes) == 1:  # a single split: the other rows take turns too, for predictions by the trees of all parts
            rest = choice.tasks[0]
            part = torch.cat([part, 1 + torch.arange(len(rest.x)) % (FOLDS - 1)])
            x, y, weight = (torch.cat(both) for both in ((x, rest.x), (y, rest.y), (weight, rest.weight)))
        return x[:, : self._n_columns].numpy(), y.numpy(), weight.numpy(), part.numpy()

    def _continue(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray, epochs: int, schedule: str) -> None:
        """Continues training from the current weights."""
        start = self.population_
        if not isinstance(self.hidden, str) and tuple(self.hidden) != tuple(self.hidden_):
            rule = f"must stay {tuple(self.hidden_)} where training continues; got {self.hidden}"
            raise ValueError(f"`hidden` {rule}. Fit without `warm_start` to begin anew.")
        self.seed_ += 1  # fresh batches and masks
        members = [replace(m, epochs=epochs, seed=self.seed_ + i) for i, m in enumerate(start.members)]
        if self.weight_decay == "search" and self._n_classes is None:  # not that of the few rows of a small table
            members = [replace(m, weight_decay=type(m).weight_decay) for m in members]
        settings = self._settings(len(x)) | {"schedule": schedule, "hidden": self.hidden_}
        tasks = [Task(x, targets, weight) for targets in self._task_targets(x, y)]
        trained = train_in_jobs(tasks, members, start=start, **settings).cpu()
        self.population_ = replace(trained, precision=start.precision)
        self._refuse_divergence()

    def _continue_and_test(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> None:
        """Continues training twice: without a fifth of the rows, which estimate the noise, then with all rows."""
        held = np.random.RandomState(self.seed_).permutation(len(x)) < max(1, len(x) // 5)
        start = self.population_
        self._continue(x[~held], y[~held], weight[~held], self._epochs(len(x)), "cosine")
        tested = self._tested_precision(x[held], y[held], weight[held])
        self.population_ = start
        self._continue(x, y, weight, self._epochs(len(x)), "cosine")
        self._set_precision(tested)

    def _tested_precision(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Tensor:
        """The precision estimated from rows that the current networks were not trained on."""
        rows = [tuple(map(torch.tensor, (x, targets, weight))) for targets in self._task_targets(x, y)]
        return fit_precision(self.population_, rows, n_draws=50, groups=[0] * len(self.population_)).precision

    def _set_precision(self, precision: Tensor) -> None:
        self.population_ = replace(self.population_, precision=precision)

    def _partial_fit(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> None:
        """The step of `partial_fit`: the first rows set up the networks, later ones update τ before their training."""
        if not hasattr(self, "population_"):
            self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
            self.bins_ = self.process_ = None  # the first rows of a stream are too few
            grid, _ = self._grid(max(len(x), self._effort.small_rows))
            member = replace(grid[len(grid) // 2], task=0, epochs=1)
            members = [replace(member, seed=self.seed_ + i) for i in range(self._n_networks(len(x)))]
            self.population_ = train_in_jobs([Task(x, y, weight)], members, **self._settings(len(x))).cpu()
            self.rows_tested_ = 1
            self._refuse_divergence()
            return
        x = self._with_bins(x)
        # A running mean of the noise variance, so that a call with a single row changes it little.
        total = self.rows_tested_ + len(x)
        tested = self._tested_precision(x, y, weight)
        variance = (self.rows_tested_ / self.population_.precision + len(x) / tested) / total
        self._set_precision(1 / variance)
        self.rows_tested_ = min(total, _REMEMBERED_ROWS)
        self._continue(x, y, weight, 1, "constant")

    @abstractmethod
    def _fit_noise(self, choice: EnsembleChoice, offset: Offset | None, *, forward: bool) -> None:
        """Fits the noise or temperature to the held-out draws of a search, whose rows are in temporal order or not."""

    def _offset_and_gap(self, data: Task, *, in_groups: bool) -> tuple[Offset | None, Gap | None]:
        """What a process predicts, whose errors candidates may learn, and a gap that teaches how predictions part."""
        return None, None

    def _task_targets(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """The targets of each task of the networks: y, and what the process leaves of it."""
        return [y]

    def _fit_extrapolation(self, gap: Gap, without_gap: Population, data: Task) -> None:
        """Fits the spread of the draws far from the rows to the rows of a gap."""

    @property
    def _n_classes(self) -> int | None:
        """The number of classes; None for regression."""
        return len(self.classes_) if hasattr(self, "classes_") else None

    def _refuse_divergence(self) -> None:
        if bool(self.population_.diverged.any()):
            rate = self.population_.members[0].learning_rate
            remedy = f"Try learning_rate={rate / 10:.3g} instead of {rate:.3g}, and look for extreme values in X and y."
            raise FloatingPointError(f"Training diverged. {remedy}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing != "error"
        return tags

    def _arrays(self, X: Any, *y: Any, reset: bool, **checks: Any) -> Any:
        """The inputs, and the targets if given, as arrays; a frame's categories and dates as numbers.

        With `reset`, these rows define the columns that later rows must have; `checks` are those of `check_X_y`.
        """
        check_choice("missing", self.missing, ("auto", "error", "learn"))
        checks |= {"dtype": np.float64, "order": "C"}  # torch reads no array that runs backwards
        checks |= {"ensure_all_finite": True if self.missing == "error" else "allow-nan"}
        if isinstance(X, Mapping) and not hasattr(X, "shape"):  # a sparse array of SciPy is a dict, too
            raise TypeError("`X` must be an array or a data frame; got a dict. Pass pandas.DataFrame(X).")
        check_names(X, "X")
        if reset:
            self.frame_columns_ = frame_schema(X) if is_mixed_frame(X) else None
        try:
            if self.frame_columns_ is None:
                return validate_data(self, as_array(X), *(as_array(one, "y") for one in y), reset=reset, **checks)
            validate_data(self, X, skip_check_array=True, reset=reset)  # names and number of columns
            x = frame_inputs(self.frame_columns_, X, learn_missing=self._learns_missing)
            return check_X_y(x, *(as_array(one, "y") for one in y), **checks) if y else check_array(x, **checks)
        except ValueError as error:
            if str(error).startswith("could not convert string to float"):
                raise ValueError(f"`X` must hold numbers; {error}. Pass columns of texts in a data frame.") from None
            if not str(error).startswith("Input X contains NaN"):
                raise
            raise ValueError(f"Input X contains NaN. {_REMEDY}") from None

    def _encode(self, x: np.ndarray, *, reset: bool) -> np.ndarray:
        """The inputs of the networks, with missing values filled and flagged if `missing="learn"`."""
        if reset:
            learned = self._learns_missing or (self.missing == "auto" and bool(np.isnan(x).any()))
            self.missing_values_ = MissingValues.of(x) if learned else None
        elif self.missing_values_ is None and np.isnan(x).any():
            raise ValueError(f"Input X contains NaN, which no training row did. {_REMEDY}")
        return x if self.missing_values_ is None else self.missing_values_.encode(x)

    @property
    def _learns_missing(self) -> bool:
        """Whether missing cells of a frame are learned from: "auto" does where its training frame had some."""
        columns = () if self.frame_columns_ is None else self.frame_columns_.columns
        return self.missing == "learn" or (self.missing == "auto" and any(column.flagged for column in columns))

    def _inputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return self._encode(self._arrays(X, reset=False), reset=False)


def search_edges(choice: EnsembleChoice) -> dict[str, float]:
    """The settings whose best value is the smallest or largest of several tried: a value beyond it may be better.

    A drop probability of zero does not count, since no value lies beyond it, nor do values for finalists alone.
    """
    edges = {}
    for name in ("drop_prob", "weight_decay"):
        tried = {float(np.max(getattr(member, name))) for member in choice.candidates if member.relevance is None}
        best = float(np.max(getattr(choice.members[0], name)))
        if len(tried) > 1 and best > 0 and best in (min(tried), max(tried)):
            edges[name] = best
    return edges
