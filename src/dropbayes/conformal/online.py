r"""Conformal prediction on a stream: a level that adapts, for data that drift."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from dropbayes.conformal.thresholds import conformal_threshold
from dropbayes.runtime.validation import Array, check_positive, check_probability, row_values

__all__ = ["OnlineLevel"]


@dataclass(frozen=True)
class OnlineLevel:
    r"""The level to use next, so that the long-run coverage is the target for any data.

    $$\text{level}_{t+1} = \text{level}_t + \gamma\,(\text{target} - \mathbb 1[\text{covered}_t])$$

    Adaptive conformal inference [Gibbs & Candès 2021]. After $T$ steps the share covered differs from the target by at
    most $\big(\max(\text{target}, 1 - \text{target}) + \gamma\big)/(\gamma T)$, for every sequence, without any
    assumption. With a large γ the intervals fluctuate, and some are empty or infinite.

    Args:
        target: The long-run coverage.
        rate: The step γ; about the inverse of the number of rows within which the data drift.
        current: The current level; by default the target.

    Examples:
        >>> level = OnlineLevel(target=0.9, rate=0.05)
        >>> round(level.after(covered=False).current, 3), round(level.after(covered=True).current, 3)
        (0.945, 0.895)
    """

    target: float
    rate: float = 0.01
    current: float | None = None

    def __post_init__(self) -> None:
        check_probability("target", self.target)
        check_positive("rate", self.rate)
        if self.current is None:
            object.__setattr__(self, "current", self.target)

    def after(self, *, covered: bool) -> OnlineLevel:
        """The level once the outcome is known."""
        assert self.current is not None
        return replace(self, current=self.current + self.rate * (self.target - bool(covered)))

    def threshold(self, scores: Array) -> Tensor:
        """The threshold of the scores at the current level; ±∞ where the level has left the unit interval.

        Args:
            scores: Scores of recent rows, `[row]`.
        """
        assert self.current is not None
        recent = row_values("scores", scores, infinite=True)
        if not 0 < self.current < 1:
            return recent.new_tensor(math.inf if self.current >= 1 else -math.inf)
        return conformal_threshold(recent, level=self.current)
