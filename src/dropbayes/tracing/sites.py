"""The sites of a network: the places in its forward pass where it is random."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowLayout:
    """The layout of rows in a tensor: the axis, and the number of entries per row there (rows outermost)."""

    axis: int
    inner: int


@dataclass(frozen=True)
class PositionAxis:
    """An axis of a mask that holds positions, and the index of their sequence in the input."""

    axis: int
    sequence: int


@dataclass(frozen=True)
class Site:
    """One place in a forward pass where the network is random."""

    index: int
    """The site's number in the order of execution."""
    path: str
    """The name of the module that draws."""
    kind: str
    """The operation: "dropout", "attention", "rand", ..."""
    drop_prob: float | None
    """The drop probability; None if the random numbers have another use."""
    shape: tuple[int, ...]
    """The shape of one row's mask."""
    before: str | None = None
    """The weight layer that reads the dropped tensor."""
    layout: RowLayout | None = None
    """The layout of a batch's rows in the mask; None if the mask has no rows."""
    left_out: bool = False
    """Whether it is in a module to ignore."""
    name: str = ""
    """Its name, independent of other sites: the module, the operation and the index of the call."""
    positions: tuple[PositionAxis, ...] = ()
    """The axes that hold positions, if they were searched for."""
    number: int | None = None
    """The number that keys its masks: its index, or the number of its name."""

    @property
    def is_random(self) -> bool:
        """Whether two draws can differ here."""
        return not self.left_out and (self.drop_prob is None or 0 < self.drop_prob < 1)
