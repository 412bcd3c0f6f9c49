r"""The settings of `fit`, grouped by topic, and the keyword arguments that set single fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, TypeVar

import torch

from dropbayes.runtime.arrays import Array
from dropbayes.training.checkpoints import Checkpoint
from dropbayes.training.descent import Descent, Schedule
from dropbayes.training.stopping import EarlyStopping

__all__ = ["Bound", "FitOptions", "FitSettings", "settings_of"]

Record = TypeVar("Record", "Bound", Descent, EarlyStopping)


@dataclass(frozen=True)
class Bound:
    r"""Which bound on the evidence is optimised.

    Args:
        alpha: The α of an α-divergence in [0, 1] (Li and Gal 2017), estimated with ten draws per step; 0 is the
            evidence lower bound. See `negative_elbo`.
        keep_probs: Keep probabilities by module name, which override those traced on the first rows.
        learn_precision: Whether the τ of a `Gaussian` is trained with the network, starting from its value. The τ of
            the returned weights is `history.precision[history.best_epoch - 1]`.

    Example:
        >>> Bound(alpha=0.5).learn_precision
        False
    """

    alpha: float = 0.0
    keep_probs: Mapping[str, float] | None = None
    learn_precision: bool = False


class FitOptions(TypedDict, total=False):
    """The fields of `Bound`, `Descent` and `EarlyStopping`, as keyword arguments of `fit`, and two earlier names."""

    alpha: float
    keep_probs: Mapping[str, float] | None
    learn_precision: bool
    optimizer: Literal["adam", "sgd"] | torch.optim.Optimizer
    learning_rate: float
    momentum: float
    schedule: Schedule | None
    autocast: torch.dtype | None
    cuda_graph: bool | None
    held_out: Any
    patience: int
    n_draws: int
    checkpoint_every: int  # of `Checkpoint(every=)`
    weight: Array  # of `sample_weight`


@dataclass(frozen=True, eq=False)
class FitSettings:
    """The groups of settings, with the keyword arguments merged in."""

    bound: Bound
    descent: Descent
    stopping: EarlyStopping
    checkpoint: Checkpoint | None
    sample_weight: Array | None


def settings_of(
    bound: Bound | None,
    descent: Descent | None,
    stopping: EarlyStopping | None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None,
    sample_weight: Array | None,
    options: Mapping[str, Any],
) -> FitSettings:
    """The settings of a call of `fit`.

    Raises:
        TypeError: An option is a field of no group.
    """
    remaining = dict(options)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    every = Checkpoint("", every=remaining.pop("checkpoint_every", 1)).every
    settings = FitSettings(
        _with_fields(bound or Bound(), remaining),
        _with_fields(descent or Descent(), remaining),
        _with_fields(stopping or EarlyStopping(), remaining),
        checkpoint and replace(checkpoint, every=max(every, checkpoint.every)),
        remaining.pop("weight", sample_weight),
    )
    if remaining:
        raise TypeError(f"fit() got an unexpected keyword argument {next(iter(remaining))!r}")
    return settings


def _with_fields(record: Record, options: dict[str, Any]) -> Record:
    """The record with its fields updated from the options, which are removed there."""
    names = [field.name for field in fields(record) if field.name in options]
    return replace(record, **{name: options.pop(name) for name in names})
