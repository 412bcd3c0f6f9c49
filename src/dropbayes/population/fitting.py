r"""The training of a population: members start together, each ends at its own last step; by one or several workers."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dropbayes.population import randomness
from dropbayes.population.heads import head_of
from dropbayes.population.program import ADAM_BETAS, Program
from dropbayes.population.records import ACTIVATIONS, Activation, Member, Population, Task, concatenate, select
from dropbayes.population.standardisation import stacked_table
from dropbayes.runtime.devices import available_device, flush_denormals, tensor_cores
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import check_choice

_IDLE_SHARE = 0.25  # of the stack, before finished members leave it: that costs a copy, on a GPU a new graph capture
_MAX_WEIGHT = 1e8  # those of standardised data stay far below; above it products overflow


def train(
    tasks: Sequence[Task],
    members: Sequence[Member],
    *,
    hidden: Sequence[int] = (50,),
    likelihood: str = "gaussian",
    activation: Activation = "relu",
    batch_size: int = 128,
    schedule: Literal["constant", "cosine"] = "constant",
    betas: tuple[float, float] = ADAM_BETAS,
    learn_drop_prob: bool = False,
    start: Population | None = None,
    n_classes: int | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
    progress: bool | ProgressBar | None = None,
) -> Population:
    r"""The members, each trained by Adam on its own task, all as one tensor program.

    Member b minimises $\tfrac1N \sum_n E(\mathbf y_n, \widehat{\mathbf y}_n) + \sum_i \lambda_{bi} \|\mathbf M_i\|^2$
    on its standardised rows [GG16, eq:L:dropout], with $E = \tfrac12 \|\mathbf y - \widehat{\mathbf y}\|^2$ for the
    Gaussian and the negative log-likelihood for the others; a fresh mask for every row of every step. (Code that
    minimises the squared error without the ½ has the same minimiser at half its λ.)

    Args:
        tasks: The data sets; all with the same numbers of features and outputs.
        members: The networks, each with the index of its task.
        hidden: The widths of the hidden layers, common to all.
        likelihood: "gaussian", "heteroscedastic" (the network also gives $\log \sigma^2$) or "categorical".
        activation: "relu" or "tanh".
        batch_size: The number of rows per step, common to all. A task with fewer rows uses all of them at each step.
        schedule: "constant" learning rate, or "cosine" to zero over the member's own steps.
        betas: The decay rates of Adam's two moments.
        learn_drop_prob: Whether to learn each layer's drop probability (concrete dropout), starting from the member's.
            The entropy in the KL term is weighted by 1/(Nτ) with the member's precision (without one: 10 in standard
            units for the Gaussian), by 1/N for the other likelihoods.
        start: Networks to continue training from, one per member: their parameters and their standardisation. Adam
            is reset.
        n_classes: The number of classes, if the last ones may be absent from the tasks.
        device: "auto" (CUDA where there is one), "cpu", "cuda" ...
        dtype: The type of parameters and data.
        progress: Whether to show a bar; by default when standard error is a terminal. A given bar is advanced by the
            steps of every network.
    """
    head = head_of(likelihood)
    _check(tasks, members, hidden, activation, start)
    device = available_device(device)
    table = stacked_table(tasks, head, dtype, start=start, n_classes=n_classes)
    program = Program(
        table, members, hidden, head, activation, batch_size, schedule, learn_drop_prob, device, dtype, betas
    )
    if start is not None:
        _continue_from(start, program)
    stack, trained = program.stack, [values.clone() for values in program.networks]
    diverged = torch.zeros(len(members), dtype=torch.bool, device=device)
    # The steps of each member, and which members are in the stack, are on the host: nothing waits for the device.
    n_steps, stacked, step = stack.n_steps.long().cpu(), torch.arange(len(members)), 0
    title, total = f"{len(members)} networks", int(n_steps.sum())
    with tensor_cores(device), flush_denormals(), contextlib.ExitStack() as own:
        bar = progress  # a given one stays open
        if not isinstance(bar, ProgressBar):
            bar = own.enter_context(ProgressBar(title, total, unit="network steps", show=bar))
        while bool((training := n_steps[stacked] > step).any()):
            chunk_end = (step // randomness.STEPS_PER_CHUNK + 1) * randomness.STEPS_PER_CHUNK
            end = min(int(n_steps[stacked[training]].min()), chunk_end)
            program.run(step, end)
            bar.advance((end - step) * int(training.sum()))
            step = end
            stacked = _retire(program, trained, diverged, stacked, n_steps[stacked] - step)
    moments = {name: values[[m.task for m in members]].to(device) for name, values in table.moments.items()}
    y_scale = moments["y_scale"]
    given = y_scale.new_tensor([float("nan") if m.precision is None else m.precision for m in members])
    return Population(
        members=tuple(members),
        weights=tuple(trained[: program.n_layers]),
        biases=tuple(trained[program.n_layers : -1]),
        drop_prob=trained[-1],
        precision=torch.where(given.isnan()[:, None], y_scale**-2, given[:, None]),
        **moments,
        diverged=diverged,
        head=head,
        activation=activation,
    )


def train_in_jobs(
    tasks: Sequence[Task],
    members: Sequence[Member],
    *,
    n_jobs: int | None = None,
    start: Population | None = None,
    **settings: Any,
) -> Population:
    """The population that `train` returns, with members divided among workers; a member's bits do not depend on them.

    `n_jobs` is their number, as in joblib: -1 for all cores, None for one unless a `joblib.parallel_config` says
    otherwise. The other arguments are those of `train`.
    """
    import joblib

    # A single member would use another matrix routine than a stack, and differ in its last bits.
    if (n_shares := min(joblib.effective_n_jobs(n_jobs), len(members) // 2)) < 2:
        return train(tasks, members, start=start, **settings)
    shares = torch.arange(len(members)).tensor_split(n_shares)
    learn = joblib.delayed(functools.partial(train, tasks, **{**settings, "progress": False}))
    parts = [([members[i] for i in share], start and select(start, share)) for share in shares]
    return concatenate(joblib.Parallel(n_jobs=n_jobs)(learn(some, start=own) for some, own in parts))


def _check(
    tasks: Sequence[Task], members: Sequence[Member], hidden: Sequence[int], activation: str, start: Population | None
) -> None:
    if not members or not tasks:
        raise ValueError(f"`members` and `tasks` must not be empty; got {len(members)} and {len(tasks)}.")
    check_choice("activation", activation, ACTIVATIONS)
    if any(width < 1 for width in hidden):
        raise ValueError(f"`hidden` must hold positive widths; got {tuple(hidden)}.")
    if start is not None and len(start) != len(members):
        raise ValueError(f"`start` must hold one network for each of the {len(members)} members; got {len(start)}.")
    for number, member in enumerate(members):
        if not 0 <= member.task < len(tasks):
            raise ValueError(f"`members` must name a task below {len(tasks)}; member {number} names {member.task}.")
        if member.epochs < 1 or member.learning_rate <= 0 or member.weight_decay < 0 or member.seed < 0:
            rule = "epochs >= 1, learning_rate > 0, weight_decay >= 0 and seed >= 0"
            raise ValueError(f"`members` need {rule}; member {number} is {member}.")


def _continue_from(start: Population, program: Program) -> None:
    given, targets = (*start.weights, *start.biases), (*program.weights, *program.biases)
    if [values.shape for values in given] != [values.shape for values in targets]:
        rule, shapes = "networks of the same layers as those to train", [tuple(w.shape) for w in start.weights]
        got = f"its weights have the shapes {shapes}"
        raise ValueError(f"`start` must hold {rule}; {got}. Train from new weights instead.")
    for target, values in zip(targets, given, strict=True):
        target.copy_(values)
    for weight, kept in zip(program.weights, program.kept.unbind(1), strict=True):
        weight.div_(kept[:, None, None])
    program.weights[0].mul_(program.stack.relevance[..., None] > 0)


def _retire(program: Program, trained: Sequence[Tensor], diverged: Tensor, stacked: Tensor, left: Tensor) -> Tensor:
    """Stores the members that have no step left, or marks them as diverged, and shrinks a stack that is idle enough."""
    done, training = left == 0, left > 0
    if bool(done.any()):
        finite = torch.stack([(v.flatten(1).abs() < _MAX_WEIGHT).all(1) for v in program.parameters]).all(0).cpu()
        diverged[stacked[done & ~finite]] = True
        done = done & finite
        members, source = stacked[done].to(diverged.device), done.to(diverged.device)
        for target, values in zip(trained, program.networks, strict=True):
            target[members] = values[source]
    if 0 < int(training.sum()) <= (1 - _IDLE_SHARE) * len(training):
        program.keep(training.nonzero()[:, 0].to(diverged.device))
        return stacked[training]
    return stacked
