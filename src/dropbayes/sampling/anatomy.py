"""The anatomy of a network: its stochastic sites, its costs and the layout of its output."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from dropbayes.sampling.trees import Structure


@dataclass(frozen=True)
class RowLayout:
    """The layout of rows in a tensor: the axis, and the number of entries per row there (rows outermost)."""

    axis: int
    inner: int


_ROWS_FIRST = (RowLayout(0, 1),)


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
    """Whether `leave_out` switched it off."""
    name: str = ""
    """Its name, independent of other sites: the module, the operation and the index of the call."""
    positions: tuple[PositionAxis, ...] = ()
    """The axes that hold positions, if they were searched for."""

    @property
    def is_random(self) -> bool:
        """Whether two draws can differ here."""
        return not self.left_out and (self.drop_prob is None or 0 < self.drop_prob < 1)


@dataclass(frozen=True)
class Anatomy:
    """The result of inspecting a network on a few rows."""

    sites: tuple[Site, ...]
    left_out: tuple[Site, ...]
    off_calls: frozenset[int]  # indices of the dropout calls that are switched off
    lowered: frozenset[type]  # classes whose training branch does more than drop: they stay in evaluation mode
    prefix_cost: float  # floating-point operations before the first site, for one row
    suffix_cost: float  # and after it, for one row of one draw
    pass_bytes: int  # the memory of all tensors alive at once, for one row of one draw
    suffix_bytes: int  # and of those created from the first site on
    outputs: tuple[RowLayout | None, ...]  # of each tensor of the output
    structure: Structure
    last_layer: bool  # the last site is dropout that only the final linear layer reads
    rows_together: bool  # several rows can go through the network as one batch
    host_random: bool  # Python's or NumPy's generator is used in the forward pass
    seeds_itself: bool  # torch's generator is seeded in the forward pass: numbers drawn afterwards are fixed
    stateful: bool  # a forward pass in evaluation mode changes attributes or buffers

    @property
    def prefix_share(self) -> float:
        """The share of one forward pass that does not depend on the draw."""
        return self.prefix_cost / max(self.prefix_cost + self.suffix_cost, 1.0)

    @property
    def skips_layers(self) -> bool:
        """Whether a draw may skip layers and their sites: a single random number can decide a branch (LayerDrop)."""
        scalar = any(site.kind == "rand" and not site.shape and site.is_random for site in self.sites)
        return scalar or self.host_random

    @property
    def gives_rows(self) -> bool:
        """Whether the output is one tensor `[row, ...]`."""
        return self.structure.is_tensor and self.outputs == _ROWS_FIRST

    @property
    def n_random(self) -> int:
        """The number of sites where two draws can differ."""
        return sum(site.is_random for site in self.sites) + self.host_random


@dataclass(frozen=True)
class Sites:
    """The sites of a network in the order of execution; prints as a table."""

    entries: tuple[Site, ...]
    prefix_share: float

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Site:
        return self.entries[index]

    def _table(self) -> tuple[list[tuple[str, ...]], str]:
        head = ("site", "path", "kind", "drop_prob", "shape", "before weight layer")
        body = [
            (
                "-" if site.left_out else str(site.index),
                site.path or "(network)",
                f"{site.kind}, left out" if site.left_out else site.kind,
                "-" if site.drop_prob is None else f"{site.drop_prob:g}",
                "x".join(map(str, site.shape)) or "scalar",
                site.before or "no",
            )
            for site in self.entries
        ]
        taking_part = sum(not site.left_out for site in self.entries)
        count = f"{taking_part} site{'' if taking_part == 1 else 's'}" if taking_part else "no site: nothing is random"
        return [head, *body], f"{count}; {100 * self.prefix_share:.0f} % of a forward pass is shared by all draws"

    def __str__(self) -> str:
        rows, summary = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in (*lines, summary))

    def __repr__(self) -> str:
        kinds = sorted({site.kind for site in self.entries})
        return f"Sites({len(self)}: {', '.join(kinds)}; {100 * self.prefix_share:.0f} % shared by all draws)"

    def _repr_html_(self) -> str:
        (head, *body), summary = self._table()
        heading = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
        return f"<table><thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table><p>{html.escape(summary)}</p>"
