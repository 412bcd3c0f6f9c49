"""A network judged against outcomes: the log-likelihood, error and calibration of its predictions, streamed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes import scores
from dropbayes.likelihoods import ClassLikelihood, Gaussian, Likelihood
from dropbayes.predictive import batches
from dropbayes.sampling.plan import Plan, checked_keys
from dropbayes.sampling.statistics import Collected, RowStatistics, Wishes
from dropbayes.sampling.streaming import LogMean
from dropbayes.sampling.trees import Inputs, as_inputs

COVERAGES = (0.5, 0.8, 0.95)
"""The nominal coverages whose observed counterparts are reported."""

__all__ = ["COVERAGES", "Evaluation", "Gaussian", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """How a network's predictive distribution fares against outcomes; prints as a table."""

    log_likelihood: float
    scores: dict[str, float]
    log_likelihoods: Tensor
    n_rows: int
    n_draws: int

    def __getattr__(self, name: str) -> float:
        scores: dict[str, float] = self.__dict__.get("scores", {})
        if name in scores:
            return scores[name]
        raise AttributeError(f"an evaluation has {', '.join(['log_likelihood', *scores])}; not {name!r}")

    def __str__(self) -> str:
        lines = {"log-likelihood": self.log_likelihood, **{k.replace("_", " "): v for k, v in self.scores.items()}}
        width = max(map(len, lines))
        head = f"{self.n_rows} rows, {self.n_draws} draws"
        return "\n".join([head, *(f"{name:<{width}}  {value: .4f}" for name, value in lines.items())])


def evaluate(
    net: nn.Module,
    x: Any,
    y: Any = None,
    *,
    likelihood: Likelihood,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "row",
    sampler: str = "stratified",
    row_axis: int = 0,
    max_bytes: int | None = None,
    progress: bool | None = None,
) -> Evaluation:
    r"""The scores of a network against outcomes: log-likelihood, RMSE or accuracy, calibration.

    The log-likelihood is that of the mixture over draws,
    $\log \frac1T \sum_t p(\mathbf y^* \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist_reg], averaged over rows.

    Args:
        net: Any network with dropout.
        x: Its input, or a DataLoader of pairs (input, outcome).
        y: The outcomes, a row each; None when `x` is a DataLoader.
        likelihood: What the output means.
        n_draws: The number of draws $T$.
        seed: Fixes every mask.
        masks: "row", since averages over a test set are then less noisy, or "shared".
        sampler: "stratified" or "independent".
        row_axis: The axis of the rows in the inputs.
        max_bytes: A bound on working memory.
        progress: Whether to show a progress bar; by default only for a DataLoader.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> result = evaluate(net, torch.ones(3, 2), torch.zeros(3, 1), likelihood=Gaussian(precision=1.0))
        >>> sorted(result.scores)
        ['coverage_50', 'coverage_80', 'coverage_95', 'mae', 'rmse']
    """
    wishes = Wishes(likelihood)
    if likelihood is None:
        raise TypeError("`likelihood` must say what the output means, such as Gaussian(precision=1.0); got None.")
    keys = checked_keys(n_draws, seed, sampler)
    collected, densities, outcomes = Collected(), list[Tensor](), list[Tensor]()
    for inputs, targets in _pairs(net, x, y, row_axis, progress):
        plan = Plan.of(net, inputs, keys=keys, masks=masks, max_bytes=max_bytes)
        wishes.check(plan)
        offset = sum(map(len, outcomes))
        with torch.no_grad():
            densities += _stream(plan, inputs, targets, offset, wishes, collected)
        outcomes.append(targets)
    per_row, targets = torch.cat(densities), torch.cat(outcomes)
    judge = _class_scores if isinstance(likelihood, ClassLikelihood) else _regression_scores
    found = judge(collected, targets, likelihood)
    return Evaluation(float(per_row.mean()), found, per_row, len(targets), keys.n_draws)


def _pairs(net: nn.Module, x: Any, y: Any, row_axis: int, progress: bool | None) -> Iterator[tuple[Inputs, Tensor]]:
    streamed = isinstance(x, torch.utils.data.DataLoader)
    if not streamed and y is None:
        raise TypeError("`y` must hold the outcomes unless `x` is a DataLoader of pairs; got None.")
    for batch in batches(net, x, progress=progress, title="evaluate"):
        if streamed and (not isinstance(batch, (tuple, list)) or len(batch) != 2):
            raise TypeError(
                f"`x` must be a DataLoader of pairs (input, outcome); got batches of {type(batch).__name__}."
            )
        arguments, targets = batch if streamed else (batch, y)
        inputs = as_inputs(arguments, row_axis=row_axis)
        targets = torch.as_tensor(targets).to(inputs.device)
        if targets.dim() == 0 or len(targets) != inputs.n_rows:
            raise ValueError(
                f"`y` must have one entry a row; got shape {tuple(targets.shape)} for {inputs.n_rows} rows."
            )
        yield inputs, targets


def _stream(plan: Plan, inputs: Inputs, y: Tensor, offset: int, wishes: Wishes, collected: Collected) -> list[Tensor]:
    """Collects the moments of the rows; returns their log-likelihoods."""
    likelihood = wishes.likelihood
    assert likelihood is not None
    found: list[Tensor] = []
    statistics, densities = RowStatistics(wishes), LogMean()
    for tile in plan.tiles(inputs, offset=offset):
        if tile.draws.start == plan.draws.start:
            statistics, densities = RowStatistics(wishes), LogMean()
        output = tile.outputs[0]
        statistics.add(output, None)
        outcomes = y[tile.rows.start : tile.rows.stop]
        densities.add(likelihood.log_density(output.double(), outcomes))
        likelihood.check(output, outcomes)
        if tile.draws.stop == plan.draws.stop:
            densities.finish()
            collected.add([statistics.results(integrated=False, dtype=torch.float64)])
            found.append(densities.value)
    return found


def _regression_scores(collected: Collected, y: Tensor, likelihood: Likelihood) -> dict[str, float]:
    mean = collected.joined("mean")
    deviation = (collected.joined("epistemic") + collected.joined("aleatoric")).sqrt()
    found = {"rmse": float(scores.rmse(mean, y)), "mae": float(scores.mae(mean, y))}
    for level in COVERAGES:  # of the Gaussian with the predictive moments
        half = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * deviation
        found[f"coverage_{round(100 * level)}"] = float(scores.coverage(mean - half, mean + half, y).mean())
    return found


def _class_scores(collected: Collected, y: Tensor, likelihood: Likelihood) -> dict[str, float]:
    assert isinstance(likelihood, ClassLikelihood)
    probabilities = likelihood.class_probabilities(collected.joined("mean"))
    probabilities, labels = probabilities.reshape(-1, probabilities.shape[-1]), y.long().reshape(-1)
    return {
        "accuracy": float(scores.accuracy(probabilities, labels)),
        "brier": float(scores.brier_score(probabilities, labels).mean()),
        "calibration_error": float(scores.expected_calibration_error(probabilities, labels)),
    }
