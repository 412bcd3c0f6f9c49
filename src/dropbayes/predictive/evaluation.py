"""The evaluation of a network against outcomes: log-likelihood, error and calibration, streamed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.likelihoods import ClassLikelihood, Gaussian, Likelihood
from dropbayes.predictive.outcomes import ClassOutcomes, RegressionOutcomes
from dropbayes.predictive.scoring import CLASS_SCORES, COVERAGE_LEVELS, REGRESSION_SCORES, core_scores
from dropbayes.predictive.statistics import Request, RowResults, RowStatistics
from dropbayes.runtime.arrays import Array, to_tensor
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import finite_tensor, row_weights
from dropbayes.sampling import (
    Inputs,
    LogMean,
    Mean,
    Plan,
    RowAxis,
    Sampling,
    as_inputs,
    keep_state,
    loaded_batches,
    make_plan,
    network_arguments,
)
from dropbayes.scores.averages import weighted_mean

COVERAGES = COVERAGE_LEVELS
"""The nominal coverages whose observed counterparts are reported."""

__all__ = ["COVERAGES", "Evaluation", "Gaussian", "evaluate"]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The scores of a network's predictive distribution against outcomes; prints as a table."""

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

    def __repr__(self) -> str:
        first = {"log_likelihood": self.log_likelihood, **dict(list(self.scores.items())[:3])}
        scores = ", ".join(f"{name} {value:.4g}" for name, value in first.items())
        return f"Evaluation({self.n_rows:,} rows, {scores}; {self.n_draws} draws)"

    def __str__(self) -> str:
        lines = {"log-likelihood": self.log_likelihood, **{k.replace("_", " "): v for k, v in self.scores.items()}}
        width = max(map(len, lines))
        head = f"{self.n_rows} rows, {self.n_draws} draws"
        return "\n".join([head, *(f"{name:<{width}}  {value: .4f}" for name, value in lines.items())])

    def _repr_html_(self) -> str:
        lines = {"log-likelihood": self.log_likelihood, **{k.replace("_", " "): v for k, v in self.scores.items()}}
        cells = "".join(f"<tr><td>{name}</td><td>{value:.4f}</td></tr>" for name, value in lines.items())
        return f"<table><caption>{self.n_rows:,} rows, {self.n_draws} draws</caption>{cells}</table>"


def evaluate(
    net: nn.Module,
    x: PyTree,
    y: Any = None,
    *,
    likelihood: Likelihood,
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "row",
    sample_weight: Array | None = None,
    sampling: Sampling = Sampling(),
    progress: bool | None = None,
) -> Evaluation:
    r"""The scores of a network against outcomes: log-likelihood, RMSE or accuracy, calibration.

    The log-likelihood is that of the mixture over draws,
    $\log \frac1T \sum_t p(\mathbf y^* \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist_reg], averaged over rows.
    Coverage is that of the central intervals of the mixture of Gaussians with each draw's mean and variance;
    `predictive.REGRESSION_SCORES` and `predictive.CLASS_SCORES` define the scores.

    Args:
        net: Any network with dropout.
        x: Its input, or a DataLoader of pairs (input, outcome).
        y: The outcomes, one per row; None when `x` is a DataLoader.
        likelihood: The observation model, which defines the meaning of the output.
        n_draws: The number of draws $T$.
        seed: The seed of the masks.
        masks: "row", which makes averages over a test set less noisy, or "shared".
        sample_weight: The weight of each row: a row of weight 2 counts twice in every score. Not for a DataLoader.
        sampling: The other settings, as in `predict`.
        progress: Whether to show a progress bar; by default only for a DataLoader.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> result = evaluate(net, torch.ones(3, 2), torch.zeros(3, 1), likelihood=Gaussian(precision=1.0))
        >>> sorted(result.scores)
        ['coverage_50', 'coverage_80', 'coverage_95', 'mae', 'rmse', 'sharpness']
    """
    request = Request(likelihood)
    if likelihood is None:
        raise TypeError("`likelihood` must say what the output means, such as Gaussian(precision=1.0); got None.")
    keys = sampling.keys(n_draws, seed)
    results, densities, outcomes = RowResults(), list[Tensor](), list[Tensor]()
    offset = sampling.row_offset
    for inputs, targets in _pairs(net, x, y, sampling.row_axis, progress):
        plan = make_plan(net, inputs, keys=keys, masks=masks, sampling=sampling, first_row=offset)
        for summary, log_density in _scored_rows(plan, inputs, targets, offset, request):
            results.add([summary])
            densities.append(log_density)
        keep_state(net, inputs, plan.profile)
        offset += inputs.n_rows
        outcomes.append(targets)
    per_row, targets = torch.cat(densities), torch.cat(outcomes)
    if sample_weight is not None:
        if isinstance(x, torch.utils.data.DataLoader):
            raise TypeError("`sample_weight` must be left out for a DataLoader: its order is not known beforehand.")
        sample_weight = row_weights(sample_weight, len(targets), like=per_row)
    judge = _class_scores if isinstance(likelihood, ClassLikelihood) else _regression_scores
    values = judge(results, targets, per_row, likelihood, sample_weight)
    return Evaluation(values.pop("log_likelihood"), values, per_row, len(targets), keys.n_draws)


