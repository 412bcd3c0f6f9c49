r"""One training step of many networks as a fixed sequence of tensor operations."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
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
_CONCRETE_PRECISION = 10.0  # of members that learn drop probabilities and state none: noise of a tenth of the variance
_BLOCK_ELEMENTS = 2**19  # of the masks of one layer that are made at once


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


class Chunk(NamedTuple):
    """What a chunk of steps reads; axis 0 is the step."""

    positions: Tensor  # of the rows of a batch in a member's order, [step, size, row]
    counts: Tensor  # of these rows without padding, [step, size]
    thresholds: Tensor  # below which a word drops its unit, [step, layer, member, 1, 1]
    words: tuple[Tensor, ...]  # by layer [step, row, unit]
    rates: Tensor  # of Adam, [step, member]
    shares: Tensor  # of a step's gradient, and of its square, in Adam's two moments, [step, 2]


def forward(
    weights: Sequence[Tensor], biases: Sequence[Tensor], x: Tensor, masks: Sequence[Tensor], activation: Activation
) -> Tensor:
    r"""All members' outputs $\sigma(\mathbf x \mathbf z_1 \mathbf W_1 + \mathbf b)\,\mathbf z_2 \mathbf W_2 \dots$.

    [GG16, sect:dropout]. `x` is `[member, row, feature]`; `weights` are already divided by the keep probabilities.
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
    The weights there are those that multiply a masked input: M times a *stretch*, its relevance over the keep
    probability. Adam, invariant to the scale of a gradient, takes the steps of M, stretched.
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
        self.widths = widths = [table.x.shape[1], *hidden, head.per_output * table.n_outputs]
        self.n_layers = len(widths) - 1
        rows = torch.full((len(members), max(self.sizes) + 1), len(table.x) - 1)
        decays, drops, weights, steps, relevance, entropies = [], [], [], [], [], []
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
            n_seen = widths[0] if member.n_inputs is None else member.n_inputs
            if not 1 <= n_seen <= widths[0]:
                raise ValueError(f"`n_inputs` must lie between 1 and {widths[0]}, the task's columns; got {n_seen}.")
            if len(factors := member.relevance or (1.0,) * n_seen) != n_seen:
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
            member_words=tuple(w.to(device) for w in randomness.member_words([m.seed for m in members], widths)),
        )
        parameters = [torch.stack(layer).to(device) for layer in zip(*weights, strict=True)]
        parameters += [torch.zeros(len(members), 1, width, dtype=dtype, device=device) for width in widths[1:]]
        parameters += [torch.logit(stack.drop_prob).to(dtype)] if learn_drop_prob else []
        zeros = [torch.zeros_like(values) for values in parameters]
        self._lay_out(stack, parameters, zeros, zeros)
        self.vector.mul_(self._stretch)
        self.chunk, self.chunk_number = self._chunk(0), 0

    def _lay_out(self, stack: Stack, *state: Sequence[Tensor]) -> None:
        """Lays out the parameters of these members, Adam's moments and the buffers of a step."""
        self.stack, self.shapes = stack, [parameter.shape for parameter in state[0]]
        self.vector, self.first, self.second = (torch.cat([values.flatten() for values in part]) for part in state)
        self.gradient, self._scale, self._update = (torch.zeros_like(self.vector) for _ in range(3))
        vectors = self.vector, self.gradient, self.first, self._update
        self.parameters, self._gradients, self._moments, self._updates = map(self.views, vectors)
        self.weights = self.parameters[: self.n_layers]
        self.biases = self.parameters[self.n_layers : 2 * self.n_layers]
        self.has_dropout = [self.learn_drop_prob or bool(p.any()) for p in stack.drop_prob.T]  # before each layer
        n_members, is_cuda, learned = len(stack.rows), self.vector.is_cuda, self.learn_drop_prob
        # The batches and masks of some steps are made at once: of a few members, a step's are not worth their calls.
        elements = n_members * self.batch_size * max(self.widths[:-1])
        self._n_steps = 1 if is_cuda else max(1, min(16, _BLOCK_ELEMENTS // elements))
        shapes = [(n_members, self._n_steps, self.batch_size, width) for width in self.widths[:-1]]
        self._mixed = [self.vector.new_empty(shape, dtype=torch.int16) for shape in shapes]
        self._masks = [self.vector.new_empty(shape) for shape in shapes]
        shapes = [(n_members, self.batch_size, width) for width in self.widths[1:]]
        self._outputs, self._deltas = ([self.vector.new_empty(shape) for shape in shapes] for _ in range(2))
        self._transposed = [weight.mT.contiguous() for weight in self.weights]
        self._weights_t, self._outputs_t = ([v.mT for v in part] for part in (self.weights, self._outputs))
        self.kept = torch.ones_like(stack.drop_prob) if learned else 1 - stack.drop_prob  # in the stretch
        self._stretch = self._per_parameter(1 / self.kept.to(self.vector), otherwise=1.0)
        self.views(self._stretch)[0].mul_(stack.relevance[..., None])
        seen = self._stretch > 0  # inputs that a member does not see have no stretch, and no steps
        self._shrink = torch.where(seen, 1 / self._stretch, 1.0)
        self._epsilon = torch.where(seen, ADAM_EPSILON * self._shrink.square(), torch.inf)
        decays = stack.weight_decay * (0 if learned else 2)  # the KL has its own
        self._decay = self._per_parameter(decays, otherwise=0.0).mul_(self._shrink.square())
        same = [bool((values == values[0]).all()) for values in (stack.learning_rate, stack.n_steps)]
        self._one_rate = not is_cuda and all(same)
        self._fan_in = self.vector.new_tensor(self.widths[:-1])  # a graph cannot take it from the host
        self.step_in_chunk = torch.zeros(1, dtype=torch.long, device=self.vector.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _per_parameter(self, layers: Tensor, *, otherwise: float) -> Tensor:
        """The values `[member, layer]` at the weights of their layers, a constant at all other parameters."""
        vector = torch.full_like(self.vector, otherwise)
        for layer, values in enumerate(self.views(vector)[: self.n_layers]):
            values.copy_(layers[:, layer, None, None].expand_as(values))
        return vector

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector of the parameters' length as weights, biases and, if learned, logits."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return [values.view(shape) for values, shape in zip(vector.split(sizes), self.shapes, strict=True)]

    @property
    def networks(self) -> list[Tensor]:
        """The weights, the biases and the drop probabilities `[member, layer]` of the networks."""
        drop_prob = self.parameters[-1].sigmoid().double() if self.learn_drop_prob else self.stack.drop_prob
        kept = self.kept.to(self.vector)[..., None, None].unbind(1)
        return [*(weight * p for weight, p in zip(self.weights, kept, strict=True)), *self.biases, drop_prob]

    def keep(self, index: Tensor) -> None:
        """Drops all members but those with these indices."""
        state = [[values[index] for values in self.views(part)] for part in (self.vector, self.first, self.second)]
        self._lay_out(Stack(**tree_map_only(Tensor, lambda values: values[index], vars(self.stack))), *state)
        thresholds, rates = self.chunk.thresholds[:, :, index], self.chunk.rates[:, index]
        self.chunk = self.chunk._replace(thresholds=thresholds, rates=rates)

    def run(self, first: int, last: int) -> None:
        """Advances every member from one step to another of the same chunk."""
        number, begin = divmod(first, randomness.STEPS_PER_CHUNK)
        if number != self.chunk_number:  # at the same addresses, from which a graph reads
            tree_map(Tensor.copy_, self.chunk, self._chunk(number))
            self.chunk_number = number
        self.step_in_chunk.fill_(begin)
        if self.vector.is_cuda and self.graph is None:
            state = [self.vector, self.first, self.second, self.step_in_chunk]
            self.graph, _ = capture_graph(self.step, state, self.vector.device)
        advance, end = self.step if self.graph is None else self.graph.replay, begin + last - first
        for block in range(begin, end, self._n_steps):
            self._steps = slice(block, min(block + self._n_steps, end))
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
        # Moments whose bias is corrected [Kingma and Ba 2015] are weighted means of the gradients so far.
        betas = step.new_tensor(self.betas)
        shares = (1 - betas) / (1 - betas ** (step[:, None] + 1))
        counts, rate, shares = (values.to(self.vector) for values in (counts, rate, shares))
        return Chunk(positions, counts, below, tuple(words), rate, shares)

    def _current_values(self, values: Tensor) -> Tensor:
        if values.is_cuda:  # during a graph's replay the host does not know the step
            return values.index_select(0, self.step_in_chunk)
        return values[self._steps]

    def step(self) -> None:
        """An Adam step of every member on its own batch; on a CPU, a few."""
        # Inference skips what each operation does for autograd, a tenth of the time of a small step.
        with torch.inference_mode(not (self.learn_drop_prob or self.vector.is_cuda)):
            shares, rates = map(self._current_values, (self.chunk.shares, self.chunk.rates))
            # Numbers are faster than tensors, and one rate for all is faster than one for each.
            moments = shares[..., None] if shares.is_cuda else shares.tolist()
            steps = zip(moments, rates[:, 0].tolist() if self._one_rate else rates, strict=True)
            for batch, ((first, second), rate) in zip(self._batches(), steps, strict=True):
                (self._differentiate if self.learn_drop_prob else self._backward)(*batch)
                self._adam(first, second, rate)
            self.step_in_chunk += 1

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        """Masked inputs, targets, the share of each row in the objective and masks (words if learned) of each step."""
        current = map(self._current_values, (self.chunk.positions, self.chunk.counts))
        positions, counts = (values.index_select(1, self.stack.size_group) for values in current)
        chosen = self.stack.rows.gather(1, positions.transpose(0, 1).flatten(1))
        flat, shape = chosen.flatten(), (len(chosen), -1, self.batch_size)  # indexing by a matrix takes twice as long
        x, y, weight = (values.index_select(0, flat).view(*shape, *values.shape[1:]) for values in self.data)
        share = (weight / counts.T[..., None])[..., None]
        masks = [self._mask(layer) if dropped else None for layer, dropped in enumerate(self.has_dropout)]
        if masks[0] is not None and not self.learn_drop_prob:
            x.mul_(masks[0])
        of_steps = [repeat(None) if values is None else values.unbind(1) for values in (x, y, share, *masks)]
        return zip(*of_steps, strict=False)

    def _mask(self, layer: int) -> Tensor:
        words, own = self._current_values(self.chunk.words[layer]), self.stack.member_words[layer][:, None]
        mixed = torch.bitwise_xor(words, own, out=self._mixed[layer][:, : len(words)])
        if self.learn_drop_prob:
            return mixed
        torch.ge(mixed, self._current_values(self.chunk.thresholds)[:, layer].transpose(0, 1), out=mixed)
        return self._masks[layer][:, : len(words)].copy_(mixed)  # `ge` would allocate as many numbers for floats

    def _backward(self, x: Tensor, y: Tensor, share: Tensor, *masks: Tensor | None) -> None:
        """The gradient of the data term with respect to all parameters, written out: half the passes of autograd."""
        relu, inputs, h = self.activation == "relu", [x], x
        for layer, (weight, bias, out) in enumerate(zip(self.weights, self.biases, self._outputs, strict=True), 1):
            h = torch.baddbmm(bias, h, weight, out=out)
            if layer < self.n_layers:
                h = h.relu_() if relu else h.tanh_()
                mask = masks[layer]
                inputs.append(h if mask is None else h.mul_(mask))
        delta = self.head.loss_gradient(h, y).mul_(share)
        for layer in reversed(range(self.n_layers)):
            torch.bmm(self._outputs_t[layer - 1] if layer else x.mT, delta, out=self._gradients[layer])
            torch.sum(delta, 1, keepdim=True, out=self._gradients[self.n_layers + layer])
            if not layer:
                continue
            # A strided transpose takes twice as long in MKL, and 70 times in oneDNN's reference kernel on ARM.
            transposed, mask = self._transposed[layer].copy_(self._weights_t[layer]), masks[layer]
            delta = torch.bmm(delta, transposed, out=self._deltas[layer - 1])
            if relu:  # a unit's input to the layer is positive where it is both active and kept
                torch.ops.aten.threshold_backward.grad_input(delta, inputs[layer], 0.0, grad_input=delta)
            else:
                delta.mul_(1 - inputs[layer].square()).mul_(1.0 if mask is None else mask)

    def _differentiate(self, x: Tensor, y: Tensor, share: Tensor, *words: Tensor) -> None:
        """The gradient by autograd, where the drop probabilities are parameters too."""
        with torch.enable_grad():
            vector = self.vector.detach().requires_grad_()
            *parameters, logit = self.views(vector)
            weights, biases = parameters[: self.n_layers], parameters[self.n_layers :]
            keep = 1 - logit.sigmoid()
            scaled = [weight / keep[:, layer, None, None] for layer, weight in enumerate(weights)]
            masks = []
            for layer, mixed in enumerate(words):  # relaxed Bernoulli masks: differentiable in the drop probability
                uniform = (mixed.to(logit.dtype) + (randomness.WORD_VALUES + 1) / 2) / randomness.WORD_VALUES
                masks.append(torch.sigmoid((torch.logit(uniform) - logit[:, layer, None, None]) / CONCRETE_TEMPERATURE))
            output = forward(scaled, biases, x, masks, self.activation)
            delta = self.head.loss_gradient(output.detach(), y) * share
            kl = self._kl(self.views(vector * self._shrink)[: self.n_layers], logit)
            (gradient,) = torch.autograd.grad([output, kl.sum()], vector, [delta, None])
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
        return (quadratic - self.stack.kl_scale[:, None] * self._fan_in * entropy).sum(1)

    def _adam(self, first: float | Tensor, second: float | Tensor, rate: float | Tensor) -> None:
        """One step, given the shares of the gradient and its square in the moments and the rates."""
        self.gradient.addcmul_(self.vector, self._decay)
        self.first.lerp_(self.gradient, first)
        self.second.lerp_(torch.mul(self.gradient, self.gradient, out=self._scale), second)
        scale = torch.sqrt(self.second, out=self._scale)
        torch.addcmul(self._epsilon, scale, self._shrink, out=scale)
        if not isinstance(rate, Tensor):  # the same values as below, in one pass
            self.vector.addcdiv_(self.first, scale, value=-rate)
            return
        for values, moment in zip(self._updates, self._moments, strict=True):
            torch.mul(moment, rate.view(-1, *[1] * (values.dim() - 1)), out=values)
        self.vector.addcdiv_(self._update, scale, value=-1)
