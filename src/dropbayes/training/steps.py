r"""One step of training: the objective of a batch and its gradients, as a CUDA graph for small networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.runtime.devices import capture_graph
from dropbayes.training.objective import row_misfit
from dropbayes.training.rows import Batch, Rows

GRAPH_PARAMETERS = 20_000_000  # larger networks saturate a CUDA device without a graph


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
        if self.alpha:  # ten draws, as in Li and Gal (2017)
            output = torch.stack([batch.output(self.net) for _ in range(10)])
        else:
            output = batch.output(self.net)
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
