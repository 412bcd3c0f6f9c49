r"""Linear, convolutional and embedding layers whose weights are drawn from a noise's $q(\mathbf W)$."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.layers.bernoulli import Bernoulli, kl_from_density
from dropbayes.layers.decay import Decay
from dropbayes.layers.family import Family, in_full_precision, is_zero
from dropbayes.layers.noise import BernoulliNoise, Noise
from dropbayes.layers.precision import Prior
from dropbayes.runtime.validation import check_type
from dropbayes.tracing import draw_or_mean


def _in_training(layer: nn.Module) -> bool:
    # A function, because the sampler may set the flag of classes whose code reads it: here that would draw products row
    # by row, which are not draws of one function.
    return layer.training


class WeightLayer(nn.Module):
    r"""A torch layer whose `weight` is the mean of a $q(\mathbf W)$."""

    weight: Tensor
    bias: Tensor | None
    noise: Noise
    row_axis: int

    def __init__(self, *args: Any, noise: Noise | None = None, row_axis: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_type("noise", noise, (Noise, type(None)), "be a noise, such as BernoulliNoise(0.1)")
        self.noise = BernoulliNoise() if noise is None else copy.deepcopy(noise)  # no two layers share parameters
        self.noise.attach(*self.matrix().shape, bias=self.bias is not None)
        self.row_axis = row_axis

    def matrix(self) -> Tensor:
        """The stored weight as `[unit, column]`, as a table has it: a unit is an input (a channel, a word)."""
        return self.weight

    def weight_of(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`, with any leading axes."""
        return matrix

    def posterior(self) -> Family:
        return self.noise.posterior(self.matrix())

    def _random_weights(self) -> Family:
        """The posterior of the random units, all unless a layer has constant ones, in float32 or better."""
        return self.noise.posterior(in_full_precision(self.matrix())).in_full_precision()

    @property
    def keep_prob(self) -> float | None:
        return self.noise.keep_prob

    @property
    def kl_is_weight_decay(self) -> bool:
        return self.noise.kl_is_weight_decay

    def parameter_keep_probs(self) -> dict[str, float]:
        """The keep probability of every parameter whose prior is a weight decay."""
        if not self.kl_is_weight_decay:
            return {}
        keep_prob = self.noise.keep_prob or 1.0
        return {"weight": keep_prob, "bias": keep_prob if self.noise.drop_bias else 1.0}

    def kl(self, prior: Prior, *, name: str = "", first: bool = True) -> Tensor:
        r"""$\mathrm{KL}(q \| p)$ of this layer's weights and biases under `prior`, with the family's constants."""
        keep_prob = self.noise.keep_prob or 1.0
        weight = Decay(name, self, "weight", keep_prob, prior, first)
        divergence = self._random_weights().kl(weight.length_scale)
        if self.bias is None:
            return divergence
        # Without a family of its own the bias is a point, the limit of dropout with nothing dropped.
        stored = in_full_precision(self.bias)[:, None]
        q = (self.noise.bias_posterior(stored) or Bernoulli(stored, 1.0)).in_full_precision()
        bias = Decay(name, self, "bias", keep_prob if self.noise.drop_bias else 1.0, prior, first)
        if bias.density is not None:
            return divergence + kl_from_density(q, bias.density)
        return divergence if is_zero(bias.length_scale) else divergence + q.kl(bias.length_scale)

    def _draw_weight(self) -> Tensor:
        """One weight for all rows: the mean in evaluation mode, a draw when operations are intercepted."""
        matrix = self.matrix()
        q = self.noise.posterior(matrix)
        return self.weight_of(draw_or_mean(q.sample, self.noise.mean(matrix), training=False))

    def _row_axis(self, x: Tensor) -> int:
        """The axis of the rows of `x`: 0 for an input of two axes."""
        return self.row_axis if x.dim() > 2 else 0

    def _with_units_dropped(self, operation: Callable[..., Tensor], x: Tensor, axis: int) -> Tensor:
        """An operation on `x` whose units (`axis`) are masked: one mask per row, the same at all positions."""
        noise, training = self.noise, _in_training(self)
        if x.dim() <= 2 and isinstance(noise, BernoulliNoise):
            dropped = F.dropout(x, noise.drop_prob, training)
        else:
            dropped = x * noise.mask(*mask_shape(x, self._row_axis(x), axis), like=x, training=training)
        if self.bias is None or noise.bias_posterior(self.bias[:, None]) is None:
            return operation(dropped, self.weight, self.bias)
        return self._add_bias(operation(dropped, self.weight, None), axis)

    def _add_bias(self, output: Tensor, axis: int) -> Tensor:
        """`output` plus the bias along `axis`, which is a draw in families with random biases."""
        if self.bias is None:
            return output
        q = self.noise.bias_posterior(self.bias[:, None])
        shape = [1] * output.dim()
        shape[axis] = -1
        if q is None or not _in_training(self) or output.dim() == 1:
            bias = self.bias[:, None]
            draw = bias if q is None else draw_or_mean(q.sample, bias, training=_in_training(self))
            return output + draw.view(shape)
        row_axis = self._row_axis(output)
        shape[row_axis] = output.shape[row_axis]
        draws = q.sample(output.shape[row_axis], relaxed=True)[..., 0]  # [row, output]
        return output + draws.reshape(shape)  # the rows' axis comes before the outputs'


