r"""Weight layers that draw their weights from a chosen $q(\omega)$: linear, convolutional and embedding.

Each layer is its torch namesake with a `noise`: the stored weight is the mean of $q$, and evaluation mode computes with
it. In training mode every row of the batch (axis 0) gets a distinct draw, as in the paper's estimator of the bound. An
interceptor of operations (`dropbayes.predict`) makes evaluation mode random: it sees `torch.nn.functional.dropout` and
the operations in `STOCHASTIC`, and decides what they draw.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dropbayes.precision import Prior
from dropbayes.variational import Bernoulli, Concrete, DiagonalGaussian, Family, Mixture, multiplicative_gaussian

__all__ = [
    "STOCHASTIC",
    "BernoulliNoise",
    "ConcreteNoise",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "GaussianNoise",
    "Linear",
    "MixtureNoise",
    "Noise",
    "drawn",
]


def drawn(sample: Callable[[], Tensor], mean: Tensor, *, training: bool) -> Tensor:
    """`sample()` in training mode, `mean` otherwise: a stochastic operation that a torch function mode can switch on.

    In evaluation mode the call is shown to any active `TorchFunctionMode`, which may answer with
    `drawn(sample, mean, training=True)`; the draws inside then come from `torch.rand` and `torch.randn`.
    """
    if training:
        return sample()
    if has_torch_function((mean,)):
        return handle_torch_function(drawn, (mean,), sample, mean, training=training)
    return mean


STOCHASTIC = (drawn,)
"""The operations of this module that are random when `training` is true."""


def _in_training(layer: nn.Module) -> bool:
    """Whether `layer` is in training mode, where every row has its own draw.

    A function apart, because what draws from networks may raise the flag of classes whose code reads it: here that
    would give products drawn row by row, which are draws of no one function.
    """
    return layer.training


# --- the families, as modules that hold their own parameters -------------------------------------------------------


class Noise(nn.Module, ABC):
    r"""A choice of $q(\mathbf W)$ around a stored weight matrix `[row, column]`."""

    on_units = False
    """Whether a draw multiplies input units by a mask, which needs no weight matrix of its own."""
    kl_is_weight_decay = False
    """Whether the KL is, up to a constant, a multiple of the squared weights."""
    keep_prob: float | None = None
    drop_bias = False
    std = 0.0
    bias_is_fixed = True

    def attach(self, rows: int, columns: int) -> None:
        """Makes the parameters this family needs beyond the stored weight."""

    @abstractmethod
    def posterior(self, weight: Tensor) -> Family:
        r"""$q(\mathbf W)$ around the stored `weight`, `[row, column]`."""

    def mean(self, weight: Tensor) -> Tensor:
        r"""$\mathbb E_q[\mathbf W]$: the stored weight itself for every family but mixtures."""
        return weight

    def mask(self, *shape: int, like: Tensor, training: bool) -> Tensor:
        """The factors of input units, with mean 1; only for families `on_units`."""
        raise NotImplementedError(f"{type(self).__name__} draws weights, not masks of units.")


def _check_drop_prob(value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(
            f"`drop_prob` must lie in [0, 1); got {value!r}. It is the probability of dropping, not keeping."
        )


class BernoulliNoise(Noise):
    r"""Dropout: $p\,\mathcal N(\mathbf m, \sigma^2 \mathbf I) + (1-p)\,\mathcal N(0, \sigma^2 \mathbf I)$ for a unit.

    [GG16, eq:variaitonal_dist_1]. The stored weight $\theta$ is the mean, $\mathbf M = \theta / p$, as in `nn.Dropout`.

    Args:
        drop_prob: $1 - p$ in [0, 1).
        std: $\sigma$; 0 is dropout, more is the paper's non-diminishing $\sigma$ (for biases too).
        drop_bias: Whether biases have Bernoulli variables of their own [GG16, section "Insights"].
    """

    kl_is_weight_decay = True

    def __init__(self, drop_prob: float = 0.1, *, std: float = 0.0, drop_bias: bool = False) -> None:
        super().__init__()
        _check_drop_prob(drop_prob)
        if not std >= 0:
            raise ValueError(f"`std` (σ) must be zero or more; got {std!r}.")
        self.drop_prob, self.std, self.drop_bias = drop_prob, std, drop_bias
        self.keep_prob = 1.0 - drop_prob
        self.on_units = std == 0
        self.bias_is_fixed = std == 0 and not drop_bias

    def posterior(self, weight: Tensor) -> Bernoulli:
        assert self.keep_prob is not None
        return Bernoulli(weight / self.keep_prob, self.keep_prob, self.std)

    def mask(self, *shape: int, like: Tensor, training: bool) -> Tensor:
        return F.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), self.drop_prob, training)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}, std={self.std}, drop_bias={self.drop_bias}"


class ConcreteNoise(Noise):
    r"""Dropout with a learnt drop probability (Gal, Hron and Kendall 2017).

    Its KL takes the prior's length-scale for the kept weights $\mathbf M = \theta/p$ whatever `Prior.describes` says: a
    prior that moved with the learnt $p$ would not bound the evidence.

    Args:
        drop_prob: The initial drop probability, in (0, 1).
        temperature: Of the relaxation.
    """

    on_units = True

    def __init__(self, drop_prob: float = 0.1, *, temperature: float = 0.1) -> None:
        super().__init__()
        _check_drop_prob(drop_prob)
        if drop_prob == 0:
            raise ValueError("`drop_prob` must be positive to be learnt; got 0, whose logit is infinite.")
        self.temperature = temperature
        self.drop_logit = nn.Parameter(torch.logit(torch.tensor(drop_prob, dtype=torch.float64)).float())

    @property
    def drop_prob(self) -> float:
        """The drop probability learnt so far."""
        return torch.sigmoid(self.drop_logit.detach()).item()

    def posterior(self, weight: Tensor) -> Concrete:
        logit = self.drop_logit.to(weight.dtype)
        return Concrete(weight / torch.sigmoid(-logit), logit, self.temperature)

    def mask(self, *shape: int, like: Tensor, training: bool) -> Tensor:
        ones = torch.ones(shape, dtype=like.dtype, device=like.device)
        q = self.posterior(like.new_ones(1, 1))
        return drawn(lambda: q.masks(*shape) / q.keep_prob, ones, training=training)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3g}, temperature={self.temperature}"


class GaussianNoise(Noise):
    r"""Weights multiplied by $\mathcal N(1, \sigma^2)$, each by its own [GG16, section "Insights"].

    Args:
        noise_std: $\sigma$; $\sqrt{(1-p)/p}$ has the variance of dropout.
    """

    def __init__(self, noise_std: float = 0.3) -> None:
        super().__init__()
        if not noise_std > 0:
            raise ValueError(f"`noise_std` (σ) must be positive; got {noise_std!r}.")
        self.noise_std = noise_std

    def posterior(self, weight: Tensor) -> DiagonalGaussian:
        return multiplicative_gaussian(weight, self.noise_std)

    def extra_repr(self) -> str:
        return f"noise_std={self.noise_std}"


class MixtureNoise(Noise):
    r"""A mixture of $L$ Gaussians per unit, all learnt: probabilities, means, deviations and low-rank factors.

    The stored weight is the mean of the first component; the others start at small random values, as dropout's second
    one sits at 0.

    Args:
        n_components: $L \ge 2$.
        rank: The rank of the covariance beyond its diagonal; 0 for a diagonal one.
        std: The initial $\sigma$ of every component.
    """

    def __init__(self, n_components: int = 3, *, rank: int = 0, std: float = 0.05) -> None:
        super().__init__()
        if n_components < 2 or rank < 0 or not std > 0:
            raise ValueError(
                "`n_components` must be at least 2, `rank` at least 0 and `std` positive; "
                f"got {n_components!r}, {rank!r} and {std!r}."
            )
        self.n_components, self.rank, self.initial_std = n_components, rank, std

    def attach(self, rows: int, columns: int) -> None:
        shape = (self.n_components, rows, columns)
        self.logits = nn.Parameter(torch.zeros(self.n_components))
        self.other_locs = nn.Parameter(self.initial_std * torch.randn(self.n_components - 1, rows, columns))
        self.log_stds = nn.Parameter(torch.full(shape, self.initial_std).log())
        if self.rank:
            self.factors = nn.Parameter(self.initial_std * torch.randn(*shape, self.rank))

    def posterior(self, weight: Tensor) -> Mixture:
        locs = torch.cat([weight[None], self.other_locs])
        return Mixture(self.logits.softmax(0), locs, self.log_stds.exp(), self.factors if self.rank else None)

    def mean(self, weight: Tensor) -> Tensor:
        return self.posterior(weight).mean

    def extra_repr(self) -> str:
        return f"n_components={self.n_components}, rank={self.rank}"


# --- the layers ----------------------------------------------------------------------------------------------------


class WeightLayer(nn.Module, ABC):
    r"""A torch layer whose `weight` is the mean of a $q(\mathbf W)$."""

    weight: Tensor
    bias: Tensor | None
    noise: Noise

    def __init__(self, *args: Any, noise: Noise | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise = BernoulliNoise() if noise is None else copy.deepcopy(noise)  # a layer's parameters are its own
        self.noise.attach(*self.matrix().shape)

    @abstractmethod
    def matrix(self) -> Tensor:
        """The stored weight as `[row, column]`: a row for each input unit (channel, word)."""

    @abstractmethod
    def weight_of(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`, with any leading axes."""

    def posterior(self) -> Family:
        r"""The current $q(\mathbf W)$."""
        return self.noise.posterior(self.matrix())

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
        assert self.noise.keep_prob is not None
        return {"weight": self.noise.keep_prob, "bias": self.noise.keep_prob if self.noise.drop_bias else 1.0}

    def kl(self, prior: Prior, *, name: str = "", first: bool = True) -> Tensor:
        r"""$\mathrm{KL}(q \| p)$ of this layer's weights and biases under `prior`, with the family's constants."""
        keep_prob = self.noise.keep_prob if isinstance(self.noise, BernoulliNoise) else 1.0
        assert keep_prob is not None
        scale = prior.of_weight(name, parameter="weight", first=first, fan_in=self.weight[0].numel())
        divergence = self.posterior().kl(prior.of_kept(scale, keep_prob))
        bias, bias_scale = getattr(self, "bias", None), prior.of_bias(name, parameter="bias")
        if bias is None or bias_scale == 0:
            return divergence
        if self.noise.drop_bias:
            q = Bernoulli(bias[:, None] / keep_prob, keep_prob, self.noise.std)
            return divergence + q.kl(prior.of_kept(bias_scale, keep_prob))
        if self.noise.std > 0:
            return divergence + DiagonalGaussian(bias[:, None], bias.new_tensor(self.noise.std)).kl(bias_scale)
        return divergence + 0.5 * bias_scale**2 * bias.square().sum()

    def _drawn_weight(self) -> Tensor:
        """One weight for all rows: the mean in evaluation mode, a draw where that is intercepted."""
        matrix = self.matrix()
        q = self.noise.posterior(matrix)
        return self.weight_of(drawn(q.sample, self.noise.mean(matrix), training=False))

    def _drop_units(self, x: Tensor, axis: int) -> Tensor:
        """`x` with its units (`axis`) masked: one mask per row, the same at all positions."""
        noise = self.noise
        if x.dim() <= 2 and isinstance(noise, BernoulliNoise):
            return F.dropout(x, noise.drop_prob, _in_training(self))
        shape = [1] * x.dim()
        shape[0], shape[axis] = x.shape[0], x.shape[axis]
        return x * noise.mask(*shape, like=x, training=_in_training(self))

    def _add_bias(self, output: Tensor, axis: int) -> Tensor:
        """`output` plus the bias along `axis`, itself a draw where the family says so."""
        if self.bias is None:
            return output
        shape = [1] * output.dim()
        shape[axis] = -1
        bias = self.bias.view(shape)
        shape[0], shape[axis] = output.shape[0], self.bias.numel()
        if self.noise.drop_bias:
            bias = bias * self.noise.mask(*shape, like=output, training=_in_training(self))
        if self.noise.std > 0:
            bias = bias + self.noise.std * drawn(
                lambda: torch.randn(shape, dtype=bias.dtype, device=bias.device),
                torch.zeros_like(bias),
                training=_in_training(self),
            )
        return output + bias


