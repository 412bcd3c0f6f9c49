r"""The training of one network from its first epoch to its last, best or interrupted one."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.runtime.arrays import Array
from dropbayes.runtime.devices import available_device
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import check_count
from dropbayes.sampling import draws
from dropbayes.sampling.functions import is_stochastic
from dropbayes.training import checkpoints
from dropbayes.training.checkpoints import History, Run
from dropbayes.training.descent import Descent, DescentOptions, described, kept_rates
from dropbayes.training.fingerprints import fingerprint
from dropbayes.training.noise import ModelNoise
from dropbayes.training.rows import Batch, Rows, output_tensor, training_rows
from dropbayes.training.steps import Step, batch_objective, run_epoch, wants_graph
from dropbayes.weight_layers import complete_keep_probs
from dropbayes.weight_layers.precision import Prior

__all__ = ["Progress", "fit"]

ALPHA_DRAWS = 10
"""Draws per step of an α-divergence: the number of Li and Gal (2017)."""


@dataclass(frozen=True)
class Progress:
    """What a callback sees after an epoch; returning True stops the training."""

    epoch: int
    net: nn.Module
    history: History


def fit(
    net: nn.Module,
    x: Any,
    y: Any = None,
    *,
    likelihood: Likelihood,
    prior: Prior | None = None,
    learn_precision: bool = False,
    alpha: float = 0.0,
    keep_probs: Mapping[str, float] | None = None,
    sample_weight: Array | None = None,
    epochs: int = 100,
    batch_size: int = 128,
    descent: Descent | None = None,
    held_out: Any = None,
    patience: int = 10,
    n_draws: int = 32,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    callbacks: Sequence[Callable[[Progress], bool | None]] = (),
    device: str | torch.device = "auto",
    seed: int = 0,
    progress: bool | None = None,
    **options: Unpack[DescentOptions],
) -> History:
    r"""The `History` of training `net` in place to the minimum of the negative evidence lower bound.

    Each step descends $-\tfrac1M \sum_{n \in S} \log p(\mathbf y_n \mid \widehat{\mathbf y}_n) + \tfrac1N
    \mathrm{KL}(q \| p)$ [GG16, eq:L:GP-MC-reg-SVI] on a mini-batch. For a Gaussian it is divided by τ, so that
    learning rates mean the same as beside the dropout loss $E + \sum_i \lambda_i \|\mathbf M_i\|^2$ [GG16,
    eq:L:dropout] whatever the precision.

    A run depends on its arguments and `seed` alone; the caller's random state and learning rates are left as they were.
    With `checkpoint=`, a run killed at any moment and called again gives, bit for bit, the weights and history of the
    run that was not.

    Args:
        net: Any network. It comes back on its own device and in its own mode.
        x: Inputs with the row axis first: a tensor or array, a tuple (`net(*x)`) or a dict (`net(**x)`) of them, or a
            DataLoader of pairs (input, target).
        y: Targets, as `likelihood` takes them; None if `x` is a DataLoader.
        likelihood: The observation model $p(\mathbf y \mid \widehat{\mathbf y})$.
        prior: The length-scales of weights and biases; `Prior()` by default.
        learn_precision: Whether the τ of a `Gaussian` is trained with the network, from its own value on. The τ that
            goes with the returned weights is `history.precision[history.best_epoch - 1]`.
        alpha: The α of an α-divergence in [0, 1] (Li and Gal 2017), estimated with ten draws per step; 0 is the
            evidence lower bound. See `negative_elbo`.
        keep_probs: Keep probabilities by module name, before those that a trace of the first rows shows.
        sample_weight: The weight of each row. A row of weight 2 counts as two, beside the prior too: N is their sum.
        epochs: The number of passes over the rows.
        batch_size: The number of rows of a mini-batch, M; a DataLoader has its own.
        descent: The optimiser, its learning rate and schedule, the numerical precision.
        held_out: `(x, y)` of rows for early stopping on the predictive log-likelihood, or a DataLoader of pairs.
        patience: The number of epochs without improvement after which training stops. The network returns to its best
            epoch.
        n_draws: The number of draws per held-out row.
        checkpoint: A file to write after every `checkpoint_every` epochs and to resume from. One of another run (other
            network, data, weights, optimiser, schedule, seed ...) is refused. Of a DataLoader, every value of a
            TensorDataset is compared, of other datasets their type and length.
        checkpoint_every: The number of epochs between checkpoints.
        callbacks: Functions called with a `Progress` after every epoch; one that returns True stops the training.
        device: "auto" (CUDA where there is one), "cpu", "cuda" ...
        seed: The seed of batches and masks.
        progress: Whether to show a bar; by default in a terminal or notebook.
        **options: The fields of `Descent` one by one: `learning_rate=1e-2` for `descent=Descent(learning_rate=1e-2)`.

    Raises:
        FloatingPointError: The loss or a weight is no longer finite. The network keeps its last finite state.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 1))
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> history = fit(net, x, x.sin(), likelihood=Gaussian(precision=10.0), epochs=2, device="cpu")
        >>> len(history.loss)
        2
    """
    counts = {"epochs": epochs, "batch_size": batch_size, "patience": patience}
    for name, count in (counts | {"n_draws": n_draws, "checkpoint_every": checkpoint_every}).items():
        check_count(name, count)
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"`likelihood` must say what the output means, such as Gaussian(precision=1.0); got {likelihood!r}."
        )
    weight = options.pop("weight", sample_weight)
    descent = replace(descent or Descent(), **options)
    target = available_device(device)
    rows = training_rows(x, y, net=net, device=target, batch_size=batch_size, sample_weight=weight)
    judged = _held_out_rows(held_out, net, target)
    noise = ModelNoise(likelihood, learn_precision, target)
    with (
        _borrowed(net, target),
        noise.trained_by(descent.optimizer_of(net)) as trained,
        kept_rates(trained) as (optimizer, base_rates),
    ):
        _check_targets(net, rows, likelihood)
        _check_targets(net, judged, likelihood)
        traced = complete_keep_probs(net, next(rows.pass_through()).first(2).arguments, keep_probs)
        objective = batch_objective(net, noise.likelihood, prior or Prior(), traced, rows.n_data, alpha)
        scale = 1 / float(likelihood.precision) if isinstance(likelihood, Gaussian) else 1.0
        graphed = wants_graph(net, descent.cuda_graph, target) and not learn_precision
        step = Step(
            net, objective, scale, descent.autocast, graphed, bool(descent.cuda_graph), ALPHA_DRAWS if alpha else 1
        )
        identity = ""
        if checkpoint is not None:
            identity = fingerprint(
                net=net, rows=rows.identity(), held_out=judged and judged.identity(), likelihood=likelihood,
                prior=prior, keep_probs=keep_probs, learn_precision=learn_precision, alpha=alpha,
                **counts | {"epochs": None},
                n_draws=n_draws, seed=seed,
                optimizer=described(optimizer), schedule=descent.schedule, autocast=descent.autocast,
            )  # fmt: skip
        run = checkpoints.load(checkpoint, net, optimizer, fingerprint=identity)
        noise.restore(run.history.precision)
        done = len(run.history.loss)
        with ProgressBar("fit", epochs, unit="epochs", initial=done, show=progress) as bar:
            while len(run.history.loss) < epochs and not run.history.stopped:
                epoch, before = len(run.history.loss), _state_copy(net)
                _seed(target, seed, epoch)
                net.train()
                loss = run_epoch(step, optimizer, rows, base_rates=base_rates, schedule=descent.schedule, epoch=epoch)
                _check_finite(net, before, loss, epoch, optimizer)
                score = (
                    None if judged is None else _held_out_score(net, judged, noise.likelihood(), n_draws, seed, epoch)
                )
                run = replace(run, history=replace(run.history, precision=[*run.history.precision, *noise.values()]))
                run = _extended(run, net, loss, score, optimizer.param_groups[0]["lr"], patience)
                stop = [callback(Progress(epoch + 1, net, run.history)) for callback in callbacks]
                if any(stop) and not run.history.stopped:
                    run = replace(run, history=replace(run.history, stopped="callback"))
                last = run.history.stopped or epoch + 1 == epochs
                if checkpoint is not None and (last or (epoch + 1) % checkpoint_every == 0):
                    checkpoints.save(checkpoint, net, optimizer, run, fingerprint=identity)
                bar.advance()
        if run.best is not None:
            net.load_state_dict(run.best)
    return run.history if run.history.stopped else replace(run.history, stopped="epochs")


@contextlib.contextmanager
def _borrowed(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Moves the network to the device; its own device and modes, and the caller's random state, are restored."""
    home, modes = next(net.parameters()).device, [(module, module.training) for module in net.modules()]
    net.to(device)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        net.to(home)
        for module, training in modes:
            module.training = training


