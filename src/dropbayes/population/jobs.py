"""Training of a population by several workers, through joblib: processes, or a Dask or Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dropbayes.population.fitting import train
from dropbayes.population.records import STACKED, Member, Population, Task, select

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
    return _concatenate(trained)


def _concatenate(populations: Sequence[Population]) -> Population:
    n_checks = max(len(population.history) for population in populations)
    histories = [_pad_history(population.history, n_checks) for population in populations]
    stacked: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in populations]) for name in STACKED}
    return replace(
        populations[0],
        members=tuple(member for population in populations for member in population.members),
        weights=tuple(torch.cat(layer) for layer in zip(*(p.weights for p in populations), strict=True)),
        biases=tuple(torch.cat(layer) for layer in zip(*(p.biases for p in populations), strict=True)),
        history=torch.cat(histories, 1),
        **stacked,
    )


def _pad_history(history: Tensor, n_checks: int) -> Tensor:
    missing = history.new_full((n_checks - len(history), history.shape[1]), math.nan)
    return torch.cat([history, missing])
