r"""Bounds on extrapolation: inputs and predictions far beyond the range of the training rows are pulled back to it.

A network of rectified units is linear far from its training rows: a sensor that reads fifty deviations off would be
predicted as far off. Inside the range $[a, b]$ nothing changes; beyond it a value v becomes
$$b + m \tanh\big((v - b) / m\big),$$
smooth, rising, and never more than the margin m beyond the range. The margin of an input is the width of its range.
Predictions are free up to the width of the targets' range beyond it, so that a trend may go on, and never more than
two widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bounds"]


@dataclass(frozen=True, eq=False)
class Bounds:
    """The ranges of the training rows, in standardised units.

    Attributes:
        x_low, x_high: The smallest and largest value of each input, `[input]`.
        y_low, y_high: Those of each target, `[output]`.

    Example:
        >>> bounds = Bounds(*(torch.tensor([value]) for value in (-1.0, 1.0, 0.0, 1.0)))
        >>> bounds.inputs(torch.tensor([[0.5], [1.0], [9.0]])).flatten()
        tensor([0.5000, 1.0000, 2.9987])
    """

    x_low: Tensor
    x_high: Tensor
    y_low: Tensor
    y_high: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Bounds:
        """The bounds of standardised training rows `[row, input]` and targets `[row, output]`."""
        return cls(x.amin(0), x.amax(0), y.amin(0), y.amax(0))

    def union(self, other: Bounds) -> Bounds:
        """The bounds of both sets of rows."""
        return Bounds(
            torch.minimum(self.x_low, other.x_low),
            torch.maximum(self.x_high, other.x_high),
            torch.minimum(self.y_low, other.y_low),
            torch.maximum(self.y_high, other.y_high),
        )

    def inputs(self, x: Tensor) -> Tensor:
        """Standardised inputs `[row, input]`, pulled back to the range of the training rows."""
        return _pulled_back(x, self.x_low, self.x_high, self.x_high - self.x_low)

    def outputs(self, y: Tensor) -> Tensor:
        """Standardised function values `[..., output]`, pulled back to the range of the targets."""
        margin = (self.y_high - self.y_low).clamp_min(1.0)
        return _pulled_back(y, self.y_low - margin, self.y_high + margin, margin)


def _pulled_back(values: Tensor, low: Tensor, high: Tensor, margin: Tensor) -> Tensor:
    # The range of a standardised column is at least 2; a constant one is not standardised, and its range is 0.
    low, high, margin = (bound.to(values) for bound in (low, high, margin.clamp_min(1.0)))
    inside = values.clamp(low, high)
    # A value beyond the range of floats stays infinite, and so does its prediction: callers refuse it.
    return torch.where(values.isfinite(), inside + margin * torch.tanh((values - inside) / margin), values)
