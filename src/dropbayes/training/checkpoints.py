r"""Checkpoints of a run: verified when read, and accepted only by the run that wrote them."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.runtime import files
from dropbayes.runtime.validation import check_count
from dropbayes.training import fingerprints

__all__ = ["Checkpoint", "History", "Run", "load", "save"]

# A file is this line, the SHA-256 of the rest, and the rest: a dictionary as torch saves it.
_MAGIC = b"dropbayes checkpoint 3\n"


@dataclass(frozen=True)
class Checkpoint:
    """The file that a run is saved in and resumed from.

    Args:
        path: The file.
        every: The number of epochs between two saves.
    """

    path: str | os.PathLike[str]
    every: int = 1

    def __post_init__(self) -> None:
        check_count("every", self.every)


@dataclass(frozen=True)
class History:
    """The record of a training run, with one entry per epoch.

    Attributes:
        loss: The negative evidence lower bound per row, a mean over the epoch's batches.
        log_likelihood: The held-out predictive log-likelihood (empty without held-out rows).
        learning_rate: The learning rate of the epoch's last step.
        precision: The model precision τ after the epoch, a list where every output has its own (empty unless it is
            learned).
        best_epoch: The epoch whose weights the network has, counted from 1.
        stopped: "epochs", "patience" or "callback".
    """

    loss: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    precision: list[float | list[float]] = field(default_factory=list)
    best_epoch: int = 0
    stopped: str = ""


@dataclass(frozen=True)
class Run:
    """The state of a run between epochs, apart from its network and optimiser.

    Attributes:
        history: The record so far.
        best: The weights of the best held-out epoch, if rows are held out.
        best_score: Their held-out log-likelihood.
        waited: The number of epochs since then.
        start: The fingerprint of the weights that the run began with.
    """

    history: History
    best: dict[str, Tensor] | None = None
    best_score: float = -math.inf
    waited: int = 0
    start: str = ""


def save(
    path: str | os.PathLike[str], net: nn.Module, optimizer: torch.optim.Optimizer, run: Run, *, fingerprint: str
) -> None:
    """Replaces the checkpoint atomically."""
    contents = {
        "fingerprint": fingerprint,
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": asdict(run.history),
        "best": run.best,
        "best_score": run.best_score,
        "waited": run.waited,
        "start": run.start,
    }
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    payload = buffer.getvalue()
    files.write_bytes(path, _MAGIC + hashlib.sha256(payload).digest() + payload)


def load(
    path: str | os.PathLike[str] | None,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    fingerprint: str,
    epochs: int,
) -> Run:
    """The run as its checkpoint left it, network and optimiser included, or a new one without a checkpoint.

    A run that reached its last epoch may be continued; one stopped by patience or a callback may not.

    Raises:
        ValueError: The file is damaged, no checkpoint, or one of another or a longer run. Nothing was changed.
    """
    if path is None:
        return Run(History())
    if not pathlib.Path(path).exists():
        return Run(History(), start=_digest(net.state_dict()))
    saved = _read_verified(pathlib.Path(path), next(net.parameters()).device)
    if saved["fingerprint"] != fingerprint:
        raise ValueError(
            f"`checkpoint` {os.fspath(path)!r} belongs to another run (other network, data, optimiser, seed or "
            "settings). Delete it to start anew, or name another file."
        )
    if not _same_layout(saved["net"], net.state_dict()) or not _same_layout(saved["best"], net.state_dict()):
        raise _refusal(path)
    # The network of a killed run has its first weights again, that of a finished one its last or best.
    known = {saved["start"], _digest(saved["net"]), _digest(saved["best"] or {})}
    if _digest(net.state_dict()) not in known:
        raise ValueError(
            f"`checkpoint` {os.fspath(path)!r} belongs to a run from other initial weights. Delete it to start anew, "
            "name another file, or initialise the network with the seed it had."
        )
    if len(saved["history"]["loss"]) > epochs:
        raise ValueError(
            f"`epochs` must be at least the {len(saved['history']['loss'])} that `checkpoint` {os.fspath(path)!r} has; "
            f"got {epochs}. Delete it to start anew, or name another file."
        )
    try:
        run = Run(
            History(**saved["history"]), saved["best"], float(saved["best_score"]), int(saved["waited"]), saved["start"]
        )
        optimizer.load_state_dict(saved["optimizer"])
    except Exception:
        raise _refusal(path) from None
    net.load_state_dict(saved["net"])
    return run


def _digest(weights: Mapping[str, Tensor]) -> str:
    return fingerprints.fingerprint(weights=dict(weights))


def _read_verified(path: pathlib.Path, device: torch.device) -> dict[str, Any]:
    start = len(_MAGIC) + hashlib.sha256().digest_size
    contents = path.read_bytes() if path.is_file() else b""
    payload = memoryview(contents)[start:]
    if not contents.startswith(_MAGIC) or hashlib.sha256(payload).digest() != contents[len(_MAGIC) : start]:
        raise _refusal(path)
    try:
        saved = torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
        keys = {"fingerprint", "net", "optimizer", "history", "best", "best_score", "waited", "start"}
        if saved.keys() != keys or saved["history"].keys() != {one.name for one in fields(History)}:
            raise ValueError
    except Exception:  # a valid digest over other contents
        raise _refusal(path) from None
    return dict(saved)


def _refusal(path: str | os.PathLike[str]) -> ValueError:
    return ValueError(
        f"`checkpoint` {os.fspath(path)!r} is damaged, or was not written by this version of dropbayes. Delete it to "
        "start anew, or name another file."
    )


def _same_layout(saved: Any, current: dict[str, Tensor]) -> bool:
    """Whether the saved tensors (None: there are none) have the names, shapes and dtypes of the network's."""
    if saved is None:
        return True
    if not isinstance(saved, dict) or saved.keys() != current.keys():
        return False
    pairs = [(saved[name], value) for name, value in current.items()]
    return all(isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
