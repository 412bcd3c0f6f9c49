"""The sources of networks that send rows to places, or whose draws take one of a few paths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dropbayes.sampling.source import KeyedSource, MaskSpec
from dropbayes.tracing import RowLayout, Site, UnsupportedStrategy
from dropbayes.tracing.entries import RowsOfEntries, place_among_own
from dropbayes.tracing.operations import LESS, MORE, Arguments, NamedArguments, Operation, operands, uses_values


class SentSource(KeyedSource):
    """The masks of rows that are sorted or sent to places, whole or in parts: each entry has those that it has alone.

    Entries are followed from the input on; each belongs to a pair of a draw and a row.
    """

    def follow(self, paths: Mapping[int, str], inputs: Sequence[Tensor]) -> None:
        super().follow(paths, inputs)
        self._entries = RowsOfEntries(len(self.draws) * len(self.rows), inputs)
        self._moved: Tensor | None = None  # the pairs of the entries at a site, unless they stand in order

    def after(self, func: Operation, args: Arguments, kwargs: NamedArguments, result: object) -> None:
        self._entries.follow(func, args, kwargs, operands((result,)))

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        self._followed = like
        return super().keep(kind, drop_prob, shape, like)

    def dropout(self, kind: str, x: Tensor, drop_prob: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
        self._followed = self._followed if kind == "attention" else x  # whose weights have the rows of the queries
        return super().dropout(kind, x, drop_prob, shape, inplace)

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        self._followed = self.like
        return super().uniform(kind, drop_prob, shape, device)

    def attention(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        self._followed = query
        return super().attention(query, *args, **kwargs) if self._entries.are_in_order(query) else None

    def _layout(self, site: Site, shape: tuple[int, ...]) -> tuple[RowLayout | None, tuple[int, ...]]:
        self._moved = self._sent(site)
        return super()._layout(site, shape) if self._moved is None else (None, shape)

    def _sent(self, site: Site) -> Tensor | None:
        """The pair of each entry at a site, unless all stand in order, or one mask fits them all."""
        layout, tensor = site.layout, self._followed
        fits_all = len(self.draws) == 1 and self._mask_rows(site) is None and not self._has_parts(site)
        if layout is None or (fits_all and layout.inner < 2):
            return None
        pairs = None if tensor is None or layout.axis else self._entries.of(tensor)
        guesses = len(self.draws) == 1 or not self.spec.profile.sorts_rows  # of numbers that may be for any entries
        if layout.inner and (guesses if tensor is None else self._entries.are_in_order(tensor)):
            return None
        if pairs is None:
            raise UnsupportedStrategy("a mask for entries that cannot be followed")
        return pairs

    def _mask(self, site: Site, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._placed(site, shape, lambda shape: super(SentSource, self)._mask(site, drop_prob, shape, like))

    def _uniforms(self, site: Site, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return self._placed(site, shape, lambda shape: super(SentSource, self)._uniforms(site, shape, device))

    def _placed(self, site: Site, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """The numbers of each entry, among those made for as many entries as a row has."""
        if (pairs := self._moved) is None:
            return make(shape)
        draws, rows, n_pairs = pairs // len(self.rows), pairs % len(self.rows), len(self.draws) * len(self.rows)
        place, most = place_among_own(pairs, n_pairs)
        inner = max(1, cast(RowLayout, site.layout).inner)
        if most > inner and not self._has_parts(site):
            raise UnsupportedStrategy("more entries of a row than it has alone")
        own = (most if self._has_parts(site) else inner, *shape[1:])
        numbers = make(own)
        numbers = numbers.expand(*numbers.shape[: -len(own)], *own)  # tied positions
        return numbers[None, draws, place] if self._mask_rows(site) is None else numbers[None, draws, rows, place]


class GroupedSource(KeyedSource):
    """The masks of draws that take one path: each gate has a number that stands for all of theirs.

    It may be used for nothing but the comparison by which they were grouped, in which theirs must agree.
    """

    by_kernels = False

    def follow(self, paths: Mapping[int, str], inputs: Sequence[Tensor]) -> None:
        super().follow(paths, inputs)
        self._numbers_for = dict[int, tuple[Tensor, Tensor]]()  # by the id of a number: itself, and those it stands for
        self._drawn: Tensor | None = None

    def after(self, func: Operation, args: Arguments, kwargs: NamedArguments, result: Any) -> None:
        if self._drawn is not None:
            self._numbers_for[id(result)], self._drawn = (result, self._drawn.to(result.dtype)), None
            return
        for number in operands((*args, *kwargs.values())) if uses_values(func, result) else ():
            if id(number) in self._numbers_for:
                theirs = [self._numbers_for[id(number)][1] if arg is number else arg for arg in args]
                if kwargs or func not in LESS | MORE or not bool((func(*theirs) == result).all()):
                    raise UnsupportedStrategy("draws that take other paths")

    def _layout(self, site: Site, shape: tuple[int, ...]) -> tuple[RowLayout | None, tuple[int, ...]]:
        return (None, shape) if site.name in self.gates else super()._layout(site, shape)

    def _uniforms(self, site: Site, shape: tuple[int, ...], device: torch.device) -> Tensor:
        uniforms = super()._uniforms(site, shape, device)
        if site.name in self.gates:
            self._drawn = uniforms.flatten()
        return uniforms


def same_paths(spec: MaskSpec, draws: Sequence[int]) -> list[Sequence[int]]:
    """The draws in groups whose gates lie on the same sides of their numbers."""
    source, groups = KeyedSource(spec, draws, range(1), folded=True), dict[tuple[bool, ...], list[int]]()
    gates = [site for site in spec.profile.sites if site.name in source.gates]
    sides = [source._uniforms(s, s.shape, torch.device("cpu")).view(len(draws)) < source.gates[s.name] for s in gates]
    for draw, path in zip(draws, torch.stack(sides, 1).tolist(), strict=True):
        groups.setdefault(tuple(path), []).append(draw)
    return [tuple(group) if len(group) > 1 else range(group[0], group[0] + 1) for group in groups.values()]
