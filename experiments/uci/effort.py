r"""The UCI sets with `DropoutRegressor`: one method and one configuration space for all sets, at a given effort.

Everything is chosen inside the training rows of a split, by the estimator itself. The test rows are scored as in the
paper: RMSE of the predictive mean, mean log predictive density.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.parameters import EFFORTS
from dropbayes.runtime.progress import ProgressBar
from experiments.uci.data import Dataset

__all__ = ["QUICK", "Settings", "network_steps", "results", "settings_for"]


@dataclass(frozen=True)
class Settings:
    """The arguments of the estimator.

    Attributes:
        effort: "quick", "standard" or "best".
        noise: The noise model.
    """

    effort: Literal["quick", "standard", "best"] = "standard"
    noise: Literal["student", "constant", "heteroscedastic"] = "student"


QUICK = {"effort": "quick"}


def settings_for(dataset: Dataset) -> Settings:
    """The settings of any set: the defaults of the estimator."""
    del dataset
    return Settings()


def network_steps(dataset: Dataset, n_splits: int, settings: Settings) -> float:
    """The approximate cost of a run, in steps of one network."""
    effort, n_rows = EFFORTS[settings.effort], len(dataset.splits[0][0])
    n_folds = 5 if n_rows < 2000 else 1
    full = sum(share for _, _, share in (*effort.candidates, *effort.binned)) + effort.n_finalists
    networks = full * n_folds + effort.n_networks
    return networks * (effort.steps + effort.steps_per_row * n_rows) * n_splits


def results(
    dataset: Dataset,
    splits: Sequence[int],
    *,
    settings: Settings,
    device: str = "auto",
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """RMSE, log-likelihood, the share of epistemic variance and the chosen drop probabilities of each split.

    Args:
        dataset: The set.
        splits: The indices of the splits to run.
        settings: The effort.
        device: "auto", "cpu", "cuda" ...
        progress: Whether to show a bar.
    """
    with ProgressBar(f"{dataset.name}, {settings.effort}", len(splits), unit="splits", show=progress) as bar:
        return [_result(dataset, split, settings, device) for split in bar.follow(splits)]


def _result(dataset: Dataset, split: int, settings: Settings, device: str) -> dict[str, Any]:
    rows, test = dataset.splits[split]
    model = DropoutRegressor(effort=settings.effort, noise=settings.noise, device=device, random_state=split)
    mixture = model.fit(dataset.x[rows], dataset.y[rows]).predictive(dataset.x[test])
    y = dataset.y[test]
    return {
        "split": split,
        "rmse": float(np.sqrt(np.mean((mixture.mean.numpy() - y) ** 2))),
        "log_likelihood": float(mixture.log_density(y).mean()),
        "epistemic_share": float(mixture.epistemic_share.mean()),
        "drop_prob": sorted({tuple(p) for p in model.population_.drop_prob.tolist()}),
        "freedom": mixture.freedom,
    }
