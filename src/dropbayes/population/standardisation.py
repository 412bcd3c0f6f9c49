r"""The standardised rows of all tasks, concatenated in one table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dropbayes.population.heads import Head
from dropbayes.population.records import Population, Task
from dropbayes.runtime.validation import row_weights

# A column whose deviation is this small relative to its mean varies by rounding errors only.
_CONSTANT = 1e-10


@dataclass(frozen=True, eq=False)
class Moments:
    """The centres and scales of inputs and targets: `[feature]` and `[output]`, or with a task axis before."""

    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor


@dataclass(frozen=True, eq=False)
class Table:
    """The concatenated standardised training rows of all tasks, followed by one padding row of weight 0.

    Attributes:
        x, y, weight: The rows; weights have mean 1 in each task.
        first: The index of each task's first row.
        n_rows: The number of rows of each task.
        moments: The standardisation, one entry per task.
        n_outputs: The number of outputs, or of classes.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    first: list[int]
    n_rows: list[int]
    moments: Moments
    n_outputs: int


def moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean and deviation of each column; the scale of a constant column is 1.

    Computed in units of the column's largest magnitude: squares of very large or small numbers leave the range of
    floats.
    """
    unit = values.abs().amax(0)
    unit = torch.where(unit > 0, unit, 1.0)
    share = (weight / weight.sum())[:, None]
    scaled = values / unit
    mean = (share * scaled).sum(0)
    scale = (share * (scaled - mean).square()).sum(0).sqrt()
    constant = scale <= _CONSTANT
    return mean * unit, torch.where(constant, 1.0, scale * unit)


def _task_columns(task: Task, number: int, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    x, y = torch.as_tensor(task.x).double(), head.columns(task.y)
    if x.dim() != 2 or len(x) != len(y) or not len(x):
        raise ValueError(
            f"`tasks` must hold x [row, feature] and y with as many rows, at least one; task {number} has x "
            f"{tuple(x.shape)} and y {tuple(y.shape)}."
        )
    return x, y, row_weights(task.weight, len(x), name="weight")


def stacked_table(
    tasks: Sequence[Task],
    head: Head,
    dtype: torch.dtype,
    *,
    start: Population | None = None,
    n_classes: int | None = None,
) -> Table:
    """The table of all tasks' rows, each task standardised by its own (weighted) moments or those of its start."""
    columns = [_task_columns(task, number, head) for number, task in enumerate(tasks)]
    widths = {(x.shape[1], y.shape[1]) for x, y, _ in columns}
    if len(widths) > 1:
        raise ValueError(
            "`tasks` of one population must share their numbers of features and outputs; got "
            f"{sorted(widths)}. Train one population for each."
        )
    if start is not None and start.x_mean.shape[1] != columns[0][0].shape[1]:
        raise ValueError(
            f"`start` holds networks of {start.x_mean.shape[1]} features; the tasks have {columns[0][0].shape[1]}."
        )
    standard = []
    for number, (x, y, weight) in enumerate(columns):
        if start is None:
            neutral = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
            standard.append(Moments(*moments(x, weight), *(moments(y, weight) if head.has_noise else neutral)))
        else:
            member = next((i for i, m in enumerate(start.members) if m.task == number), 0)  # no member: any will do
            standard.append(Moments(*(getattr(start, one.name)[member].cpu() for one in fields(Moments))))
    xs = [((x - m.x_mean) / m.x_scale).to(dtype) for (x, _, _), m in zip(columns, standard, strict=True)]
    ys = [y for _, y, _ in columns]
    n_outputs = max(head.n_outputs(y) for y in ys)
    if head.has_noise:
        ys = [((y - m.y_mean) / m.y_scale).to(dtype) for y, m in zip(ys, standard, strict=True)]
    weights = [(weight / weight.mean()).to(dtype) for _, _, weight in columns]
    n_rows = [len(x) for x in xs]
    return Table(
        x=torch.cat([*xs, xs[0].new_zeros(1, xs[0].shape[1])]),
        y=torch.cat([*ys, ys[0].new_zeros(1, ys[0].shape[1])]),
        weight=torch.cat([*weights, weights[0].new_zeros(1)]),
        first=[0, *itertools.accumulate(n_rows)][:-1],
        n_rows=n_rows,
        moments=Moments(*(torch.stack([getattr(m, one.name) for m in standard]) for one in fields(Moments))),
        n_outputs=n_outputs if n_classes is None or head.has_noise else n_classes,
    )
