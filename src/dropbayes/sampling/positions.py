r"""The masks of a sequence: one for all of its positions, or one per absolute position.

A network that reads a sequence token by token, with a cache, must have at every step the masks that it would have on
the whole sequence: only then are its steps those of one function. *Tied* masks have one value for
all positions, as Gal and Ghahramani (2016, *A Theoretically Grounded Application of Dropout in Recurrent Neural
Networks*) require: the weights are then random, $\mathbf{W} \operatorname{diag}(\mathbf{z})$, and not the
tokens. Attention weights, which have a position for queries and one for keys, are tied over both: a head is dropped
whole, which drops its block of rows of the output projection. *Own* masks are keyed by the absolute position (attention
weights by that of query and key).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dropbayes.sampling.masks import LONGEST, Units, named_site
from dropbayes.tracing import Site

POSITIONS = ("tied", "own")


def checked_positions(positions: str | None) -> str | None:
    """`positions`, if it is None or one of the two kinds."""
    if positions is not None and positions not in POSITIONS:
        raise ValueError(f"`positions` must be None or one of {', '.join(map(repr, POSITIONS))}; got {positions!r}.")
    return positions


@dataclass(frozen=True)
class Positions:
    """The dependence of the masks of one run on position.

    Args:
        tied: Whether all positions share a mask.
        lengths: The number of positions of each sequence of the input, including those in a cache.
    """

    tied: bool
    lengths: tuple[int, ...]

    def generate(
        self, site: Site, shape: tuple[int, ...], make: Callable[[int, tuple[int, ...], Units | None], Tensor]
    ) -> Tensor:
        """The result of `make` for a site's number, the shape of its mask and the numbers of its units.

        A tied mask has length 1 along its positions.
        """
        axes = {position.axis for position in site.positions}
        if self.tied or not axes:
            return make(
                site.number or named_site(site.name), tuple(1 if a in axes else n for a, n in enumerate(shape)), None
            )
        return make(site.number or named_site(site.name), shape, self._units(site, shape))

    def _units(self, site: Site, shape: tuple[int, ...]) -> Units:
        lengths = [shape[position.axis] for position in site.positions]
        totals = [self.lengths[position.sequence] for position in site.positions]
        # The last entry is the last position: queries are the newest tokens, keys reach back to the first (or, in a
        # sliding window, to the first that is left). Only a cache with room to spare is longer than the sequence.
        starts = [max(0, total - length) for total, length in zip(totals, lengths, strict=True)]
        if max(start + length for start, length in zip(starts, lengths, strict=True)) > LONGEST:
            raise ValueError(f'`positions` "own" numbers at most {LONGEST} positions; {site.path or "net"} has more.')
        return Units(shape, tuple(position.axis for position in site.positions), tuple(starts))
