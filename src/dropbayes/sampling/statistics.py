"""What a prediction is made of: the statistics of each row's draws, collected in the network's own structure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.likelihoods import ClassLikelihood, Gaussian, Likelihood
from dropbayes.sampling.plan import Plan
from dropbayes.sampling.streaming import Mean, Moments, Votes


@dataclass(frozen=True)
class Wishes:
    """What is wanted of the draws."""

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
        """Whether integrating over the last layer loses nothing that is wanted."""
        moments = self.likelihood is None or isinstance(self.likelihood, Gaussian)
        return moments and not self.quantiles and not self.keep_draws

    def check(self, plan: Plan) -> None:
        """Refuses a likelihood that cannot read this network's output."""
        n_tensors = len(plan.anatomy.row_axes)
        if self.likelihood is not None and n_tensors != 1:
            raise ValueError(
                f"`likelihood` needs an output of one tensor; the network gives {n_tensors}. Pass a network that "
                "returns the one to judge, or leave the likelihood out."
            )


class RowStatistics:
    """The statistics of some rows' draws, for one tensor of the output."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.moments = Moments()
        self.within = Mean()  # of the likelihood's variance given the draw
        self.integrated: Tensor | None = None  # the sum over draws of the variance over an integrated last layer
        self.entropies = Mean()
        self.votes = Votes()
        self.kept: list[Tensor] = []

    def add(self, output: Tensor, variance: Tensor | None) -> None:
        """Counts in outputs `[draw, row, ...]`, with their mean variance `[row, ...]` over an integrated last layer."""
        likelihood = self.wishes.likelihood
        if self.wishes.keep_draws or self.wishes.quantiles:
            self.kept.append(output)
        if likelihood is not None and not self.moments.count:
            likelihood.check(output)
        self.moments.add(output if likelihood is None else likelihood.mean(output))
        if variance is not None:
            added = variance.double() * len(output)
            self.integrated = added if self.integrated is None else self.integrated + added
        elif likelihood is not None and not isinstance(likelihood, Gaussian):
            self.within.add(likelihood.variance(output))
        if isinstance(likelihood, ClassLikelihood):
            probabilities = likelihood.class_probabilities(likelihood.mean(output))
            self.entropies.add(_entropy(probabilities))
            self.votes.add(probabilities)

    def results(self, *, integrated: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        """The statistics by name, `[row, ...]`."""
        for grouped in (self.moments, self.within, self.entropies):
            grouped.finish()
        _check_finite(self.moments.mean)
        likelihood, mean, epistemic = self.wishes.likelihood, self.moments.mean, self.moments.variance
        if integrated:
            assert self.integrated is not None
            epistemic = (
                epistemic + self.integrated / self.moments.count
            )  # the law of total variance over the last layer's masks
        if isinstance(likelihood, Gaussian):
            aleatoric = torch.full_like(mean, 1 / float(likelihood.precision))
        elif self.within.count:
            aleatoric = self.within.value
        else:
            aleatoric = torch.zeros_like(mean)
        found = {"mean": mean, "epistemic": epistemic, "aleatoric": aleatoric}
        if isinstance(likelihood, ClassLikelihood):
            found["entropy"] = _entropy(likelihood.class_probabilities(mean))
            found["expected_entropy"] = self.entropies.value
            found["variation_ratio"] = self.votes.variation_ratio
        found = {name: value.to(dtype) for name, value in found.items()}
        return {**found, **self._from_kept(dtype)}

    def _from_kept(self, dtype: torch.dtype) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.kept:
            every = torch.cat(self.kept)
            if self.wishes.quantiles:
                levels = torch.tensor(self.wishes.quantiles, dtype=torch.float64, device=every.device)
                found["quantiles"] = every.double().quantile(levels, dim=0).movedim(0, 1).to(dtype)
            if self.wishes.keep_draws:
                found["draws"] = every.movedim(0, 1)
        return found


def _entropy(probabilities: Tensor) -> Tensor:
    # `information.entropy` without its checks: these are softmaxes, a tile at a time
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


def _check_finite(mean: Tensor) -> None:
    # One NaN or infinity among the draws makes their mean so, too, and the sum of all means.
    if not math.isfinite(mean.sum()):
        raise ValueError(
            "`net` gave NaN or infinite outputs. Check the input rows and the weights for NaN, or predict in float32."
        )


def result_dtype(output: Tensor) -> torch.dtype:
    """The dtype of statistics of such outputs."""
    return torch.float64 if output.dtype == torch.float64 else torch.float32


class Collected:
    """The statistics of all rows so far, tensor by tensor of the output."""

    def __init__(self) -> None:
        self.parts: list[dict[str, list[Tensor]]] = []

    def add(self, found: list[dict[str, Tensor]]) -> None:
        """Appends the statistics of the next rows: one dict for each tensor of the output."""
        self.parts = self.parts or [{name: [] for name in one} for one in found]
        for parts, one in zip(self.parts, found, strict=True):
            for name, value in one.items():
                parts[name].append(value)

    def joined(self, name: str, place: int = 0) -> Tensor:
        """One statistic of one tensor of the output, for all rows: `[row, ...]`."""
        values = self.parts[place][name]
        return values[0] if len(values) == 1 else torch.cat(values)

    def trees(self, plan: Plan) -> dict[str, Any]:
        """Every statistic in the network's own structure, draws and quantiles in front; class statistics as tensors."""
        found: dict[str, Any] = {}
        for name in self.parts[0]:
            values = [self.joined(name, place) for place in range(len(self.parts))]
            if name in ("entropy", "expected_entropy", "variation_ratio"):
                found[name] = values[0]
                continue
            leading = 1 if name in ("draws", "quantiles") else 0
            values = [value.movedim(1, 0) for value in values] if leading else values
            found[name] = plan.anatomy.structure.build(plan.arranged(values, leading=leading))
        return found
