"""Files and folders that are written whole or not at all."""

import contextlib
import ctypes
import glob
import hashlib
import os
import pathlib
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO

AnyPath = str | os.PathLike[str]


def check_output(path: AnyPath) -> None:
    """Raises OSError unless a file can be at the path: before long work, so that its result is not lost."""
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; make it first.")
    is_device = path.exists() and not path.is_file()  # or a pipe, which is written directly
    if not is_device and not os.access(path.resolve().parent, os.W_OK):
        raise PermissionError(f"the folder {str(path.parent)!r} cannot be written to; choose another.")


def digest(path: AnyPath) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacement(path: AnyPath) -> Iterator[BinaryIO]:
    """A binary file to write that replaces `path` when the context ends without an exception.

    A reader finds the old file or the new one, never a part: the temporary file has a unique name in the same folder,
    is flushed and renamed. Permissions and symbolic links are kept; a pipe or a device is written directly.
    """
    path = pathlib.Path(path)
    check_output(path)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # a link stays a link
    _remove_abandoned(path)
    temporary = _temporary(path)
    mode = 0o600 if path.exists() else 0o666  # it may replace a private file
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and str(error.filename) in ("None", str(temporary)):
            error.filename = str(path)  # a full disk names none, and nobody knows the temporary one
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_replacement(path: AnyPath) -> Iterator[pathlib.Path]:
    """A new folder to fill that replaces the folder `path` when the context ends without an exception.

    Both change places in one step where the system can, whatever signal ends the process. Permissions and links stay.
    """
    path = pathlib.Path(path).resolve()  # a link stays a link
    if path.exists():  # else what was left may be the only folder there is
        _remove_abandoned(path)
    temporary = _temporary(path)
    try:
        temporary.mkdir(0o700 if path.exists() else 0o777)
        yield temporary
        if not path.exists():
            os.rename(temporary, path)
            return
        for new in (*temporary.iterdir(), temporary):
            old = path if new == temporary else path / new.name
            if old.exists():
                new.chmod(stat.S_IMODE(old.stat().st_mode))
        _exchange(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.chmod(0o700)  # the folder replaced may be read-only
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Exchanges two folders: in one step by Linux's renameat2, else in three."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        renameat2 = None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 is not None and renameat2(here, os.fsencode(temporary), here, os.fsencode(path), exchange) == 0:
        return
    old = _temporary(path)
    try:
        os.rename(path, old)
        os.rename(temporary, path)
        os.rename(old, temporary)
    finally:
        if old.exists():
            os.rename(old, temporary if path.exists() else path)


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.part")  # a name of 255 bytes has no room


def _remove_abandoned(path: pathlib.Path) -> None:
    """Removes temporary files and folders beside `path` that are unchanged for a day: their processes were killed."""
    for entry in path.parent.glob(f".{glob.escape(path.name[:50])}.{16 * '[0-9a-f]'}.part"):
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > 86_400:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def write_bytes(path: AnyPath, contents: bytes) -> None:
    with replacement(path) as file:
        file.write(contents)


def write_text(path: AnyPath, text: str) -> None:
    write_bytes(path, text.encode())