def mask_shape(x: Tensor, row_axis: int, unit_axis: int) -> list[int]:
    """The shape of a mask that a row's positions share: the size of `x` along rows and units, 1 elsewhere."""
    full_axes = {row_axis % x.dim(), unit_axis % x.dim()}
    return [size if axis in full_axes else 1 for axis, size in enumerate(x.shape)]


class Linear(WeightLayer, nn.Linear):
    r"""`nn.Linear` with weights drawn from $q(\mathbf W)$; `bias=False` or a bias that is the GP's mean function.

    `noise` is the family, by default `BernoulliNoise(0.1)`; the $Q$ `in_features` are the units that are dropped.
    `row_axis` is the axis of the rows in inputs of three or more axes: 1 for `[time, row, unit]`.

    Example:
        >>> layer = Linear(3, 2, noise=BernoulliNoise(0.5)).eval()
        >>> torch.equal(layer(torch.ones(1, 3)), F.linear(torch.ones(1, 3), layer.weight, layer.bias))
        True
    """

    def matrix(self) -> Tensor:
        return self.weight.mT

    def weight_of(self, matrix: Tensor) -> Tensor:
        return matrix.mT

    def moments(self, input: Tensor) -> tuple[Tensor, Tensor]:
        r"""The mean and variance of the output over $q$, for given inputs: closed form in every family.

        $\mathbb E[\mathbf x \mathbf W + \mathbf b]$ and $\mathbf x^2\,\mathrm{Var}[\mathbf W] + \mathrm{Var}[\mathbf
        b]$: units are independent. Differentiable in the family's parameters, probabilities included.
        """
        q = self.posterior()
        mean, variance = input @ q.mean, input.square() @ q.variance
        q_bias = None if self.bias is None else self.noise.bias_posterior(self.bias[:, None])
        variance = variance if q_bias is None else variance + q_bias.variance[:, 0]
        return mean if self.bias is None else mean + self.bias, variance

    def forward(self, input: Tensor) -> Tensor:
        """`[row, ..., unit]` to `[row, ..., out_features]`: the positions of a row share its draw."""
        if self.noise.on_units:
            return self._with_units_dropped(F.linear, input, -1)
        if not _in_training(self):
            output = F.linear(input, self._draw_weight())
        elif input.dim() <= 2:
            output = self.posterior().product(input, relaxed=True)
        else:
            rows = input.movedim(self.row_axis, 0)
            draws = self.posterior().sample(len(rows), relaxed=True)
            output = (rows.flatten(1, -2) @ draws).unflatten(1, rows.shape[1:-1]).movedim(0, self.row_axis)
        return self._add_bias(output, -1)


