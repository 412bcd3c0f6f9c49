r"""The standardised rows of all tasks, concatenated in one table."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.population.heads import Head
from dropbayes.population.records import Population, Task
from dropbayes.runtime.validation import row_weights

_CONSTANT = 1e-10  # a column whose deviation is this small relative to its mean varies by rounding errors only
MOMENTS = ("x_mean", "x_scale", "y_mean", "y_scale")


@dataclass(frozen=True, eq=False)
class Table:
    """The concatenated standardised training rows of all tasks, followed by one padding row of weight 0."""

    x: Tensor
    y: Tensor
    weight: Tensor  # with mean 1 in each task
    first: list[int]  # the index of each task's first row
    n_rows: list[int]  # of each task
    n_outputs: int  # or classes
    moments: dict[str, Tensor]  # the standardisation, by the names of `MOMENTS`, one entry per task


def moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean and deviation of each column; the scale of a constant column is 1, or more for a huge one."""
    unit = values.abs().amax(0)  # in which squares of very large or small numbers stay in the range of floats
    unit = torch.where(unit > 0, unit, 1.0)
    share = (weight / weight.sum())[:, None]
    scaled = values / unit
    mean = (share * scaled).sum(0)
    scale = (share * (scaled - mean).square()).sum(0).sqrt()
    rounding = 1024 * torch.finfo(torch.float64).eps * unit  # units in which a huge constant still has three digits
    return mean * unit, torch.where(scale <= _CONSTANT, rounding.clamp_min(1.0), scale * unit)


def stacked_table(
    tasks: Sequence[Task], head: Head, dtype: torch.dtype, *, start: Population | None, n_classes: int | None
) -> Table:
    """The table of all tasks' rows, each task standardised by its own (weighted) moments or those of its start."""
    columns = [_task_columns(task, number, head) for number, task in enumerate(tasks)]
    if len(widths := {(x.shape[1], y.shape[1]) for x, y, _ in columns}) > 1:
        rule = "of one population must share their numbers of features and outputs"
        raise ValueError(f"`tasks` {rule}; got {sorted(widths)}. Train one population for each.")
    if start is not None and start.x_mean.shape[1] != (n_features := columns[0][0].shape[1]):
        raise ValueError(f"`start` holds networks of {start.x_mean.shape[1]} features; the tasks have {n_features}.")
    rows, standard = [], []
    for number, (x, y, weight) in enumerate(columns):
        if start is None:
            neutral = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
            own = [*moments(x, weight), *(moments(y, weight) if head.has_noise else neutral)]
        else:
            member = next((i for i, m in enumerate(start.members) if m.task == number), 0)  # no member: any will do
            own = [getattr(start, name)[member].cpu() for name in MOMENTS]
        x_mean, x_scale, y_mean, y_scale = own
        y = ((y - y_mean) / y_scale).to(dtype) if head.has_noise else y
        rows.append((((x - x_mean) / x_scale).to(dtype), y, (weight / weight.mean()).to(dtype)))
        standard.append(own)
    n_rows = [len(x) for x, _, _ in columns]
    x, y, weight = (torch.cat([*parts, torch.zeros_like(parts[0][:1])]) for parts in zip(*rows, strict=True))
    n_outputs = y.shape[1] if head.has_noise else n_classes or int(y.max()) + 1
    stacked = {name: torch.stack(values) for name, values in zip(MOMENTS, zip(*standard, strict=True), strict=True)}
    return Table(x, y, weight, [0, *itertools.accumulate(n_rows)][:-1], n_rows, n_outputs, stacked)


def _task_columns(task: Task, number: int, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    x, y = torch.as_tensor(task.x).double(), head.columns(task.y)
    if x.dim() != 2 or len(x) != len(y) or not len(x):
        rule = "must hold x [row, feature] and y with as many rows, at least one"
        raise ValueError(f"`tasks` {rule}; task {number} has x {tuple(x.shape)} and y {tuple(y.shape)}.")
    return x, y, row_weights(task.weight, len(x), name="weight")
