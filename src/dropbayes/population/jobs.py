"""Training of a population by several workers, through joblib: processes, or a Dask or Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dropbayes.population.fitting import train
from dropbayes.population.records import Member, Population, Task, concatenate, select

__all__ = ["train_in_jobs"]


def train_in_jobs(
    tasks: Sequence[Task],
    members: Sequence[Member],
    *,
    n_jobs: int | None = None,
    start: Population | None = None,
    **settings: Any,
) -> Population:
    """The population that `train` returns, with members divided among workers; a member's bits do not depend on them.

    Args:
        tasks: As for `train`.
        members: As for `train`.
        n_jobs: The number of workers, as in joblib: -1 for all cores, None for one unless a
            `joblib.parallel_config` says otherwise.
        start: As for `train`.
        settings: The other settings of `train`.
    """
    import joblib

    # A single member would use another matrix routine than a stack, and differ in its last bits.
    n_shares = min(joblib.effective_n_jobs(n_jobs), len(members) // 2)
    if n_shares < 2:
        return train(tasks, members, start=start, **settings)
    edges = [len(members) * share // n_shares for share in range(n_shares + 1)]
    shares = [range(first, stop) for first, stop in pairwise(edges)]
    quiet = {**settings, "progress": False}
    trained = joblib.Parallel(n_jobs=n_jobs)(
        joblib.delayed(train)(
            tasks, [members[i] for i in share], start=None if start is None else select(start, share), **quiet
        )
        for share in shares
    )
    return concatenate(trained)