class Linear(WeightLayer, nn.Linear):
    r"""`nn.Linear` with weights drawn from $q(\mathbf W)$; `bias=False` or a bias that is the GP's mean function.

    Args:
        in_features: $Q$, the number of units that are dropped.
        out_features: $K$.
        bias: As in `nn.Linear`.
        noise: The family; `BernoulliNoise(0.1)` by default.

    Example:
        >>> layer = Linear(3, 2, noise=BernoulliNoise(0.5)).eval()
        >>> torch.equal(layer(torch.ones(1, 3)), F.linear(torch.ones(1, 3), layer.weight, layer.bias))
        True
    """

    def matrix(self) -> Tensor:
        return self.weight.mT

    def weight_of(self, matrix: Tensor) -> Tensor:
        return matrix.mT

    def forward(self, input: Tensor) -> Tensor:
        """`[row, ..., unit]` to `[row, ..., out_features]`: axes between row and unit share a row's draw."""
        noise = self.noise
        if noise.on_units:
            dropped = self._drop_units(input, -1)
            if noise.bias_is_fixed:
                return F.linear(dropped, self.weight, self.bias)
            return self._add_bias(F.linear(dropped, self.weight), -1)
        if not _in_training(self):
            output = F.linear(input, self._drawn_weight())
        elif input.dim() <= 2:
            output = self.posterior().product(input)
        else:
            draws = self.posterior().sample(len(input))
            output = (input.flatten(1, -2) @ draws).unflatten(1, input.shape[1:-1])
        return self._add_bias(output, -1)


