"""The settings of sampling that few callers change, in one record."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from dropbayes.runtime.validation import check_choice, check_count, check_positive
from dropbayes.sampling.inputs import RowAxis
from dropbayes.sampling.masks import SAMPLERS, Keys

POSITIONS = ("tied", "per_position")


def check_sampling(sampling: object) -> None:
    if not isinstance(sampling, Sampling):
        raise TypeError(f"`sampling` must be a dropbayes.Sampling; got {sampling!r}. Pass Sampling(), or leave it out.")


@dataclass(frozen=True)
class Sampling:
    """How draws are made: one record for `predict`, `draws`, `function_draw`, `evaluate`, `sites` and `generate`.

    Attributes:
        sampler: "stratified", whose draws together cover every unit's mask evenly, or "independent".
        positions: For a network that reads sequences: "tied" for one mask for all positions of a sequence,
            "per_position" for one per absolute position; None treats a position like any other unit.
        row_axis: The axis of the rows in the inputs, 1 for sequence-first networks: one for all arguments or one for
            each (a dict or tuple); None where the whole input is one row (graphs, sets, a contrastive batch).
        row_offset: The index of the first row, which keys its masks: shards of rows then have the masks of the whole.
        ignore_modules: Modules, by name or class name, whose randomness in training is not dropout (an augmentation).
        batch_invariant: Whether a row's result has the same bits in any batch: by default True on a CPU. False is
            faster, with the same masks and results equal up to rounding, as they always are (and it is the default)
            where rows are sent to experts, sorted or packed by their lengths.
        integrate_last_layer: Whether moments integrate over the last layer's dropout exactly, if the network allows it.
        tolerance: For `n_draws="auto"`: the target standard error of the mean, relative to the predictive standard
            deviation.
        max_draws: For `n_draws="auto"`: the most draws of a row, at which it stops short of the tolerance.
        max_bytes: A bound on working memory, excluding the result.

    Example:
        >>> Sampling(sampler="independent").keys(n_draws=10, seed=1)
        Keys(seed=1, n_draws=10, sampler='independent', replicate=0)
    """

    sampler: str = "stratified"
    positions: str | None = None
    row_axis: RowAxis = 0
    row_offset: int = 0
    ignore_modules: str | Sequence[str] = ()
    batch_invariant: bool | None = None
    integrate_last_layer: bool = True
    tolerance: float = 0.05
    max_draws: int = 10_000
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_choice("sampler", self.sampler, SAMPLERS)
        check_choice("positions", self.positions, (None, *POSITIONS))
        check_count("row_offset", self.row_offset, at_least=0)
        if not hasattr(self.ignore_modules, "__iter__") or not all(isinstance(m, str) and m for m in self.ignored):
            raise TypeError(f"`ignore_modules` must hold names of modules or classes; got {self.ignore_modules!r}.")
        check_choice("batch_invariant", self.batch_invariant, (None, True, False))
        check_positive("tolerance", self.tolerance)
        check_count("max_draws", self.max_draws, at_least=64)  # to estimate an error from
        if self.max_bytes is not None:
            check_positive("max_bytes", self.max_bytes)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of the ignored modules, in order."""
        names = (self.ignore_modules,) if isinstance(self.ignore_modules, str) else tuple(self.ignore_modules)
        return tuple(sorted(names, key=str))

    def keys(self, n_draws: int, seed: int) -> Keys:
        """The keys of the masks of `n_draws` draws."""
        if isinstance(n_draws, bool) or not hasattr(n_draws, "__index__"):
            raise TypeError(f"`n_draws` must be a whole number; got {n_draws!r}. Try n_draws=100.")
        check_count("n_draws", operator.index(n_draws))
        if not hasattr(seed, "__index__"):
            raise TypeError(f"`seed` must be a whole number; got {seed!r}.")
        return Keys(operator.index(seed), operator.index(n_draws), self.sampler)
