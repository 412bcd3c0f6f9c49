r"""The clean protocol of the authors: drop probability and precision chosen per split on held-out training rows.

Per split: twelve candidates (four drop probabilities, three precisions τ) learn the first 80 % of the training rows,
the best log-likelihood on the rest chooses one, and that one learns all training rows. One hidden layer, dropout before
both layers, 10,000 draws. Source: the authors' experiment code of 2018, which is also that of Mukhoti, Stenetorp and
Gal (2018), "On the importance of strong baselines in Bayesian deep learning".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dropbayes.population import Evaluation, Member, Population, Task, evaluate, train
from experiments.uci.data import Dataset


@dataclass(frozen=True)
class Settings:
    """The authors' settings for one set.

    Attributes:
        precisions: The grid of τ, in units of 1/y².
        drop_probs: The grid of drop probabilities, the same before both layers.
        n_hidden: The number of units in the hidden layer.
        epochs: The number of passes over the rows.
        batch_size: The number of rows per step.
        length_scale: The prior length-scale.
        learning_share: The fraction of the training rows on which candidates are trained.
        n_draws: T, for choosing and for testing.
    """

    precisions: tuple[float, ...]
    drop_probs: tuple[float, ...] = (0.005, 0.01, 0.05, 0.1)
    n_hidden: int = 50
    epochs: int = 4000
    batch_size: int = 128
    length_scale: float = 1e-2
    learning_share: float = 0.8
    n_draws: int = 10_000


SETTINGS = {
    "boston": Settings((0.1, 0.15, 0.2)),
    "concrete": Settings((0.025, 0.05, 0.075)),
    "energy": Settings((0.25, 0.5, 0.75)),
    "kin8nm": Settings((150.0, 200.0, 250.0)),
    "naval": Settings((30_000.0, 40_000.0, 50_000.0)),
    "power": Settings((0.05, 0.1, 0.15)),
    "protein": Settings((0.025, 0.05, 0.075), n_hidden=100, epochs=2000),
    "wine": Settings((2.5, 3.0, 3.5)),
    "yacht": Settings((0.25, 0.5, 0.75)),
}


QUICK = {"n_draws": 1000, "epochs": 2000}


def settings_for(dataset: Dataset) -> Settings:
    """The authors' settings for their sets; for any other, precisions about those of a fit that explains 80 to 95 %."""
    if dataset.name in SETTINGS:
        return SETTINGS[dataset.name]
    return Settings(tuple(float(factor / dataset.y.var()) for factor in (5.0, 10.0, 20.0)))


def candidates(settings: Settings, n_rows: int) -> list[Member]:
    r"""The members of the grid, with the weight decay the authors' code gives them.

    Their loss is the squared error of standardised targets without the ½, beside
    $\tfrac{l^2 (1 - p)}{2 N \tau} \|\mathbf W\|^2$ with τ in the *original* units of y and p the drop probability. With
    the ½ of [GG16, eq:L:dropout] the same minimiser needs half of it.
    """
    return [
        Member(
            drop_prob=drop_prob,
            weight_decay=0.5 * settings.length_scale**2 * (1 - drop_prob) / (2 * n_rows * precision),
            precision=None,
            epochs=settings.epochs,
        )
        for drop_prob, precision in itertools.product(settings.drop_probs, settings.precisions)
    ]


def network_steps(dataset: Dataset, n_splits: int, settings: Settings | None = None) -> float:
    """The cost of a run, in steps of one network."""
    settings = settings or settings_for(dataset)
    n_train = len(dataset.splits[0][0])
    sizes = [int(settings.learning_share * n_train)] * len(settings.drop_probs) * len(settings.precisions) + [n_train]
    return float(sum(settings.epochs * -(-n // settings.batch_size) for n in sizes) * n_splits)


def results(
    dataset: Dataset,
    splits: Sequence[int],
    *,
    settings: Settings | None = None,
    device: str = "auto",
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """RMSE, log-likelihood and the chosen candidate of each split, all splits and candidates trained at once.

    Args:
        dataset: The set.
        splits: The indices of the splits to run.
        settings: The grids; the authors' by default.
        device: "auto", "cpu", "cuda" ...
        progress: Whether to show a bar.
    """
    settings = settings or settings_for(dataset)
    grid = list(itertools.product(settings.drop_probs, settings.precisions))
    selection, final = [], []
    for split in splits:
        rows, test = dataset.splits[split]
        cut = int(settings.learning_share * len(rows))
        selection.append(_task(dataset, rows[:cut], rows[cut:]))
        final.append(_task(dataset, rows, test))
    members = [
        replace(member, task=t, seed=split)
        for t, split in enumerate(splits)
        for member in candidates(settings, len(selection[0].x))
    ]
    tau = torch.tensor([precision for _ in splits for _, precision in grid])
    scores = _scores(selection, members, tau, settings, device, progress).log_likelihood
    best = scores.view(len(splits), len(grid)).nan_to_num(nan=-torch.inf).argmax(1).tolist()
    chosen = [
        replace(candidates(settings, len(final[0].x))[best[t]], task=t, seed=1000 + split)
        for t, split in enumerate(splits)
    ]
    tested = _scores(final, chosen, torch.tensor([grid[b][1] for b in best]), settings, device, progress)
    return [
        {
            "split": split,
            "rmse": float(tested.rmse[t]),
            "log_likelihood": float(tested.log_likelihood[t]),
            "drop_prob": grid[best[t]][0],
            "precision": grid[best[t]][1],
        }
        for t, split in enumerate(splits)
    ]


def _task(dataset: Dataset, learned: np.ndarray, held_out: np.ndarray) -> Task:
    return Task(dataset.x[learned], dataset.y[learned], held_out=(dataset.x[held_out], dataset.y[held_out]))


def _scores(
    tasks: Sequence[Task],
    members: Sequence[Member],
    precision: torch.Tensor,
    settings: Settings,
    device: str,
    progress: bool | None,
) -> Evaluation:
    """The members trained on their tasks and scored on the held-out rows with the given τ."""
    trained: Population = train(
        tasks,
        members,
        hidden=(settings.n_hidden,),
        batch_size=settings.batch_size,
        device=device,
        progress=progress,
    )
    trained = replace(trained, precision=precision.double()[:, None].to(trained.device))
    return evaluate(trained, [task.held_out for task in tasks], n_draws=settings.n_draws)
