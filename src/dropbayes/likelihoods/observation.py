r"""The interface of observation models $p(\mathbf y \mid \widehat{\mathbf y})$, and the validation of targets."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.utils._pytree import PyTree


class Likelihood(ABC):
    r"""A distribution of one observation given the network's output, $p(\mathbf y \mid \widehat{\mathbf y})$."""

    @abstractmethod
    def mean(self, output: Tensor) -> Tensor:
        r"""The conditional mean $\mathbb{E}[\mathbf y \mid \widehat{\mathbf y}]$ (for classes: their probabilities)."""

    @abstractmethod
    def variance(self, output: Tensor) -> Tensor:
        r"""The conditional variance of each element of $\mathbf y$, shaped like `mean(output)`."""

    @abstractmethod
    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        r"""The log-density $\log p(\mathbf y \mid \widehat{\mathbf y})$, one value per (draw,) row: `[..., row]`."""

    @abstractmethod
    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""One observation drawn from $p(\mathbf y \mid \widehat{\mathbf y})$ for each element of `output`."""

    def for_output(self, n_axes: int) -> Self:
        """This likelihood for outputs of `n_axes` axes, rows first, whatever axes of draws come before them."""
        return self

    def check(self, output: Tensor, y: Tensor | None = None) -> None:  # noqa: B027 - most accept any values
        """Raises ValueError, or warns, if the values of `output` or `y` do not suit this likelihood.

        `log_density` checks shapes only, so that a training step never waits for the device.
        """


class ClassLikelihood(Likelihood):
    """A distribution over classes, which has an entropy and a most probable class."""

    def variance(self, output: Tensor) -> Tensor:
        probabilities = self.mean(output)
        return probabilities * (1 - probabilities)

    @abstractmethod
    def class_probabilities(self, mean: Tensor) -> Tensor:
        """The probability of each class along a new last axis, `[..., row, *event, class]`, from `mean(output)`."""


def sum_events(density: Tensor, y: Tensor) -> Tensor:
    """Sums out the event axes: all axes of `y` after its row axis."""
    return density.flatten(start_dim=density.dim() - y.dim() + 1).sum(-1) if y.dim() > 1 else density


def checked_targets(output: Tensor, y: Tensor) -> Tensor:
    """The targets `y`, which must have the shape of the output's rows; truth values as numbers."""
    # A (rows, 1) output against (rows,) targets would broadcast to rows x rows.
    if output.dim() < y.dim() or output.shape[output.dim() - y.dim() :] != y.shape:
        rows = tuple(output.shape[max(0, output.dim() - max(y.dim(), 2)) :])  # without the axis of draws
        got = f"y {tuple(y.shape)} against output {rows}"
        remedy = "Reshape y (y[:, None] for a one-column output) or squeeze the output"
        raise ValueError(f"`y` must have the shape of the network's output for its rows; got {got}. {remedy}.")
    return y.to(output.dtype) if y.dtype == torch.bool else y


def output_tensor(output: PyTree) -> Tensor:
    """The one tensor of a network's output that a likelihood reads: the output itself, or its `logits`."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        got = f"{type(output).__name__}. Wrap the network so that it returns the tensor the likelihood reads"
        raise TypeError(f"`net` must return a tensor or an output with `logits`; got {got}.")
    return logits
