"""The profile of a network: its stochastic sites, its costs, the layout of its output, and how it may be run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dropbayes.runtime.formatting import Printed, Table
from dropbayes.runtime.validation import check_keep_prob
from dropbayes.sampling.inputs import Structure
from dropbayes.tracing import RowLayout, Site


@dataclass(frozen=True)
class Profile:
    """What the inspection of a network on a few rows has shown."""

    sites: tuple[Site, ...]
    left_out: tuple[Site, ...]
    prefix_cost: float  # floating-point operations before the first site, for one row
    suffix_cost: float  # and after it, for one row of one draw
    pass_bytes: int  # the memory of all tensors alive at once, for one row of one draw
    suffix_bytes: int  # and of those created from the first site on
    outputs: tuple[RowLayout | None, ...]  # of each tensor of the output
    structure: Structure
    last_layer: bool  # the last site is dropout that only the final linear layer reads
    rows_together: bool = True  # several rows can go through the network as one batch
    one_row: bool = False  # it was seen on a single row, and takes no batch or gives its rows other outputs there
    reads_rows: bool = False  # Python reads a value that depends on the rows, and may branch on it
    rows_depend: bool = False  # Python reads a number that depends on the rows: each row runs alone
    numbers_vary: bool = False  # and that number is another for another row, or for a batch
    draws_branch: bool = False  # Python reads a value that depends on a draw: the draws run one at a time
    rows_branch: bool = False  # and that depends on the rows as well: each row of each draw runs alone
    by_name: bool = False  # a draw may skip sites, which are then known by name and not by number
    host_random: bool = False  # Python's, NumPy's or torch's own generator is used in the forward pass
    seeds_torch: bool = False  # torch's generator is seeded in the forward pass: numbers drawn afterwards are fixed
    is_stateful: bool = False  # a forward pass changes attributes, buffers or weights: each run needs its own view
    writes_input: bool = False

    @property
    def prefix_share(self) -> float:
        """The share of one forward pass that does not depend on the draw."""
        return self.prefix_cost / max(self.prefix_cost + self.suffix_cost, 1.0)

    @property
    def gives_rows(self) -> bool:
        """Whether the output is one tensor `[row, ...]`."""
        return self.structure.is_tensor and self.outputs == (RowLayout(0, 1),)

    @property
    def n_random(self) -> int:
        """The number of sites where two draws can differ."""
        return sum(site.is_random for site in self.sites) + self.host_random

    def check_random(self) -> None:
        """Raises on a network in which nothing is random."""
        if self.n_random:
            return
        for site in self.sites:
            if site.drop_prob is not None:
                check_keep_prob(1 - site.drop_prob)  # not random, though not switched off: it drops everything
        raise ValueError(
            "`net` must have dropout to be a distribution over functions, but it has no dropout that is switched on: "
            "every draw would be the same. Make a network that has it with dropbayes.add_dropout(net, drop_prob=0.1); "
            "dropbayes.doctor(net, x) says what is random, and what is not and why."
        )


@dataclass(frozen=True)
class Sites(Printed):
    """The sites of a network in the order of execution; prints as a table."""

    entries: tuple[Site, ...]
    prefix_share: float

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Site:
        return self.entries[index]

    def table(self) -> Table:
        """The sites, one in each line."""
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
        shared = f"{count}; {100 * self.prefix_share:.0f} % of a forward pass is shared by all draws"
        return Table("", body, head, notes=[shared], rule=True)

    def __repr__(self) -> str:
        kinds = sorted({site.kind for site in self.entries})
        return f"Sites({len(self)}: {', '.join(kinds)}; {100 * self.prefix_share:.0f} % shared by all draws)"
