r"""Bounds on extrapolation: a mean prediction far beyond the range of the targets is pulled back to it.

A network of rectified units is linear far from its training rows: a sensor that reads fifty deviations off would be
predicted as far off. With $[a, b]$ the range of the training targets widened by its width on either side, so that a
trend may go on, a mean prediction v inside stays as it is, and beyond it becomes
$$b + m \tanh\big((v - b) / m\big),$$
smooth, rising, and never more than the margin m, the width, beyond. All draws move by the same shift: the spread
that shows how far off the row is stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bounds"]


@dataclass(frozen=True, eq=False)
class Bounds:
    """The range of the training targets, standardised, `[output]`.

    Example:
        >>> bounds = Bounds(torch.tensor([-1.0]), torch.tensor([1.0]))
        >>> bounds.shift(torch.tensor([[0.5], [3.0], [99.0]])).flatten()
        tensor([  0.,   0., -94.])
    """

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, y: Tensor) -> Bounds:
        """The bounds of standardised targets `[row, output]`."""
        return cls(y.amin(0), y.amax(0))

    def union(self, other: Bounds) -> Bounds:
        """The bounds of both sets of rows."""
        return Bounds(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def shift(self, mean: Tensor) -> Tensor:
        """The shift of each mean prediction `[row, output]` to its place within the bounds; 0 inside them.

        A prediction beyond the range of floats is not shifted: callers refuse it.
        """
        # The range of a standardised target is at least 2; a constant one is not standardised, and its range is 0.
        margin = (self.high - self.low).clamp_min(1.0).to(mean)
        inside = mean.clamp(self.low.to(mean) - margin, self.high.to(mean) + margin)
        excess = mean - inside
        return torch.where(mean.isfinite(), margin * torch.tanh(excess / margin) - excess, 0.0)