def _held_out_rows(held_out: Any, net: nn.Module, device: torch.device) -> Rows | None:
    if held_out is None:
        return None
    if isinstance(held_out, (tuple, list)):
        if len(held_out) != 2:
            raise ValueError(f"`held_out` must be a pair (x, y) or a DataLoader of pairs; got {len(held_out)} parts.")
        return training_rows(*held_out, net=net, device=device, batch_size=1, name="held_out")
    return training_rows(held_out, None, net=net, device=device, batch_size=1, name="held_out")


def _check_targets(net: nn.Module, rows: Rows | None, likelihood: Likelihood) -> None:
    """Raises unless the likelihood can read the network's output beside these targets; one row is looked at."""
    if rows is None:
        return
    net.eval()
    batch = next(rows.pass_through())
    with torch.no_grad():
        output = batch.first(1).output(net)
        likelihood.check(output.expand(len(batch.y), *output.shape[1:]), batch.y)
        likelihood.log_density(output, batch.y[:1])


def _extended(run: Run, net: nn.Module, loss: float, score: float | None, rate: float, patience: int) -> Run:
    """The run with one more epoch."""
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


def _held_out_score(net: nn.Module, rows: Rows, likelihood: Likelihood, n_draws: int, seed: int, epoch: int) -> float:
    r"""The mean of $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist]."""
    total = 0.0
    for batch in rows.pass_through():
        densities = likelihood.log_density(_held_out_draws(net, batch, n_draws, seed), batch.y).double()
        total += float((densities.logsumexp(0) - math.log(len(densities))).sum())
    if math.isnan(total):
        raise FloatingPointError(
            f"the held-out log-likelihood is NaN in epoch {epoch + 1}: no epoch could be called the best. Look for NaN "
            "or extreme values in the inputs of `held_out`."
        )
    return total / rows.n_rows


