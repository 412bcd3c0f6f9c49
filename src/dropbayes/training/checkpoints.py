r"""Checkpoints of a run: written atomically, read only by the run they belong to."""

from __future__ import annotations

import hashlib
import math
import os
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass

import torch
from torch import Tensor, nn

from dropbayes import files
from dropbayes.likelihoods import Likelihood
from dropbayes.precision import Prior

_FORMAT = 1


@dataclass(frozen=True)
class History:
    """What happened, one entry per epoch.

    Attributes:
        loss: The negative evidence lower bound per row, a mean over the epoch's batches.
        log_likelihood: The held-out predictive log-likelihood (empty without held-out rows).
        learning_rate: The rate of the epoch's last step.
        precision: The model precision τ after the epoch (empty unless it is learned).
        best_epoch: The epoch whose weights the network has, counted from 1.
        stopped: "epochs", "patience" or "callback".
    """

    loss: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    precision: list[float] = field(default_factory=list)
    best_epoch: int = 0
    stopped: str = ""


@dataclass(frozen=True)
class Run:
    """The state of a run between epochs, its network and optimiser apart."""

    history: History
    best: dict[str, Tensor] | None = None
    best_score: float = -math.inf
    waited: int = 0
    log_precision: float | None = None


def fingerprint_of(
    net: nn.Module,
    data: list[Tensor],
    likelihood: Likelihood,
    prior: Prior | None,
    batch_size: int,
    descent: torch.optim.Optimizer,
    schedule: Callable[[int], float] | None,
    seed: int,
) -> str:
    """A digest of what makes a run the same run; its number of epochs may grow."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in descent.param_groups]
    shapes = [(name, tuple(value.shape)) for name, value in net.state_dict().items()]
    policy = schedule if is_dataclass(schedule) else getattr(schedule, "__qualname__", None)
    sizes = [tuple(part.shape) for part in data]
    settings = (shapes, likelihood, prior, batch_size, type(descent).__name__, groups, policy, seed, sizes)
    digest = hashlib.sha256(repr(settings).encode())
    for part in data:  # at most ten thousand values of each: another data set differs in some of them
        flat = part.detach().reshape(-1)
        digest.update(flat[:: max(1, flat.numel() // 10_000)].cpu().double().numpy().tobytes())
    return digest.hexdigest()


def write(path: pathlib.Path, net: nn.Module, descent: torch.optim.Optimizer, run: Run, fingerprint: str) -> None:
    """Replaces the checkpoint in one step: a reader finds the old file or the new one, never a part."""
    contents = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "net": net.state_dict(),
        "optimizer": descent.state_dict(),
        "history": asdict(run.history),
        "best": run.best,
        "best_score": run.best_score,
        "waited": run.waited,
        "log_precision": run.log_precision,
    }
    with files.replacement(path) as file:
        torch.save(contents, file)


def resumed(
    net: nn.Module, descent: torch.optim.Optimizer, checkpoint: str | os.PathLike[str] | None, fingerprint: str
) -> Run:
    """The run as its checkpoint left it, or a new one."""
    if checkpoint is None or not pathlib.Path(checkpoint).exists():
        return Run(History())
    device = next(net.parameters()).device
    saved = torch.load(checkpoint, map_location=device, weights_only=True)
    if saved.get("format") != _FORMAT or saved.get("fingerprint") != fingerprint:
        raise ValueError(
            f"`checkpoint` {os.fspath(checkpoint)!r} belongs to another run (other network, data, optimiser, seed or "
            "settings). Delete it to start anew, or name another file."
        )
    net.load_state_dict(saved["net"])
    descent.load_state_dict(saved["optimizer"])
    history = History(**saved["history"])
    # A run stopped by its last epoch may be continued; patience and callbacks are final.
    return Run(history, saved["best"], saved["best_score"], saved["waited"], saved.get("log_precision"))
