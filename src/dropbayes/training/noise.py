r"""The observation noise of a run: a fixed likelihood, or a Gaussian whose $\tau$ is trained with the network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from dropbayes.likelihoods import Gaussian, Likelihood

__all__ = ["ModelNoise"]


class ModelNoise:
    r"""The likelihood of a run; the optimiser updates $\log\tau$, so that $\tau$ stays positive.

    Args:
        likelihood: The likelihood, with the $\tau$ to start from.
        learned: Whether $\tau$ is trained; only a `Gaussian` has one.
        device: The training device.
    """

    def __init__(self, likelihood: Likelihood, learned: bool, device: torch.device) -> None:
        self.fixed, self.log_precision = likelihood, None
        if learned:
            if not isinstance(likelihood, Gaussian):
                raise ValueError(f"`learn_precision` needs a Gaussian likelihood; got {likelihood!r}.")
            start = torch.as_tensor(likelihood.precision, dtype=torch.get_default_dtype(), device=device)
            self.log_precision = nn.Parameter(start.detach().log())

    def likelihood(self) -> Likelihood:
        """The likelihood with the current precision."""
        return self.fixed if self.log_precision is None else Gaussian(self.log_precision.exp())

    @contextlib.contextmanager
    def precision_group(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
        """Yields the optimiser with a temporary parameter group for the precision."""
        if self.log_precision is None:
            yield optimizer
            return
        optimizer.add_param_group({"params": [self.log_precision], "weight_decay": 0.0})
        try:
            yield optimizer
        finally:
            optimizer.param_groups.pop()

    def values(self) -> list[float | list[float]]:
        r"""The current $\tau$, a list where every output has its own; empty if it is not learned."""
        return [] if self.log_precision is None else [self.log_precision.detach().double().exp().tolist()]

    def restore(self, history: list[float | list[float]]) -> None:
        """Restores the last precision of a history; as a float64 it holds every bit of the parameter."""
        if self.log_precision is not None and history:
            with torch.no_grad():
                self.log_precision.copy_(torch.tensor(history[-1], dtype=torch.float64).log())
