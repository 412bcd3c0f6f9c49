r"""The parameters of the estimators, and the candidates, widths, batches and epochs that follow from them."""

from __future__ import annotations

import numbers
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator

from dropbayes.estimators.effort import EFFORTS, Effort
from dropbayes.population import Member
from dropbayes.runtime.validation import check_choice

# From this many rows on, one split with a fifth held out replaces the folds, and fewer networks are trained.
MANY_ROWS = 2000
FOLDS = 5


@dataclass(eq=False, repr=False)
class Parameters(BaseEstimator):
    """The parameters, which the regressor and the classifier document, and the settings they amount to."""

    hidden: tuple[int, ...] | Literal["auto"] = "auto"
    _: KW_ONLY
    effort: Literal["quick", "standard", "best"] = "standard"
    drop_prob: Any = "search"
    weight_decay: Any = "search"
    learn_drop_prob: bool = False
    activation: Literal["relu", "tanh"] = "relu"
    missing: Literal["auto", "error", "learn"] = "auto"
    n_networks: int | Literal["auto"] = "auto"
    n_steps: int | Literal["auto"] = "auto"
    min_epochs: int = 10
    learning_rate: float | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    n_folds: int | Literal["auto"] = "auto"
    n_draws: int = 50
    warm_start: bool = False
    n_jobs: int | None = None
    device: str = "auto"
    random_state: Any = None
    verbose: bool = False

    @property
    def _effort(self) -> Effort:
        return EFFORTS[self.effort]

    def _check_parameters(self) -> None:
        check_choice("effort", self.effort, EFFORTS)
        for name in ("min_epochs", "n_draws", "n_networks", "n_steps", "batch_size", "n_folds"):
            value, auto = getattr(self, name), "" if name in ("min_epochs", "n_draws") else "'auto' or "
            if not (auto and value == "auto") and not (isinstance(value, numbers.Integral) and int(value) >= 1):
                raise ValueError(f"`{name}` must be {auto}a positive integer; got {value!r}.")
        rate = self.learning_rate
        if rate != "auto" and not (isinstance(rate, numbers.Real) and rate > 0):
            raise ValueError(f"`learning_rate` must be 'auto' or a positive number; got {rate!r}.")
        for name in ("drop_prob", "weight_decay"):
            value = getattr(self, name)
            in_tuples = name == "drop_prob"
            given = [p for one in _listed(value) for p in (one if isinstance(one, tuple) and in_tuples else (one,))]
            numeric = given and all(isinstance(p, numbers.Real) and 0 <= float(p) < np.inf for p in given)
            if not numeric and not (isinstance(value, str) and value == "search"):
                raise ValueError(f"`{name}` must be 'search', a number >= 0, or a list of such to try; got {value!r}.")
        if self.n_jobs is not None and not (isinstance(self.n_jobs, numbers.Integral) and self.n_jobs):
            raise ValueError(f"`n_jobs` must be None or a whole number but 0, -1 for all cores; got {self.n_jobs!r}.")
        listed = isinstance(self.hidden, (tuple, list, np.ndarray))
        if not (all(isinstance(n, numbers.Integral) for n in self.hidden) if listed else self.hidden == "auto"):
            raise ValueError(f"`hidden` must be 'auto' or a tuple of widths such as (50, 50); got {self.hidden!r}.")

    def _hidden_widths(self, n_rows: int) -> tuple[int, ...]:
        if not isinstance(self.hidden, str):
            return tuple(self.hidden)
        return tuple(width * (2 if n_rows >= self._effort.wide_rows else 1) for width in self._effort.hidden)

    def _batch_size(self, n_rows: int) -> int:
        if self.batch_size != "auto":
            return min(int(self.batch_size), n_rows)
        return min(n_rows, 64 if n_rows < 3000 else self._effort.large_batch if n_rows < 100_000 else 512)

    def _epochs(self, n_rows: int, share: float = 1.0) -> int:
        """The number of epochs that amounts to the number of steps; on large tables at least `min_epochs`."""
        effort, per_epoch = self._effort, -(-n_rows // self._batch_size(n_rows))
        steps = min(effort.steps + effort.steps_per_row * n_rows, effort.max_steps)
        steps *= 128 / max(128, self._batch_size(n_rows))
        epochs = (steps if self.n_steps == "auto" else int(self.n_steps)) / per_epoch
        return max(1, round(share * max(self.min_epochs, epochs)))

    @property
    def _is_searched(self) -> bool:
        """Whether the effort chooses the candidates, and what stands beside the networks: the caller names none."""
        return isinstance(self.drop_prob, str)

    def _grid(self, n_rows: int) -> tuple[list[Member], int]:
        """The candidates, and the number of finalists to train again for all steps."""
        effort, n_finalists, n_layers = self._effort, 0, len(self._hidden_widths(n_rows))
        tried = [{"drop_prob": one, "epochs": self._epochs(n_rows)} for one in _listed(self.drop_prob)]
        if self._is_searched:
            bins, n_finalists = getattr(self, "bins_", None), effort.n_finalists
            plain = {"n_inputs": bins and len(bins.edges)}
            kinds = [(effort.candidates, plain)]
            kinds += [(effort.binned, {})] if bins else []
            kinds += [(effort.offset, {**plain, "offset": True})] if getattr(self, "process_", None) else []
            tried = [
                {"drop_prob": (inputs, *[units] * n_layers), "epochs": self._epochs(n_rows, share), **kind}
                for candidates, kind in kinds
                for inputs, units, share in candidates
            ]
        decays = effort.weight_decays if isinstance(self.weight_decay, str) else _listed(self.weight_decay)
        rate = effort.learning_rate * max(1.0, self._batch_size(n_rows) / 128) ** 0.5
        rate = rate if self.learning_rate == "auto" else float(self.learning_rate)
        grid = [Member(**one, weight_decay=decay, learning_rate=rate) for one in tried for decay in decays]
        return grid, n_finalists

    def _folds(self, n_rows: int) -> int:
        return (FOLDS if n_rows < MANY_ROWS else 1) if self.n_folds == "auto" else int(self.n_folds)

    def _n_networks(self, n_rows: int) -> int:
        if self.n_networks != "auto":
            return int(self.n_networks)
        return self._effort.n_networks if n_rows < MANY_ROWS else self._effort.large_networks


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
