r"""The training of one network from its first epoch to its last, best or interrupted one."""

import contextlib
import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dropbayes.layers import KeepProbs, Prior, keep_probs
from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.runtime.devices import available_device
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import Array, check_count, check_type
from dropbayes.tracing.generators import keyed_generators, seed_generators
from dropbayes.training import checkpoints
from dropbayes.training.checkpoints import Checkpoint, History, Run
from dropbayes.training.objective import Objective, divergence_of
from dropbayes.training.optimization import GRAPH_PARAMETERS, EarlyStopping, ModelNoise, Optimization, Step, run_epoch
from dropbayes.training.rows import Rows, TensorRows, training_rows


@dataclass(frozen=True)
class Progress:
    """The argument of a callback after an epoch."""

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
    objective: Objective | None = None,
    optimization: Optimization | None = None,
    stopping: EarlyStopping | None = None,
    sample_weight: Array | None = None,
    epochs: int = 100,
    batch_size: int = 128,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    callbacks: Sequence[Callable[[Progress], bool | None]] = (),
    device: str | torch.device = "auto",
    seed: int = 0,
    progress: bool | None = None,
) -> History:
    r"""The `History` of training `net` in place to the minimum of the negative evidence lower bound.

    Each step descends $-\tfrac1M \sum_{n \in S} \log p(\mathbf y_n \mid \widehat{\mathbf y}_n) + \tfrac1N
    \mathrm{KL}(q \| p)$ [GG16, eq:L:GP-MC-reg-SVI] on a mini-batch. For a Gaussian it is divided by τ: learning rates
    mean the same as with the dropout loss $E + \sum_i \lambda_i \|\mathbf M_i\|^2$ [GG16, eq:L:dropout].

    A run depends on its arguments alone; the caller's random state and learning rates are left as they were. With
    `checkpoint=`, a run killed at any moment and called again ends, bit for bit, as an uninterrupted one; one that an
    exception ended, such as KeyboardInterrupt, by the network itself, which then has the weights of the file.

    Args:
        net: Any network. Its device and mode are restored at the end.
        x: Inputs with the row axis first: a tensor or array, a tuple (`net(*x)`) or a dict (`net(**x)`) of them, or a
            DataLoader of pairs (input, target) or of dicts with `labels`, as Hugging Face's are.
        y: Targets, as `likelihood` takes them; None if `x` is a DataLoader.
        likelihood: The observation model $p(\mathbf y \mid \widehat{\mathbf y})$.
        prior: The length-scales of weights and biases, which are not trained here; `Prior()` by default.
        objective: Which bound is minimised: its α-divergence, and whether τ is trained too.
        optimization: The optimiser, its learning rate and schedule.
        stopping: The held-out rows on whose predictive log-likelihood training stops early.
        sample_weight: The weight of each row. A row of weight 2 counts twice, also against the prior: N is their sum.
        epochs: The number of passes over the rows.
        batch_size: The number of rows of a mini-batch, M; a DataLoader has its own.
        checkpoint: A file to write after every epoch and to resume from; `Checkpoint(path, every=10)` writes less
            often. One of another run (other network, initial weights, data, seed ...) or of a longer one is refused;
            of a dataset that is no TensorDataset, type and length are compared. Generators in `net` are not saved.
        callbacks: Functions called with a `Progress` after every epoch; one that returns True stops the training.
        device: "auto" (CUDA where there is one), "cpu", "cuda" ...
        seed: The seed of batches and masks.
        progress: Whether to show a bar; by default in a terminal or notebook.

    Raises:
        FloatingPointError: The loss or a weight is no longer finite. The network keeps its last finite state, with a
            checkpoint that of the file.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 1))
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> history = fit(net, x, x.sin(), likelihood=Gaussian(precision=10.0), epochs=2, device="cpu")
        >>> len(history.loss)
        2
    """
    check_count("epochs", epochs)
    check_count("batch_size", batch_size)
    check_count("seed", seed, at_least=0)
    check_type("likelihood", likelihood, Likelihood, "say what the output means, as Gaussian(1.0) does")
    prior, objective = prior or Prior(), objective or Objective()
    optimization, stopping = optimization or Optimization(), stopping or EarlyStopping()
    file = Checkpoint(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    kinds = {"prior": Prior, "objective": Objective, "optimization": Optimization, "stopping": EarlyStopping}
    for record, (name, kind) in zip((prior, objective, optimization, stopping), kinds.items(), strict=True):
        check_type(name, record, kind, f"be a record {kind.__name__}(...)")
    check_type("checkpoint", file, (Checkpoint, type(None)), "be a path or a record Checkpoint(...)")
    if not isinstance(net, nn.Module) or not any(p.requires_grad for p in net.parameters()):
        raise TypeError(f"`net` must be an nn.Module with parameters to train; got a {type(net).__name__} without.")
    _check_fixed(net, prior=prior, **({} if objective.learn_precision else {"likelihood": likelihood}))
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(f"`callbacks` must be a list of functions; got {callbacks!r}.")
    target = available_device(device)
    rows = training_rows(x, y, net=net, device=target, batch_size=batch_size, sample_weight=sample_weight)
    judged = stopping.rows(net, target)
    noise = ModelNoise(likelihood, objective.learn_precision, target)
    with _on_device(net, target), optimization.borrowed(net, noise.log_precision) as (optimizer, base_rates):
        for some in [rows] if judged is None else [rows, judged]:
            _check_targets(net, some, likelihood)
        size = sum(parameter.numel() for parameter in net.parameters())
        precision = likelihood.precision if isinstance(likelihood, Gaussian) else 1.0
        step = Step(
            net,
            noise.likelihood,
            divergence_of(net, prior=prior, keep_probs=_traced_keep_probs(net, rows)),
            rows.n_data,
            objective.alpha,
            scale=1 / torch.as_tensor(precision, dtype=torch.float64, device="cpu").mean().item(),
            graphed=target.type == "cuda" and size <= GRAPH_PARAMETERS and not objective.learn_precision,
        )
        run, identity = Run(History()), ""
        if file is not None:
            groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
            data = (rows.identity, judged and judged.identity, batch_size, seed)
            model = (net, likelihood, prior, objective, stopping.patience, stopping.n_draws)
            identity = checkpoints.fingerprint_of((data, model, type(optimizer), groups, optimization.schedule))
            run = checkpoints.load(file.path, net, optimizer, fingerprint=identity, epochs=epochs)
            if not run.history.loss:  # so that a folder that is lacking is noticed, and a first epoch can be repeated
                checkpoints.save(file.path, net, optimizer, run, fingerprint=identity)
        noise.restore(run.history.precision)
        bar = ProgressBar("fit", epochs, unit="epochs", initial=len(run.history.loss), show=progress)
        with bar, _kept_state(net, returns=file is not None) as kept:
            is_read = bool(callbacks) or judged is not None or file is not None
            unchecked = 0  # the steps since the last state that was found finite
            net.train()
            while len(run.history.loss) < epochs and not run.history.stopped:
                epoch = len(run.history.loss)
                _seed(target, seed, epoch)
                loss = run_epoch(step, optimizer, rows, base_rates, optimization.schedule, epoch)
                unchecked += rows.n_batches
                rate = optimizer.param_groups[0]["lr"]
                if is_read or unchecked >= 16 or epoch + 1 == epochs or not math.isfinite(loss):
                    _check_finite(net, kept, loss, epoch, rate, rows)
                    unchecked = 0
                    if file is None:
                        kept.update(copy.deepcopy(net.state_dict()))
                score = None if judged is None else stopping.score(net, judged, noise.likelihood(), seed, epoch)
                run = _with_epoch(run, net, loss, score, rate, noise.values(), stopping.patience)
                stop = [callback(Progress(epoch + 1, net, run.history)) for callback in callbacks]
                if is_read:
                    net.train()
                if any(stop) and not run.history.stopped:
                    run = replace(run, history=replace(run.history, stopped="callback"))
                last = run.history.stopped or epoch + 1 == epochs
                if file is not None and (last or (epoch + 1) % file.every == 0):
                    checkpoints.save(file.path, net, optimizer, run, fingerprint=identity)
                    kept.update(copy.deepcopy(net.state_dict()))
                bar.advance()
        if run.best is not None:
            net.load_state_dict(run.best)
    return run.history if run.history.stopped else replace(run.history, stopped="epochs")


def _check_fixed(net: nn.Module, **records: object) -> None:
    """Raises for a tensor that waits for a gradient in vain: the parameters of the network alone are optimised."""
    ours = set(map(id, net.parameters()))
    for name, record in records.items():
        leaves = pytree.tree_leaves(getattr(record, "__dict__", {}))
        if any(getattr(leaf, "requires_grad", False) and id(leaf) not in ours for leaf in leaves):
            rule = "hold no tensor that requires a gradient and is no parameter of `net`: it would not be trained"
            remedy = "Make it one, or take objective=Objective(learn_precision=True) for a Gaussian's precision."
            raise ValueError(f"`{name}` must {rule}. {remedy}")


@contextlib.contextmanager
def _on_device(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Moves the network to the device; it and the global generators, for which other runs wait, are then restored."""
    home, modes = next(net.parameters()).device, [(module, module.training) for module in net.modules()]
    net.to(device)
    try:
        with keyed_generators(None), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        net.to(home)
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _kept_state(net: nn.Module, *, returns: bool) -> Iterator[dict[str, Any]]:
    """A copy of the state, for the caller to renew; after an error the network may return to it, as to a checkpoint."""
    kept = copy.deepcopy(net.state_dict())
    try:
        yield kept
    except BaseException:
        if returns:
            net.load_state_dict(kept)
        raise


def _check_targets(net: nn.Module, rows: Rows, likelihood: Likelihood) -> None:
    """Raises unless the network's output and the targets suit the likelihood, checked on one row."""
    net.eval()
    batch = next(rows.pass_through())
    with torch.no_grad():
        if not (output := batch.first(1).output(net)).dim():
            raise ValueError("`net` gives no axis of rows for a single row: name what it squeezes, as in squeeze(-1).")
        likelihood.check(output.expand(len(batch.y), *output.shape[1:]), batch.y)
        likelihood.log_density(output, batch.y[:1])


def _traced_keep_probs(net: nn.Module, rows: Rows) -> KeepProbs | None:
    """The keep probabilities found by tracing the first rows; None where that fails."""
    try:
        return keep_probs(net, next(rows.pass_through()).first(2).arguments)
    except Exception as error:  # code that fails inside a function mode or on few rows
        warnings.warn(f"`net` could not be traced ({error}): its dropout is read off its structure.", stacklevel=3)
        return None


def _with_epoch(
    run: Run, net: nn.Module, loss: float, score: float | None, rate: float, precision: list[Any], patience: int
) -> Run:
    before = run.history
    is_best = score is None or score > run.best_score
    waited = 0 if is_best else run.waited + 1
    history = History(
        loss=[*before.loss, loss],
        log_likelihood=before.log_likelihood if score is None else [*before.log_likelihood, score],
        learning_rate=[*before.learning_rate, rate],
        precision=[*before.precision, *precision],
        best_epoch=len(before.loss) + 1 if is_best else before.best_epoch,
        stopped="patience" if waited >= patience else "",
    )
    if score is not None and is_best:
        run = replace(run, best=copy.deepcopy(net.state_dict()), best_score=score)
    return replace(run, history=history, waited=waited)


def _check_finite(net: nn.Module, before: dict[str, Tensor], loss: float, epoch: int, rate: float, rows: Rows) -> None:
    largest = torch.stack(torch._foreach_norm(list(net.parameters()), math.inf))  # a single device synchronisation
    if math.isfinite(loss) and bool(largest.isfinite().all()):
        return
    net.load_state_dict(before)
    if isinstance(rows, TensorRows) and (count := sum(int(leaf.isnan().sum()) for leaf in rows.inputs.tensors)):
        raise ValueError(f"`x` must not hold NaN that reaches the loss; {count} values are. Fill or remove their rows.")
    fault = f"diverged in epoch {epoch + 1} (loss {loss}); the network was restored to its last finite state"
    remedy = f"Try learning_rate={rate / 10:.3g} instead of {rate:.3g}, standardise x and y (mean 0, deviation 1)"
    raise FloatingPointError(f"Training {fault}. {remedy}, and look for NaN, infinite or extreme values in them.")


def _seed(device: torch.device, *key: int) -> None:
    """Seeds the generators in use; `torch.manual_seed` is slower, since it also queries unused devices."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])
    seed_generators(seed)  # Python's and NumPy's too, which a network or a dataset may use
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or torch.cuda.current_device()].manual_seed(seed)
