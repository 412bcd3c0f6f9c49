"""Byte streams for a parser: validated as UTF-8, and interruptible by signals."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["CheckedBytes", "InterruptibleInput", "ParserInput", "interruptible", "standard_input", "wait_for_release"]


class CheckedBytes(io.RawIOBase):
    """A byte stream that validates UTF-8 as it is read."""

    def __init__(self, stream: Any, label: str) -> None:
        self.stream, self.label = stream, label
        self.pushed_back = b""
        self.n_bytes, self.n_lines = 0, 1
        self.last = [b"", b""]  # enough to see how the file ends
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.error: ValueError | None = None
        self.ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self.pushed_back:
            data, self.pushed_back = self.pushed_back, b""
            if 0 <= size < len(data):
                data, self.pushed_back = data[:size], data[size:]
            return data
        try:
            data = b"" if self.ended else _read_fully(self.stream, size)
            self._check(data)
        except ValueError as error:
            self.error = error  # kept: a parser that asked for the bytes may wrap what it catches
            raise
        return data

    def _check(self, data: bytes) -> None:
        pending = len(self.decoder.getstate()[0])
        try:
            self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = max(0, error.start - pending)
            line = self.n_lines + data.count(b"\n", 0, at)
            what = f"byte {self.n_bytes + error.start - pending + 1} (0x{error.object[error.start]:02x})"
            raise ValueError(
                f"{self.label}, line {line}: {what} is not UTF-8 text; name the `encoding` of "
                "the file (cp1252 is Windows' own), or save it as UTF-8."
            ) from None
        if b"\0" in data:
            line = self.n_lines + data.count(b"\n", 0, data.index(b"\0"))
            raise ValueError(f"{self.label}, line {line}: holds a NUL byte; this is no text file, or a damaged one.")
        self.n_bytes += len(data)
        self.n_lines += data.count(b"\n")
        if data:
            self.last = [self.last[1], data]

    def first(self, size: int) -> bytes:
        """The first bytes, which will be read again."""
        chunks, left = [], size
        while left and (data := self.read(left)):
            chunks.append(data)
            left -= len(data)
        self.pushed_back = b"".join(chunks)
        return self.pushed_back


class ParserInput:
    """What Arrow's CSV parser holds: the bytes to read and the receiver of rows with too many or too few fields.

    A thread of the parser may still hold this object when the parser has already failed. A thread that wants the
    interpreter's lock while the interpreter ends aborts the process, so a reader waits until this object is gone. Both
    roles are one object, because the thread drops them one after the other.

    Args:
        read: The function that reads as many bytes as it is asked for.
        ragged: The list that rows with a wrong number of fields are added to.
    """

    __slots__ = ("__weakref__", "ragged", "read")
    closed = False

    def __init__(self, read: Callable[[int], bytes], ragged: list[Any]) -> None:
        self.read, self.ragged = read, ragged

    def readable(self) -> bool:
        """Whether bytes can be read: always."""
        return True

    def refuse(self, row: Any) -> str:
        """Records a ragged row, and tells the parser to fail."""
        self.ragged.append(row)
        return "error"


def wait_for_release(held: Callable[[], object], *, seconds: float = 5.0) -> None:
    """Waits until an object is released by every thread; one that blocks for longer is left alone.

    Args:
        held: The weak reference to the object.
        seconds: The longest to wait.
    """
    limit = time.monotonic() + seconds
    while held() is not None and time.monotonic() < limit:
        time.sleep(0.0005)


def _read_fully(stream: Any, size: int) -> bytes:
    """As many bytes as asked for, or all that are left: a parser takes a short read for the end of a block."""
    if size < 0:
        return bytes(stream.read())
    chunks: list[bytes] = []
    while size > 0 and (data := stream.read(size)):
        chunks.append(data)
        size -= len(data)
    return b"".join(chunks)


class InterruptibleInput:
    """A pipe whose blocking read, in a thread of the parser, ends when the main thread receives a signal.

    While the main thread waits inside the parser, Python runs no signal handler. But the signal is written to a
    wake-up descriptor at once, which the reading thread watches too.

    Args:
        file: The pipe, read by its descriptor.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def wake(self) -> None:
        """Ends the current read."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def close(self) -> None:
        """Stops listening to signals."""
        signal.set_wakeup_fd(self._previous)
        self._wake.close()
        self._woken.close()

    def read(self, size: int) -> bytes:
        """As many bytes as asked for, or all that are left."""
        chunks: list[bytes] = []
        while size > 0:
            ready, _, _ = select.select([self.file.fileno(), self._woken.fileno()], [], [])
            if self._woken.fileno() in ready:
                raise InterruptedError("interrupted")
            data = os.read(self.file.fileno(), size)
            if not data:
                break
            chunks.append(data)
            size -= len(data)
        return b"".join(chunks)


def interruptible(stream: Any) -> Any:
    """A stream whose blocking reads can be interrupted by signals, on POSIX and in the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    return InterruptibleInput(stream) if in_main and os.name == "posix" else stream


def standard_input() -> Any:
    """The bytes of standard input."""
    try:
        sys.stdin.fileno()
    except (OSError, ValueError):  # no true stream: nothing to wait for
        return sys.stdin.buffer
    return interruptible(sys.stdin.buffer)
