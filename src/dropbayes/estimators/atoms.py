r"""Targets that repeat some values: an atom for each, so that a prediction can say "exactly zero".

Half of all claims are zero, a grade is one of four. A density cannot say so, and its quantiles lie beside the values
that happen. With $\bar F$ the mean of the predictive distribution functions of held-out rows, the cell $[a_k, b_k]$ of
an atom $v_k$ has the share of the atom and of what lies below it,
$$\bar F(a_k) = \tfrac1N \#\{y_n < v_k\}, \qquad \bar F(b_k) = \tfrac1N \#\{y_n \le v_k\},$$
and an outcome is $v_k$ where the mixture over the draws falls into the cell, as it is elsewhere. Quantiles, intervals,
the distribution function, the CRPS and samples are those of that outcome; moments and density remain the mixture's.
A central interval whose ends are atoms holds more than was asked for: the lighter end is left out while that brings
the interval nearer to the coverage.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.estimators.transforms import MappedMixture
from dropbayes.predictive.mixtures import Mixture

# An atom has at least this share of the rows, and this many; all of them together at least that share.
_MIN_SHARE, _MIN_ROWS, _MIN_TOTAL = 0.01, 5, 0.1
_LEVELS = 16  # of the noise of each draw in the mean distribution function


@dataclass(frozen=True, eq=False)
class Atoms:
    """The atoms and their cells, in increasing order; the map from the mixture's scale to outcomes."""

    values: Tensor  # the atoms
    low: Tensor  # the ends of their cells
    high: Tensor

    def inverse(self, z: Tensor) -> Tensor:
        """The outcome where the mixture gives z; the lower one where two cells meet."""
        return self._at(z, self.values)

    @property
    def jumps(self) -> list[float]:
        """The z at which `inverse` jumps: the ends of the cells."""
        return torch.cat([self.low, self.high]).tolist()

    def cell(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of the cell that holds z; z itself between cells."""
        return self._at(z, self.low), self._at(z, self.high)

    def _at(self, z: Tensor, values: Tensor) -> Tensor:
        low, high = self.low.to(z), self.high.to(z)
        cell = (torch.searchsorted(low, z.contiguous()) - 1).clamp_min(0)
        return torch.where((z > low[cell]) & (z <= high[cell]), values.to(z)[cell], z)

    def forward(self, y: Tensor) -> Tensor:
        """The largest z whose outcome is at most y."""
        end = y.new_tensor([torch.inf])
        low, high = torch.cat([self.low.to(y), end]), torch.cat([-end, self.high.to(y)])
        n_below = torch.searchsorted(self.values.to(y), y.contiguous(), right=True)
        return torch.maximum(high[n_below], torch.minimum(y, low[n_below]))


class AtomMixture(MappedMixture):
    """The predictive distribution of outcomes, from a mixture and its atoms."""

    transform: Atoms

    def interval(self, coverage: float) -> tuple[Tensor, Tensor]:
        start, end = self.base.interval(coverage)
        start, end = self.transform.cell(start)[0], self.transform.cell(end)[1]  # outcomes of (start, end]
        below, up_to = self.base.pit(start), self.base.pit(end)
        for _ in self.transform.values:
            later = self.transform.cell(_just_above(start))[1].maximum(start)
            sooner = self.transform.cell(end)[0]
            after, before = self.base.pit(later), self.base.pit(sooner)
            spare = 2 * (up_to - below - coverage)  # an end that holds less brings the rest nearer
            first, last = after - below, up_to - before
            first_leaves = (first <= spare) & ((first <= last) | (last > spare)) & (later < end)
            last_leaves = (last <= spare) & ~first_leaves & (start < sooner)
            if not bool((first_leaves | last_leaves).any()):
                break
            start, below = torch.where(first_leaves, later, start), torch.where(first_leaves, after, below)
            end, up_to = torch.where(last_leaves, sooner, end), torch.where(last_leaves, before, up_to)
        return self.transform.inverse(_just_above(start)), self.transform.inverse(end)


def _just_above(z: Tensor) -> Tensor:
    return torch.nextafter(z, z.new_tensor(torch.inf))


def fit_atoms(mixture: Mixture, y: Tensor, weight: Tensor) -> Atoms | None:
    """The atoms of held-out rows, from predictions `[draw, row]` and outcomes; None where hardly any value repeats."""
    from scipy.stats import t

    values, place, counts = y.unique(return_inverse=True, return_counts=True)
    share = torch.zeros(len(values)).double().index_add_(0, place, weight.double() / weight.sum())
    chosen = (counts >= _MIN_ROWS) & (share >= _MIN_SHARE)
    if float(share[chosen].sum()) < _MIN_TOTAL:
        return None
    levels = (torch.arange(_LEVELS) + 0.5) / _LEVELS
    scores = torch.from_numpy(t.ppf(levels.numpy(), mixture.freedom)).to(mixture.location)
    outcomes, order = (mixture.location + mixture.scale * scores[:, None, None]).flatten().sort()
    mass = (weight / weight.sum()).expand(_LEVELS, mixture.n_draws, -1).flatten()[order].cumsum(0)
    mass = mass / mass[-1]
    atoms, ends = values[chosen], torch.stack([share.cumsum(0) - share, share.cumsum(0)])[:, chosen]
    low, high = outcomes[torch.searchsorted(mass, ends).clamp_max(len(outcomes) - 1)]
    low, high = torch.minimum(low, atoms), torch.maximum(high, atoms)
    low[1:] = torch.maximum(low[1:], atoms[:-1])
    high[:-1] = torch.minimum(high[:-1], low[1:])
    low[0] = torch.where(chosen[0], -torch.inf, low[0])
    high[-1] = torch.where(chosen[-1], torch.inf, high[-1])
    return Atoms(atoms, low, high)
