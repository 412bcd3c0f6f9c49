r"""The training of one network from its first epoch to its last, best or interrupted one."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.precision import Prior
from dropbayes.runtime.devices import available_device
from dropbayes.runtime.progress import ProgressBar
from dropbayes.sampling import draws, sites
from dropbayes.training.checkpoints import History, Run, fingerprint_of, resumed, write
from dropbayes.training.steps import (
    Rows,
    Step,
    batch_objective,
    made_optimizer,
    moved,
    output_of,
    run_epoch,
    tensors_of,
    wants_graph,
)


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
    home, modes = next(net.parameters()).device, [(module, module.training) for module in net.modules()]
    device = available_device(device)
    data = Rows(x, y, weight, device)
    net.to(device)
    descent = made_optimizer(net, optimizer, learning_rate, momentum)
    objective = batch_objective(net, likelihood, prior or Prior(), keep_probs, n_rows)
    scale = 1 / likelihood.precision if isinstance(likelihood, Gaussian) else 1.0
    step = Step(net, objective, scale, data, autocast, wants_graph(net, cuda_graph, device), bool(cuda_graph))
    base_rates = [group["lr"] for group in descent.param_groups]
    fingerprint = fingerprint_of(net, [*tensors_of(x), y], likelihood, prior, batch_size, descent, schedule, seed)
    run = resumed(net, descent, checkpoint, fingerprint)
    try:
        done = len(run.history.loss)
        with _own_randomness(device), ProgressBar("fit", epochs, unit="epochs", initial=done, show=progress) as bar:
            while len(run.history.loss) < epochs and not run.history.stopped:
                epoch = len(run.history.loss)
                good = _state_copy(net)
                _seed(device, seed, epoch)
                net.train()
                loss = run_epoch(step, descent, base_rates, schedule, n_rows, batch_size, epoch)
                _check_finite(net, good, loss, epoch, descent)
                score = _score(net, held_out, likelihood, n_draws, seed, device)
                run = _recorded(run, net, loss, score, descent.param_groups[0]["lr"], patience)
                stop = [callback(Progress(epoch + 1, net, run.history)) for callback in callbacks]
                if any(stop) and not run.history.stopped:
                    run = replace(run, history=replace(run.history, stopped="callback"))
                last = run.history.stopped or epoch + 1 == epochs
                if checkpoint is not None and (last or (epoch + 1) % checkpoint_every == 0):
                    write(pathlib.Path(checkpoint), net, descent, run, fingerprint)
                bar.advance()
        if run.best is not None:
            net.load_state_dict(run.best)
    finally:
        net.to(home)
        for module, training in modes:
            module.training = training
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


def _recorded(run: Run, net: nn.Module, loss: float, score: float | None, rate: float, patience: int) -> Run:
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
        return Run(history, _state_copy(net), score, 0)
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
    x, y = moved(held_out[0], device), held_out[1].to(device)
    densities = likelihood.log_density(_held_out_draws(net, x, n_draws, seed), y)
    return float((densities.double().logsumexp(0) - math.log(n_draws)).mean())


def _held_out_draws(net: nn.Module, x: Any, n_draws: int, seed: int) -> Tensor:
    """Outputs with fresh masks, `[draw, row, ...]`; the same masks at every check, so that scores are comparable."""
    net.eval()
    with torch.no_grad():
        if not any(site.is_random for site in sites(net, x)):
            return output_of(net, x)[None]
        sampled = draws(net, x, n_draws=n_draws, seed=seed, masks="row")
    return sampled if isinstance(sampled, Tensor) else sampled.logits


def _state_copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _check_finite(
    net: nn.Module, good: dict[str, Tensor], loss: float, epoch: int, descent: torch.optim.Optimizer
) -> None:
    largest = torch.stack(torch._foreach_norm(list(net.parameters()), math.inf))  # one wait for the device, not many
    if math.isfinite(loss) and bool(largest.isfinite().all()):
        return
    net.load_state_dict(good)
    rate = descent.param_groups[0]["lr"]
    raise FloatingPointError(
        f"Training diverged in epoch {epoch + 1} (loss {loss}); the network was put back to the epoch before. Try "
        f"learning_rate={rate / 10:.3g} instead of {rate:.3g}, standardise x and y (mean 0, deviation 1), and look for "
        "NaN, infinite or extreme values in them."
    )


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Puts the caller's random state back at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _seed(device: torch.device, *key: int) -> None:
    """Seeds the generators in use; `torch.manual_seed` takes longer, for it also asks after devices not in use."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or torch.cuda.current_device()].manual_seed(seed)