def _held_out_draws(net: nn.Module, batch: Batch, n_draws: int, seed: int) -> Tensor:
    """Outputs with fresh masks, `[draw, row, ...]`; the same masks at every check, so that scores are comparable."""
    net.eval()
    with torch.no_grad():
        if not is_stochastic(net, batch.arguments):
            return batch.output(net)[None]
        return output_tensor(draws(net, batch.arguments, n_draws=n_draws, seed=seed, masks="row"))


def _state_copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _check_finite(
    net: nn.Module, before: dict[str, Tensor], loss: float, epoch: int, optimizer: torch.optim.Optimizer
) -> None:
    largest = torch.stack(torch._foreach_norm(list(net.parameters()), math.inf))  # one wait for the device, not many
    if math.isfinite(loss) and bool(largest.isfinite().all()):
        return
    net.load_state_dict(before)
    rate = optimizer.param_groups[0]["lr"]
    raise FloatingPointError(
        f"Training diverged in epoch {epoch + 1} (loss {loss}); the network was restored to its state before this "
        f"epoch. Try learning_rate={rate / 10:.3g} instead of {rate:.3g}, standardise x and y (mean 0, deviation 1), "
        "and look for NaN, infinite or extreme values in them."
    )


def _seed(device: torch.device, *key: int) -> None:
    """Seeds the generators in use; `torch.manual_seed` is slower, since it also asks for devices not in use."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or torch.cuda.current_device()].manual_seed(seed)
