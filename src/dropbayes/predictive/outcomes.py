"""Predictions beside what happened, row by row: the data that scores are computed from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes import information, scores
from dropbayes.runtime.validation import Array, finite_tensor, matching_tensors, row_values

INTERVAL_LEVEL = 0.95
"""The nominal coverage of the intervals whose width is scored."""


@dataclass(frozen=True)
class RegressionOutcomes:
    """The per-row data of the regression scores.

    Args:
        y: The observed targets, `[row, ...]`.
        mean: The predictive mean.
        std: The predictive standard deviation.
        pit: The predictive distribution function at the target (`calibration.mixture_pit`).
        log_likelihood: The predictive log-likelihood of each row, `[row]`.
        sample_weight: The weight of each row.
        crps: The continuous ranked probability score of each row, or of a selection of rows.
        lower: The lower end of the central interval with coverage `INTERVAL_LEVEL`.
        upper: Its upper end.
    """

    y: Array
    mean: Array
    std: Array
    pit: Array
    log_likelihood: Array
    sample_weight: Array | None = None
    crps: Array | None = None
    lower: Array | None = None
    upper: Array | None = None

    def __post_init__(self) -> None:
        n_rows = len(matching_tensors({"mean": self.mean, "std": self.std, "pit": self.pit, "y": self.y})[0])
        row_values("log_likelihood", self.log_likelihood, n_rows=n_rows, infinite=True)

    def absolute_errors(self) -> Tensor:
        outcome, mean = matching_tensors({"y": self.y, "mean": self.mean})
        return (outcome - mean).abs()

    def loss(self) -> Tensor:
        """The absolute error of each row, averaged over its outputs."""
        return (
            self.absolute_errors().flatten(1).mean(1) if torch.as_tensor(self.y).dim() > 1 else self.absolute_errors()
        )

    def uncertainty(self) -> Tensor:
        """The predictive variance of each row, summed over its outputs."""
        variance = finite_tensor("std", self.std).square()
        return variance.flatten(1).sum(1) if variance.dim() > 1 else variance


@dataclass(frozen=True)
class ClassOutcomes:
    """The per-row data of the classification scores.

    Args:
        labels: Class indices, `[row]`.
        probabilities: Predictive probabilities, `[row, class]`.
        sample_weight: The weight of each row.
        mutual_information: The mutual information of label and weights, in nats.
    """

    labels: Array
    probabilities: Array
    sample_weight: Array | None = None
    mutual_information: Array | None = None

    def uncertainty(self) -> Tensor:
        """The entropy of each row, in nats."""
        return information.entropy(self.probabilities)

    def correct(self) -> Tensor:
        return scores.confidence_and_correctness(self.probabilities, self.labels)[1]

    def loss(self) -> Tensor:
        """1 for each row whose most probable class is wrong."""
        return 1 - self.correct()
