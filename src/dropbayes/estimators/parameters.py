r"""The parameters of the estimators, the efforts among them, and the candidates, batches and epochs that follow."""

import numbers
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator

from dropbayes.population import Member
from dropbayes.runtime.validation import check_choice

MANY_ROWS = 2000  # from here on one split with a fifth held out replaces the folds, and fewer networks are trained
FOLDS = 5
# The drop probability of the inputs, that of all other layers, and the fraction of the steps: a short training costs
# little and also guards against over-fitting. Of a small table also λN, which is that of one prior for any N.
Candidate = tuple[float, ...]


@dataclass(frozen=True)
class Effort:
    """The settings of a search, which do not depend on the table."""

    candidates: tuple[Candidate, ...]
    binned: tuple[Candidate, ...] = ()  # that see the bins too: better where the target jumps, worse where it is smooth
    offset: tuple[Candidate, ...] = ()  # that learn what a Gaussian process leaves; without any, no process is fitted
    small_rows: int = 180  # of fewer numbers, a prior says as much as they do: their candidates are those of `small`
    small: tuple[tuple[Candidate, ...], ...] = (
        ((0.0, 0.01, 0.2), (0.1, 0.2, 0.2), (0.0, 0.0, 0.2, 1.0), (0.0, 0.01, 0.2, 0.1), (0.1, 0.2, 0.2, 0.1)),
        ((0.05, 0.1, 0.2), (0.0, 0.01, 0.2, 1.0)),
        ((0.0, 0.1, 0.2, 5.0), (0.1, 0.2, 0.2)),  # so much decay leaves the process alone
    )
    n_finalists: int = 0  # the best candidates, which are trained again for all steps
    hidden: tuple[int, ...] = (48, 48)  # widths: multiples of 16 fill a processor's vectors (50 takes as long as 64)
    wide_rows: int = 10**9  # from so many rows on, the hidden layers are twice as wide
    learning_rate: float = 0.01  # that of Adam at first; it decays to zero along a cosine
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam: a second that forgets sooner saves a third of the steps
    large_batch: int = 128  # rows per step from 3,000 rows on; of 256, half the steps at a rate greater by root two
    steps: int = 2000  # of a network, + `steps_per_row` · N, at most `max_steps` unless the epochs need more
    steps_per_row: float = 0.0
    max_steps: int = 10**9
    bin_inputs: int = 32  # the maximum number of inputs from the bins of all columns
    n_members: int = 3  # candidates selected for the ensemble
    n_networks: int = 6  # those trained on all rows, which the members share
    large_networks: int = 6  # the same from 2,000 rows on, where a network more costs most and adds least
    search_draws: int = 32  # per network and held-out row, in the choice among candidates
    noise_draws: int = 8  # per member and held-out row, to which the noise model is fitted
    # Of the noise model, at least 100 for more than 1,000 rows of a large table; more over-fit a few hundred rows.
    noise_steps: int = 50
    noise_rows: int = 2000  # the maximum number of held-out rows to which the noise model is fitted
    n_trees: int = 0  # of the forest of each fold beside the networks


EFFORTS = {
    "quick": Effort(
        candidates=((0.0, 0.01, 1.0), (0.0, 0.05, 1.0), (0.05, 0.1, 1.0), (0.1, 0.2, 0.5)),
        offset=((0.0, 0.05, 0.2),),
        hidden=(50, 50),
        steps=500,
        n_members=2,
        n_networks=2,
        large_networks=2,
        noise_steps=60,
        noise_rows=500,
    ),
    "standard": Effort(
        candidates=(
            *((0.0, 0.0, 0.2), (0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.0, 0.1, 0.2)),
            *((0.05, 0.1, 0.2), (0.1, 0.2, 0.2)),
        ),
        binned=((0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.05, 0.1, 0.2)),
        offset=((0.0, 0.01, 0.2), (0.0, 0.1, 0.2), (0.1, 0.2, 0.2)),
        n_finalists=2,
        betas=(0.9, 0.99),
        large_batch=256,
        steps=1700,
        steps_per_row=0.2,
        max_steps=6000,
        large_networks=4,
        search_draws=16,
        n_trees=20,
    ),
    "best": Effort(
        candidates=(
            *((0.0, 0.0, 0.2), (0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.0, 0.1, 0.2), (0.02, 0.05, 0.2)),
            *((0.05, 0.1, 0.2), (0.0, 0.05, 0.04), (0.05, 0.1, 0.04), (0.1, 0.2, 0.1)),
        ),
        binned=((0.0, 0.0, 0.2), (0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.05, 0.1, 0.2), (0.05, 0.1, 0.04)),
        offset=((0.0, 0.01, 0.2), (0.0, 0.05, 0.1), (0.05, 0.1, 0.1), (0.1, 0.2, 0.04)),
        n_finalists=3,
        bin_inputs=64,
        hidden=(100, 100),
        wide_rows=20_000,
        learning_rate=5e-3,
        steps=15_000,
        steps_per_row=6.0,
        n_networks=9,
        large_networks=9,
        search_draws=64,
        noise_draws=16,
        noise_steps=300,
        noise_rows=20_000,
        n_trees=100,
    ),
}
"""The efforts by name; "best" is the method of the UCI table."""


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
        if (rate := self.learning_rate) != "auto" and not (isinstance(rate, numbers.Real) and rate > 0):
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
        effort, n_layers, decays = self._effort, len(self._hidden_widths(n_rows)), _listed(self.weight_decay)
        tried: list[tuple[Any, Any]] = [({"drop_prob": one}, (1.0,)) for one in _listed(self.drop_prob)]
        if self._is_searched:
            bins = getattr(self, "bins_", None)
            plain = {"n_inputs": bins and len(bins.edges)}
            small = n_rows < effort.small_rows and not (decays or hasattr(self, "classes_"))
            listed = effort.small if small else (effort.candidates, effort.binned, effort.offset)
            suited = True, bins, getattr(self, "process_", None)
            tried = [
                ({"drop_prob": (inputs, *[units] * n_layers), **kind}, rest)
                for kind, candidates, suits in zip((plain, {}, {**plain, "offset": True}), listed, suited, strict=True)
                for inputs, units, *rest in (candidates if suits else ())
            ]
        rate = effort.learning_rate * max(1.0, self._batch_size(n_rows) / 128) ** 0.5
        rate = rate if self.learning_rate == "auto" else float(self.learning_rate)
        grid = [
            Member(**one, epochs=self._epochs(n_rows, share), weight_decay=decay, learning_rate=rate)
            for one, (share, *own) in tried
            for decay in decays or [own[0] / n_rows if own else Member.weight_decay]
        ]
        return grid, effort.n_finalists if self._is_searched else 0

    def _folds(self, n_rows: int) -> int:
        return (FOLDS if n_rows < MANY_ROWS else 1) if self.n_folds == "auto" else int(self.n_folds)

    def _n_networks(self, n_rows: int) -> int:
        if self.n_networks != "auto":
            return int(self.n_networks)
        return self._effort.n_networks if n_rows < MANY_ROWS else self._effort.large_networks


def _listed(value: Any) -> list[Any]:
    """The settings that the caller names; none for "search"."""
    return value if isinstance(value, list) else [] if isinstance(value, str) else [value]
