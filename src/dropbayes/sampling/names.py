"""The names of sites: the caller of a stochastic operation, independent of other sites."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from torch import nn


class SiteNames:
    """The names of the sites of one forward pass, in the order of execution.

    Args:
        paths: The names of the network's modules, by id.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths
        self._calls: Counter[str] = Counter()

    def callers(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose code is running, from the innermost to the network itself."""
        frame = sys._getframe(1)
        while frame is not None:  # reading the callers' variables would keep them alive
            owner = frame.f_locals.get("self")
            path = self.paths.get(id(owner))
            if path is not None:
                yield path, owner
            if path == "":
                return
            frame = frame.f_back  # type: ignore[assignment]

    def next(self, kind: str) -> str:
        """The name of the next site: module, operation, and the index of the call.

        A module that several others share is named with those that call it.
        """
        paths = [path for path, _ in self.callers()] or [""]
        others = dict.fromkeys(path for path in paths[1:] if path and not f"{paths[0]}.".startswith(f"{path}."))
        call = f"{' in '.join((paths[0], *others))} {kind}"
        self._calls[call] += 1
        return f"{call} {self._calls[call] - 1}"