def _pairs(
    net: nn.Module, x: PyTree, y: Any, row_axis: RowAxis, progress: bool | None
) -> Iterator[tuple[Inputs, Tensor]]:
    """The inputs and outcomes in `x` and `y`, or in each batch of a DataLoader."""
    if not isinstance(x, torch.utils.data.DataLoader):
        if y is None and isinstance(x, Mapping) and "labels" in x:
            x, y = _without_labels(x)
        if y is None:
            raise TypeError("`y` must hold the outcomes unless `x` is a DataLoader of pairs; got None.")
        yield _pair(x, y, row_axis)
        return
    with ProgressBar("evaluate", operator.length_hint(x, 0) or None, unit="batches", show=progress) as bar:
        for batch in bar.follow(loaded_batches(net, x)):
            if isinstance(batch, Mapping) and "labels" in batch:
                arguments, targets = _without_labels(batch)
                yield _pair(network_arguments(net, arguments), targets, row_axis)
            elif isinstance(batch, (tuple, list)) and len(batch) == 2:
                yield _pair(batch[0], batch[1], row_axis)
            else:
                raise TypeError(
                    "`x` must be a DataLoader of pairs (input, outcome) or of dicts with `labels`; got batches of "
                    f"{type(batch).__name__}."
                )


def _without_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]


def _pair(arguments: Any, y: Any, row_axis: RowAxis) -> tuple[Inputs, Tensor]:
    inputs = as_inputs(arguments, row_axis=row_axis)
    targets = to_tensor(y, name="y").to(inputs.device)
    if targets.is_floating_point() or targets.is_complex():
        finite_tensor("y", targets)
    if not inputs.is_one_row and (targets.dim() == 0 or len(targets) != inputs.n_rows):
        raise ValueError(f"`y` must have one entry per row; got shape {tuple(targets.shape)} for {inputs.n_rows} rows.")
    return inputs, targets[None] if inputs.is_one_row else targets


def _scored_rows(
    plan: Plan, inputs: Inputs, y: Tensor, offset: int, request: Request
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The moments of the rows, and their log-likelihoods, block by block."""
    assert request.likelihood is not None
    of_classes = isinstance(request.likelihood, ClassLikelihood)
    for rows, blocks in itertools.groupby(plan.run(inputs, first_row=offset), lambda block: block.rows):
        outcomes = y[rows.start : rows.stop]
        statistics, densities, transforms = RowStatistics(request), LogMean(), Mean()
        for block in blocks:
            ((output,), _) = request.judged(plan.profile, block)
            statistics.add(output, None)
            likelihood = statistics.likelihood
            assert likelihood is not None
            likelihood.check(output, outcomes)
            densities.add(likelihood.log_density(output.double(), outcomes))
            if not of_classes:
                transforms.add(_distribution(likelihood, output.double(), outcomes))
        densities.finish()
        summary = statistics.results(torch.float64)
        if not of_classes:
            transforms.finish()
            summary["pit"] = transforms.value
        yield summary, densities.value


def _distribution(likelihood: Likelihood, output: Tensor, y: Tensor) -> Tensor:
    """The distribution function at the outcome, of the Gaussian with each draw's mean and variance."""
    return torch.special.ndtr((y - likelihood.mean(output)) / likelihood.variance(output).sqrt())


def _regression_scores(
    results: RowResults, y: Tensor, densities: Tensor, likelihood: Likelihood, sample_weight: Array | None
) -> dict[str, float]:
    std = (results.join_rows("epistemic") + results.join_rows("aleatoric")).sqrt()
    rows = RegressionOutcomes(y, results.join_rows("mean"), std, results.join_rows("pit"), densities, sample_weight)
    return core_scores(REGRESSION_SCORES, rows)


def _class_scores(
    results: RowResults, y: Tensor, densities: Tensor, likelihood: Likelihood, sample_weight: Array | None
) -> dict[str, float]:
    mean = results.join_rows("mean")
    likelihood = likelihood.for_output(mean.dim())
    assert isinstance(likelihood, ClassLikelihood)
    probabilities = likelihood.class_probabilities(mean)
    labels, n_rows = y.long(), len(y)
    if sample_weight is not None:  # each of a row's labels has the row's weight
        sample_weight = torch.as_tensor(sample_weight).repeat_interleave(labels.numel() // n_rows)
    rows = ClassOutcomes(labels.reshape(-1), probabilities.reshape(-1, probabilities.shape[-1]), sample_weight)
    per_label = core_scores(CLASS_SCORES, rows)
    weight = None if sample_weight is None else sample_weight[:: labels.numel() // n_rows]
    return per_label | {"log_likelihood": float(weighted_mean(densities, weight))}
