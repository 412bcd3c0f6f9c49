r"""One training step of many networks as a fixed sequence of tensor operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from dropbayes.layers import weight_decay
from dropbayes.population import randomness
from dropbayes.population.heads import Head
from dropbayes.population.records import ACTIVATIONS, Activation, Member, drop_probs
from dropbayes.population.standardisation import Table
from dropbayes.runtime.devices import capture_graph

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba (2015), the settings of the reference implementation
CONCRETE_TEMPERATURE = 0.1  # Gal, Hron and Kendall (2017)
# The noise that learned drop probabilities assume when a member states none: a tenth of the targets' variance.
_CONCRETE_PRECISION = 10.0
_HAS_MKL = torch.backends.mkl.is_available()


@dataclass(frozen=True, eq=False)
class Stack:
    """The per-member settings of the members in training; axis 0 is the member."""

    rows: Tensor  # the row indices of the member's task, in the member's order, padded with the empty row
    size_group: Tensor  # the index of its task's size among the distinct sizes
    drop_prob: Tensor  # [member, layer]
    weight_decay: Tensor  # λ of each layer, [member, layer]
    learning_rate: Tensor  # the initial one
    n_steps: Tensor  # the length of the schedule
    relevance: Tensor  # the factor on each input, [member, input]; zero for those that it does not see
    kl_scale: Tensor  # the weight of the KL against the data term where drop probabilities are learned
    member_words: tuple[Tensor, ...]  # one for each unit before each weight layer, combined with the step's words

    def select(self, index: Tensor) -> Stack:
        return Stack(**tree_map_only(Tensor, lambda values: values[index], vars(self)))


class Chunk(NamedTuple):
    """What a chunk of steps reads; axis 0 is the step."""

    positions: Tensor  # of the rows of a batch in a member's order, [step, size, row]
    counts: Tensor  # of these rows without padding, [step, size]
    thresholds: Tensor  # below which a word drops its unit, [step, layer, member, 1, 1]
    words: tuple[Tensor, ...]  # by layer [step, row, unit]
    rates: Tensor  # of Adam, with both moments' bias corrections, [step, member]
    epsilons: Tensor  # [step]


def forward(
    weights: Sequence[Tensor], biases: Sequence[Tensor], x: Tensor, masks: Sequence[Tensor], activation: Activation
) -> Tensor:
    r"""All members' outputs $\sigma(\mathbf x \mathbf z_1 \mathbf W_1 + \mathbf b)\,\mathbf z_2 \mathbf W_2 \dots$.

    [GG16, eq:NN:reg]. `x` is `[member, row, feature]`; `weights` are already divided by the keep probabilities.
    """
    nonlinearity, h = ACTIVATIONS[activation][0], x
    for layer, (weight, bias, mask) in enumerate(zip(weights, biases, masks, strict=True)):
        h = torch.baddbmm(bias, h * mask, weight)
        h = nonlinearity(h) if layer + 1 < len(weights) else h
    return h


class Program:
    """The stacked parameters of the members in training and the step that advances them all.

    A step reads its batch positions and random words in the current chunk from tensors at fixed addresses,
    so on a CUDA device it is captured once as a graph and replayed. All parameters lie in one vector, so that Adam
    passes over them once, however many layers there are: weights `[member, in, out]`, biases `[member, 1, out]` and,
    if learned, logits of the drop probabilities; `parameters` are views of them, `first` and `second` Adam's moments.
    """

    def __init__(
        self,
        table: Table,
        members: Sequence[Member],
        hidden: Sequence[int],
        head: Head,
        activation: Activation,
        batch_size: int,
        schedule: str,
        learn_drop_prob: bool,
        device: torch.device,
        dtype: torch.dtype,
        betas: tuple[float, float] = ADAM_BETAS,
    ) -> None:
        self.head, self.activation, self.schedule, self.betas = head, activation, schedule, betas
        self.learn_drop_prob = learn_drop_prob
        self.data = [values.to(device) for values in (table.x, table.y, table.weight)]
        self.sizes, self.batch_size = sorted(set(table.n_rows)), batch_size
        self.widths = widths = [table.x.shape[1], *hidden, head.width(table.n_outputs)]
        self.n_layers = len(widths) - 1
        rows = torch.full((len(members), max(self.sizes) + 1), len(table.x) - 1)
        decays, drops, words, weights, steps, relevance, entropies = [], [], [], [], [], [], []
        for b, member in enumerate(members):
            n_rows = table.n_rows[member.task]
            rows[b, :n_rows] = table.first[member.task] + randomness.member_order(member.seed, n_rows)
            drop = drop_probs(member, self.n_layers)
            decay, precision = [member.weight_decay] * len(drop), _CONCRETE_PRECISION
            if member.precision is not None:
                # Standardised targets have the precision τ·scale²; with several outputs their mean is used.
                precision = member.precision * float(table.moments["y_scale"][member.task].square().mean())
                decay = [
                    weight_decay(precision=precision, keep_prob=1 - p, length_scale=member.length_scale, n_data=n_rows)
                    for p in drop
                ]
            drops.append(drop)
            decays.append(decay)
            # The 1/(Nτ) that weights the KL against the data term (τ = 1 where that is the log-likelihood itself).
            entropies.append(1 / (n_rows * (precision if head.name == "gaussian" else 1.0)))
            words.append(randomness.member_words(member.seed, widths))
            n_seen = widths[0] if member.n_inputs is None else member.n_inputs
            if not 1 <= n_seen <= widths[0]:
                raise ValueError(f"`n_inputs` must lie between 1 and {widths[0]}, the task's columns; got {n_seen}.")
            factors = member.relevance or (1.0,) * n_seen
            if len(factors) != n_seen:
                raise ValueError(f"`relevance` must hold a factor for each of {n_seen} inputs; got {len(factors)}.")
            relevance.append([*factors, *[0.0] * (widths[0] - n_seen)])
            first, *rest = randomness.initial_weights(member.seed, [n_seen, *widths[1:]], dtype)
            weights.append([torch.cat([first, first.new_zeros(widths[0] - n_seen, widths[1])]), *rest])
            steps.append(member.epochs * randomness.steps_per_epoch(n_rows, batch_size))

        def on_device(values: Any, kind: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        drop_prob = on_device(drops)
        stack = Stack(
            rows=rows.to(device),
            size_group=on_device([self.sizes.index(table.n_rows[m.task]) for m in members], torch.long),
            drop_prob=drop_prob.clamp(1e-3, 0.9) if learn_drop_prob else drop_prob,
            weight_decay=on_device(decays, dtype),
            learning_rate=on_device([m.learning_rate for m in members]),
            n_steps=on_device(steps),
            relevance=on_device(relevance, dtype),
            kl_scale=on_device(entropies, dtype),
            member_words=tuple(torch.stack(layer).to(device) for layer in zip(*words, strict=True)),
        )
        parameters = [torch.stack(layer).to(device) for layer in zip(*weights, strict=True)]
        parameters += [torch.zeros(len(members), 1, width, dtype=dtype, device=device) for width in widths[1:]]
        parameters += [torch.logit(stack.drop_prob).to(dtype)] if learn_drop_prob else []
        self._lay_out(stack, parameters)
        self.first, self.second = torch.zeros_like(self.vector), torch.zeros_like(self.vector)
        self.chunk, self.chunk_number = self._chunk(0), 0

    def _lay_out(self, stack: Stack, parameters: Sequence[Tensor]) -> None:
        """Lays out the parameters of these members and the buffers of a step."""
        self.stack, self.shapes = stack, [parameter.shape for parameter in parameters]
        self.vector = torch.cat([parameter.flatten() for parameter in parameters])
        self.gradient, self._update, self._scaled = (torch.zeros_like(self.vector) for _ in range(3))
        self.parameters, self._gradients = self.views(self.vector), self.views(self.gradient)
        self._scaled_parameters = self.views(self._scaled)
        self.weights = self.parameters[: self.n_layers]
        self.biases = self.parameters[self.n_layers : 2 * self.n_layers]
        # Whether any member drops units before each weight layer.
        self.has_dropout = [self.learn_drop_prob or bool(p.any()) for p in stack.drop_prob.T]
        shapes = [(len(stack.rows), self.batch_size, width) for width in self.widths[:-1]]
        self._mixed = [self.vector.new_empty(shape, dtype=torch.int16) for shape in shapes]
        self._masks = [self.vector.new_empty(shape) for shape in shapes]
        self._inverse_keep = self._per_parameter(1 / (1 - stack.drop_prob).to(self.vector), otherwise=1.0)
        self.views(self._inverse_keep)[0].mul_(stack.relevance[..., None])
        self._decay = self._per_parameter(2 * stack.weight_decay, otherwise=0.0)
        same = [bool((values == values[0]).all()) for values in (stack.learning_rate, stack.n_steps)]
        self._one_rate = not self.vector.is_cuda and all(same)
        self.step_in_chunk = torch.zeros(1, dtype=torch.long, device=self.vector.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _per_parameter(self, layers: Tensor, *, otherwise: float) -> Tensor:
        """The values `[member, layer]` at the weights of their layers, a constant at all other parameters."""
        vector = torch.full_like(self.vector, otherwise)
        for layer, values in enumerate(self.views(vector)[: self.n_layers]):
            values.copy_(layers[:, layer, None, None].expand_as(values))
        return vector

    # --- the parameters -------------------------------------------------------------------------------------------

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector of the parameters' length as weights, biases and, if learned, logits."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return [values.view(shape) for values, shape in zip(vector.split(sizes), self.shapes, strict=True)]

    @property
    def networks(self) -> list[Tensor]:
        """The weights, for inputs times their relevance, the biases and the drop probabilities `[member, layer]`."""
        drop_prob = self.parameters[-1].sigmoid().double() if self.learn_drop_prob else self.stack.drop_prob
        return [*self.weights, *self.biases, drop_prob]

    def keep(self, index: Tensor) -> None:
        """Drops all members but those with these indices."""
        first, second = ([values[index] for values in self.views(moment)] for moment in (self.first, self.second))
        self._lay_out(self.stack.select(index), [values[index] for values in self.parameters])
        self.first, self.second = (torch.cat([values.flatten() for values in moment]) for moment in (first, second))
        thresholds, rates = self.chunk.thresholds[:, :, index], self.chunk.rates[:, index]
        self.chunk = self.chunk._replace(thresholds=thresholds, rates=rates)

    # --- the steps ------------------------------------------------------------------------------------------------

    def run(self, first: int, last: int) -> None:
        """Advances every member from one step to another of the same chunk."""
        number, self._step = divmod(first, randomness.STEPS_PER_CHUNK)
        if number != self.chunk_number:  # at the same addresses, from which a graph reads
            tree_map(Tensor.copy_, self.chunk, self._chunk(number))
            self.chunk_number = number
        self.step_in_chunk.fill_(self._step)
        if self.vector.is_cuda and self.graph is None:
            state = [self.vector, self.first, self.second, self.step_in_chunk]
            self.graph, _ = capture_graph(self.step, state, self.vector.device)
        advance = self.step if self.graph is None else self.graph.replay
        for _ in range(last - first):
            advance()

    def _chunk(self, number: int) -> Chunk:
        """A chunk of steps, drawn while a CUDA device still works on the one before."""
        drawn = randomness.chunk_of(number, self.batch_size, self.sizes, self.widths)
        dithers, positions, counts, *words = (values.to(self.vector.device) for values in drawn)
        below = randomness.thresholds(self.stack.drop_prob.T, dithers[..., None])[..., None, None]
        step = number * len(dithers) + torch.arange(len(dithers), dtype=dithers.dtype, device=dithers.device)
        rate = self.stack.learning_rate.expand(len(step), -1)
        if self.schedule == "cosine":
            rate = rate * 0.5 * (1 + torch.cos(math.pi * (step[:, None] / self.stack.n_steps).clamp(max=1)))
        # Both moments' bias corrections, as in the second form of Kingma and Ba's algorithm.
        beta1, beta2 = self.betas
        root = (1 - beta2 ** (step + 1)).sqrt()
        rate = rate * (root / (1 - beta1 ** (step + 1)))[:, None]
        counts, rate, epsilon = (values.to(self.vector) for values in (counts, rate, ADAM_EPSILON * root))
        return Chunk(positions, counts, below, tuple(words), rate, epsilon)

    def _current_values(self, values: Tensor) -> Tensor:
        if values.is_cuda:  # during a graph's replay the host does not know the step
            return values.index_select(0, self.step_in_chunk)[0]
        return values[self._step]

    def step(self) -> None:
        """One Adam step of every member on its own batch."""
        with torch.no_grad():
            positions, counts = map(self._current_values, (self.chunk.positions, self.chunk.counts))
            if len(self.sizes) == 1:
                chosen = self.stack.rows.index_select(1, positions[0])
            else:
                positions, counts = (v.index_select(0, self.stack.size_group) for v in (positions, counts))
                chosen = self.stack.rows.gather(1, positions)
            # Indexing by a matrix takes twice as long.
            flat, shape = chosen.flatten(), chosen.shape
            x, y, weight = (values.index_select(0, flat).view(*shape, *values.shape[1:]) for values in self.data)
            share = weight / counts[:, None]
            differentiate = self._differentiate if self.learn_drop_prob else self._backward
            differentiate(x, y, share)
            self._adam()
            self._step += 1
            self.step_in_chunk += 1

    def _words(self, layer: int) -> Tensor:
        shared = self._current_values(self.chunk.words[layer])
        return torch.bitwise_xor(shared, self.stack.member_words[layer], out=self._mixed[layer])

    def _backward(self, x: Tensor, y: Tensor, share: Tensor) -> None:
        """The gradient of the objective with respect to all parameters, written out: half the passes of autograd."""
        relu, below = self.activation == "relu", self._current_values(self.chunk.thresholds)
        masks: list[Tensor | None] = [
            torch.ge(self._words(layer), below[layer], out=self._masks[layer]) if dropped else None
            for layer, dropped in enumerate(self.has_dropout)
        ]
        torch.mul(self.vector, self._inverse_keep, out=self._scaled)
        scaled = self._scaled_parameters[: self.n_layers]
        inputs, active, h = [], [], x
        for layer, (weight, bias, mask) in enumerate(zip(scaled, self.biases, masks, strict=True)):
            active.append(h)
            if mask is not None:
                h = h.mul_(mask) if relu and layer else h * mask
            inputs.append(h)
            h = torch.baddbmm(bias, h, weight)
            if layer + 1 < self.n_layers:
                h = h.relu_() if relu else h.tanh_()
        delta = self.head.loss_gradient(h, y) * share[..., None]
        for layer in reversed(range(self.n_layers)):
            torch.bmm(inputs[layer].transpose(1, 2), delta, out=self._gradients[layer])
            torch.sum(delta, 1, keepdim=True, out=self._gradients[self.n_layers + layer])
            if not layer:
                continue
            weight = scaled[layer].transpose(1, 2)
            if delta.shape[2] == 1 and not delta.is_cuda:  # the same products, at a fifth of the time
                delta = delta * weight
            else:  # with a strided transpose, oneDNN on ARM may take a reference kernel, 70 times slower
                delta = torch.bmm(delta, weight if _HAS_MKL else weight.contiguous())
            if relu:  # a unit's input to the layer is positive where it is both active and kept
                delta = torch.ops.aten.threshold_backward(delta, inputs[layer], 0.0)
            else:
                mask = masks[layer]
                delta = (delta if mask is None else delta * mask) * (1 - active[layer].square())
        self.gradient.mul_(self._inverse_keep)
        self.gradient.addcmul_(self.vector, self._decay)

    def _differentiate(self, x: Tensor, y: Tensor, share: Tensor) -> None:
        """The gradient by autograd, where the drop probabilities are parameters too."""
        with torch.enable_grad():
            vector = self.vector.detach().requires_grad_()
            *parameters, logit = self.views(vector)
            weights, biases = parameters[: self.n_layers], parameters[self.n_layers :]
            keep = 1 - logit.sigmoid()
            scaled = [weight / keep[:, layer, None, None] for layer, weight in enumerate(weights)]
            scaled[0] = scaled[0] * self.stack.relevance[..., None]
            masks = []
            for layer in range(self.n_layers):  # relaxed Bernoulli masks: differentiable in the drop probability
                words = self._words(layer).to(logit.dtype)
                uniform = (words + (randomness.WORD_VALUES + 1) / 2) / randomness.WORD_VALUES
                masks.append(torch.sigmoid((torch.logit(uniform) - logit[:, layer, None, None]) / CONCRETE_TEMPERATURE))
            output = forward(scaled, biases, x, masks, self.activation)
            delta = self.head.loss_gradient(output.detach(), y) * share[..., None]
            (gradient,) = torch.autograd.grad([output, self._kl(weights, logit).sum()], vector, [delta, None])
        self.gradient.copy_(gradient)

    def _kl(self, weights: Sequence[Tensor], logit: Tensor) -> Tensor:
        r"""The KL of concrete dropout for weights that multiply inverted masks, over the data term's scale.

        $\tfrac{1}{N\tau} \sum_i \big(\tfrac{l^2}{2 p_i} \|\mathbf W_i\|^2 - K_i H(p_i)\big)$
        """
        norms = torch.stack([weight.square().sum((1, 2)) for weight in weights], 1)
        drop, log_sigmoid = logit.sigmoid(), torch.nn.functional.logsigmoid
        entropy = -(drop * log_sigmoid(logit) + (1 - drop) * log_sigmoid(-logit))
        # λ holds the keep probability the member began with: λ / p₀ = l² / (2 N τ).
        quadratic = self.stack.weight_decay * norms / ((1 - self.stack.drop_prob.to(norms.dtype)) * (1 - drop))
        fan_in = norms.new_tensor(self.widths[:-1])
        return (quadratic - self.stack.kl_scale[:, None] * fan_in * entropy).sum(1)

    def _adam(self) -> None:
        beta1, beta2 = self.betas
        self.first.lerp_(self.gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(self.gradient, self.gradient, value=1 - beta2)
        scale = torch.sqrt(self.second, out=self._update).add_(self._current_values(self.chunk.epsilons))
        if self._one_rate:  # the same values as below, in one pass instead of eight
            self.vector.addcdiv_(self.first, scale, value=-float(self.chunk.rates[self._step, 0]))
            return
        rate, steps = self._current_values(self.chunk.rates), self._scaled.copy_(self.first)
        for values in self._scaled_parameters:
            values *= rate.view(-1, *[1] * (values.dim() - 1))
        self.vector -= steps.div_(scale)
