r"""Our method for the UCI sets: small ensembles of two-layer dropout networks with a noise model from held-out draws.

Per split, all inside its training rows:

1. Every candidate (drop probabilities, a length of training) learns all but one fold of the training rows and is scored
   on that fold: the log-likelihood with τ re-fitted on held-out draws.
2. Three places of an ensemble are given to candidates one after the other, each to the one that adds most to the
   held-out log-likelihood of the mixture (a candidate may win several places).
3. The chosen ones are trained on all training rows, several seeds each, and once more on the folds; the held-out draws
   of these fit the noise model (`dropbayes.experiments.uci.noise`).

The test rows are predicted by the mixture over all draws of the networks of step 3, and scored as in the paper: RMSE of
the predictive mean, mean log predictive density. One configuration space for all sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.experiments.uci.data import Dataset
from dropbayes.experiments.uci.noise import features, fit_noise, log_density
from dropbayes.population import Member, Population, Task, draws, evaluate, fit_precision, select, train


@dataclass(frozen=True)
class Settings:
    """The configuration space, the same for every set.

    Attributes:
        candidates: The drop probability of the inputs, that before all other layers, and the share of the steps; a
            short training costs little and is another guard against over-fitting.
        hidden: Widths of the hidden layers.
        wide_rows: Sets with at least so many training rows have hidden layers twice as wide.
        learning_rate: Adam's first step size; it falls to zero along a cosine.
        weight_decay: λ of the squared weights, beside half the squared error of standardised targets.
        batch_size: Rows of a step.
        steps, steps_per_row: A network is trained for `steps` + `steps_per_row` · N steps, N its set's training rows.
        n_folds: Folds of the training rows.
        few_rows: Sets with fewer training rows hold out every fold in turn, the others the last one alone.
        n_places: Places of the ensemble.
        n_seeds: Networks trained on all rows for each place.
        selection_draws, noise_draws, test_draws: Draws of each network for the three uses.
        noise_steps: Steps of the noise model's fit.
    """

    candidates: tuple[tuple[float, float, float], ...] = (
        *((0.0, 0.0, 1.0), (0.0, 0.01, 1.0), (0.0, 0.05, 1.0), (0.0, 0.1, 1.0), (0.02, 0.05, 1.0), (0.05, 0.1, 1.0)),
        *((0.0, 0.05, 0.1), (0.05, 0.1, 0.1), (0.1, 0.2, 0.1)),
        *((0.0, 0.05, 0.03), (0.0, 0.1, 0.03), (0.05, 0.1, 0.03)),
    )
    hidden: tuple[int, ...] = (100, 100)
    wide_rows: int = 20_000
    learning_rate: float = 5e-3
    weight_decay: float = 1e-6
    batch_size: int = 128
    steps: int = 20_000
    steps_per_row: float = 6.0
    n_folds: int = 5
    few_rows: int = 2000
    n_places: int = 3
    n_seeds: int = 3
    selection_draws: int = 64
    noise_draws: int = 16
    test_draws: int = 200
    noise_steps: int = 400


QUICK = {
    "candidates": ((0.0, 0.01, 1.0), (0.0, 0.05, 1.0), (0.05, 0.1, 1.0), (0.05, 0.1, 0.3)),
    "hidden": (50, 50),
    "steps": 3000,
    "steps_per_row": 0.0,
    "n_places": 2,
    "n_seeds": 2,
    "noise_draws": 2,
    "test_draws": 100,
    "noise_steps": 150,
}


def settings_for(dataset: Dataset) -> Settings:
    """The settings of any set: the default ones."""
    del dataset
    return Settings()


def _n_steps(settings: Settings, n_train: int) -> int:
    return round(settings.steps + settings.steps_per_row * n_train)


def _folds(settings: Settings, n_train: int) -> list[int]:
    return list(range(settings.n_folds)) if n_train < settings.few_rows else [settings.n_folds - 1]


def network_steps(dataset: Dataset, n_splits: int, settings: Settings | None = None) -> float:
    """How many steps of one network a run takes: the measure of its cost."""
    settings = settings or settings_for(dataset)
    n_train = len(dataset.splits[0][0])
    n_folds = len(_folds(settings, n_train))
    shares = sum(share for _, _, share in settings.candidates)
    networks = shares * n_folds + settings.n_places * (n_folds + settings.n_seeds)
    return float(networks * _n_steps(settings, n_train) * n_splits)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The tasks of all splits: fold tasks `[split, fold]` first, then one task of all training rows per split."""

    tasks: list[Task]
    n_splits: int
    n_folds: int
    n_steps: int
    hidden: tuple[int, ...]
    settings: Settings

    @property
    def n_fold_tasks(self) -> int:
        return self.n_splits * self.n_folds

    def fold_tasks(self, s: int) -> range:
        """The numbers of the fold tasks of one split."""
        return range(s * self.n_folds, (s + 1) * self.n_folds)

    def held_out(self, task: int) -> tuple[np.ndarray, ...]:
        """The inputs and targets a task does not learn."""
        return self.tasks[task].held_out or ()

    def member(self, task: int, number: int, seed: int) -> Member:
        """A network of the numbered candidate for a task, with as many epochs as make up the steps."""
        settings, (inputs, drop_prob, share) = self.settings, self.settings.candidates[number]
        per_epoch = -(-len(self.tasks[task].y) // settings.batch_size)
        return Member(
            task=task,
            drop_prob=(inputs, *[drop_prob] * len(settings.hidden)),
            weight_decay=settings.weight_decay,
            learning_rate=settings.learning_rate,
            epochs=max(1, round(share * self.n_steps / per_epoch)),
            seed=seed,
        )

    def train(self, members: Sequence[Member], device: str, progress: bool | None) -> Population:
        """The members, trained."""
        return train(
            self.tasks[: 1 + max(member.task for member in members)],
            members,
            hidden=self.hidden,
            batch_size=self.settings.batch_size,
            schedule="cosine",
            device=device,
            progress=progress,
        )


def _plan(dataset: Dataset, splits: Sequence[int], settings: Settings) -> _Plan:
    n_train = len(dataset.splits[0][0])
    fold_tasks, full_tasks = [], []
    for split in splits:
        rows, test = dataset.splits[split]
        parts = np.array_split(rows, settings.n_folds)
        for k in _folds(settings, n_train):
            learned = np.concatenate([part for i, part in enumerate(parts) if i != k])
            fold_tasks.append(_task(dataset, learned, parts[k]))
        full_tasks.append(_task(dataset, rows, test))
    hidden = tuple(width * (2 if n_train >= settings.wide_rows else 1) for width in settings.hidden)
    n_folds, n_steps = len(_folds(settings, n_train)), _n_steps(settings, n_train)
    return _Plan(fold_tasks + full_tasks, len(splits), n_folds, n_steps, hidden, settings)


def _task(dataset: Dataset, learned: np.ndarray, held_out: np.ndarray) -> Task:
    return Task(dataset.x[learned], dataset.y[learned], held_out=(dataset.x[held_out], dataset.y[held_out]))


def results(
    dataset: Dataset,
    splits: Sequence[int],
    *,
    settings: Settings | None = None,
    device: str = "auto",
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """RMSE, log-likelihood and the chosen drop probabilities of each split, all splits trained at once.

    Args:
        dataset: The set.
        splits: Which of its splits.
        settings: The configuration space; the default one if None.
        device: "auto", "cpu", "cuda" ...
        progress: Shows a bar.
    """
    settings = settings or settings_for(dataset)
    plan = _plan(dataset, splits, settings)
    searched = plan.train(
        [
            plan.member(task, number, 1000 * splits[task // plan.n_folds] + number)
            for number in range(len(settings.candidates))
            for task in range(plan.n_fold_tasks)
        ],
        device,
        progress,
    )
    places = _places(searched, plan)
    members = []
    for s, split in enumerate(splits):
        for place, number in enumerate(places[s]):
            seed, full = 1000 * split + 100 * (1 + place), plan.n_fold_tasks + s
            members += [plan.member(task, number, seed) for task in plan.fold_tasks(s)]
            members += [plan.member(full, number, seed + 1 + i) for i in range(settings.n_seeds)]
    trained = plan.train(members, device, progress)
    return _scored(plan, splits, searched, trained, places)


def _places(searched: Population, plan: _Plan) -> list[list[int]]:
    """The candidates in the places of each split's ensemble, each the best addition to the mixture of those before."""
    n_candidates = len(plan.settings.candidates)
    rows = [task.held_out for task in plan.tasks]
    # The folds of one candidate of one split share their τ.
    group = torch.arange(len(searched)) // plan.n_folds
    searched = fit_precision(searched, rows, n_draws=plan.settings.selection_draws, groups=group)
    scores = evaluate(searched, rows, n_draws=plan.settings.selection_draws)
    density = torch.where(scores.weight > 0, scores.log_density, 0.0).nan_to_num(nan=-torch.inf)
    # [candidate, split, rows of all folds]; a padded row has log-density 0 for every candidate and decides nothing.
    density = density.view(n_candidates, plan.n_splits, -1)
    chosen: list[list[int]] = []
    for s in range(plan.n_splits):
        places: list[int] = []
        mixture = torch.full_like(density[0, s], -torch.inf)
        for _ in range(plan.settings.n_places):
            joined = torch.logaddexp(mixture, density[:, s])
            places.append(int((joined - math.log(len(places) + 1)).mean(1).argmax()))
            mixture = joined[places[-1]]
        chosen.append(places)
    return chosen


def _draws_by_task(population: Population, plan: _Plan, n_draws: int) -> dict[int, Tensor]:
    """Draws `[member, draw, row]` of the held-out rows of each task, of all members that learned it, in their order."""
    sampled, _ = draws(population, [plan.held_out(task)[0] for task in range(len(plan.tasks))], n_draws=n_draws)
    of_task: dict[int, list[int]] = {}
    for index, member in enumerate(population.members):
        of_task.setdefault(member.task, []).append(index)
    return {
        task: sampled[:, index, : len(plan.held_out(task)[1]), 0].transpose(0, 1) for task, index in of_task.items()
    }


def _scored(
    plan: _Plan, splits: Sequence[int], searched: Population, trained: Population, places: list[list[int]]
) -> list[dict[str, Any]]:
    """The results of each split: the noise model fitted to the fold tasks' draws, the test rows scored with it."""
    settings, device = plan.settings, trained.device
    search = _draws_by_task(searched, plan, settings.noise_draws)
    again = _draws_by_task(trained, plan, settings.noise_draws)
    finals = [i for i, member in enumerate(trained.members) if member.task >= plan.n_fold_tasks]
    test = _draws_by_task(select(trained, finals), plan, settings.test_draws)

    held_out, tested, moments = [], [], []
    for s in range(plan.n_splits):
        full = plan.n_fold_tasks + s
        moments.append(_Standard(plan.tasks[full], device))
        per_fold = [
            torch.cat([search[task][places[s]].flatten(0, 1), again[task].flatten(0, 1)]) for task in plan.fold_tasks(s)
        ]
        rows = [plan.held_out(task) for task in plan.fold_tasks(s)]
        joined = tuple(np.concatenate(part) for part in zip(*rows, strict=True))
        held_out.append(moments[s].rows(joined, torch.cat(per_fold, 1)))
        tested.append(moments[s].rows(plan.held_out(full), test[full].flatten(0, 1)))
    sampled, z, y = _stacked(held_out)
    noise, _ = fit_noise(sampled, z, y, n_steps=settings.noise_steps)
    sampled, z, y = _stacked(tested)
    density = log_density(noise, sampled, z, y).double().mean(1)
    error = (sampled.double().mean(1) - y.double()).square().mean(1).sqrt()
    return [
        {
            "split": split,
            "rmse": float(error[s] * moments[s].y_scale),
            "log_likelihood": float(density[s] - math.log(moments[s].y_scale)),
            "candidates": [settings.candidates[number] for number in places[s]],
            "shrink": float(noise.log_shrink[s].exp()),
            "tail": float(1 + noise.log_tail[s].exp()),
        }
        for s, split in enumerate(splits)
    ]


class _Standard:
    """The standardisation of a split by its training rows."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.device = device
        self.x_mean, x_scale = task.x.mean(0), task.x.std(0)
        self.x_scale = np.where(x_scale <= 1e-10 * (1 + np.abs(self.x_mean)), 1.0, x_scale)
        self.y_mean, self.y_scale = float(task.y.mean()), float(task.y.std())

    def rows(self, rows: tuple[np.ndarray, ...], sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, draws and outcomes of rows, standardised."""
        x = torch.as_tensor((rows[0] - self.x_mean) / self.x_scale, device=self.device)
        y = torch.as_tensor((rows[1] - self.y_mean) / self.y_scale, device=self.device)
        return x.float(), ((sampled - self.y_mean) / self.y_scale).float(), y.float()


def _stacked(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The draws, noise features and outcomes of all splits, one group each."""
    x, sampled, y = (torch.stack(part) for part in zip(*parts, strict=True))
    return sampled, features(x, sampled), y