class _Convolution(WeightLayer):
    """The common base of the three convolutions: a unit is an input channel, dropped at all positions together."""

    groups: int
    in_channels: int
    out_channels: int
    _conv_forward: Callable[..., Tensor]

    def matrix(self) -> Tensor:
        return self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2).reshape(self.in_channels, -1)

    def weight_of(self, matrix: Tensor) -> Tensor:
        lead, kernel = matrix.shape[:-2], self.weight.shape[2:]
        shape = (self.groups, self.in_channels // self.groups, self.out_channels // self.groups)
        weight = matrix.reshape(*lead, *shape, *kernel).transpose(len(lead) + 1, len(lead) + 2)
        return weight.reshape(*lead, *self.weight.shape)

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == self.weight.dim() - 1:  # one row without its axis, as torch allows
            return self.forward(input[None])[0]
        if self.noise.on_units:
            return self._with_units_dropped(self._conv_forward, input, 1)
        if not _in_training(self):
            return self._add_bias(self._conv_forward(input, self._draw_weight(), None), 1)
        weights = self.weight_of(self.posterior().sample(len(input), relaxed=True))
        rows = torch.func.vmap(lambda row, weight: self._conv_forward(row[None], weight, None)[0])
        return self._add_bias(rows(input, weights), 1)


class Conv1d(_Convolution, nn.Conv1d):
    r"""`nn.Conv1d` with weights drawn from $q(\mathbf W)$, given as `noise=`; a unit is an input channel."""


class Conv2d(_Convolution, nn.Conv2d):
    r"""`nn.Conv2d` with weights drawn from $q(\mathbf W)$, given as `noise=`; a unit is an input channel."""


class Conv3d(_Convolution, nn.Conv3d):
    r"""`nn.Conv3d` with weights drawn from $q(\mathbf W)$, given as `noise=`; a unit is an input channel."""


class Embedding(WeightLayer, nn.Embedding):
    r"""`nn.Embedding` with a table drawn from $q$: with `BernoulliNoise`, word types are dropped, not words.

    A word type has one draw per row of indices, at every position of the row (Gal and Ghahramani 2016). Indices are
    `[row, ...]`, or `[time, row]` with `row_axis=1`. The vector of `padding_idx` is a constant: neither random nor
    under the prior.
    """

    bias = None

    def _random_weights(self) -> Family:
        q = super()._random_weights()
        if self.padding_idx is None:
            return q
        words = torch.arange(self.num_embeddings, device=self.weight.device)
        return q.at(words[words != self.padding_idx])

    def forward(self, input: Tensor) -> Tensor:
        row_axis = self.row_axis if input.dim() > 1 else 0
        if self.noise.on_units:
            mask = functools.partial(self.noise.mask, like=self.weight, training=_in_training(self))
            return nn.Embedding.forward(self, input) * word_mask(input, self.num_embeddings, mask, row_axis)
        if not _in_training(self):
            return self._with_padding(input, F.embedding(input, self._draw_weight(), self.padding_idx))
        rows = input.movedim(row_axis, 0) if input.dim() else input[None]
        words = rows.reshape(len(rows), -1)
        draws = self.posterior().at(words.flatten()).sample(relaxed=True).unflatten(0, words.shape)
        # A word repeated in its row takes the draw of its first occurrence.
        first = (words[:, :, None] == words[:, None, :]).to(torch.int8).argmax(-1)
        draws = draws.gather(1, first[..., None].expand_as(draws)).reshape(*rows.shape, self.embedding_dim)
        return self._with_padding(input, draws.movedim(0, row_axis) if input.dim() else draws[0])

    def _with_padding(self, input: Tensor, vectors: Tensor) -> Tensor:
        if self.padding_idx is None:
            return vectors
        return torch.where((input == self.padding_idx)[..., None], self.weight[self.padding_idx].detach(), vectors)


def word_mask(indices: Tensor, n_words: int, mask: Callable[..., Tensor], row_axis: int) -> Tensor:
    """The factor of each looked-up vector, `[*indices.shape, 1]`: one `mask(row, word type)` over the whole table."""
    if not indices.dim():
        return word_mask(indices[None], n_words, mask, 0)[0]
    rows = indices.movedim(row_axis, 0)
    words = rows.reshape(len(rows), -1)
    return mask(len(rows), n_words).gather(1, words).reshape(rows.shape).movedim(0, row_axis)[..., None]
