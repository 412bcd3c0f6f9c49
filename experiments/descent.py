r"""The paper's long training of deep one-dimensional networks: full-batch descent with a million cheap steps.

A step writes its gradients out by hand: three stacked products and about thirty small operations, which on CUDA are
recorded once, several steps to a graph, and replayed. Nothing in a step waits for the host; the learning rate is
computed on the device.
"""

from __future__ import annotations

import math
import pathlib
import time
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.runtime import files
from dropbayes.runtime.devices import capture_graph, cpu_threads, tensor_cores
from dropbayes.runtime.progress import ProgressBar
from experiments.bands import network_bands
from experiments.datasets import Series
from experiments.record import Arrays, Record

__all__ = ["Network", "descend", "module", "network_stage"]

STEPS_PER_CALL = 10
"""Steps recorded in one CUDA graph, whose masks are drawn together."""
STEPS_PER_BLOCK = 5000
"""Steps between two checks for finite weights; a block's masks depend only on the seed and its index."""
BLOCKS_PER_CHECKPOINT = 10
ONE_THREAD_WIDTH = 256
"""Up to this width a second thread costs more than it saves: 20 times on a busy machine."""


@dataclass(frozen=True)
class Network:
    r"""A network with dropout after each hidden layer, and its descent, in the terms of the authors' files.

    The loss is $\frac{1}{2N}\sum_n (y_n - \widehat y_n)^2 + \frac w2 \|\theta\|^2$, biases included, the learning rate
    $\text{base}\,(1 + \gamma\,\text{iteration})^{-\text{power}}$, doubled for biases.
    """

    hidden_layers: int
    width: int
    activation: Literal["relu", "tanh"]
    drop_prob: float
    learning_rate: float
    weight_decay: float
    gamma: float = 1e-4
    power: float = 0.25
    momentum: float = 0.9


def module(network: Network, *, seed: int = 0) -> nn.Sequential:
    r"""The untrained network as a module: weights in $\pm\sqrt{3/\text{fan-in}}$, uniformly, and biases 0.

    Example:
        >>> net = module(Network(2, 8, "relu", 0.1, learning_rate=0.01, weight_decay=1e-6))
        >>> [type(layer).__name__ for layer in net][:3]
        ['Linear', 'ReLU', 'Dropout']
    """
    source = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for n_in in [1] + [network.width] * (network.hidden_layers - 1):
        layers += [nn.Linear(n_in, network.width), nn.ReLU() if network.activation == "relu" else nn.Tanh()]
        layers += [nn.Dropout(network.drop_prob)]
    net = nn.Sequential(*layers, nn.Linear(network.width, 1))
    for layer in net:
        if isinstance(layer, nn.Linear):
            bound = math.sqrt(3 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=source)
            nn.init.zeros_(layer.bias)
    return net


class Schedule(Protocol):
    """The settings of an experiment with such networks."""

    @property
    def n_steps(self) -> int: ...
    @property
    def n_draws(self) -> int: ...
    @property
    def n_grid(self) -> int: ...
    @property
    def seed(self) -> int: ...


def network_stage(
    name: str,
    network: Network,
    data: Series,
    positions: dict[str, Tensor],
    settings: Schedule,
    record: Record,
    *,
    device: torch.device,
) -> Arrays:
    """The bands of a network trained on the observed part of a series, and the seconds that training took.

    Args:
        name: The name of the stage.
        network: The network and its descent.
        data: The series.
        positions: The inputs to predict at, by name.
        settings: The numbers of steps, draws and points of the axis, and the seed.
        record: The record that keeps the stage.
        device: The device to train on.
    """

    def compute() -> Arrays:
        start = time.perf_counter()
        checkpoint = record.checkpoint(name)
        net = descend(
            network, data.x, data.y, n_steps=settings.n_steps, seed=settings.seed, device=device, checkpoint=checkpoint
        )
        seconds = np.array(time.perf_counter() - start)
        arrays = network_bands(net, positions, n_draws=settings.n_draws, device=device) | {"seconds": seconds}
        checkpoint.unlink(missing_ok=True)
        return arrays

    key = (network, settings.n_steps, settings.n_draws, settings.n_grid, settings.seed, data.source)
    return record.stage(name, compute, key=key)


