r"""The training of one network on the paper's objective, with checkpoints that survive a kill at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.objective import kl_divergence
from dropbayes.precision import Prior, kl_coefficients

__all__ = ["History", "InverseDecay", "Progress", "fit"]

_FORMAT = 1
# Larger networks keep the device busy by themselves; larger data stay on the host and travel batch by batch.
_GRAPH_PARAMETERS, _RESIDENT_BYTES = 20_000_000, 2**31


@dataclass(frozen=True)
class InverseDecay:
    r"""The factor $(1 + \gamma\,\text{iteration})^{-\text{power}}$ on the base learning rate: the paper's policy.

    Example:
        >>> round(InverseDecay(gamma=1e-4, power=0.25)(150_000), 3)
        0.5
    """

    gamma: float
    power: float

    def __call__(self, iteration: int) -> float:
        return float((1 + self.gamma * iteration) ** -self.power)


@dataclass(frozen=True)
class History:
    """What happened, one entry per epoch.

    Attributes:
        loss: The negative evidence lower bound per row, a mean over the epoch's batches.
        log_likelihood: The held-out predictive log-likelihood (empty without held-out rows).
        learning_rate: The rate of the epoch's last step.
        best_epoch: The epoch whose weights the network has, counted from 1.
        stopped: "epochs", "patience" or "callback".
    """

    loss: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    best_epoch: int = 0
    stopped: str = ""


@dataclass(frozen=True)
class Progress:
    """What a callback sees after an epoch; returning True stops the training."""

    epoch: int
    net: nn.Module
    history: History


def fit(
    net: nn.Module,
    x: Any,
    y: Tensor,
    *,
    likelihood: Likelihood,
    prior: Prior | None = None,
    keep_probs: Mapping[str, float] | None = None,
    weight: Tensor | None = None,
    epochs: int = 100,
    batch_size: int = 128,
    optimizer: Literal["adam", "sgd"] | torch.optim.Optimizer = "adam",
    learning_rate: float = 1e-3,
    momentum: float = 0.9,
    schedule: Callable[[int], float] | None = None,
    held_out: tuple[Any, Tensor] | None = None,
    patience: int = 10,
    n_draws: int = 32,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    callbacks: Sequence[Callable[[Progress], bool | None]] = (),
    autocast: torch.dtype | None = None,
    cuda_graph: bool | None = None,
    device: str | torch.device = "auto",
    seed: int = 0,
    progress: bool | None = None,
) -> History:
    r"""The `History` of training `net` in place to the minimum of the negative evidence lower bound.

    Each step descends $-\tfrac1M \sum_{n \in S} \log p(\mathbf y_n \mid \widehat{\mathbf y}_n) + \tfrac1N
    \mathrm{KL}(q \| p)$ [GG16, eq:L:GP-MC-reg-SVI] on a mini-batch. For a Gaussian it is divided by τ, so that
    learning rates mean the same as beside the dropout loss $E + \sum_i \lambda_i \|\mathbf M_i\|^2$ [GG16,
    eq:L:dropout] whatever the precision.

    A run depends on its arguments and `seed` alone; the caller's random state is left as it was. With `checkpoint=`,
    a run killed at any moment and called again gives, bit for bit, the weights and history of the run that was not.

    Args:
        net: Any network. It comes back on its own device and in its own mode.
        x: Inputs with the row axis first: a tensor, a tuple (`net(*x)`) or a dict (`net(**x)`) of tensors.
        y: Targets, as `likelihood` takes them.
        likelihood: $p(\mathbf y \mid \widehat{\mathbf y})$.
        prior: The length-scales of weights and biases; `Prior()` by default.
        keep_probs: Keep probabilities by module name where the network's structure does not tell.
        weight: The weight of each row; a row of weight 2 counts as two.
        epochs: Passes over the rows.
        batch_size: Rows of a mini-batch, M.
        optimizer: "adam", "sgd" (with `momentum`), or an optimiser made for this network.
        learning_rate: The base rate of "adam" and "sgd".
        momentum: The momentum of "sgd".
        schedule: The factor on the base rate at each iteration, such as `InverseDecay(gamma=1e-4, power=0.25)`.
        held_out: `(x, y)` of rows for early stopping on the predictive log-likelihood.
        patience: Epochs without improvement after which training stops. The network returns to its best epoch.
        n_draws: Draws per held-out row.
        checkpoint: A file to write after every `checkpoint_every` epochs, atomically, and to resume from.
        checkpoint_every: Epochs between checkpoints.
        callbacks: Called with a `Progress` after every epoch; one that returns True stops the training.
        autocast: `torch.bfloat16` for mixed precision.
        cuda_graph: Replays the forward and backward passes as a CUDA graph; by default for small networks on CUDA.
        device: "auto" (CUDA where there is one), "cpu", "cuda" ...
        seed: The seed of batches and masks.
        progress: Shows a bar; by default when standard error is a terminal.

    Raises:
        FloatingPointError: The loss or a weight is no longer finite. The network keeps its last finite state.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 1))
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> history = fit(net, x, x.sin(), likelihood=Gaussian(precision=10.0), epochs=2, device="cpu")
        >>> len(history.loss)
        2
    """
    n_rows = len(y)
    _check(n_rows, epochs=epochs, batch_size=batch_size, patience=patience, autocast=autocast, schedule=schedule)
    home, mode = next(net.parameters()).device, net.training
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    data = _Rows(x, y, weight, device)
    net.to(device)
    descent = _optimizer(net, optimizer, learning_rate, momentum)
    objective = _objective(net, likelihood, prior or Prior(), keep_probs, n_rows)
    scale = 1 / likelihood.precision if isinstance(likelihood, Gaussian) else 1.0
    step = _Step(net, objective, scale, data, autocast, _wants_graph(net, cuda_graph, device))
    base_rates = [group["lr"] for group in descent.param_groups]
    fingerprint = _fingerprint(net, y, likelihood, prior, batch_size, descent, schedule, seed)
    run = _resumed(net, descent, checkpoint, fingerprint)
    try:
        with _own_randomness(device), _bar(epochs, progress) as bar:
            bar.update(len(run.history.loss))
            while len(run.history.loss) < epochs and not run.history.stopped:
                epoch = len(run.history.loss)
                good = _state_copy(net)
                _seed(seed, epoch)
                net.train()
                loss = _epoch(step, descent, base_rates, schedule, n_rows, batch_size, epoch)
                _check_finite(net, good, loss, epoch, descent)
                score = _score(net, held_out, likelihood, n_draws, seed, device)
                run = _recorded(run, net, loss, score, descent.param_groups[0]["lr"], patience)
                stop = [callback(Progress(epoch + 1, net, run.history)) for callback in callbacks]
                if any(stop) and not run.history.stopped:
                    run = replace(run, history=replace(run.history, stopped="callback"))
                last = run.history.stopped or epoch + 1 == epochs
                if checkpoint is not None and (last or (epoch + 1) % checkpoint_every == 0):
                    _write(pathlib.Path(checkpoint), net, descent, run, fingerprint)
                bar.update(1)
        if run.best is not None:
            net.load_state_dict(run.best)
    finally:
        net.to(home).train(mode)
    return run.history if run.history.stopped else replace(run.history, stopped="epochs")


def _check(
    n_rows: int,
    *,
    epochs: int,
    batch_size: int,
    patience: int,
    autocast: torch.dtype | None,
    schedule: Callable[[int], float] | None,
) -> None:
    if not n_rows:
        raise ValueError("`y` must have at least one row; got none.")
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("patience", patience)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value!r}.")
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"`autocast` must be None or torch.bfloat16; got {autocast}. float16 gradients underflow unscaled."
        )
    if schedule is not None and not callable(schedule):
        raise ValueError(f"`schedule` must be a function of the iteration; got {schedule!r}. Try InverseDecay(...).")


# --- rows, objective, step ----------------------------------------------------------------------------------------


def _pick(x: Any, rows: Tensor | slice) -> Any:
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, Mapping):
        return {name: part[rows] for name, part in x.items()}
    return tuple(part[rows] for part in x)


def _tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)


def _moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, Mapping):
        return {name: part.to(device) for name, part in x.items()}
    return tuple(part.to(device) for part in x)


def _output(net: nn.Module, x: Any) -> Tensor:
    result = net(x) if isinstance(x, Tensor) else net(**x) if isinstance(x, Mapping) else net(*x)
    return result if isinstance(result, Tensor) else result.logits


@dataclass(eq=False)
class _Rows:
    """The training rows, on the device when they fit there."""

    x: Any
    y: Tensor
    weight: Tensor | None
    device: torch.device

    def __post_init__(self) -> None:
        parts = [*_tensors(self.x), self.y]
        if any(len(part) != len(self.y) for part in parts):
            raise ValueError(f"`x` and `y` must have the same number of rows; got {[len(part) for part in parts]}.")
        if sum(part.nbytes for part in parts) <= _RESIDENT_BYTES:
            self.x, self.y = _moved(self.x, self.device), self.y.to(self.device)
        if self.weight is not None:
            self.weight = (self.weight / self.weight.double().mean()).to(self.device, torch.float32)

    def batch(self, rows: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """The numbered rows, on the device."""
        near = rows.to(self.y.device)
        weight = None if self.weight is None else self.weight[rows.to(self.device)]
        return _moved(_pick(self.x, near), self.device), self.y[near].to(self.device), weight


def _objective(
    net: nn.Module, likelihood: Likelihood, prior: Prior, keep_probs: Mapping[str, float] | None, n_data: int
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    r"""The negative evidence lower bound per row as a function of a batch's outputs; see `objective.negative_elbo`."""
    coefficients = kl_coefficients(net, prior=prior, keep_probs=keep_probs)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    pairs = [(0.5 * c / n_data, parameters[name]) for name, c in coefficients.items() if c]
    stated = any(hasattr(module, "kl") for module in net.modules())  # layers that know their own divergence

    def loss(output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        density = likelihood.log_density(output, y)
        misfit = -(density if weight is None else density * weight).mean()
        if stated:
            return misfit + kl_divergence(net, prior=prior, keep_probs=keep_probs) / n_data
        return torch.stack([misfit, *(c * parameter.square().sum() for c, parameter in pairs)]).sum()

    return loss


def _wants_graph(net: nn.Module, cuda_graph: bool | None, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return sum(p.numel() for p in net.parameters()) <= _GRAPH_PARAMETERS if cuda_graph is None else cuda_graph


@dataclass(eq=False)
class _Step:
    """The forward and backward pass of a batch: gradients into the parameters, the loss returned."""

    net: nn.Module
    objective: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    scale: float
    rows: _Rows
    autocast: torch.dtype | None
    graphed: bool
    replay: dict[tuple[int, ...], Callable[[Any, Tensor, Tensor | None], Tensor]] = field(default_factory=dict)

    def __call__(self, chosen: Tensor) -> Tensor:
        x, y, weight = self.rows.batch(chosen)
        if not self.graphed:
            return self._eager(x, y, weight)
        shape = tuple(y.shape)
        if shape not in self.replay:
            self.replay[shape] = self._captured(x, y, weight)
        return self.replay[shape](x, y, weight)

    def _eager(self, x: Any, y: Tensor, weight: Tensor | None) -> Tensor:
        self.net.zero_grad(set_to_none=True)
        with torch.autocast(y.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = _output(self.net, x)
        loss = self.objective(output.float() if self.autocast else output, y, weight)
        (loss * self.scale).backward()
        return loss.detach()

    def _captured(self, x: Any, y: Tensor, weight: Tensor | None) -> Any:
        """The pass as a CUDA graph reading from tensors of fixed address; what its warm-up changed is put back."""
        buffers = [(b, b.clone()) for b in self.net.buffers()]
        state = torch.cuda.get_rng_state(y.device)
        static = (_moved(_cloned(x), y.device), y.clone(), None if weight is None else weight.clone())
        stream = torch.cuda.Stream(y.device)
        stream.wait_stream(torch.cuda.current_stream(y.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._eager(*static)
        torch.cuda.current_stream(y.device).wait_stream(stream)
        self.net.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._eager(*static)
        gradients = [p.grad for p in self.net.parameters()]
        for buffer, value in buffers:
            buffer.copy_(value)
        torch.cuda.set_rng_state(state, y.device)

        def replay(x: Any, y: Tensor, weight: Tensor | None) -> Tensor:
            for target, values in zip(_tensors(static[0]), _tensors(x), strict=True):
                target.copy_(values)
            static[1].copy_(y)
            if weight is not None and static[2] is not None:
                static[2].copy_(weight)
            graph.replay()
            for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            return loss.clone()

        return replay


def _cloned(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return {k: v.clone() for k, v in x.items()} if isinstance(x, Mapping) else tuple(v.clone() for v in x)


def _epoch(
    step: _Step,
    descent: torch.optim.Optimizer,
    base_rates: list[float],
    schedule: Callable[[int], float] | None,
    n_rows: int,
    batch_size: int,
    epoch: int,
) -> float:
    """One pass over the rows; the mean loss of its batches."""
    order = torch.randperm(n_rows)
    total: Tensor | None = None
    n_batches = math.ceil(n_rows / batch_size)
    for number, chosen in enumerate(order.split(batch_size)):
        if schedule is not None:
            factor = schedule(epoch * n_batches + number)
            for group, rate in zip(descent.param_groups, base_rates, strict=True):
                group["lr"] = rate * factor
        loss = step(chosen)
        descent.step()
        total = loss if total is None else total + loss
    return float(total) / n_batches if total is not None else math.nan


def _optimizer(
    net: nn.Module, optimizer: str | torch.optim.Optimizer, learning_rate: float, momentum: float
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"`learning_rate` must be a positive number; got {learning_rate!r}.")
    if optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=learning_rate, fused=True)
    if optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=momentum, fused=True)
    raise ValueError(f"`optimizer` must be 'adam', 'sgd' or a torch optimiser; got {optimizer!r}.")


# --- early stopping, divergence -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    history: History
    best: dict[str, Tensor] | None = None
    best_score: float = -math.inf
    waited: int = 0


def _recorded(run: _Run, net: nn.Module, loss: float, score: float | None, rate: float, patience: int) -> _Run:
    history = replace(
        run.history,
        loss=[*run.history.loss, loss],
        learning_rate=[*run.history.learning_rate, rate],
        best_epoch=len(run.history.loss) + 1,
    )
    if score is None:
        return replace(run, history=history)
    history = replace(history, log_likelihood=[*history.log_likelihood, score])
    if score > run.best_score:
        return _Run(history, _state_copy(net), score, 0)
    stopped = "patience" if run.waited + 1 >= patience else ""
    history = replace(history, best_epoch=run.history.best_epoch, stopped=stopped)
    return replace(run, history=history, waited=run.waited + 1)


def _score(
    net: nn.Module,
    held_out: tuple[Any, Tensor] | None,
    likelihood: Likelihood,
    n_draws: int,
    seed: int,
    device: torch.device,
) -> float | None:
    r"""The mean of $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist]."""
    if held_out is None:
        return None
    x, y = _moved(held_out[0], device), held_out[1].to(device)
    densities = likelihood.log_density(_held_out_draws(net, x, n_draws, seed), y)
    return float((densities.double().logsumexp(0) - math.log(n_draws)).mean())


def _held_out_draws(net: nn.Module, x: Any, n_draws: int, seed: int) -> Tensor:
    """Outputs with fresh masks, `[draw, row, ...]`; the same masks at every check, so that scores are comparable."""
    _seed(seed, 2**31)
    net.eval()
    for module in net.modules():
        if "Dropout" in type(module).__name__:
            module.train()
    with torch.no_grad():
        return torch.stack([_output(net, x) for _ in range(n_draws)])


def _state_copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _check_finite(
    net: nn.Module, good: dict[str, Tensor], loss: float, epoch: int, descent: torch.optim.Optimizer
) -> None:
    if math.isfinite(loss) and all(bool(p.isfinite().all()) for p in net.parameters()):
        return
    net.load_state_dict(good)
    rate = descent.param_groups[0]["lr"]
    raise FloatingPointError(
        f"Training diverged in epoch {epoch + 1} (loss {loss}); the network was put back to the epoch before. Try "
        f"learning_rate={rate / 10:.3g} instead of {rate:.3g}, standardise x and y (mean 0, deviation 1), and look for "
        "NaN, infinite or extreme values in them."
    )


# --- randomness, checkpoints, progress ----------------------------------------------------------------------------


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Puts the caller's random state back at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _seed(*key: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0]))


def _fingerprint(
    net: nn.Module,
    y: Tensor,
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
    target = y.detach().cpu().contiguous().double()
    policy = schedule if is_dataclass(schedule) else getattr(schedule, "__qualname__", None)
    settings = (shapes, likelihood, prior, batch_size, type(descent).__name__, groups, policy, seed, tuple(y.shape))
    data = target.reshape(-1)[:: max(1, target.numel() // 10_000)].numpy().tobytes()
    return hashlib.sha256(repr(settings).encode() + data).hexdigest()


def _write(path: pathlib.Path, net: nn.Module, descent: torch.optim.Optimizer, run: _Run, fingerprint: str) -> None:
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
    }
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(contents, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _resumed(
    net: nn.Module, descent: torch.optim.Optimizer, checkpoint: str | os.PathLike[str] | None, fingerprint: str
) -> _Run:
    """The run as its checkpoint left it, or a new one."""
    if checkpoint is None or not pathlib.Path(checkpoint).exists():
        return _Run(History())
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
    return _Run(history, saved["best"], saved["best_score"], saved["waited"])


@contextlib.contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[Any]:
    if progress or (progress is None and sys.stderr.isatty()):
        from tqdm.auto import tqdm

        with tqdm(total=total, desc="fit", unit="epoch") as bar:
            yield bar
    else:
        yield _Silent()


class _Silent:
    def update(self, count: int) -> None:
        del count
