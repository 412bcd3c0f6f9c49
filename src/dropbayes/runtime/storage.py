r"""Model files: tensors and settings in one safetensors file that is whole or refused.

The file is an ordinary safetensors file. Its metadata hold a JSON description (format number, kind of model, versions,
settings) and the SHA-256 of the whole file, computed with the digest's own 64 characters as zeros. Reading checks the
digest before anything is interpreted; nothing in a file is ever executed.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.runtime import __version__, files

FORMAT = 1
_BLANK = "0" * 64


@dataclass(frozen=True, eq=False)
class ModelFile:
    """The contents of a model file."""

    kind: str  # of the model; the reader names the kinds it knows
    tensors: dict[str, Tensor]
    settings: dict[str, Any]  # everything else, as JSON values
    versions: dict[str, str]  # of the library and of torch that wrote it

    def tensor(self, name: str, *, shape: Sequence[int | None]) -> Tensor:
        """The tensor of this name and shape (None for any size), of floating-point numbers that are all finite."""
        if (value := self.tensors.get(name)) is None:
            raise ValueError(f"`path` must hold the tensor {name!r}; it is missing. Save the model again.")
        fits = value.dim() == len(shape) and all(b in (None, a) for a, b in zip(value.shape, shape, strict=True))
        if not (fits and value.is_floating_point()):
            expected = tuple("any" if size is None else size for size in shape)
            rule = f"hold {name!r} of shape {expected} and a floating dtype"
            raise ValueError(f"`path` must {rule}; got {tuple(value.shape)} of {value.dtype}. Save the model again.")
        if not bool(value.isfinite().all()):
            raise ValueError(f"`path` must hold finite numbers in {name!r}; got NaN or infinity. Save the model again.")
        return value


def save(path: files.AnyPath, tensors: Mapping[str, Tensor], *, kind: str, settings: dict[str, Any]) -> None:
    """Writes a model file, whole or not at all; the settings are JSON values."""
    from safetensors.torch import save as serialise

    versions = {"dropbayes": __version__, "torch": torch.__version__}
    description = {"format": FORMAT, "kind": kind, "versions": versions, "settings": settings}
    try:
        text = json.dumps(description, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`settings` must hold finite JSON values only; {error}.") from None
    # One metadata entry, so that its position in the header does not depend on a hash order.
    blank = json.dumps({"model": text, "sha256": _BLANK})
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    contents = serialise(arrays, {"dropbayes": blank})
    start = contents.rindex(_BLANK.encode(), 0, 8 + int.from_bytes(contents[:8], "little"))
    digest = hashlib.sha256(contents).hexdigest().encode()
    files.write_bytes(path, contents[:start] + digest + contents[start + len(digest) :])


def load(path: files.AnyPath, *, kinds: Collection[str]) -> ModelFile:
    """The contents of a model file of one of the given kinds; a ValueError, and no other error, for other contents."""
    if pathlib.Path(path).is_dir():
        remedy = "dropbayes.load reads the folder of a whole model"
        raise IsADirectoryError(f"`path` must name a model file; {os.fspath(path)!r} is a folder. {remedy}.")
    return parse(pathlib.Path(path).read_bytes(), kinds=kinds)


def parse(contents: bytes, *, kinds: Collection[str]) -> ModelFile:
    """The model in the bytes of a file; see `load`."""
    from safetensors.torch import load as deserialise

    try:
        model = _verify(contents)
        tensors = deserialise(contents)  # checks offsets, shapes and dtypes against the bytes at hand
    except Exception:
        rule = "name a whole model file; this one is damaged, cut short or not a dropbayes model"
        raise ValueError(f"`path` must {rule}. Save it again.") from None
    written, kind = model["format"], model["kind"]
    if written != FORMAT:
        raise ValueError(f"`path` has the format {written!r:.80}; this version reads {FORMAT}. Upgrade dropbayes.")
    if kind not in kinds:
        raise ValueError(f"`path` holds a {kind!r:.80}; expected one of {sorted(kinds)}.")
    return ModelFile(kind, tensors, model["settings"], model["versions"])


def _verify(contents: bytes) -> dict[str, Any]:
    """The description of a file whose digest is right; an exception of any class for all others."""
    length = int.from_bytes(contents[:8], "little")
    if length > min(32 * 2**20, len(contents) - 8):  # ten thousand tensors fit in a tenth of it
        raise ValueError
    header = contents[8 : 8 + length]
    outer = json.loads(json.loads(header.decode())["__metadata__"]["dropbayes"])
    digest = outer["sha256"]
    if len(digest) != 64:
        raise ValueError
    start = 8 + header.rindex(digest.encode())
    blank = contents[:start] + _BLANK.encode() + contents[start + 64 :]
    if hashlib.sha256(blank).hexdigest() != digest:
        raise ValueError
    description: dict[str, Any] = json.loads(outer["model"])
    # True equals 1 in Python, but is not a format number.
    kinds = {"format": int, "kind": str, "settings": dict, "versions": dict}
    if any(type(description[name]) is not kind for name, kind in kinds.items()):
        raise ValueError
    return description
