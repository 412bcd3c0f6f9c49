r"""One step of training: a batch of rows, its objective, its gradients, as a CUDA graph where that pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Likelihood
from dropbayes.objective import kl_divergence
from dropbayes.precision import Prior
from dropbayes.runtime.devices import capture_graph
from dropbayes.weight_layers import kl_coefficients

# Larger networks keep the device busy by themselves; larger data stay on the host and travel batch by batch.
_GRAPH_PARAMETERS, _RESIDENT_BYTES = 20_000_000, 2**31


def _pick(x: Any, rows: Tensor | slice) -> Any:
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, Mapping):
        return {name: part[rows] for name, part in x.items()}
    return tuple(part[rows] for part in x)


def tensors_of(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)


def moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, Mapping):
        return {name: part.to(device) for name, part in x.items()}
    return tuple(part.to(device) for part in x)


def output_of(net: nn.Module, x: Any) -> Tensor:
    result = net(x) if isinstance(x, Tensor) else net(**x) if isinstance(x, Mapping) else net(*x)
    return result if isinstance(result, Tensor) else result.logits


@dataclass(eq=False)
class Rows:
    """The training rows, on the device when they fit there."""

    x: Any
    y: Tensor
    weight: Tensor | None
    device: torch.device

    def __post_init__(self) -> None:
        parts = [*tensors_of(self.x), self.y]
        if any(len(part) != len(self.y) for part in parts):
            raise ValueError(f"`x` and `y` must have the same number of rows; got {[len(part) for part in parts]}.")
        if sum(part.nbytes for part in parts) <= _RESIDENT_BYTES:
            self.x, self.y = moved(self.x, self.device), self.y.to(self.device)
        if self.weight is not None:
            self.weight = (self.weight / self.weight.double().mean()).to(self.device, torch.float32)

    def batch(self, rows: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """The numbered rows, on the device."""
        near = rows.to(self.y.device)
        weight = None if self.weight is None else self.weight[rows.to(self.device)]
        return moved(_pick(self.x, near), self.device), self.y[near].to(self.device), weight


def batch_objective(
    net: nn.Module, likelihood: Likelihood, prior: Prior, keep_probs: Mapping[str, float] | None, n_data: int
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    r"""The negative evidence lower bound per row as a function of a batch's outputs; see `objective.negative_elbo`."""
    coefficients = kl_coefficients(net, prior=prior, keep_probs=keep_probs)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    pairs = [(0.5 * c / n_data, parameters[name]) for name, c in coefficients.items() if c]
    stated = any(hasattr(module, "kl") for module in net.modules())  # layers that know their own divergence

    def loss(output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        density = likelihood.log_density(output, y)
        misfit = -(density if weight is None else density * weight).mean()
        if stated:
            return misfit + kl_divergence(net, prior=prior, keep_probs=keep_probs) / n_data
        return torch.stack([misfit, *(c * parameter.square().sum() for c, parameter in pairs)]).sum()

    return loss


def wants_graph(net: nn.Module, cuda_graph: bool | None, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return sum(p.numel() for p in net.parameters()) <= _GRAPH_PARAMETERS if cuda_graph is None else cuda_graph


@dataclass(eq=False)
class Step:
    """The forward and backward pass of a batch: gradients into the parameters, the loss returned."""

    net: nn.Module
    objective: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    scale: float
    rows: Rows
    autocast: torch.dtype | None
    graphed: bool
    demanded: bool
    replay: dict[tuple[int, ...], Callable[[Any, Tensor, Tensor | None], Tensor]] = field(default_factory=dict)

    def __call__(self, chosen: Tensor) -> Tensor:
        x, y, weight = self.rows.batch(chosen)
        if not self.graphed:
            return self._eager(x, y, weight)
        shape = tuple(y.shape)
        if shape not in self.replay:
            try:
                self.replay[shape] = self._captured(x, y, weight)
            except RuntimeError:
                if self.demanded:
                    raise
                self.graphed = False  # the network synchronises with the host, or its shapes depend on data
                return self._eager(x, y, weight)
        return self.replay[shape](x, y, weight)

    def _eager(self, x: Any, y: Tensor, weight: Tensor | None) -> Tensor:
        self.net.zero_grad(set_to_none=True)
        with torch.autocast(y.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = output_of(self.net, x)
        loss = self.objective(output.float() if self.autocast else output, y, weight)
        (loss * self.scale).backward()
        return loss.detach()

    def _captured(self, x: Any, y: Tensor, weight: Tensor | None) -> Any:
        """The pass as a CUDA graph that reads from tensors of fixed address."""
        static = (moved(_cloned(x), y.device), y.clone(), None if weight is None else weight.clone())
        graph, loss = capture_graph(lambda: self._eager(*static), list(self.net.buffers()), y.device)
        gradients = [(p, p.grad) for p in self.net.parameters()]

        def replay(x: Any, y: Tensor, weight: Tensor | None) -> Tensor:
            for target, values in zip(tensors_of(static[0]), tensors_of(x), strict=True):
                target.copy_(values)
            static[1].copy_(y)
            if weight is not None and static[2] is not None:
                static[2].copy_(weight)
            graph.replay()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            return loss.clone()

        return replay


def _cloned(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return {k: v.clone() for k, v in x.items()} if isinstance(x, Mapping) else tuple(v.clone() for v in x)


def run_epoch(
    step: Step,
    descent: torch.optim.Optimizer,
    base_rates: list[float],
    schedule: Callable[[int], float] | None,
    n_rows: int,
    batch_size: int,
    epoch: int,
) -> float:
    """One pass over the rows; the mean loss of its batches."""
    order = torch.randperm(n_rows)
    total: Tensor | None = None
    n_batches = math.ceil(n_rows / batch_size)
    for number, chosen in enumerate(order.split(batch_size)):
        if schedule is not None:
            factor = schedule(epoch * n_batches + number)
            for group, rate in zip(descent.param_groups, base_rates, strict=True):
                group["lr"] = rate * factor
        loss = step(chosen)
        descent.step()
        total = loss if total is None else total + loss
    return float(total) / n_batches if total is not None else math.nan


def made_optimizer(
    net: nn.Module, optimizer: str | torch.optim.Optimizer, learning_rate: float, momentum: float
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"`learning_rate` must be a positive number; got {learning_rate!r}.")
    if optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=learning_rate, fused=True)
    if optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=momentum, fused=True)
    raise ValueError(f"`optimizer` must be 'adam', 'sgd' or a torch optimiser; got {optimizer!r}.")
