r"""The choice of drop probability, precision and the rest: every candidate trained at once, scored on held-out rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dropbayes.population.evaluation import evaluate, fit_precision
from dropbayes.population.heads import Head, head_of
from dropbayes.population.jobs import train_in_jobs
from dropbayes.population.records import Member, Population, Task, select


@dataclass(frozen=True, eq=False)
class Choice:
    """The outcome of a search.

    Attributes:
        best: The chosen settings.
        population: Its members, trained on all rows, τ re-fitted on the held-out draws of the search.
        log_likelihood: The held-out log-likelihood of each candidate, a mean over rows.
        precision: τ of each candidate and output in standardised units, from its held-out draws.
    """

    best: Member
    population: Population
    log_likelihood: Tensor
    precision: Tensor


def candidates(*, budget: int | None = None, seed: int = 0, **choices: Sequence[Any]) -> list[Member]:
    """The members of a grid, or a random `budget` of them.

    Args:
        budget: The number of members to sample; all by default.
        seed: The seed of the random choice.
        choices: The values of each field of `Member` to vary.

    Example:
        >>> len(candidates(drop_prob=[0.01, 0.1], weight_decay=[1e-6, 1e-4], epochs=[40]))
        4
    """
    grid = [
        Member(**dict(zip(choices, values, strict=True))) for values in itertools.product(*map(list, choices.values()))
    ]
    return grid if budget is None or budget >= len(grid) else random.Random(seed).sample(grid, budget)


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


def fold_tasks(
    x: Any,
    y: Any,
    *,
    n_folds: int,
    groups: Any = None,
    forward: bool = False,
    weight: Any = None,
    likelihood: str | Head = "gaussian",
    seed: int = 0,
) -> tuple[Task, ...]:
    """One task per fold: the training rows, and the held-out fold with its weights.

    Args:
        x: Inputs `[row, feature]`.
        y: Targets.
        n_folds: Folds; 1 for a single split with a fifth of the rows held out.
        groups: The group number of each row; rows of a group are never on both sides of a split. Each row its own by
            default.
        forward: Whether the groups are in temporal order, and each fold follows its training rows.
        weight: Row weights.
        likelihood: The likelihood of the networks; the folds of a classification are stratified by class.
        seed: The seed of the folds.
    """
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    weight = None if weight is None else torch.as_tensor(weight)
    groups = torch.arange(len(x)) if groups is None else torch.as_tensor(groups)
    if len(groups.unique()) < 2:
        raise ValueError("`groups` must have at least 2 groups, one to learn from and one to hold out; got 1.")
    if forward:
        splits = forward_folds(groups, n_folds)
    else:
        head = head_of(likelihood)
        strata = None if head.has_noise else head.columns(y)[:, 0]
        splits = folds(groups, n_folds, strata=strata, seed=seed)

    def weights(rows: Tensor) -> Tensor | None:
        return None if weight is None else weight[rows]

    return tuple(
        Task(x[learned], y[learned], weights(learned), held_out=(x[held], y[held], weights(held)))
        for learned, held in splits
    )


def choose(
    x: Any,
    y: Any,
    grid: Sequence[Member],
    *,
    n_folds: int = 5,
    groups: Any = None,
    weight: Any = None,
    n_members: int = 1,
    n_draws: int = 100,
    seed: int = 0,
    **settings: Any,
) -> Choice:
    r"""The candidate with the best held-out predictive log-likelihood, trained again on all rows.

    All candidates on all folds are one population. The τ of each candidate is the maximiser of its held-out
    log-likelihood (see `fit_precision`), which is also its score; the winner's members are trained on all rows and
    keep that τ.

    Args:
        x: Inputs `[row, feature]`.
        y: Targets.
        grid: The candidates (see `candidates`); their `task` and `seed` are set here.
        n_folds: Folds; 1 for a single split with a fifth of the rows held out.
        groups: The group number of each row; rows of a group are never on both sides of a split. Each row its own by
            default.
        weight: Row weights.
        n_members: The number of networks with the chosen settings to train on all rows, with different seeds; 0 returns
            the winner's fold networks.
        n_draws: The number of draws per held-out row.
        seed: The seed of folds and networks.
        settings: Passed to `train`: `hidden`, `likelihood`, `batch_size`, `learn_drop_prob` ...
    """
    likelihood = settings.get("likelihood", "gaussian")
    tasks = fold_tasks(x, y, n_folds=n_folds, groups=groups, weight=weight, likelihood=likelihood, seed=seed)
    members = [replace(c, task=k, seed=seed) for c in grid for k in range(len(tasks))]
    trained = train_in_jobs(tasks, members, **settings)
    held_out = [task.held_out for task in tasks]
    group = torch.arange(len(grid)).repeat_interleave(len(tasks))
    trained = fit_precision(trained, held_out, n_draws=n_draws, groups=group)
    scores = evaluate(trained, held_out, n_draws=n_draws)
    total = torch.where(scores.weight > 0, scores.log_density * scores.weight, 0).sum(1).view(len(grid), -1).sum(1)
    log_likelihood = (total / scores.weight.view(len(grid), -1)[0].sum()).nan_to_num(nan=-torch.inf)
    precision = (trained.precision * trained.y_scale.square())[:: len(tasks)]
    winner = int(log_likelihood.argmax())
    if not bool(log_likelihood[winner].isfinite()):
        raise ValueError(
            "`grid` has no candidate whose training stayed finite. Lower the learning rates, and look for extreme "
            "values in x and y."
        )
    if not n_members:
        folded = select(trained, range(winner * len(tasks), (winner + 1) * len(tasks)))
        return Choice(replace(grid[winner], seed=seed), folded, log_likelihood.cpu(), precision.cpu())
    settings = {k: v for k, v in settings.items() if k not in ("check_every", "patience")}
    reached = trained.epochs.view(len(grid), -1)[winner].double().median()
    best = replace(grid[winner], epochs=max(1, int(reached)), seed=seed)
    final = train_in_jobs(
        [Task(torch.as_tensor(x), torch.as_tensor(y), weight)],
        [replace(best, task=0, seed=seed + i) for i in range(n_members)],
        **settings,
    )
    final = replace(final, precision=precision[winner] * final.y_scale**-2)
    return Choice(best, final, log_likelihood.cpu(), precision.cpu())
