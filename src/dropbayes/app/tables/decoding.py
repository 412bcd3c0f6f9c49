"""Files as UTF-8 text, however they are compressed and encoded."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

__all__ = ["as_utf8", "check_encoding"]


def _zstandard(stream: Any) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(_Readable(stream), mode="r"), "zstd")


_COMPRESSED: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda stream: gzip.GzipFile(fileobj=stream)),
    b"\x28\xb5\x2f\xfd": ("zstd", _zstandard),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\0": ("xz", lzma.LZMAFile),
}
_FOREIGN = {
    b"PK\x03\x04": "an Excel workbook or a zip archive, which is not read: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel workbook, which is not read: save the sheet as CSV",
    **dict.fromkeys(
        (b"<!doctyp", b"<!DOCTYP", b"<html", b"<HTML"),
        "a web page, perhaps one that asks for a login: download the table itself",
    ),
    **dict.fromkeys((b"[{", b'{"'), "JSON, which is not read: save the table as CSV or Parquet"),
    b"%PDF": "a PDF, which is not read: save the table as CSV or Parquet",
}
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


class _Bytes(io.RawIOBase):
    """A file object whose subclasses define only `read`."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer)) or b""
        buffer[: len(data)] = data
        return len(data)


class _Readable(_Bytes):
    """A stream with bytes that were already read put back in front."""

    def __init__(self, stream: Any, taken: bytes = b"") -> None:
        self.stream, self.taken = stream, taken

    def read(self, size: int = -1) -> bytes:
        if self.taken:
            data, self.taken = (self.taken, b"") if size < 0 else (self.taken[:size], self.taken[size:])
            return data
        return bytes(self.stream.read(size))


class _Decompressed(_Bytes):
    """A decompressed stream whose errors name the file."""

    def __init__(self, stream: Any, label: str, kind: str) -> None:
        self.stream, self.label, self.kind = stream, label, kind

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self.stream.read(size))
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{self.label} is damaged or cut short: its {self.kind} data end badly ({error})."
            ) from None
        except OSError as error:
            if error.errno is not None:  # the disk's, not the decompressor's
                raise
            raise ValueError(f"{self.label} is damaged or cut short: its {self.kind} data end badly.") from None


class _Recoded(_Bytes):
    """Text of another encoding, as UTF-8."""

    def __init__(self, stream: Any, label: str, encoding: str) -> None:
        self.stream, self.label, self.encoding = stream, label, encoding
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.n_lines = 1
        self.left = b""

    def read(self, size: int = -1) -> bytes:
        while not self.left:
            data = self.stream.read(size)
            try:
                text = self.decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.label}, line {self.n_lines} or after: is not {self.encoding} text ({error.reason}); name "
                    "its `encoding`, or save the file as UTF-8."
                ) from None
            self.n_lines += text.count("\n")
            self.left = text.encode()
            if not data:
                break
        out, self.left = (self.left, b"") if size < 0 else (self.left[:size], self.left[size:])
        return out


def check_encoding(encoding: str | None) -> None:
    """Raises ValueError for an encoding that Python does not know."""
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError:
        raise ValueError(
            f"`encoding` must be a text encoding such as utf-8, utf-16 or cp1252; got {encoding!r}."
        ) from None


def as_utf8(stream: Any, label: str, *, encoding: str | None = None) -> tuple[Any, bool]:
    """The stream as UTF-8 text, decompressed and recoded as needed; and whether it was compressed.

    Args:
        stream: Bytes of a file or a pipe.
        label: What to call it in messages.
        encoding: The encoding of the text; by default UTF-8, or UTF-16 where the file begins with its mark.

    Raises:
        ValueError: The file is a spreadsheet, a PDF or Parquet in a stream.
    """
    stream, start = _peek(stream)
    compressed = False
    for magic, (kind, opened) in _COMPRESSED.items():
        if start.startswith(magic):
            stream, start = _peek(_Decompressed(opened(stream), label, kind))
            compressed = True
            break
    for magic, what in _FOREIGN.items():
        if start.startswith(magic):
            raise ValueError(f"{label} is {what}.")
    if start.startswith(b"PAR1"):
        raise ValueError(f"{label} is Parquet, which cannot be read from a stream; name the file instead.")
    for mark, name in _BYTE_ORDER_MARKS.items():
        if start.startswith(mark) and encoding is None:
            encoding = name
    if encoding is not None and codecs.lookup(encoding).name != "utf-8":
        stream = _Recoded(stream, label, encoding)
    return stream, compressed


def _peek(stream: Any) -> tuple[Any, bytes]:
    """The stream and its first bytes, which will be read again."""
    start = b""
    while len(start) < 8 and (data := stream.read(8 - len(start))):
        start += data
    return _Readable(stream, start), start