class _Convolution(WeightLayer):
    """What the three convolutions share: a unit is an input channel, dropped at all positions together."""

    groups: int
    in_channels: int
    out_channels: int

    def matrix(self) -> Tensor:
        by_group = self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return by_group.reshape(self.in_channels, -1)

    def weight_of(self, matrix: Tensor) -> Tensor:
        lead, kernel = matrix.shape[:-2], self.weight.shape[2:]
        shape = (self.groups, self.in_channels // self.groups, self.out_channels // self.groups)
        weight = matrix.reshape(*lead, *shape, *kernel).transpose(len(lead) + 1, len(lead) + 2)
        return weight.reshape(*lead, *self.weight.shape)

    def forward(self, input: Tensor) -> Tensor:
        if self.noise.on_units:
            dropped = self._drop_units(input, 1)
            if self.noise.bias_is_fixed:
                return self._conv_forward(dropped, self.weight, self.bias)  # type: ignore[operator]
            return self._add_bias(self._conv_forward(dropped, self.weight, None), 1)  # type: ignore[operator]
        if not _in_training(self):
            return self._add_bias(self._conv_forward(input, self._drawn_weight(), None), 1)  # type: ignore[operator]
        weights = self.weight_of(self.posterior().sample(len(input)))
        one_row: Any = lambda row, weight: self._conv_forward(row[None], weight, None)[0]  # type: ignore[operator]  # noqa: E731
        return self._add_bias(torch.func.vmap(one_row)(input, weights), 1)


class Conv1d(_Convolution, nn.Conv1d):
    r"""`nn.Conv1d` with weights drawn from $q(\mathbf W)$, given as `noise=`; a unit is an input channel."""


class Conv2d(_Convolution, nn.Conv2d):
    r"""`nn.Conv2d` with weights drawn from $q(\mathbf W)$, given as `noise=`; a unit is an input channel."""


class Conv3d(_Convolution, nn.Conv3d):
    r"""`nn.Conv3d` with weights drawn from $q(\mathbf W)$, given as `noise=`; a unit is an input channel."""


class Embedding(WeightLayer, nn.Embedding):
    r"""`nn.Embedding` with a table drawn from $q$: with `BernoulliNoise`, word types are dropped, not words.

    A word type has one draw per row of indices, wherever it stands in the row (Gal and Ghahramani 2016).
    """

    bias = None

    def matrix(self) -> Tensor:
        return self.weight

    def weight_of(self, matrix: Tensor) -> Tensor:
        return matrix

    def forward(self, input: Tensor) -> Tensor:
        if self.noise.on_units:

            def mask(*shape: int) -> Tensor:
                return self.noise.mask(*shape, like=self.weight, training=_in_training(self))

            return nn.Embedding.forward(self, input) * row_mask(input, self.num_embeddings, mask)
        if not _in_training(self):
            return F.embedding(input, self._drawn_weight(), self.padding_idx)
        rows = input.reshape(input.shape[0] if input.dim() else 1, -1)
        draws = self.posterior().at(rows.flatten()).sample().unflatten(0, rows.shape)
        # A word that comes again in its row takes the draw of its first appearance.
        first = (rows[:, :, None] == rows[:, None, :]).to(torch.int8).argmax(-1)
        draws = draws.gather(1, first[..., None].expand_as(draws))
        return draws.reshape(*input.shape, self.embedding_dim)


def row_mask(indices: Tensor, n_embeddings: int, mask: Callable[..., Tensor]) -> Tensor:
    """The factor of each looked-up vector, `[*indices.shape, 1]`: one `mask(row, word type)` over the whole table."""
    rows = indices.reshape(indices.shape[0] if indices.dim() else 1, -1)
    return mask(len(rows), n_embeddings).gather(1, rows).reshape(*indices.shape, 1)
