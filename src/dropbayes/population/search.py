r"""The folds of a search: training rows, and rows held out from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropbayes.population.heads import Head, head_of


def folds(
    groups: Tensor, n_folds: int, *, strata: Tensor | None = None, seed: int = 0, holdout: float = 0.2
) -> list[tuple[Tensor, Tensor]]:
    """Training and held-out rows: `n_folds` disjoint folds, or for one fold a single split.

    Args:
        groups: The group index of each row; the rows of a group stay together.
        n_folds: The number of folds, at most the number of groups.
        strata: A number for each row, such as its class; every fold gets its share of the groups of each (a group
            counts for the number that most of its rows have).
        seed: The seed of the random choice.
        holdout: The fraction of groups held out by a single split.
    """
    numbers, group = groups.unique(return_inverse=True)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    if strata is None:
        blocks = list(order.tensor_split(min(n_folds, len(order))))
        blocks = blocks if n_folds > 1 else [order[: max(1, round(holdout * len(order)))]]
    else:
        order = order[_strata_of_groups(group, strata)[order].argsort(stable=True)]
        # Each stratum is dealt round robin to the folds; a single split takes every fifth row.
        n_blocks = min(n_folds if n_folds > 1 else round(1 / holdout), len(order))
        blocks = [order[block::n_blocks] for block in range(n_blocks)][: max(1, n_folds)]
    held = [torch.isin(group, block) for block in blocks]
    return [((~mask).nonzero()[:, 0], mask.nonzero()[:, 0]) for mask in held]


def forward_folds(times: Tensor, n_folds: int, *, holdout: float = 0.2) -> list[tuple[Tensor, Tensor]]:
    """Splits that train on a growing past and hold out what follows (forward chaining).

    Args:
        times: The time of each row as a number; rows of one time stay together.
        n_folds: The number of folds, less than the number of times; 1 is a single split.
        holdout: The fraction of the times, the last ones, held out by a single split.
    """
    distinct = times.unique()
    if n_folds == 1:
        blocks = [distinct[-max(1, round(holdout * len(distinct))) :]]
    else:
        blocks = list(distinct.tensor_split(min(n_folds + 1, len(distinct))))[1:]
    held = [(times >= block[0]) & (times <= block[-1]) for block in blocks]
    return [
        ((times < block[0]).nonzero()[:, 0], mask.nonzero()[:, 0]) for block, mask in zip(blocks, held, strict=True)
    ]


def _strata_of_groups(group: Tensor, strata: Tensor) -> Tensor:
    """The most frequent stratum of each group, by group index."""
    _, stratum = strata.unique(return_inverse=True)
    counts = torch.zeros(int(group.max()) + 1, int(stratum.max()) + 1, dtype=torch.long)
    return counts.index_put_((group, stratum), torch.ones_like(group), accumulate=True).argmax(1)


def splits(
    y: Any,
    *,
    n_folds: int,
    groups: Any = None,
    forward: bool = False,
    likelihood: str | Head = "gaussian",
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """The training rows and the held-out rows of each fold.

    Args:
        y: Targets.
        n_folds: Folds; 1 for a single split with a fifth of the rows held out.
        groups: The group number of each row; rows of a group are never on both sides of a split. Each row its own by
            default.
        forward: Whether the groups are in temporal order, and each fold follows its training rows.
        likelihood: The likelihood of the networks; the folds of a classification are stratified by class.
        seed: The seed of the folds.
    """
    groups = torch.arange(len(y)) if groups is None else torch.as_tensor(groups)
    if len(groups.unique()) < 2:
        raise ValueError("`groups` must have at least 2 groups, one to learn from and one to hold out; got 1.")
    if forward:
        return forward_folds(groups, n_folds)
    head = head_of(likelihood)
    strata = None if head.has_noise else head.columns(y)[:, 0]
    return folds(groups, n_folds, strata=strata, seed=seed)
