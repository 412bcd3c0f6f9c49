r"""Checkpoints of a run: verified when read, and accepted only by the run that wrote them."""

import functools
import hashlib
import io
import math
import os
import pathlib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.runtime import files
from dropbayes.runtime.validation import check_count

_MAGIC = b"dropbayes checkpoint 5\n"  # then the SHA-256 of the rest, and the rest: a dictionary as torch saves it
_PLAIN = (bool, int, float, str, tuple, type(None))


@dataclass(frozen=True)
class Checkpoint:
    """The file that a run is saved in and resumed from."""

    path: files.AnyPath
    every: int = 1  # epochs between two saves

    def __post_init__(self) -> None:
        check_count("every", self.every)


@dataclass(frozen=True)
class History:
    """The record of a training run, with one entry per epoch.

    `loss` is the negative evidence lower bound per row, a mean over the epoch's batches, `log_likelihood` that of
    held-out rows, `precision` the learned τ, a list where every output has its own; empty if there is none.
    """

    loss: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)  # of the epoch's last step
    precision: list[float | list[float]] = field(default_factory=list)
    best_epoch: int = 0  # whose weights the network has, counted from 1
    stopped: str = ""  # by "epochs", "patience" or "callback"


@dataclass(frozen=True)
class Run:
    """The state of a run between epochs, apart from its network and optimiser."""

    history: History
    best: dict[str, Tensor] | None = None  # the weights of the best held-out epoch, if rows are held out
    best_score: float = -math.inf  # their held-out log-likelihood
    waited: int = 0  # the number of epochs since then
    start: str = ""  # the fingerprint of the weights that the run began with


def save(path: files.AnyPath, net: nn.Module, optimizer: torch.optim.Optimizer, run: Run, *, fingerprint: str) -> None:
    states = {"fingerprint": fingerprint, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
    buffer = io.BytesIO()
    torch.save({**states, "run": {**vars(run), "history": vars(run.history)}}, buffer)
    payload = buffer.getvalue()
    files.write_bytes(path, _MAGIC + hashlib.sha256(payload).digest() + payload)


def load(
    path: files.AnyPath, net: nn.Module, optimizer: torch.optim.Optimizer, *, fingerprint: str, epochs: int
) -> Run:
    """The run as its checkpoint left it, network and optimiser included, or a new one if there is no such file.

    Nothing is changed if the file is damaged, no checkpoint, or one of another or a longer run.
    """
    if not pathlib.Path(path).exists():
        return Run(History(), start=fingerprint_of(net.state_dict()))

    def refusal(reason: str, remedy: str = "or name another file") -> ValueError:
        return ValueError(f"`checkpoint` {os.fspath(path)!r} {reason}. Delete it to start anew, {remedy}.")

    try:
        contents, start = pathlib.Path(path).read_bytes(), len(_MAGIC) + hashlib.sha256().digest_size
        payload = contents[start:]
        if contents[:start] != _MAGIC + hashlib.sha256(payload).digest():
            raise ValueError("another file, or a damaged one")
        saved = torch.load(io.BytesIO(payload), map_location=next(net.parameters()).device, weights_only=True)
        run = Run(**{**saved["run"], "history": History(**saved["run"]["history"])})
        belongs, weights, state = saved["fingerprint"] == fingerprint, saved["net"], saved["optimizer"]
    except Exception:  # a file that cannot be read, or a valid digest over other contents
        raise refusal("is damaged, or was not written by this version of dropbayes") from None
    if not belongs:
        raise refusal("belongs to another run (other network, data, optimiser, seed or settings)")
    # The network of a killed run has its first weights again, or those of the file; that of a finished one its best.
    if fingerprint_of(net.state_dict()) not in {run.start, fingerprint_of(weights), fingerprint_of(run.best)}:
        remedy = "name another file, or make the network anew as it was at the start"
        raise refusal("belongs to a run from other initial weights", remedy)
    if len(run.history.loss) > epochs:
        raise refusal(f"has {len(run.history.loss)} epochs, more than the `epochs` asked for, {epochs}")
    optimizer.load_state_dict(state)
    net.load_state_dict(weights)
    return run


def fingerprint_of(value: object) -> str:
    """A digest of what the weights of a run depend on: elements of tensors, settings of modules, code of functions."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: object) -> None:
    digest.update(f"<{type(value).__qualname__}".encode())
    parts: Iterable[object] = ()
    match value:
        case Tensor() | np.ndarray():
            tensor = torch.as_tensor(value, device="cpu").detach().cpu().contiguous()
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        case nn.Module():  # not its weights, which training changes
            settings = [
                {name: v for name, v in vars(m).items() if isinstance(v, _PLAIN) and name.strip("_") != "training"}
                for m in value.modules()
            ]
            trained = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in value.named_parameters()]
            parts = (str(value), settings, trained)
        case Mapping():
            parts = sorted(value.items(), key=repr)
        case tuple() | list():
            parts = value
        case functools.partial():
            parts = (value.func, value.args, value.keywords)
        case types.FunctionType():
            closure = [cell.cell_contents for cell in value.__closure__ or ()]
            constants = [one for one in value.__code__.co_consts if not isinstance(one, types.CodeType)]
            parts = (value.__code__.co_code, constants, value.__code__.co_names, value.__defaults__, closure)
        case types.MethodType():
            parts = (value.__func__, value.__self__)
        case _ if getattr(value, "__dict__", None) and not isinstance(value, type):
            parts = (vars(value),)
        case _:
            digest.update(repr(value).encode())
    for part in parts:
        _feed(digest, part)
    digest.update(b">")
