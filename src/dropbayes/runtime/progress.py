"""Progress of long work on standard error: a bar in a terminal or notebook, one line per minute elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

__all__ = ["DelayedBar", "ProgressBar"]

_Item = TypeVar("_Item")
_SECONDS_PER_LINE = 60.0
_SECONDS_BEFORE_A_BAR = 3.0


class ProgressBar:
    """A display of the progress of some work, for the duration of a context.

    Args:
        title: The name of the work.
        total: The number of units in the work; None if unknown.
        unit: The unit that is counted, in the plural; "bytes" are shown in kB and MB.
        initial: The number of units already done, in a resumed run.
        show: Whether to show a bar. By default: a bar where standard error is a terminal or belongs to a notebook,
            otherwise one line per minute.

    Example:
        >>> with ProgressBar("fit", 3, unit="epochs") as progress:
        ...     progress.advance()
        ...     progress.advance_to(3)
    """

    def __init__(
        self, title: str, total: int | None, *, unit: str = "steps", initial: int = 0, show: bool | None = None
    ) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self.initial = initial
        bar = show if show is not None else interactive()
        self._bar = _bar(title, total, unit, initial) if bar else None
        self._lines = show is None
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Adds `count` units to those done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._lines and time.monotonic() - self._last_line >= _SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                print(self.line(self._last_line - self._start), file=sys.stderr, flush=True)

    def advance_to(self, position: int) -> None:
        """Sets the number of units done."""
        self.advance(position - self.done)

    def follow(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each counted as one unit once the next is requested."""
        for item in items:
            yield item
            self.advance()

    def line(self, seconds: float) -> str:
        """The progress in one line of text, after the given seconds.

        Example:
            >>> progress = ProgressBar("fit", 400, unit="epochs", show=False)
            >>> progress.advance(100)
            >>> progress.line(60)
            'fit: 100 of 400 epochs, 1 min elapsed, about 3 min left'
        """
        count = f"{self.done / 1e6:.1f}" if self.unit == "bytes" else f"{self.done:,}"
        if self.total is not None:
            count += f" of {self.total / 1e6:.1f}" if self.unit == "bytes" else f" of {self.total:,}"
        text = f"{self.title}: {count} {'MB' if self.unit == 'bytes' else self.unit}, {_duration(seconds)} elapsed"
        new = self.done - self.initial
        if self.total is None or new <= 0:
            return text
        return f"{text}, about {_duration(seconds * (self.total - self.done) / new)} left"


class DelayedBar:
    """A bar that appears once the work has taken some seconds, in a terminal or notebook only.

    Args:
        title: The name of the work.
        total: The number of rows in the work.
        show: Whether to show it; by default where standard error is a terminal or belongs to a notebook.
    """

    def __init__(self, title: str, total: int, *, show: bool | None = None) -> None:
        self.title, self.total, self.show = title, total, show
        self.done = 0
        self._start = time.monotonic()
        self._bar: ProgressBar | None = None

    def __enter__(self) -> DelayedBar:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*failure)

    def advance(self, count: int) -> None:
        """Adds `count` rows to those done."""
        self.done += count
        if self._bar is not None:
            self._bar.advance(count)
        elif self._is_due() and (interactive() if self.show is None else self.show):
            self._bar = ProgressBar(self.title, self.total, unit="rows", initial=self.done, show=True)

    def _is_due(self) -> bool:
        return self.done < self.total and time.monotonic() - self._start > _SECONDS_BEFORE_A_BAR


def interactive() -> bool:
    """Whether a bar can be redrawn on standard error: in a terminal or in a notebook."""
    notebook = "IPKernelApp" in getattr(_ipython(), "config", {})
    return notebook or (sys.stderr is not None and sys.stderr.isatty())


def _ipython() -> Any:
    """The running IPython shell, if IPython is loaded at all."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def _bar(title: str, total: int | None, unit: str, initial: int) -> Any:
    from tqdm.auto import tqdm

    if unit == "bytes":
        return tqdm(total=total, desc=title, unit="B", unit_scale=True, initial=initial, leave=False)
    return tqdm(total=total, desc=title, unit=f" {unit}", initial=initial, leave=False)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "under 1 min"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
