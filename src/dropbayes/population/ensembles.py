r"""Ensemble selection: the candidates that add most to the held-out likelihood are selected, one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dropbayes.population.evaluation import draws, fit_and_score, row_mean
from dropbayes.population.fitting import train_in_jobs
from dropbayes.population.heads import head_of
from dropbayes.population.records import Member, Population, Task, concatenate, select
from dropbayes.runtime.validation import row_weights


@dataclass(frozen=True, eq=False)
class EnsembleChoice:
    """The candidates selected as members of an ensemble, and their networks of the folds."""

    candidates: tuple[Member, ...]
    log_likelihood: Tensor  # of each candidate, a (weighted) mean over held-out rows
    selection: tuple[int, ...]  # the index of each member's candidate; one may be selected several times
    precision: Tensor  # τ of each member and output in standardised units, from held-out draws
    held_out: tuple[Tensor, ...]  # the indices of each fold's held-out rows
    tasks: tuple[Task, ...]  # the folds, followed by those of y without its offset if there is one
    fold_networks: Population  # member by member, each on every fold

    @property
    def members(self) -> tuple[Member, ...]:
        """The settings of each member."""
        return tuple(self.candidates[number] for number in self.selection)

    def held_out_draws(self, n_draws: int, offset: Tensor | None = None) -> Tensor:
        """Draws `[draw, row, output]` of the held-out rows of all folds, from all members, in the units of y.

        There are `n_draws` per member; those with an offset add that of each row, `[draw, row, output]`.
        """
        inputs = [task.held_out[0] for task in self.tasks if task.held_out is not None]
        sampled, _ = draws(self.fold_networks, inputs, n_draws=n_draws)  # [draw, member x fold, row, output]
        n_folds = len(self.held_out)
        values = torch.cat([sampled[:, fold::n_folds, : len(rows)] for fold, rows in enumerate(self.held_out)], 2)
        if offset is not None:
            has_offset = torch.tensor([member.offset for member in self.members])
            values[:, has_offset] += offset[:, None, torch.cat(self.held_out)].to(values)
        return values.flatten(0, 1)

    def held_out_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights of the held-out rows of all folds."""
        rows = [task.held_out for task in self.tasks[: len(self.held_out)] if task.held_out is not None]
        x, y, weight = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return x, y, weight


