r"""The families $q(\mathbf W)$ as modules that hold their own parameters, and the operation that draws from them."""

import math
import numbers
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.layers.bernoulli import Bernoulli, Concrete
from dropbayes.layers.family import DiagonalGaussian, Family, Mixture, in_full_precision, multiplicative_gaussian
from dropbayes.runtime.validation import check_count, check_positive
from dropbayes.tracing import draw_or_mean


class Noise(nn.Module, ABC):
    r"""A choice of $q(\mathbf W)$ around a stored weight matrix `[unit, column]`."""

    on_units = False  #: Whether a draw multiplies input units by a mask, which needs no weight matrix of its own.
    kl_is_weight_decay = False  #: Whether the KL is, up to a constant, a multiple of the squared weights.
    keep_prob: float | None = None
    drop_bias = False

    def attach(self, units: int, columns: int, *, bias: bool) -> None:
        """Creates the parameters that this family needs besides the stored weight and bias."""

    @abstractmethod
    def posterior(self, weight: Tensor) -> Family:
        r"""$q(\mathbf W)$ around the stored `weight`, `[unit, column]`."""

    def bias_posterior(self, bias: Tensor) -> Family | None:
        r"""$q(\mathbf b)$ around the stored `bias`, `[output, 1]` [GG16, eq:variaitonal_dist_3]; None for a point."""
        return None

    def mean(self, weight: Tensor) -> Tensor:
        r"""$\mathbb E_q[\mathbf W]$: the stored weight itself for every family but mixtures."""
        return weight

    def mask(self, *shape: int, like: Tensor, training: bool) -> Tensor:
        """The factors of input units, with mean 1; only for families `on_units`."""
        raise NotImplementedError(f"{type(self).__name__} draws weights, not masks of units.")


class _Spread(Noise):
    r"""A family with one $\sigma$, a number or the exponential of a parameter."""

    def __init__(self, std: float, *, learn_std: bool) -> None:
        super().__init__()
        self.fixed_std = std
        self.log_std = nn.Parameter(torch.tensor(math.log(std))) if learn_std else None

    @property
    def std(self) -> float | Tensor:
        return self.fixed_std if self.log_std is None else self.log_std.exp()


def check_drop_prob(value: float, name: str = "drop_prob") -> None:
    if not isinstance(value, (numbers.Real, Tensor)) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must lie in [0, 1); got {value!r}. It is the probability of dropping, not keeping.")


class Dropping:
    """A module, or a hook of one, that drops units with one probability."""

    drop_prob: float

    @property
    def keep_prob(self) -> float:
        return 1.0 - self.drop_prob


def dropout_mask(*shape: int, drop_prob: float, like: Tensor, training: bool) -> Tensor:
    """The factors of units under dropout, 0 or 1/p; 1 in evaluation mode."""
    return F.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), drop_prob, training)


class BernoulliNoise(_Spread):
    r"""Dropout: $p\,\mathcal N(\mathbf m, \sigma^2 \mathbf I) + (1-p)\,\mathcal N(0, \sigma^2 \mathbf I)$ for a unit.

    [GG16, eq:variaitonal_dist_1]. The stored weight $\theta$ is the mean, $\mathbf M = \theta / p$, as in `nn.Dropout`.

    Args:
        drop_prob: $1 - p$ in [0, 1).
        std: $\sigma$; 0 is dropout, more is the paper's non-diminishing $\sigma$ (for biases too), whose KL is finite.
        drop_bias: Whether biases have Bernoulli variables of their own [GG16, section "Insights"].
        learn_std: Whether $\sigma$, positive, is a parameter of the layer.
    """

    def __init__(
        self, drop_prob: float = 0.1, *, std: float = 0.0, drop_bias: bool = False, learn_std: bool = False
    ) -> None:
        check_drop_prob(drop_prob)
        check_positive("std", std, allow_zero=not learn_std)
        super().__init__(std, learn_std=learn_std)
        self.drop_prob, self.drop_bias = drop_prob, drop_bias
        self.keep_prob = 1.0 - drop_prob
        self.on_units = self.kl_is_weight_decay = std == 0

    def posterior(self, weight: Tensor) -> Bernoulli:
        assert self.keep_prob is not None
        return Bernoulli(weight / self.keep_prob, self.keep_prob, self.std)

    def bias_posterior(self, bias: Tensor) -> Family | None:
        if self.drop_bias:
            return self.posterior(bias)
        return None if self.on_units else DiagonalGaussian(bias, torch.as_tensor(self.std).to(bias))

    def mask(self, *shape: int, like: Tensor, training: bool) -> Tensor:
        return dropout_mask(*shape, drop_prob=self.drop_prob, like=like, training=training)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}, std={float(self.std):.3g}, drop_bias={self.drop_bias}"