def descend(
    network: Network,
    x: Tensor,
    y: Tensor,
    *,
    n_steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    checkpoint: pathlib.Path | None = None,
) -> nn.Sequential:
    """The trained network, on the CPU; with `checkpoint`, an interrupted run continues to the same weights.

    Args:
        network: The network and its descent.
        x: The inputs, `[row, 1]`.
        y: The targets, `[row, 1]`.
        n_steps: The number of steps; a multiple of `STEPS_PER_CALL`.
        seed: The seed of weights and masks.
        device: The device to train on.
        checkpoint: The file that stores the state.

    Raises:
        FloatingPointError: A weight is no longer finite.
    """
    if n_steps < 1 or n_steps % STEPS_PER_CALL:
        raise ValueError(f"`n_steps` must be a positive multiple of {STEPS_PER_CALL}; got {n_steps!r}.")
    device = torch.device(device)
    net = module(network, seed=seed)
    n_threads = 1 if network.width <= ONE_THREAD_WIDTH else torch.get_num_threads()
    random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with tensor_cores(device), cpu_threads(n_threads), random:
        program = _Program(network, net, x.to(device), y.to(device))
        stamp = repr((network, seed, tuple(x.shape), float(y.double().sum())))
        done = _resume(program, checkpoint, stamp)
        call = program.call
        if device.type == "cuda":
            call = capture_graph(program.call, list(program.state.values()), device)[0].replay
        n_blocks = math.ceil(n_steps / STEPS_PER_BLOCK)
        with ProgressBar(
            f"{network.activation} network", n_steps, unit="steps", initial=min(n_steps, done * STEPS_PER_BLOCK)
        ) as progress:
            for block in range(done, n_blocks):
                torch.manual_seed(seed * 1_000_003 + block)
                for _ in range(min(STEPS_PER_BLOCK, n_steps - block * STEPS_PER_BLOCK) // STEPS_PER_CALL):
                    call()
                    progress.advance(STEPS_PER_CALL)
                program.check_finite(block)
                if checkpoint is not None and ((block + 1) % BLOCKS_PER_CHECKPOINT == 0 or block + 1 == n_blocks):
                    _save(program, checkpoint, stamp, block + 1)
        program.store(net)
    return net.eval()


class _Program:
    """The step as a program over a few tensors at fixed addresses.

    The square matrices between hidden layers are one tensor `[layer, in, out]`; all other parameters one vector.
    """

    def __init__(self, network: Network, net: nn.Sequential, x: Tensor, y: Tensor) -> None:
        linear = [layer for layer in net if isinstance(layer, nn.Linear)]
        n_rows, width, n_hidden = len(x), network.width, network.hidden_layers
        device, dtype = x.device, x.dtype
        self.network, self.x, self.y = network, x, y[:, 0].contiguous()
        middle = [layer.weight.detach().T for layer in linear[1:-1]]
        self.square = torch.stack(middle).to(device, dtype) if middle else torch.empty(0, width, width, device=device)
        vectors = [linear[0].weight.detach()[:, 0], linear[-1].weight.detach()[0]]
        vectors += [layer.bias.detach() for layer in linear]
        self.rest = torch.cat(vectors).to(device, dtype)
        self.sizes = [width, width, n_hidden * width, 1]
        rates = [1.0, 1.0, 2.0, 2.0]  # a bias learns twice as fast
        self.rate_factors = torch.cat([x.new_full((n,), -r) for n, r in zip(self.sizes, rates, strict=True)])
        self.square_velocity, self.rest_velocity = torch.zeros_like(self.square), torch.zeros_like(self.rest)
        self.iteration = torch.zeros((), device=device, dtype=torch.float64)
        self.count = torch.arange(STEPS_PER_CALL, device=device, dtype=torch.float64)
        shape = (STEPS_PER_CALL, n_hidden, n_rows, width)
        # Four 16-bit words from each 64-bit random number: a unit is dropped when its word lies below the threshold.
        self.words = torch.empty((math.prod(shape) + 3) // 4, device=device, dtype=torch.int64)
        self.masks = torch.empty(shape, device=device, dtype=dtype)
        self.inputs = torch.empty(shape[1:], device=device, dtype=dtype)
        self.deltas = torch.empty_like(self.inputs)
        self.ones = x.new_ones(n_hidden, 1, n_rows)

    @property
    def state(self) -> dict[str, Tensor]:
        """The state that a step changes."""
        names = ("square", "rest", "square_velocity", "rest_velocity", "iteration")
        return {name: getattr(self, name) for name in names}

    def call(self) -> None:
        """`STEPS_PER_CALL` steps."""
        self.draw_masks()
        decay = (1 + self.network.gamma * (self.iteration + self.count)) ** -self.network.power
        rates = (self.network.learning_rate * decay).to(self.rest.dtype)
        for masks, rate in zip(self.masks, rates, strict=True):
            self.step(masks, rate)
        self.iteration += STEPS_PER_CALL

    def draw_masks(self) -> None:
        self.words.random_(-(2**63), None)
        threshold = round(self.network.drop_prob * 2**16) - 2**15
        words = self.words.view(torch.int16)[: self.masks.numel()].view(self.masks.shape)
        torch.mul(words >= threshold, 1 / (1 - self.network.drop_prob), out=self.masks)

    def step(self, masks: Tensor, rate: Tensor) -> None:
        """One step with the given masks `[layer, row, unit]`."""
        first, last, biases, last_bias = self.rest.split(self.sizes)
        n_hidden = self.network.hidden_layers
        biases = biases.view(n_hidden, -1)
        activate = torch.relu if self.network.activation == "relu" else torch.tanh
        active = []
        z = torch.addcmul(biases[0], self.x, first)
        for layer in range(n_hidden):
            active.append(activate(z))
            torch.mul(active[layer], masks[layer], out=self.inputs[layer])
            if layer + 1 < n_hidden:
                z = torch.addmm(biases[layer + 1], self.inputs[layer], self.square[layer])
        error = (torch.mv(self.inputs[-1], last) + last_bias - self.y) / len(self.y)
        upstream = error[:, None] * last
        for layer in reversed(range(n_hidden)):
            self._through_activation(upstream * masks[layer], active[layer], self.deltas[layer])
            if layer:
                upstream = self.deltas[layer] @ self.square[layer - 1].T
        of_biases = (self.ones @ self.deltas).flatten()  # a product: sums over an inner axis are slow on CPU
        gradient = torch.cat([self.x[:, 0] @ self.deltas[0], error @ self.inputs[-1], of_biases, error.sum()[None]])
        self._update(gradient, rate)

    def _through_activation(self, upstream: Tensor, active: Tensor, out: Tensor) -> None:
        if self.network.activation == "relu":
            torch.ops.aten.threshold_backward.grad_input(upstream, active, 0, grad_input=out)
        else:
            torch.ops.aten.tanh_backward.grad_input(upstream, active, grad_input=out)

    def _update(self, gradient: Tensor, rate: Tensor) -> None:
        """Velocity and parameters, as in `torch.optim.SGD`."""
        momentum, decay = self.network.momentum, self.network.weight_decay
        if len(self.square):
            self.square_velocity.baddbmm_(self.inputs[:-1].mT, self.deltas[1:], beta=momentum)
            self.square_velocity.add_(self.square, alpha=decay)
            self.square.addcmul_(self.square_velocity, -rate)
        self.rest_velocity.mul_(momentum).add_(gradient).add_(self.rest, alpha=decay)
        self.rest.addcmul_(self.rest_velocity, self.rate_factors * rate)

    def check_finite(self, block: int) -> None:
        if not all(bool(value.isfinite().all()) for value in self.state.values()):
            raise FloatingPointError(
                f"Training diverged within {(block + 1) * STEPS_PER_BLOCK} steps at a learning rate of "
                f"{self.network.learning_rate}. Take a lower one."
            )

    def store(self, net: nn.Sequential) -> None:
        """Copies the parameters into the module."""
        first, last, biases, last_bias = self.rest.split(self.sizes)
        linear = [layer for layer in net if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            linear[0].weight.copy_(first[:, None])
            for layer, matrix in zip(linear[1:-1], self.square, strict=True):
                layer.weight.copy_(matrix.T)
            for layer, bias in zip(linear, biases.view(len(linear) - 1, -1), strict=False):
                layer.bias.copy_(bias)
            linear[-1].weight.copy_(last[None])
            linear[-1].bias.copy_(last_bias)


def _save(program: _Program, path: pathlib.Path, stamp: str, blocks: int) -> None:
    with files.replacement(path) as file:
        torch.save({"stamp": stamp, "blocks": blocks, "state": program.state}, file)


def _resume(program: _Program, path: pathlib.Path | None, stamp: str) -> int:
    """Loads the state of an interrupted run of the same kind; returns the number of blocks it had done."""
    if path is None or not path.exists():
        return 0
    saved = torch.load(path, map_location=program.x.device, weights_only=True)
    if saved["stamp"] != stamp:
        return 0
    for name, value in program.state.items():
        value.copy_(saved["state"][name])
    return int(saved["blocks"])