def choose_ensemble(
    x: Any,
    y: Any,
    grid: Sequence[Member],
    *,
    finalists: int = 0,
    finalist_epochs: int = 1,
    n_members: int = 3,
    n_folds: int = 5,
    groups: Any = None,
    forward: bool = False,
    weight: Any = None,
    offset: Any = None,
    trust: Tensor | None = None,
    n_draws: int = 32,
    seed: int = 0,
    **settings: Any,
) -> EnsembleChoice:
    r"""The ensemble chosen greedily by held-out predictive log-likelihood and, for numbers, mean error.

    All candidates on all folds are one population; the best few, first the best of each number of inputs seen, may be
    trained once more, longer, as further candidates. For classes these learn each input by its relevance (Neal 1996) in
    the short trainings, and the best with the most dropout and decay, too. The τ of each is that of `fit_precision`.

    Args:
        x: Inputs `[row, feature]`.
        y: Targets.
        grid: The candidates; their `task` and `seed` are set here.
        finalists: The number of best candidates to train again for `finalist_epochs`; for classes one more.
        finalist_epochs: The number of epochs of that second training.
        n_members: The number of members to select, with repetition.
        n_folds: The number of folds; 1 for a single split with a fifth of the rows held out.
        groups: The group index of each row; rows of a group are never on both sides of a split.
        forward: Whether the groups are in temporal order, and each fold follows its training rows.
        weight: Row weights.
        offset: A prediction of y for each row that was made without it; candidates with `offset` learn what is left.
        trust: A factor on what they learn of each row, less than 1 for outliers of the offset.
        n_draws: The number of draws per held-out row.
        seed: The seed of folds and networks.
        **settings: Passed to `train`.
    """
    head = head_of(settings.get("likelihood", "gaussian"))
    groups = torch.arange(len(y)) if groups is None else torch.as_tensor(groups)
    if len(groups.unique()) < 2:
        raise ValueError("`groups` must have at least 2 groups, one to learn from and one to hold out; got 1.")
    strata = None if head.has_noise else head.columns(y)[:, 0]
    rows = forward_folds(groups, n_folds) if forward else random_folds(groups, n_folds, strata=strata, seed=seed)
    x, y, weight = torch.as_tensor(x), torch.as_tensor(y), row_weights(weight, len(y), name="weight")
    tasks = _tasks(rows, x, y, y, weight)
    if offset is not None:
        left = y - offset
        tasks += _tasks(rows, x, left if trust is None else left * trust, left, weight)
    held_out, n_folds, candidates = tuple(held for _, held in rows), len(rows), list(grid)
    held, sizes = torch.cat(held_out), [len(held) for held in held_out]
    trained, density, error = _score_candidates(tasks, sizes, candidates, n_draws, seed, settings)
    row_weight = weight[held].to(density)
    if finalists:
        best = _finalists(candidates, row_mean(density, row_weight), finalists)
        longer = [replace(candidates[number], epochs=finalist_epochs) for number in best]
        longer = longer if head.has_noise else _class_finalists(longer, trained)
        again, more, errors = _score_candidates(tasks, sizes, longer, n_draws, seed + len(candidates), settings)
        candidates, trained = candidates + longer, concatenate([trained, again])
        density, error = torch.cat([density, more]), torch.cat([error, errors])
    log_likelihood = row_mean(density, row_weight)
    if not bool(log_likelihood.isfinite().any()):
        remedy = "Lower the learning rate, and look for extreme values in x and y, or rescale them."
        raise ValueError(f"No candidate's training and likelihood stayed finite. {remedy}")
    selection = greedy_selection(density, row_weight, n_members, error)
    chosen = select(trained, [number * n_folds + fold for number in selection for fold in range(n_folds)])
    found = log_likelihood.cpu(), tuple(selection), (chosen.precision * chosen.y_scale.square())[::n_folds].cpu()
    return EnsembleChoice(tuple(candidates), *found, held_out, tasks, chosen)


def _tasks(
    folds: Sequence[tuple[Tensor, Tensor]], x: Tensor, learned: Tensor, y: Tensor, weight: Tensor
) -> tuple[Task, ...]:
    """One task per fold: what is learned of its training rows, and the targets y of its held-out rows."""
    return tuple(Task(x[i], learned[i], weight[i], held_out=(x[k], y[k], weight[k])) for i, k in folds)


def _finalists(candidates: Sequence[Member], score: Tensor, count: int) -> list[int]:
    """The indices of the best candidates, the best of each kind (the inputs seen, the offset) first."""
    order = score.argsort(descending=True).tolist()
    first = {(candidates[i].n_inputs, candidates[i].offset): i for i in reversed(order)}.values()
    leaders = sorted(first, key=order.index)
    return [*leaders, *(number for number in order if number not in leaders)][:count]


def _class_finalists(best: Sequence[Member], trained: Population) -> list[Member]:
    """The best, and the first of them with the most dropout and decay, all with the relevance of their inputs."""
    most = trained.members[int(trained.drop_prob.sum(1).argmax())].drop_prob
    finalists = []
    for one in (*best, replace(best[0], drop_prob=most, weight_decay=1e-3)):
        # The squared mean square of each input's weights in all networks that see the same, with a mean square of 1.
        same = [number for number, member in enumerate(trained.members) if member.n_inputs == one.n_inputs]
        power = trained.weights[0][same, : one.n_inputs].square().mean((0, 2)).square()
        relevance = tuple((power / power.square().mean().sqrt()).clamp_min(1e-3).tolist())
        finalists.append(replace(one, relevance=relevance))
    return finalists


