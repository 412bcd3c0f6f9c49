r"""The heads of a population's networks: how outputs, of every member at once, become a likelihood."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from dropbayes.runtime.validation import check_choice, finite_tensor, to_tensor


class Head:
    """A likelihood for training and evaluating a population: Gaussian noise of constant precision τ, unless overridden.

    Half the squared error is the data term over τ [GG16, eq:L:GP-MC-reg].
    """

    name: ClassVar[str] = "gaussian"
    has_noise: ClassVar[bool] = True  #: Whether targets are numbers, standardised, with a noise whose τ can be fitted.
    per_output: ClassVar[int] = 1  #: The units of the last layer for each output (or class).

    def columns(self, y: Any) -> Tensor:
        """Targets as `[row, output]`."""
        column = finite_tensor("y", y).double()
        column = column[:, None] if column.dim() == 1 else column
        if column.dim() != 2:
            raise ValueError(f"`y` must be [row] or [row, output]; got the shape {tuple(column.shape)}.")
        return column

    def loss_gradient(self, output: Tensor, y: Tensor) -> Tensor:
        """The gradient of each row's data term with respect to its outputs."""
        return output - y

    def in_units(self, output: Tensor, shift: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The conditional mean and variance in the units of y, of mean `shift` and noise variance τ⁻¹ `noise`."""
        return output * scale + shift, noise.expand_as(output)

    def log_density(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        r"""$\log p(\mathbf y \mid \widehat{\mathbf y})$ of each row, over all outputs, in the units of y."""
        return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).sum(-1)


class HeteroscedasticHead(Head):
    r"""Gaussian noise whose log-variance is a second output of the network; τ⁻¹ scales its variance."""

    name = "heteroscedastic"
    per_output = 2

    def loss_gradient(self, output: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = output.chunk(2, dim=-1)
        error, precision = mean - y, torch.exp(-log_variance)
        return torch.cat([error * precision, 0.5 * (1 - error.square() * precision)], -1)

    def in_units(self, output: Tensor, shift: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = output.chunk(2, dim=-1)
        return mean * scale + shift, log_variance.exp() * noise


class CategoricalHead(Head):
    """Classes, whose logits are the outputs."""

    name = "categorical"
    has_noise = False

    def columns(self, y: Any) -> Tensor:
        column = to_tensor(y, name="y")
        whole = not column.is_floating_point() and column.dtype != torch.bool and not column.is_complex()
        column = column[:, 0] if column.dim() == 2 and column.shape[1] == 1 else column
        if column.dim() != 1 or not whole or (len(column) and int(column.min()) < 0):
            rule, got = "hold class numbers from 0, as integers [row]", f"{column.dtype} of shape {tuple(column.shape)}"
            raise ValueError(f"`y` must {rule}; got {got}. Take the argmax of one-hot rows.")
        return column[:, None].long()

    def loss_gradient(self, output: Tensor, y: Tensor) -> Tensor:
        probabilities = output.mT.softmax(1).mT.contiguous()  # along the rows: a sixth of the time for a few classes
        return probabilities.scatter_add_(-1, y, -torch.ones_like(probabilities[..., :1]))

    def in_units(self, output: Tensor, shift: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = output.softmax(-1)
        return probabilities, probabilities * (1 - probabilities)

    def log_density(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        return mean.log().gather(-1, y.expand(*mean.shape[:-1], 1))[..., 0]


HEADS: dict[str, Head] = {head.name: head for head in (Head(), HeteroscedasticHead(), CategoricalHead())}


def head_of(likelihood: str) -> Head:
    check_choice("likelihood", likelihood, HEADS)
    return HEADS[likelihood]
