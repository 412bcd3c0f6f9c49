"""The names of sites: the caller of a stochastic operation, independent of other sites."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn


class SiteNames:
    """The names of the sites of one forward pass, in the order of execution.

    Args:
        paths: The names of the modules that run, by id.
        originals: The modules in whose place they run, by id: that one of them runs itself is an error.
    """

    def __init__(self, paths: Mapping[int, str], originals: Mapping[int, nn.Module] | None = None) -> None:
        self.paths, self._originals = paths, originals or {}
        self._calls: Counter[str] = Counter()

    def callers(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose code is running, from the innermost to the network itself."""
        frame = sys._getframe(1)
        while frame is not None:  # reading the callers' variables would keep them alive
            owner = frame.f_locals.get("self")
            path = self.paths.get(id(owner))
            if path is not None:
                yield path, owner
            elif owner is not None and self._originals.get(id(owner)) is owner and frame.f_code.co_name == "forward":
                raise ValueError(
                    f"`net` reaches its own {type(owner).__name__} past its module tree (by a closure, a global or a "
                    "library's hook), where it cannot be watched. Register the module as a submodule and call it from "
                    "there."
                )
            if path == "":
                return
            frame = frame.f_back  # type: ignore[assignment]

    def caller(self) -> tuple[str, nn.Module | None]:
        """The innermost module whose code is running."""
        return next(self.callers(), ("", None))

    def next(self, kind: str) -> str:
        """The name of the next site: module, operation, and the index of the call.

        A module that several others share is named with those that call it.
        """
        paths = [path for path, _ in self.callers()] or [""]
        others = dict.fromkeys(path for path in paths[1:] if path and not f"{paths[0]}.".startswith(f"{path}."))
        call = f"{' in '.join((paths[0], *others))} {kind}"
        self._calls[call] += 1
        return f"{call} {self._calls[call] - 1}"
