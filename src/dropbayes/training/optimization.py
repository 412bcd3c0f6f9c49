r"""How the objective is minimised and until when: optimiser, learning rate, schedule, early stopping."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from dropbayes.likelihoods import Likelihood
from dropbayes.runtime.validation import check_count, check_positive, check_probability
from dropbayes.sampling import draws, is_stochastic, output_tensor
from dropbayes.training.rows import Rows, training_rows


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
class Optimization:
    """The settings of the optimisation.

    Args:
        optimizer: "adam", "sgd" (with `momentum`), or an optimiser built for this network's parameters.
        learning_rate: The base learning rate of "adam" and "sgd"; an optimiser object keeps its own.
        momentum: The momentum of "sgd".
        schedule: The factor on the base rate at each iteration, such as `InverseDecay(gamma=1e-4, power=0.25)`.

    Example:
        >>> Optimization("sgd", learning_rate=0.1).momentum
        0.9
    """

    optimizer: Literal["adam", "sgd"] | torch.optim.Optimizer = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.optimizer, torch.optim.Optimizer) or self.optimizer in ("adam", "sgd")):
            raise ValueError(f"`optimizer` must be 'adam', 'sgd' or a torch optimiser; got {self.optimizer!r}.")
        check_positive("learning_rate", self.learning_rate)
        check_probability("momentum", self.momentum, closed=True)
        if self.schedule is not None and not callable(self.schedule):
            raise ValueError(
                f"`schedule` must be a function of the iteration; got {self.schedule!r}. Try InverseDecay(...)."
            )

    def optimizer_of(self, net: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of the network's parameters.

        Raises:
            ValueError: The given optimiser holds parameters of another network, or decays them.
        """
        if self.optimizer == "adam":
            return torch.optim.Adam(net.parameters(), lr=self.learning_rate, fused=True)
        if self.optimizer == "sgd":
            return torch.optim.SGD(net.parameters(), lr=self.learning_rate, momentum=self.momentum, fused=True)
        assert isinstance(self.optimizer, torch.optim.Optimizer)
        ours = {id(parameter) for parameter in net.parameters()}
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in ours for parameter in held)
        if foreign or not held:
            raise ValueError(
                f"`optimizer` must hold parameters of `net`; {foreign} of its {len(held)} belong to another network. "
                "Build it from net.parameters() after the network has its final form."
            )
        decays = {group["weight_decay"] for group in self.optimizer.param_groups if group.get("weight_decay")}
        if decays:
            raise ValueError(
                f"`optimizer` must not decay weights, which the prior's divergence in the objective does already; got "
                f"weight_decay={max(decays):g}. Build it with weight_decay=0 and set `prior`."
            )
        return self.optimizer


@contextlib.contextmanager
def borrowed(
    optimizer: torch.optim.Optimizer, log_precision: nn.Parameter | None
) -> Iterator[tuple[torch.optim.Optimizer, list[float]]]:
    """Yields the optimiser and its base learning rates, with a group for the precision; all is as before at the end."""
    if log_precision is not None:
        optimizer.add_param_group({"params": [log_precision], "weight_decay": 0.0})
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        yield optimizer, rates
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if log_precision is not None:
            optimizer.param_groups.pop()


@dataclass(frozen=True, eq=False)
class EarlyStopping:
    """The criterion of early stopping. The network is then restored to its best epoch.

    Args:
        held_out: `(x, y)` of the rows whose predictive log-likelihood is monitored, or a DataLoader of pairs; None for
            no early stopping.
        patience: The number of epochs without improvement after which training stops.
        n_draws: The number of draws per held-out row.

    Example:
        >>> EarlyStopping(patience=20).n_draws
        32
    """

    held_out: Any = None
    patience: int = 10
    n_draws: int = 32

    def __post_init__(self) -> None:
        check_count("patience", self.patience)
        check_count("n_draws", self.n_draws)

    def rows(self, net: nn.Module, device: torch.device) -> Rows | None:
        """The held-out rows on the device; None without early stopping."""
        if self.held_out is None:
            return None
        parts = self.held_out if isinstance(self.held_out, (tuple, list)) else (self.held_out, None)
        if len(parts) != 2:
            raise ValueError(f"`held_out` must be a pair (x, y) or a DataLoader of pairs; got {len(parts)} parts.")
        return training_rows(*parts, net=net, device=device, batch_size=1, name="held_out")


@torch.no_grad()
def held_out_score(net: nn.Module, rows: Rows, likelihood: Likelihood, n_draws: int, seed: int, epoch: int) -> float:
    r"""The mean of $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist]."""
    net.eval()
    total = 0.0
    for batch in rows.pass_through():
        if is_stochastic(net, batch.arguments):  # the same masks at every check, so that scores are comparable
            sampled = output_tensor(draws(net, batch.arguments, n_draws=n_draws, seed=seed, masks="row"))
        else:
            sampled = batch.output(net)[None]
        densities = likelihood.log_density(sampled, batch.y).double()
        total += float((densities.logsumexp(0) - math.log(len(densities))).sum())
    if math.isnan(total):
        raise FloatingPointError(
            f"the held-out log-likelihood is NaN in epoch {epoch + 1}: no epoch could be called the best. Look for NaN "
            "or extreme values in the inputs of `held_out`."
        )
    return total / rows.n_rows
