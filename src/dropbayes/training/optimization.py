r"""How the objective is minimised and until when: optimiser, schedule, steps (as a CUDA graph), early stopping."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Gaussian, Likelihood, output_tensor, predictive_log_density
from dropbayes.runtime.devices import capture_graph
from dropbayes.runtime.validation import check_count, check_positive, check_probability
from dropbayes.sampling import draws, is_stochastic
from dropbayes.training.objective import row_misfit
from dropbayes.training.rows import Batch, Rows, training_rows

Schedule = Callable[[int], float]
GRAPH_PARAMETERS = 20_000_000  # larger networks saturate a CUDA device without a graph


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
        optimizer: "adam", "sgd" (with `momentum`), or an optimiser of this network's parameters, with its own rate.
        learning_rate: The base learning rate of "adam" and "sgd".
        momentum: The momentum of "sgd".
        schedule: The factor on the base rate at each iteration, such as `InverseDecay(gamma=1e-4, power=0.25)`.
    """

    optimizer: Literal["adam", "sgd"] | torch.optim.Optimizer = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.optimizer, torch.optim.Optimizer) or self.optimizer in ("adam", "sgd")):
            raise ValueError(f"`optimizer` must be 'adam', 'sgd' or a torch optimiser; got {self.optimizer!r}.")
        check_positive("learning_rate", self.learning_rate)
        check_probability("momentum", self.momentum, closed=True)
        if self.schedule is not None and not callable(self.schedule):
            raise ValueError(f"`schedule` must be a function, as InverseDecay(...) is; got {self.schedule!r}.")

    def optimizer_of(self, net: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of the network's parameters; a given one must hold no others, and not decay them."""
        if self.optimizer == "adam":
            return torch.optim.Adam(net.parameters(), lr=self.learning_rate, fused=True)
        if self.optimizer == "sgd":
            return torch.optim.SGD(net.parameters(), lr=self.learning_rate, momentum=self.momentum, fused=True)
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            kind = type(self.optimizer).__name__  # its closure would draw other masks at every call
            raise ValueError(f"`optimizer` must step by one gradient, without a closure; got {kind}. Use 'adam'.")
        ours = {id(parameter) for parameter in net.parameters()}
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in ours for parameter in held)
        if foreign or not held:
            got = f"{foreign} of its {len(held)} belong to another network"
            remedy = "Build it from net.parameters() after the network has its final form."
            raise ValueError(f"`optimizer` must hold parameters of `net`; {got}. {remedy}")
        if decay := max(group.get("weight_decay") or 0 for group in self.optimizer.param_groups):
            rule = "not decay weights, which the prior's divergence in the objective does already"
            remedy = "Build it with weight_decay=0 and set `prior`."
            raise ValueError(f"`optimizer` must {rule}; got weight_decay={decay:g}. {remedy}")
        return self.optimizer

    @contextlib.contextmanager
    def borrowed(
        self, net: nn.Module, log_precision: nn.Parameter | None
    ) -> Iterator[tuple[torch.optim.Optimizer, list[float]]]:
        """Yields the optimiser and its base rates, with a group for the precision; all is as before at the end."""
        optimizer = self.optimizer_of(net)
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
                optimizer.state.pop(log_precision, None)


class ModelNoise:
    r"""The likelihood of a run. A learned $\tau$ stays positive: the optimiser updates $\log\tau$."""

    def __init__(self, likelihood: Likelihood, learned: bool, device: torch.device) -> None:
        self.fixed, self.log_precision = likelihood, None
        if learned:
            if not isinstance(likelihood, Gaussian):
                raise ValueError(f"`learn_precision` needs a Gaussian likelihood; got {likelihood!r}.")
            start = torch.as_tensor(likelihood.precision, dtype=torch.get_default_dtype(), device=device)
            self.log_precision = nn.Parameter(start.detach().log())

    def likelihood(self) -> Likelihood:
        return self.fixed if self.log_precision is None else Gaussian(self.log_precision.exp())

    def values(self) -> list[float | list[float]]:
        r"""The current $\tau$, a list where every output has its own; empty if it is not learned."""
        return [] if self.log_precision is None else [self.log_precision.detach().double().exp().tolist()]

    def restore(self, history: list[float | list[float]]) -> None:
        """Restores the last precision of a history; as a float64 it holds every bit of the parameter."""
        if self.log_precision is not None and history:
            with torch.no_grad():
                self.log_precision.copy_(torch.tensor(history[-1], dtype=torch.float64, device="cpu").log())


