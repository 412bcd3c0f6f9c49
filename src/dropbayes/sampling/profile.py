"""The profile of a network: its stochastic sites, its costs, the layout of its output, and how it may be run."""

from dataclasses import dataclass

from dropbayes.runtime.validation import check_keep_prob
from dropbayes.tracing import RowLayout, Site
from dropbayes.tracing.outputs import Structure


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
    n_calls: int = 0  # of torch's functions, in one pass
    shared_cost: float = 0.0  # operations of one draw for all rows together, such as the drawing of weights
    rows_together: bool = True  # several rows can go through the network as one batch
    one_row: bool = False  # it was seen on a single row, and takes no batch or gives its rows other outputs there
    reads_rows: bool = False  # Python reads a value that depends on the rows, and may branch on it
    rows_depend: bool = False  # Python reads a number, or the host draws some, by the rows: each row runs alone
    numbers_vary: bool = False  # and that number is another for another row, or for a batch
    draws_branch: bool = False  # Python reads a value that depends on a draw: the draws run one at a time
    gates: tuple[tuple[str, float], ...] = ()  # unless it is on which side of this number that of a site lies
    asks_counts: bool = False  # unless it is nothing but which places have entries, and those can be followed
    rows_branch: bool = False  # and that depends on the rows as well: each row of each draw runs alone
    reorders: bool = False  # entries are taken by indices that depend on values: it may sort rows and put them back
    ranks_rows: bool = False  # rows are counted or paired among each other; those that are sorted may be put back
    sorts_rows: bool = False  # rows are sorted among each other, if they are not ranked in another way as well
    are_sent: bool = False  # a shape depends on values: rows are sent to different places, which may have no room
    sends_parts: bool = False  # and of a row any number of parts, which meet a site there
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
    def moves_rows(self) -> bool:
        """Whether entries of the rows come to stand in another order, or in several places."""
        return self.are_sent or self.sorts_rows

    @property
    def of_vectors(self) -> bool:
        """Whether a row has one vector at the first site, so that layers before it have products of the rows alone."""
        return all(len(site.shape) < 3 for site in self.sites[:1])

    @property
    def sites_have_rows(self) -> bool:
        """Whether every mask has an axis of all rows."""
        return all(site.layout is not None and site.layout.inner for site in self.sites if site.is_random)

    @property
    def asks_at_sites(self) -> bool:
        """Whether every pass asks for random numbers at these sites alone, and nothing between them is followed."""
        branches = self.reads_rows or self.by_name  # which may ask elsewhere
        return not (self.left_out or branches or self.moves_rows or self.seeds_torch or self.is_stateful)

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
        rule = "must have dropout to be a distribution over functions, but it has no dropout that is switched on"
        remedy = "Make a network that has it with dropbayes.add_dropout(net, drop_prob=0.1)"
        doctor = "dropbayes.doctor(net, x) says what is random, and what is not and why"
        raise ValueError(f"`net` {rule}: every draw would be the same. {remedy}; {doctor}.")