class ConcreteNoise(Noise):
    r"""Dropout with a learned drop probability (Gal, Hron and Kendall 2017).

    Masks are relaxed at the `temperature` in training and Bernoulli in prediction. Its prior is on the active weights
    $\mathbf M = \theta/p$ whatever `Prior.applies_to` says: one that depended on the learned $p$ would be no prior.
    """

    on_units = True

    def __init__(self, drop_prob: float = 0.1, *, temperature: float = 0.1) -> None:
        super().__init__()
        check_drop_prob(drop_prob)
        if drop_prob == 0:
            raise ValueError("`drop_prob` must be positive to be learned; got 0, whose logit is infinite.")
        check_positive("temperature", temperature)
        self.temperature = temperature
        self.drop_logit = nn.Parameter(torch.logit(torch.tensor(drop_prob, dtype=torch.float64)).float())

    @property
    def drop_prob(self) -> float:
        return torch.sigmoid(self.drop_logit.detach()).item()

    def posterior(self, weight: Tensor) -> Concrete:
        # The logit of a rare drop needs more digits than bfloat16 has.
        logit = self.drop_logit.to(torch.promote_types(weight.dtype, torch.float32))
        return Concrete((weight / torch.sigmoid(-logit)).to(weight.dtype), logit, self.temperature)

    def mask(self, *shape: int, like: Tensor, training: bool) -> Tensor:
        ones = torch.ones(shape, dtype=like.dtype, device=like.device)
        q = self.posterior(like.new_ones(1, 1))
        draw = lambda: (q.masks(*shape, relaxed=training) / q.keep_prob).to(like.dtype)  # noqa: E731
        return draw_or_mean(draw, ones, training=training)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3g}, temperature={self.temperature}"


class GaussianNoise(_Spread):
    r"""Weights and biases multiplied by $\mathcal N(1, \sigma^2)$, each by its own [GG16, section "Insights"].

    $\sigma = \sqrt{(1-p)/p}$ has the variance of dropout; it may be learned (Kingma, Salimans and Welling 2015).
    """

    def __init__(self, noise_std: float = 0.3, *, learn_std: bool = False) -> None:
        check_positive("noise_std", noise_std)
        super().__init__(noise_std, learn_std=learn_std)

    def posterior(self, weight: Tensor) -> DiagonalGaussian:
        return multiplicative_gaussian(weight, self.std)

    def bias_posterior(self, bias: Tensor) -> DiagonalGaussian:
        return self.posterior(bias)

    def extra_repr(self) -> str:
        return f"noise_std={float(self.std):.3g}"


class MixtureNoise(Noise):
    r"""A mixture of $L$ Gaussians per unit, all learned: probabilities, means, deviations and low-rank factors.

    The stored weight is the mean of the first component; the others, of which dropout's is 0, start at small random
    values. Draws are relaxed in training (see `Mixture`) and draws of the mixture itself in prediction. A bias is
    Gaussian, with one learned $\sigma$ for the layer [GG16, eq:variaitonal_dist_3].

    Args:
        n_components: $L \ge 2$.
        rank: The rank of the covariance beyond its diagonal; 0 for a diagonal one.
        std: The initial $\sigma$ of every component and of the bias.
        temperature: The temperature of the relaxation.
    """

    def __init__(self, n_components: int = 3, *, rank: int = 0, std: float = 0.05, temperature: float = 0.1) -> None:
        super().__init__()
        check_count("n_components", n_components, at_least=2)
        check_count("rank", rank, at_least=0)
        check_positive("std", std)
        check_positive("temperature", temperature)
        self.n_components, self.rank, self.initial_std, self.temperature = n_components, rank, std, temperature

    def attach(self, units: int, columns: int, *, bias: bool) -> None:
        shape = (self.n_components, units, columns)
        self.logits = nn.Parameter(torch.zeros(self.n_components))
        self.other_locs = nn.Parameter(self.initial_std * torch.randn(self.n_components - 1, units, columns))
        self.log_stds = nn.Parameter(torch.full(shape, self.initial_std).log())
        if self.rank:
            self.factors = nn.Parameter(self.initial_std * torch.randn(*shape, self.rank))
        if bias:
            self.log_bias_std = nn.Parameter(torch.tensor(math.log(self.initial_std)))

    def posterior(self, weight: Tensor) -> Mixture:
        locs = torch.cat([weight[None], self.other_locs])
        factors = self.factors if self.rank else None
        probs = in_full_precision(self.logits).softmax(0)  # rounded to bfloat16, they would not sum to 1
        return Mixture(probs, locs, self.log_stds.exp(), factors, self.temperature)

    def bias_posterior(self, bias: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(bias, self.log_bias_std.exp())

    def mean(self, weight: Tensor) -> Tensor:
        return self.posterior(weight).mean

    def extra_repr(self) -> str:
        return f"n_components={self.n_components}, rank={self.rank}"
