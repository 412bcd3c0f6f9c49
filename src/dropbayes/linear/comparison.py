"""The linear method against a few draws: by how much it is off on this network and these rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dropbayes.linear.derivatives import rows_first
from dropbayes.linear.passes import Linear, linear_plan
from dropbayes.sampling import Sampling, as_inputs, draws, split


@dataclass(frozen=True)
class LinearCheck:
    """The linear method against draws, over all outputs of all rows; prints as a sentence."""

    ratio: float
    """The standard deviation by the linear method, relative to that of the draws: the median."""
    low: float
    high: float
    """The 10th and the 90th percentile of that ratio; a few draws alone spread it by 1 / sqrt(2 n_draws)."""
    rank_correlation: float
    """Of the two standard deviations; NaN for a single output."""
    mean_error: float
    """The distance between the means in standard deviations of the draws: the median."""
    n_draws: int

    @property
    def agrees(self) -> bool:
        """Whether the deviations agree to 15 % in the median, and the means to half a deviation."""
        return abs(self.ratio - 1) <= 0.15 and self.mean_error <= 0.5

    def __str__(self) -> str:
        advice = 'method="linear" will do' if self.agrees else 'use method="sampling"'
        return (
            f"linear method: {self.ratio:.2f} times the standard deviation of {self.n_draws} draws "
            f"[{self.low:.2f}, {self.high:.2f}], rank correlation {self.rank_correlation:.2f},\n"
            f"means {self.mean_error:.2f} deviations apart: {advice}"
        )


def check_linear(
    net: nn.Module, x: Any, *, n_draws: int = 30, seed: int = 0, sampling: Sampling = Sampling()
) -> LinearCheck:
    """By how much the linear method is off, judged by a few draws of the same rows."""
    inputs = as_inputs(x, row_axis=sampling.row_axis)
    plan = linear_plan(net, inputs, Linear())
    blocks = list(plan.run(inputs))
    sampled = split(draws(net, x, n_draws=n_draws, seed=seed, masks="row", sampling=sampling))[0]
    pairs = []
    for index, (layout, tensor) in enumerate(zip(plan.profile.outputs, sampled, strict=True)):
        drawn = torch.stack([rows_first(one, layout, inputs.n_rows) for one in tensor]).double().flatten(1)
        mean = torch.cat([block.outputs[index][0] for block in blocks]).double().flatten()
        std = torch.cat([block.variances[index] for block in blocks if block.variances]).double().sqrt().flatten()
        pairs.append(torch.stack([std, drawn.std(0), (mean - drawn.mean(0)).abs()]))
    found = torch.cat(pairs, 1)
    std, moved, error = found[:, found[1] > 1e-9 * found[1].max()]
    low, middle, high = (std / moved).quantile(torch.tensor([0.1, 0.5, 0.9]).to(std)).tolist()
    ranks = torch.stack([values.argsort().argsort().double() for values in (std, moved)])
    correlation = float(ranks.corrcoef()[0, 1]) if len(std) > 1 else float("nan")
    return LinearCheck(middle, low, high, correlation, float((error / moved).median()), n_draws)
