"""The random numbers of a network's sites as variables: held at their means, and differentiated.

A dropped unit is multiplied by a mask of mean 1 and variance p / (1 - p).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling import Keys, Profile, SiteSource, keep_mask
from dropbayes.tracing import Site, SiteNames, neutral_uniform

MASK_KINDS = {"dropout", "feature_dropout", "attention", "recurrent"}  #: The kinds of sites that multiply by a mask.

_HARD = {"argmax", "argmin", "ceil", "floor", "heaviside", "round", "sign", "trunc"}  # without a derivative


@dataclass(frozen=True, eq=False)
class Variable:
    """The random numbers of one site for all rows, at their means."""

    site: Site
    value: Tensor  #: The numbers, a leaf of the graph, of length 1 along positions that share them.
    std: float  #: The standard deviation of each number.


class SiteVariables(SiteSource):
    """A source of variables in place of random numbers; `tied`: all positions of a sequence have the same mask."""

    def __init__(self, profile: Profile, names: SiteNames, ignored: tuple[str, ...], tied: bool) -> None:
        super().__init__(profile, names, ignored)
        self.variables: list[Variable] = []
        self._tied = tied
        self._following = iter(profile.sites)
        self._drawn: Variable | None = None  # the numbers that the running operation has asked for

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        mean = torch.full(shape, 1 - drop_prob, dtype=like.dtype, device=like.device)
        return self._add(kind, mean, (drop_prob * (1 - drop_prob)) ** 0.5)

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        if drop_prob == 1:
            self._next(kind)
            return x * 0
        mask = self._add(kind, x.new_ones(()).expand(shape), (drop_prob / (1 - drop_prob)) ** 0.5)
        return x.mul_(mask) if inplace and not isinstance(x, nn.Parameter) else x * mask

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if self.is_ignored():
            return neutral_uniform(kind, shape, device)
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        if kind == "randn":  # the caller takes the normal quantile
            return torch.special.ndtr(self._add(kind, zeros, 1.0))
        uniform = self._add(kind, zeros + 0.5, 12**-0.5)
        self._drawn = self.variables[-1]
        return uniform

    def bernoulli(self, probability: Tensor, drop_prob: float | None) -> Tensor:
        if self.is_ignored():
            return probability
        chance = probability.detach()
        noise = self._add("bernoulli", torch.zeros_like(chance), 1.0)
        self._drawn = self.variables[-1]
        return probability + (chance * (1 - chance)).sqrt() * noise

    def drawn(self) -> Variable | None:
        drawn, self._drawn = self._drawn, None
        return drawn

    def gate(self, site: Variable, chance: Tensor) -> Tensor:
        if chance.numel() > site.value.numel():  # several gates of one uniform are not independent
            self.chooses(site, "lt")
        self.variables.remove(site)
        noise = torch.zeros_like(chance).requires_grad_()
        self.variables.append(Variable(site.site, noise, 1.0))
        return chance + (chance * (1 - chance)).sqrt() * noise

    def chooses(self, site: Variable, operation: str) -> None:
        # What a mask multiplies may be ordered or compared, which has derivatives nearly everywhere; a uniform may not.
        orders = operation in ("argsort", "ge", "gt", "le", "lt", "multinomial", "sort", "topk")
        hard = orders or operation in _HARD or operation.startswith("rand")
        if site in self.variables and not hard:  # a function of the numbers, not of a comparison
            return
        what = f"takes {operation} of random numbers, or of a comparison of torch.rand: a hard choice"
        remedy = 'Draw a mask with torch.bernoulli or nn.functional.dropout, or predict with method="sampling"'
        raise NotImplementedError(f"`net` {what}, which has no derivative. {remedy}.")

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "").strip("_")  # also in place
        if name in _HARD and args and isinstance(args[0], Tensor) and args[0].requires_grad:
            what = f"takes {name} of numbers that depend on its dropout: a hard choice, which has no derivative"
            raise NotImplementedError(f'`net` {what}. Predict with method="sampling".')

    def _add(self, kind: str, mean: Tensor, std: float) -> Tensor:
        """The next variable, at its mean."""
        site, value = self._next(kind), mean.detach()
        for position in site.positions if self._tied else ():
            value = value.narrow(position.axis, 0, 1)
        self.variables.append(Variable(site, value.requires_grad_(), std))
        return value.expand(mean.shape) if self._tied else value

    def _next(self, kind: str) -> Site:
        """The site that is met: the next one, or by its name where a draw may skip some."""
        name = self.names.next(kind) if self.by_name else kind
        site = self.by_name.get(name) if self.by_name else next(self._following, None)
        if site is None or site.kind != kind:
            what = f"met a site {name!r} that it did not meet when it was inspected"
            why = "its forward depends on more than its input and weights"
            raise ValueError(f'`net` {what}: {why}. Predict with method="sampling".')
        if not torch.is_grad_enabled():
            what = f"drops where derivatives are switched off ({name}): under torch.no_grad"
            why = "or in the forward of an autograd.Function, where the effect of a mask is not seen"
            raise NotImplementedError(f'`net` {what}, {why}. Use method="sampling".')
        return site


class SiteValues(SiteVariables):
    """A source of the same values for any site, in any order: the variables are those of another pass."""

    def _add(self, kind: str, mean: Tensor, std: float) -> Tensor:
        return mean.detach().requires_grad_()


def linear_part(site: Site, slope: Tensor, keys: Keys, draws: range, rows: range | None = None) -> Tensor:
    """What a site's masks add to the output of the linear network, `[draw, row, output]`; with rows, of their own."""
    rate, number, units = site.drop_prob or 0.0, site.number or 0, tuple(slope.shape[2:])
    masks = keep_mask(
        keys, number, drop_prob=rate, draws=draws, rows=rows, shape=units, dtype=slope.dtype, device=slope.device
    )
    standard = (masks - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    return torch.einsum("kru,du->drk" if rows is None else "kru,dru->drk", slope, standard)