@dataclass(eq=False)
class Step:
    r"""The forward and backward pass of a batch: gradients into the parameters, the loss of `negative_elbo` returned.

    With weights $w_n$ of the rows, N is their sum: the bound is that of a data set in which row n occurs $w_n$ times.
    """

    net: nn.Module
    likelihood: Callable[[], Likelihood]
    divergence: Callable[[], Tensor]
    n_data: float
    alpha: float
    scale: float  # the factor on the loss before its gradient is taken
    graphed: bool  # whether to replay a CUDA graph, if the network can be captured
    replays: dict[tuple[torch.Size, ...], Callable[[Batch], Tensor]] = field(default_factory=dict)

    def __call__(self, batch: Batch) -> Tensor:
        if not self.graphed:
            return self._eager(batch)
        if (shapes := tuple(tensor.shape for tensor in batch.tensors)) not in self.replays:
            try:
                self.replays[shapes] = self._capture_step(batch)
            except RuntimeError:
                self.graphed = False  # the network synchronises with the host, or its shapes depend on data
        # Not in the handler: its traceback would keep the graph of the side stream alive.
        return self.replays[shapes](batch) if self.graphed else self._eager(batch)

    def _eager(self, batch: Batch) -> Tensor:
        self.net.zero_grad(set_to_none=True)
        # For an α-divergence ten draws, as in Li and Gal (2017).
        output = torch.stack([batch.output(self.net) for _ in range(10)]) if self.alpha else batch.output(self.net)
        misfit = row_misfit(self.likelihood(), output, batch.y, alpha=self.alpha)
        misfit = misfit if batch.weight is None else misfit * batch.weight
        loss = misfit.mean() + self.divergence() / self.n_data
        (loss * self.scale).backward()
        return loss.detach()

    def _capture_step(self, batch: Batch) -> Callable[[Batch], Tensor]:
        """The pass as a CUDA graph that reads from tensors at fixed addresses."""
        fixed = batch.clone()
        graph, loss = capture_graph(lambda: self._eager(fixed), list(self.net.buffers()), batch.y.device)
        gradients = [(p, p.grad) for p in self.net.parameters()]

        def replay(batch: Batch) -> Tensor:
            for target, values in zip(fixed.tensors, batch.tensors, strict=True):
                target.copy_(values)
            graph.replay()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            return loss.clone()

        return replay


def run_epoch(
    step: Step, optimizer: torch.optim.Optimizer, rows: Rows, rates: list[float], schedule: Schedule | None, epoch: int
) -> float:
    """One pass over the rows; the mean loss of its batches."""
    losses: list[Tensor] = []
    for number, batch in enumerate(rows.epoch()):
        if schedule is not None:
            factor = schedule(iteration := epoch * rows.n_batches + number)
            check_positive(f"schedule({iteration})", factor, allow_zero=True)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        if not step.graphed:  # a graph writes the gradients anew
            optimizer.zero_grad(set_to_none=True)  # also the precision, which is no parameter of the network
        try:
            losses.append(step(batch))
        except ValueError as error:
            if len(batch.y) == 1 and "more than 1 value per channel" in str(error):
                rule = "leave no batch of a single row, of which the BatchNorm in `net` has no variance"
                raise ValueError(f"`batch_size` must {rule}; {rows.n_rows:,} rows leave one. Take another.") from None
            raise
        optimizer.step()
    return float(sum(losses[1:], losses[0])) / len(losses)


@dataclass(frozen=True, eq=False)
class EarlyStopping:
    """The criterion of early stopping: so many epochs of `patience` without a better predictive log-likelihood.

    That of the `held_out` rows `(x, y)`, or a DataLoader of pairs, from `n_draws` of each; None for no early stopping.
    The network is restored to its best epoch.
    """

    held_out: Any = None
    patience: int = 10
    n_draws: int = 32

    def __post_init__(self) -> None:
        check_count("patience", self.patience)
        check_count("n_draws", self.n_draws)

    def rows(self, net: nn.Module, device: torch.device) -> Rows | None:
        if self.held_out is None:
            return None
        parts = self.held_out if isinstance(self.held_out, (tuple, list)) else (self.held_out, None)
        if len(parts) != 2:
            raise ValueError(f"`held_out` must be a pair (x, y) or a DataLoader of pairs; got {len(parts)} parts.")
        return training_rows(*parts, net=net, device=device, batch_size=1, name="held_out")

    @torch.no_grad()
    def score(self, net: nn.Module, rows: Rows, likelihood: Likelihood, seed: int, epoch: int) -> float:
        r"""The mean of $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist]."""
        net.eval()
        total, n_rows = 0.0, 0  # a loader may leave some out
        for batch in rows.pass_through():
            if is_stochastic(net, batch.arguments):  # the same masks at every check, so that scores are comparable
                sampled = output_tensor(draws(net, batch.arguments, n_draws=self.n_draws, seed=seed, masks="row"))
            else:
                sampled = batch.output(net)[None]
            total += float(predictive_log_density(likelihood, sampled.double(), batch.y).sum())
            n_rows += len(batch.y)
        if math.isnan(total):
            reason = "look for NaN or extreme values in the inputs of `held_out`"
            raise FloatingPointError(f"the held-out log-likelihood is NaN in epoch {epoch + 1}: {reason}.")
        return total / n_rows
