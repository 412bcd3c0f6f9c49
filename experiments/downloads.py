"""Data files: in the folder `DROPBAYES_DATA`, in the user's cache, or downloaded and compared with a known digest."""

from __future__ import annotations

import gzip
import hashlib
import os
import pathlib
import urllib.error
import urllib.request

from dropbayes.runtime import files

__all__ = ["cache_folder", "data_folder", "data_path", "verified_contents"]

_GZIP = b"\x1f\x8b"


def data_folder() -> pathlib.Path | None:
    """The folder that `DROPBAYES_DATA` names, if any."""
    named = os.environ.get("DROPBAYES_DATA")
    return pathlib.Path(named) if named else None


def cache_folder() -> pathlib.Path:
    """The folder of downloaded files."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "dropbayes"


def data_path(relative: str) -> pathlib.Path | None:
    """A file in the folder that `DROPBAYES_DATA` names; None if it is not there."""
    folder = data_folder()
    return folder / relative if folder is not None and (folder / relative).exists() else None


def verified_contents(relative: str, address: str, sha256: str) -> bytes:
    """The uncompressed contents of a compressed file; it is downloaded once.

    Args:
        relative: The path of the file below the data folder and below the cache; it ends in `.gz`.
        address: The public address of the file, compressed or not.
        sha256: The digest of the uncompressed contents.
    """
    cached = cache_folder() / relative
    path = data_path(relative) or (cached if cached.exists() else None)
    if path is not None:
        return _verify(path.read_bytes(), sha256, str(path))
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            contents = _verify(answer.read(), sha256, address)
    except (urllib.error.URLError, TimeoutError) as error:
        raise FileNotFoundError(
            f"{relative} is neither in the folder DROPBAYES_DATA nor in {cache_folder()}, and {address} cannot be "
            f"reached ({error}). Download that file elsewhere, compress it with gzip and put it at {cached}, or set "
            f"DROPBAYES_DATA to a folder that holds {relative}."
        ) from None
    cached.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(cached, gzip.compress(contents, mtime=0))
    return contents


def _verify(contents: bytes, sha256: str, source: str) -> bytes:
    contents = gzip.decompress(contents) if contents.startswith(_GZIP) else contents
    digest = hashlib.sha256(contents).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{source} must hold the published data (SHA-256 {sha256}); got {digest}. Delete the file and run again to "
            "download it."
        )
    return contents
