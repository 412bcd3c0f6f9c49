"""Progress of long work on standard error: a bar in a terminal or notebook, one line per minute elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from tqdm.auto import tqdm

_Item = TypeVar("_Item")


class ProgressBar:
    """A display of the progress of some work, for the duration of a context.

    Of a `total` number of units, if known, `initial` ones were done by the run that is resumed. "bytes" are shown in kB
    and MB. By default a bar is shown in a terminal or notebook, elsewhere one line per minute; work that is done within
    the seconds of `delay` shows nothing, and waits for no import.
    """

    def __init__(
        self, title: str, total: int | None, *, unit: str, initial: int = 0, show: bool | None = None, delay: float = 0
    ) -> None:
        self.title, self.total, self.delay = title, total, delay
        self._unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if unit == "bytes" else {"unit": f" {unit}"}
        self.done = self.initial = initial
        self._drawn = interactive() if show is None else show
        self._bar = self._new_bar() if self._drawn and not delay else None
        self._lines = show is None and not self._drawn
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._drawn and self.done != self.total and time.monotonic() - self._start > self.delay:
            self._bar = self._new_bar()
        elif self._lines and time.monotonic() - self._last_line >= 60:
            self._last_line = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                print(self.line(self._last_line - self._start), file=sys.stderr, flush=True)

    def follow(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each counted as one unit once the next is requested."""
        for item in items:
            yield item
            self.advance()

    def _new_bar(self) -> tqdm[NoReturn]:
        from tqdm.auto import tqdm

        return tqdm(total=self.total, desc=self.title, initial=self.done, leave=False, **self._unit)

    def line(self, seconds: float) -> str:
        """The progress in one line of text, after the given seconds."""
        from tqdm import tqdm

        shown = "{desc}: {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}]"
        counts = {"n": self.done, "total": self.total, "initial": self.initial, "elapsed": seconds}
        return tqdm.format_meter(**counts, prefix=self.title, bar_format=shown, **self._unit)


def interactive() -> bool:
    """Whether a bar can be redrawn on standard error: in a terminal or in a notebook."""
    ipython = sys.modules.get("IPython")  # a notebook has loaded it
    shell = ipython.get_ipython() if ipython is not None else None
    return "IPKernelApp" in getattr(shell, "config", {}) or (sys.stderr is not None and sys.stderr.isatty())
