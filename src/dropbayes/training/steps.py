r"""One step of training: the objective of a batch and its gradients, as a CUDA graph for small networks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dropbayes.layers import Prior
from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.runtime.devices import capture_graph
from dropbayes.training.objective import divergence_of, row_misfit
from dropbayes.training.rows import Batch, Rows

GRAPH_PARAMETERS = 20_000_000  # larger networks saturate a CUDA device without a graph

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


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


def batch_loss(
    net: nn.Module,
    likelihood: Callable[[], Likelihood],
    prior: Prior,
    keep_probs: Mapping[str, float] | None,
    n_data: float,
    alpha: float = 0.0,
) -> Loss:
    r"""The negative evidence lower bound per row as a function of a batch's outputs; see `negative_elbo`.

    With weights $w_n$ of the rows, N is their sum: the bound is that of a data set in which row n occurs $w_n$ times.
    """
    divergence = divergence_of(net, prior=prior, keep_probs=keep_probs)

    def loss(output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        misfit = row_misfit(likelihood(), output, y, alpha=alpha)
        return (misfit if weight is None else misfit * weight).mean() + divergence() / n_data

    return loss


@dataclass(eq=False)
class Step:
    """The forward and backward pass of a batch: gradients into the parameters, the loss returned."""

    net: nn.Module
    loss: Loss
    scale: float  # the factor on the loss before its gradient is taken
    graphed: bool = False  # whether to replay a CUDA graph, if the network can be captured
    n_draws: int = 1  # of the network per step, stacked on a first axis where there are several
    replays: dict[tuple[torch.Size, ...], Callable[[Batch], Tensor]] = field(default_factory=dict)

    def __call__(self, batch: Batch) -> Tensor:
        if not self.graphed:
            return self._eager(batch)
        shapes = tuple(tensor.shape for tensor in batch.tensors)
        if shapes not in self.replays:
            try:
                self.replays[shapes] = self._capture_step(batch)
            except RuntimeError:
                self.graphed = False  # the network synchronises with the host, or its shapes depend on data
        # Not in the handler: its traceback would keep the graph of the side stream alive.
        return self.replays[shapes](batch) if self.graphed else self._eager(batch)

    def _eager(self, batch: Batch) -> Tensor:
        self.net.zero_grad(set_to_none=True)
        output = batch.output(self.net)
        if self.n_draws > 1:
            output = torch.stack([output, *(batch.output(self.net) for _ in range(self.n_draws - 1))])
        loss = self.loss(output, batch.y, batch.weight)
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
    step: Step,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    *,
    base_rates: list[float],
    schedule: Callable[[int], float] | None,
    epoch: int,
) -> float:
    """One pass over the rows; the mean loss of its batches."""
    losses: list[Tensor] = []
    for number, batch in enumerate(rows.epoch()):
        if schedule is not None:
            factor = schedule(epoch * rows.n_batches + number)
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * factor
        if not step.graphed:  # a graph writes the gradients anew
            optimizer.zero_grad(set_to_none=True)  # also the precision, which is no parameter of the network
        losses.append(step(batch))
        optimizer.step()
    return float(sum(losses[1:], losses[0])) / len(losses)
