"""The statistics of each row's draws, collected in the network's output structure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.likelihoods import ClassLikelihood, Gaussian, Likelihood
from dropbayes.linear import ControlledPlan, OnePass
from dropbayes.sampling import Block, Inputs, Mean, Moments, Plan, Profile, Votes, move_row_axis, result_dtype

__all__ = ["Request", "RowResults", "RowStatistics", "row_summaries"]


@dataclass(frozen=True)
class Request:
    """The statistics of the draws to compute."""

    likelihood: Likelihood | None = None
    quantiles: tuple[float, ...] = ()
    keep_draws: bool = False

    def __post_init__(self) -> None:
        if self.likelihood is not None and not isinstance(self.likelihood, Likelihood):
            raise TypeError(
                "`likelihood` must be one of dropbayes' likelihoods, such as Gaussian(precision=1.0) or Categorical(); "
                f"got {self.likelihood!r}."
            )
        if any(not 0 < q < 1 for q in self.quantiles):
            raise ValueError(f"`quantiles` must lie strictly between 0 and 1; got {list(self.quantiles)}.")

    @property
    def only_moments(self) -> bool:
        """Whether only moments are requested, so that the last layer may be integrated out."""
        moments = self.likelihood is None or isinstance(self.likelihood, Gaussian)
        return moments and not self.quantiles and not self.keep_draws

    def judged(self, profile: Profile, block: Block) -> tuple[list[Tensor], list[Tensor | None]]:
        """The tensors of a block to summarise, and their variances over an integrated last layer."""
        variances: list[Tensor | None] = [None] * len(block.outputs) if block.variances is None else [*block.variances]
        index = self.likelihood_tensor(profile)
        return (block.outputs, variances) if index is None else ([block.outputs[index]], [variances[index]])

    def likelihood_tensor(self, profile: Profile) -> int | None:
        """The tensor of the output that the likelihood reads: the only one, or `logits`; None without a likelihood."""
        if self.likelihood is None:
            return None
        n_tensors = len(profile.outputs)
        if n_tensors == 1:
            return 0
        tree = profile.structure.build(range(n_tensors), numbers=False)
        logits = tree.get("logits") if isinstance(tree, Mapping) else getattr(tree, "logits", None)
        if logits is None:
            raise ValueError(
                f"`likelihood` needs an output of one tensor, or one called `logits`; the network gives {n_tensors}. "
                "Pass a network that returns the one to judge, or leave the likelihood out."
            )
        return logits


class RowStatistics:
    """The statistics of some rows' draws, for one tensor of the output."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.likelihood: Likelihood | None = None  # for outputs of these axes
        self.moments = Moments()
        self.aleatoric = Mean()  # of the likelihood's variance given the draw
        self.integrated: Tensor | None = None  # the sum over draws of the variance over an integrated last layer
        self.entropies = Mean()
        self.votes = Votes()
        self.outputs: list[Tensor] = []
        self.conditionals: list[Tensor] = []  # means given the draw, of which quantiles are taken
        self.dtype = torch.float32
        self.is_complex = False

    def add(self, output: Tensor, variance: Tensor | None) -> None:
        """Adds outputs `[draw, row, ...]`, with their mean variance `[row, ...]` over an integrated last layer."""
        self.dtype = result_dtype(output)
        if output.is_complex():
            output = torch.view_as_real(output)
            self.is_complex = True
        if self.request.likelihood is not None and self.likelihood is None:
            self.likelihood = self.request.likelihood.for_output(output.dim() - 1)
            self.likelihood.check(output)
        likelihood = self.likelihood
        conditional = output if likelihood is None else likelihood.mean(output)
        if self.request.keep_draws:
            self.outputs.append(output)
        if self.request.quantiles:
            self.conditionals.append(conditional)
        self.moments.add(conditional)
        if variance is not None:
            added = variance.double() * len(output)
            self.integrated = added if self.integrated is None else self.integrated + added
        elif likelihood is not None and not isinstance(likelihood, Gaussian):
            self.aleatoric.add(likelihood.variance(output))
        if isinstance(likelihood, ClassLikelihood):
            probabilities = likelihood.class_probabilities(likelihood.mean(output))
            self.entropies.add(_entropy(probabilities))
            self.votes.add(probabilities)

    def results(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The statistics by name, `[row, ...]`."""
        for grouped in (self.moments, self.aleatoric, self.entropies):
            grouped.finish()
        likelihood, mean, epistemic = self.likelihood, self.moments.mean, self.moments.variance
        if self.integrated is not None:  # the law of total variance over the last layer's masks
            epistemic = epistemic + self.integrated / self.moments.count
        if isinstance(likelihood, Gaussian):
            aleatoric = likelihood.variance(mean.double()).detach().to(mean)
        elif self.aleatoric.count:
            aleatoric = self.aleatoric.value
        else:
            aleatoric = torch.zeros_like(mean)
        statistics = {"mean": mean, "epistemic": epistemic, "aleatoric": aleatoric}
        if isinstance(likelihood, ClassLikelihood):
            statistics["entropy"] = _entropy(likelihood.class_probabilities(mean))
            statistics["expected_entropy"] = self.entropies.value
            statistics["variation_ratio"] = self.votes.variation_ratio
        dtype = self.dtype if dtype is None else dtype
        statistics = {name: value.to(dtype) for name, value in statistics.items()} | self._from_outputs(dtype)
        return self._as_complex(statistics) if self.is_complex else statistics

    def _as_complex(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means and draws as complex numbers; variances E|z - E z|², real and imaginary parts together."""
        sums = {name: statistics[name].sum(-1) for name in ("epistemic", "aleatoric")}
        return {n: v if n in sums else torch.view_as_complex(v.contiguous()) for n, v in statistics.items()} | sums

    def _from_outputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        statistics: dict[str, Tensor] = {}
        if self.conditionals:
            every = torch.cat(self.conditionals).double()
            levels = torch.tensor(self.request.quantiles, dtype=torch.float64, device=every.device)
            statistics["quantiles"] = every.quantile(levels, dim=0).movedim(0, 1).to(dtype)
        if self.outputs:
            statistics["draws"] = torch.cat(self.outputs).movedim(0, 1)
        return statistics


def row_summaries(
    plan: Plan | ControlledPlan | OnePass, inputs: Inputs, first_row: int, request: Request
) -> Iterator[tuple[range, list[dict[str, Tensor]]]]:
    """The statistics of the rows, block by block: one dict for each tensor of the output that is summarised."""
    for rows, blocks in itertools.groupby(plan.run(inputs, first_row=first_row), lambda block: block.rows):
        statistics: list[RowStatistics] = []
        moments = None
        for block in blocks:
            moments = block.moments
            if moments is not None:
                break
            outputs, variances = request.judged(plan.profile, block)
            statistics = statistics or [RowStatistics(request) for _ in outputs]
            for one, output, variance in zip(statistics, outputs, variances, strict=True):
                one.add(output, variance)
        yield rows, [one.results() for one in statistics] if moments is None else [_summary_of(*moments, request)]


def _summary_of(mean: Tensor, epistemic: Tensor, request: Request) -> dict[str, Tensor]:
    """The statistics of rows whose moments over draws are known, `[row, ...]`."""
    aleatoric = torch.zeros_like(mean)
    if isinstance(request.likelihood, Gaussian):
        aleatoric = request.likelihood.variance(mean.double()).detach().to(mean)
    return {"mean": mean, "epistemic": epistemic, "aleatoric": aleatoric}


def _entropy(probabilities: Tensor) -> Tensor:
    # `information.entropy` without its checks: these are softmaxes, a tile at a time
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


class RowResults:
    """The statistics of all rows so far, for each tensor of the output."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, list[Tensor]]] = []

    def add(self, statistics: list[dict[str, Tensor]]) -> None:
        """Appends the statistics of the next rows: one dict for each tensor of the output."""
        self.chunks = self.chunks or [{name: [] for name in one} for one in statistics]
        for chunks, one in zip(self.chunks, statistics, strict=True):
            for name, value in one.items():
                chunks[name].append(value)

    def join_rows(self, name: str, index: int = 0) -> Tensor:
        """One statistic of one tensor of the output, for all rows: `[row, ...]`."""
        values = self.chunks[index][name]
        return values[0] if len(values) == 1 else torch.cat(values)

    def trees(self, profile: Profile, request: Request) -> dict[str, Any]:
        """Every statistic by name, in the network's structure; of the judged tensor alone if there is one."""
        likelihood_tensor, layouts = request.likelihood_tensor(profile), profile.outputs
        statistics: dict[str, Any] = {}
        if profile.gives_rows and not {"draws", "quantiles"} & self.chunks[0].keys():
            return {name: self.join_rows(name) for name in self.chunks[0]}
        alone = likelihood_tensor is not None and len(layouts) > 1
        layouts = (layouts[likelihood_tensor],) if alone and likelihood_tensor is not None else layouts
        for name in self.chunks[0]:
            values = [self.join_rows(name, index) for index in range(len(self.chunks))]
            leading = 1 if name in ("draws", "quantiles") else 0
            values = [value.movedim(1, 0) for value in values] if leading else values
            if name in ("entropy", "expected_entropy", "variation_ratio"):
                statistics[name] = values[0] if layouts[0] is not None else values[0][0]
                continue
            values = [move_row_axis(value, layout, leading) for value, layout in zip(values, layouts, strict=True)]
            statistics[name] = values[0] if alone else profile.structure.build(values, numbers=name == "mean")
        first = layouts[0]
        return statistics | {"row_axis": None if first is None else first.axis}
