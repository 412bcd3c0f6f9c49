r"""One training step of many networks as a fixed sequence of tensor operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dropbayes.population import randomness
from dropbayes.population.records import ACTIVATIONS, Activation, Head
from dropbayes.runtime.devices import capture_graph

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba (2015), the settings of the reference implementation
CONCRETE_TEMPERATURE = 0.1  # Gal, Hron and Kendall (2017)


class _Affine(torch.autograd.Function):
    """The batched affine map, its backward product given a contiguous transpose.

    With the strided transpose that autograd would pass, oneDNN on ARM takes a reference kernel, 70 times slower.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return torch.baddbmm(bias, h, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        h, weight = ctx.saved_tensors
        to_h = torch.bmm(gradient, weight.transpose(1, 2).contiguous()) if ctx.needs_input_grad[1] else None
        return gradient.sum(1, keepdim=True), to_h, torch.bmm(h.transpose(1, 2), gradient)


def forward(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    x: Tensor,
    masks: Sequence[Tensor | None],
    activation: Activation,
) -> Tensor:
    r"""All members' outputs $\sigma(\mathbf x \mathbf z_1 \mathbf W_1 + \mathbf b)\,\mathbf z_2 \mathbf W_2 \dots$.

    [GG16, eq:NN:reg]. `x` is `[member, row, feature]`; `weights` are already divided by the keep probabilities.
    """
    nonlinearity, h = ACTIVATIONS[activation][0], x
    for layer, (weight, bias, mask) in enumerate(zip(weights, biases, masks, strict=True)):
        h = _Affine.apply(bias, h if mask is None else h * mask, weight)
        h = nonlinearity(h) if layer + 1 < len(weights) else h
    return h


def row_losses(output: Tensor, y: Tensor, likelihood: Head) -> Tensor:
    r"""The data term of each row, `[member, row]`: half the squared error, or the negative log-likelihood.

    The Gaussian's is its negative log-density over τ, up to a constant [GG16, eq:L:GP-MC-reg].
    """
    if likelihood == "categorical":
        return output.logsumexp(-1) - output.gather(-1, y)[..., 0]
    if likelihood == "gaussian":
        return 0.5 * (y - output).square().sum(-1)
    mean, log_variance = output.chunk(2, dim=-1)
    return 0.5 * ((y - mean).square() * torch.exp(-log_variance) + log_variance).sum(-1)


class Program:
    """The stacked state of the members in training and the step that advances them all.

    A step reads the batch positions and random words of its place in the current chunk from tensors of fixed address,
    so on a CUDA device it is captured once as a graph and replayed.
    """

    def __init__(
        self,
        *,
        data: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        group: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        pads: list[Tensor],
        drop_prob: Tensor,
        weight_decay: Tensor,
        kl_scale: Tensor | None,
        learning_rate: Tensor,
        n_steps: Tensor,
        n_groups: int,
        batch_size: int,
        likelihood: Head,
        activation: Activation,
        schedule: str,
    ) -> None:
        self.data, self.likelihood, self.activation, self.schedule = data, likelihood, activation, schedule
        self.batch_size, self.n_groups = batch_size, n_groups
        self.rows, self.group, self.pads = rows, group, pads
        self.drop_prob, self.weight_decay, self.kl_scale = drop_prob, weight_decay, kl_scale
        self.learning_rate, self.n_steps = learning_rate, n_steps
        device, dtype, n_layers = rows.device, weights[0].dtype, len(weights)
        self.widths = [weight.shape[1] for weight in weights] + [weights[-1].shape[2]]
        logits = [torch.logit(drop_prob).to(dtype)] if kl_scale is not None else []
        self.parameters = [p.detach().clone().requires_grad_() for p in [*weights, *biases, *logits]]
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.live = [bool((drop_prob[:, layer] > 0).any()) or bool(logits) for layer in range(n_layers)]
        chunk = randomness.STEPS_PER_CHUNK
        self.positions = torch.zeros(chunk, n_groups, batch_size, dtype=torch.long, device=device)
        self.counts = torch.ones(chunk, n_groups, dtype=dtype, device=device)
        self.dithers = torch.zeros(chunk, n_layers, dtype=torch.float64, device=device)
        self.fan_in = torch.tensor(self.widths[:-1], dtype=dtype, device=device)
        self.words = [torch.zeros(chunk, batch_size, w, dtype=torch.int16, device=device) for w in self.widths[:-1]]
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.step_number = torch.zeros((), dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loaded = -1  # the chunk of steps in place
        self._allocate()

    def _allocate(self) -> None:
        shape, dtype = (len(self.rows), self.batch_size), self.parameters[0].dtype
        device = self.rows.device
        self._mixed = [torch.empty(*shape, w, dtype=torch.int16, device=device) for w in self.widths[:-1]]
        self._masks = [torch.empty(*shape, w, dtype=dtype, device=device) for w in self.widths[:-1]]
        chunk, n_layers = randomness.STEPS_PER_CHUNK, len(self.widths) - 1
        self.thresholds = torch.zeros(chunk, n_layers, shape[0], 1, 1, dtype=torch.int16, device=device)
        self.graph, self.loaded = None, -1

    @property
    def weights(self) -> list[Tensor]:
        """The weight matrices, one stack per layer."""
        return self.parameters[: len(self.widths) - 1]

    @property
    def biases(self) -> list[Tensor]:
        """The biases, one stack per layer."""
        n_layers = len(self.widths) - 1
        return self.parameters[n_layers : 2 * n_layers]

    @property
    def learned_drop_prob(self) -> Tensor:
        """The drop probabilities as they stand, `[member, layer]`."""
        return self.drop_prob if self.kl_scale is None else self.parameters[-1].detach().sigmoid().double()

    def load(self, chunk: int, parts: Sequence[Tensor]) -> None:
        """Puts the parts of a chunk of steps (`randomness.chunk_of`) in place."""
        for target, values in zip([self.dithers, self.positions, self.counts, *self.words], parts, strict=True):
            target.copy_(values, non_blocking=True)
        self.thresholds.copy_(randomness.thresholds(self.drop_prob.T, self.dithers[..., None])[..., None, None])
        self.loaded = chunk

    def keep(self, index: Tensor) -> None:
        """Drops all members but the numbered ones."""
        for name in ("rows", "group", "drop_prob", "weight_decay", "learning_rate", "n_steps"):
            setattr(self, name, getattr(self, name)[index].contiguous())
        self.kl_scale = None if self.kl_scale is None else self.kl_scale[index]
        self.pads = [pad[index] for pad in self.pads]
        self.parameters = [p.detach()[index].clone().requires_grad_() for p in self.parameters]
        self.first, self.second = [m[index] for m in self.first], [m[index] for m in self.second]
        self._allocate()

    def run(self, steps: int) -> None:
        """Advances every member by a number of steps within the loaded chunk."""
        if self.rows.is_cuda and self.graph is None:
            self._capture()
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.step()

    def _capture(self) -> None:
        """Records the step as a CUDA graph."""
        state = [*self.parameters, *self.first, *self.second, self.place, self.step_number]
        self.graph, _ = capture_graph(self.step, state, self.rows.device)

    def _sample_masks(self) -> list[Tensor | None]:
        """The keep masks of this step: 1 where the member's word reaches its threshold."""
        below = self.thresholds.index_select(0, self.place)[0]
        masks: list[Tensor | None] = []
        for layer, words in enumerate(self.words):
            if not self.live[layer]:
                masks.append(None)
                continue
            mixed = torch.bitwise_xor(words.index_select(0, self.place), self.pads[layer], out=self._mixed[layer])
            if self.kl_scale is None:
                masks.append(torch.ge(mixed, below[layer], out=self._masks[layer]))
            else:
                # The relaxed Bernoulli of concrete dropout: differentiable in the drop probability.
                uniform = (
                    mixed.to(self._masks[layer].dtype) + (randomness.WORD_VALUES + 1) / 2
                ) / randomness.WORD_VALUES
                logit = self.parameters[-1][:, layer, None, None]
                masks.append(torch.sigmoid((torch.logit(uniform) - logit) / CONCRETE_TEMPERATURE))
        return masks

    def _penalty(self) -> Tensor:
        r"""The prior's term of each member: $\sum_i \lambda_i \|\mathbf M_i\|^2$ [GG16, eq:L:dropout].

        With learned drop probabilities it is the KL of concrete dropout, for weights that multiply inverted masks:
        $\tfrac{1}{N\tau} \sum_i \big(\tfrac{l^2}{2 p_i} \|\mathbf W_i\|^2 - K_i H(p_i)\big)$.
        """
        norms = torch.stack([weight.square().sum((1, 2)) for weight in self.weights], 1)
        if self.kl_scale is None:
            return (self.weight_decay * norms).sum(1)
        logit = self.parameters[-1]
        drop = logit.sigmoid()
        entropy = -(drop * torch.nn.functional.logsigmoid(logit) + (1 - drop) * torch.nn.functional.logsigmoid(-logit))
        # λ holds the keep probability the member began with: λ / p₀ = l² / (2 N τ).
        quadratic = self.weight_decay * norms / ((1 - self.drop_prob.to(norms.dtype)) * (1 - drop))
        return (quadratic - self.kl_scale[:, None] * self.fan_in * entropy).sum(1)

    def step(self) -> None:
        """One Adam step of every member on its own batch."""
        positions = self.positions.index_select(0, self.place)[0].index_select(0, self.group)
        counts = self.counts.index_select(0, self.place)[0].index_select(0, self.group)
        chosen = self.rows.gather(1, positions)
        x, y, weight = (part[chosen] for part in self.data)
        if self.kl_scale is None:
            keep = (1 - self.drop_prob).to(x.dtype)
        else:
            keep = 1 - self.parameters[-1].sigmoid()
        scaled = [w / keep[:, layer, None, None] for layer, w in enumerate(self.weights)]
        output = forward(scaled, self.biases, x, self._sample_masks(), self.activation)
        data_term = (row_losses(output, y, self.likelihood) * weight).sum(1) / counts
        gradients = torch.autograd.grad((data_term + self._penalty()).sum(), self.parameters)
        with torch.no_grad():
            self._adam(gradients)
            self.place += 1

    def adam_rates(self, steps: int) -> tuple[Tensor, Tensor]:
        """The learning rates `[step, member]` and epsilons `[step]` of the next steps, which are counted as taken."""
        (beta1, beta2), dtype = ADAM_BETAS, self.parameters[0].dtype
        number = self.step_number + torch.arange(steps, dtype=torch.float64, device=self.rows.device)
        rate = self.learning_rate.expand(steps, -1)
        if self.schedule == "cosine":
            rate = rate * 0.5 * (1 + torch.cos(math.pi * (number[:, None] / self.n_steps).clamp(max=1)))
        # Both moments' bias corrections, as in the second form of Kingma and Ba's algorithm.
        root = (1 - beta2 ** (number + 1)).sqrt()
        self.step_number += steps
        return (rate * (root / (1 - beta1 ** (number + 1)))[:, None]).to(dtype), (ADAM_EPSILON * root).to(dtype)

    def _adam(self, gradients: tuple[Tensor, ...]) -> None:
        beta1, beta2 = ADAM_BETAS
        (rate,), (epsilon,) = self.adam_rates(1)
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_sqrt(self.second)
        for part in scale:  # the foreach form would read epsilon on the host, which a CUDA graph cannot hold
            part.add_(epsilon)
        update = torch._foreach_div(self.first, scale)
        torch._foreach_mul_(update, [rate.view(-1, *[1] * (p.dim() - 1)) for p in self.parameters])
        torch._foreach_sub_(self.parameters, update)