def greedy_selection(log_density: Tensor, weight: Tensor, n_members: int, error: Tensor) -> list[int]:
    r"""The candidates of an ensemble, each the best addition to the equally weighted mixture of those before.

    For numbers, the best is that of the mixture's log-likelihood and of the mean's under Laplace noise together,
    $-\log \sum_n w_n |e_n|$, from log-densities `[candidate, row]` and errors of the mean `[candidate, row, output]`: a
    wide candidate that covers a few rows far off, where others fail, would ruin the mean.
    """
    selection: list[int] = []
    mixture, total = torch.full_like(log_density[0], -torch.inf), torch.zeros_like(error[0])
    for _ in range(n_members):
        joined = torch.logaddexp(mixture, log_density)
        gain = torch.where(weight > 0, joined * weight, 0.0).sum(1).nan_to_num(nan=-torch.inf)
        absolute = ((total + error).abs() * weight[:, None]).sum(1)
        gain = gain - weight.sum() * absolute.clamp(min=1e-30).log().sum(-1).nan_to_num(nan=torch.inf)
        selection.append(int(gain.argmax()))
        mixture, total = joined[selection[-1]], total + error[selection[-1]]
    return selection


def _score_candidates(
    tasks: Sequence[Task], sizes: list[int], candidates: Sequence[Member], n_draws: int, seed: int, settings: Any
) -> tuple[Population, Tensor, Tensor]:
    """The candidates on all folds with their τ, and their log-densities and errors `[candidate, row of any fold]`."""
    n_folds = len(sizes)
    members = [
        replace(c, task=k + n_folds * c.offset, seed=seed + i) for i, c in enumerate(candidates) for k in range(n_folds)
    ]
    trained = train_in_jobs(tasks, members, **settings)
    group = torch.arange(len(candidates)).repeat_interleave(n_folds)
    trained, density, error = fit_and_score(trained, [task.held_out for task in tasks], n_draws=n_draws, groups=group)

    found = density.nan_to_num(nan=-torch.inf), error
    density, error = (torch.cat([v[k::n_folds, :size] for k, size in enumerate(sizes)], 1) for v in found)
    return trained, density, error


def random_folds(groups: Tensor, n_folds: int, *, strata: Tensor | None, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Training and held-out rows: `n_folds` disjoint folds of whole groups, or one split with a fifth of them held out.

    Every fold gets its share of the groups of each stratum (a group counts for that of most of its rows).
    """
    numbers, group = groups.unique(return_inverse=True)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    if strata is None:
        blocks = list(order.tensor_split(min(n_folds, len(order))))
        blocks = blocks if n_folds > 1 else [order[: max(1, round(0.2 * len(order)))]]
    else:
        _, stratum = strata.unique(return_inverse=True)
        counts = torch.zeros(len(numbers), int(stratum.max()) + 1, dtype=torch.long)
        counts.index_put_((group, stratum), torch.ones_like(group), accumulate=True)
        order = order[counts.argmax(1)[order].argsort(stable=True)]  # by the most frequent stratum of each group
        # Each stratum is dealt round robin to the folds; a single split takes every fifth row.
        n_blocks = min(n_folds if n_folds > 1 else 5, len(order))
        blocks = [order[block::n_blocks] for block in range(n_blocks)][: max(1, n_folds)]
    held = [torch.isin(group, block) for block in blocks]
    return [((~mask).nonzero()[:, 0], mask.nonzero()[:, 0]) for mask in held]


def forward_folds(times: Tensor, n_folds: int) -> list[tuple[Tensor, Tensor]]:
    """Splits that train on a growing past and hold out the times that follow; a single one holds out the last fifth."""
    distinct = times.unique()
    if n_folds == 1:
        blocks = [distinct[-max(1, round(0.2 * len(distinct))) :]]
    else:
        blocks = list(distinct.tensor_split(min(n_folds + 1, len(distinct))))[1:]
    sides = [(times < block[0], (times >= block[0]) & (times <= block[-1])) for block in blocks]
    return [(past.nonzero()[:, 0], held.nonzero()[:, 0]) for past, held in sides]
