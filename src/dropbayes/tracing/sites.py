"""The sites of a network: the places in its forward pass where it is random, and their names."""

import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from dropbayes.runtime.formatting import Printed, Table


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

    index: int  #: The site's number in the order of execution.
    path: str  #: The name of the module that draws.
    kind: str  #: The operation: "dropout", "attention", "rand", ...
    drop_prob: float | None  #: The drop probability; None if the random numbers have another use.
    shape: tuple[int, ...]  #: The shape of one row's mask.
    before: str | None = None  #: The weight layer that reads the dropped tensor.
    layout: RowLayout | None = None  #: The layout of a batch's rows in the mask; None if the mask has no rows.
    left_out: bool = False  #: Whether it is in a module to ignore.
    name: str = ""  #: Its name, independent of other sites: the module, the operation and the index of the call.
    positions: tuple[PositionAxis, ...] = ()  #: The axes that hold positions, if they were searched for.
    number: int | None = None  #: The number that keys its masks: its index, or the number of its name.

    @property
    def is_random(self) -> bool:
        """Whether two draws can differ here."""
        return not self.left_out and (self.drop_prob is None or 0 < self.drop_prob < 1)


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


class SiteNames:
    """The names of the sites of one forward pass, in the order of execution.

    Args:
        paths: The names of the modules that run, by id.
        originals: The modules in whose place they run, by id: that one of them runs itself is an error.
    """

    def __init__(self, paths: Mapping[int, str], originals: Mapping[int, nn.Module] | None = None) -> None:
        self._paths, self._originals = paths, originals or {}
        self._calls: dict[str, int] = {}

    def callers(self, *, innermost: bool = False) -> list[tuple[str, nn.Module]]:
        """The modules whose code is running, from the innermost (alone, on request) to the network itself."""
        frame, paths, found = sys._getframe(1), self._paths, list[tuple[str, nn.Module]]()
        while frame.f_globals.get("__name__", "").startswith(("dropbayes.sampling", "dropbayes.tracing")):
            frame = frame.f_back  # type: ignore[assignment]
        while frame is not None:  # reading the callers' variables would keep them alive
            code = frame.f_code
            has_self = "self" in code.co_varnames or "self" in code.co_freevars or "self" in code.co_cellvars
            owner = frame.f_locals.get("self") if has_self else None  # all variables are copied for that
            path = paths.get(id(owner))
            if path is not None and owner is not None:
                found.append((path, owner))
                if innermost or not path:
                    return found
            elif owner is not None and self._originals.get(id(owner)) is owner and code.co_name == "forward":
                raise ValueError(
                    f"`net` reaches its own {type(owner).__name__} past its module tree (by a closure, a global or a "
                    "library's hook), where it cannot be watched. Register the module as a submodule and call it from "
                    "there."
                )
            frame = frame.f_back  # type: ignore[assignment]
        return found

    def caller(self) -> tuple[str, nn.Module | None]:
        """The innermost module whose code is running."""
        return next(iter(self.callers(innermost=True)), ("", None))

    def next(self, kind: str) -> str:
        """The name of the next site: module, operation, and the index of the call.

        A module that several others share is named with those that call it.
        """
        paths = list(dict.fromkeys(path for path, _ in self.callers())) or [""]
        others = [path for path in paths[1:] if path and not f"{paths[0]}.".startswith(f"{path}.")]
        call = f"{' in '.join((paths[0], *others))} {kind}"
        self._calls[call] = count = self._calls.get(call, -1) + 1
        return f"{call} {count}"


def is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint runs the code that is running, and so runs it again for its gradient."""
    return any(f.f_globals.get("__name__") == "torch.utils.checkpoint" for f, _ in traceback.walk_stack(None))
