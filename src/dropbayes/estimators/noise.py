r"""A noise model fitted to held-out draws: heavy tails, an input-dependent scale, a factor on the draws' spread.

Given T draws $f_t(\mathbf x)$ with mean $m(\mathbf x)$ for rows that the networks were not trained on,
$$p(y \mid \mathbf x) = \tfrac1T \sum_t \mathcal T_\nu\big(y;\; m + \kappa (f_t - m),\; \sigma_t\big), \qquad
\log \sigma_t = \log \sigma(\mathbf z) + s\, \epsilon_t,$$
the predictive mixture of [GG16, eq:predictive_dist] with Student's t for the noise, the spread of the draws rescaled by
κ, and $\log \sigma$ a small network of $\mathbf z$ = (inputs, mean, logarithm of the draws' deviation). The scale of a
draw has a standard normal score $\epsilon_t$: where most errors are tiny and some are not, no ν makes both the core
narrow and the tails wide. With $\nu \to \infty$, κ = 1, s = 0 and constant σ this is the paper's predictive density
with $\tau = \sigma^{-2}$. The rows are held out from the networks that made the draws, so their likelihood can be
maximised without rewarding over-fitting; how much σ may vary is chosen by cross-validation among those rows, with
preference for the simpler model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dropbayes.estimators.extrapolation import normal_scores
from dropbayes.predictive import Mixture, draw_mean

PENALTIES = (0.1, 1.0, 10.0, 1e4)  # tried on the squared weights of log σ, in nats; the last makes σ constant
MIN_FREEDOM = 3.0  # Student's t has a variance above 2; from 3 on it is at most three times the squared scale
_HIDDEN = 16
_LEARNED = ("first", "first_bias", "second", "second_bias", "log_shrink", "raw_spread", "log_freedom")
_LIGHT_TAILS = math.log(1000.0)  # log(ν - 3) of a t that stands for a Gaussian: their distributions differ by 1/(4ν)
_FOLDS = 3
_MANY_ROWS = 1000  # of more, one held-out third separates the penalties as well as three folds
_LEARNING_RATE, _BETAS = 0.05, (0.9, 0.99)
_TOLERANCE = 2.0  # standard errors by which a weaker penalty must be better
_FEATURE_LIMIT = 4.0  # in standard deviations: features are clipped here, which limits extrapolation


@dataclass(frozen=True, eq=False)
class StudentNoise:
    """Fitted noise models, one per output (axis 0), in standardised units of x and y."""

    first: Tensor  # of the network of log σ, like the next three
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    log_shrink: Tensor  # log κ
    raw_spread: Tensor  # artanh s
    log_freedom: Tensor  # log(ν - 3)
    feature_mean: Tensor
    feature_scale: Tensor

    @property
    def freedom(self) -> Tensor:
        """The degrees of freedom ν of each output."""
        return MIN_FREEDOM + self.log_freedom.exp()

    @property
    def shrink(self) -> Tensor:
        """The factor κ on the spread of the draws of each output."""
        return self.log_shrink.exp()

    @property
    def spread(self) -> Tensor:
        """The deviation s of log σ among the draws, below 1: more draws than those of the fit reach further."""
        return self.raw_spread.tanh()

    def rescale(self, factor: Tensor) -> Self:
        """The models with every σ multiplied by a factor, one per output."""
        return replace(self, second_bias=self.second_bias + factor.log()[:, None].to(self.second_bias))

    def log_scale(self, features: Tensor, *, batch_invariant: bool = False) -> Tensor:
        r"""$\log \sigma$ of each row `[output, row]` from `noise_features`.

        With `batch_invariant`, a row's bits do not depend on the other rows, as in a matrix product they may.
        """
        standard = ((features - self.feature_mean) / self.feature_scale).clamp(-_FEATURE_LIMIT, _FEATURE_LIMIT)
        if batch_invariant:
            product = (standard[..., None, :] * self.first.transpose(1, 2)[:, None]).sum(-1)
        else:
            product = standard @ self.first
        return (torch.tanh(product + self.first_bias) * self.second).sum(-1) + self.second_bias

    def mixture(self, draws: Tensor, x: Tensor, y_mean: Tensor, y_scale: Tensor) -> Mixture:
        """The predictive mixture in the units of y, from standardised draws `[draw, row, output]` and inputs."""
        centre = draw_mean(draws)
        location = centre + self.shrink.to(draws) * (draws - centre)
        features = noise_features(x.to(self.first), draws.permute(2, 0, 1).to(self.first)).nan_to_num(nan=0.0)
        spread = self.spread.to(draws) * scale_scores(len(draws)).to(draws)[:, None, None]
        scale = (self.log_scale(features, batch_invariant=True).T.to(draws) + spread).exp()
        return Mixture(location * y_scale + y_mean, scale * y_scale, tuple(self.freedom.double().tolist()))


def scale_scores(n_draws: int) -> Tensor:
    """The score of each draw's noise, in another order than those of a process and of the distance."""
    return normal_scores(n_draws, step=math.sqrt(2))


def noise_features(x: Tensor, draws: Tensor) -> Tensor:
    """The inputs of log σ, `[output, row, feature]`: x, and mean and log-deviation of draws `[output, draw, row]`."""
    by_draw = draws.transpose(0, 1)
    mean = draw_mean(by_draw)
    deviation = draw_mean((by_draw - mean).square()).sqrt().clamp(min=1e-6).log()
    return torch.cat([x.expand(len(draws), *x.shape[-2:]), mean[..., None], deviation[..., None]], -1)


def log_density(noise: StudentNoise, draws: Tensor, features: Tensor, y: Tensor) -> Tensor:
    r"""$\log p(y \mid \mathbf x)$ of outcomes `[output, row]` from standardised draws `[output, draw, row]`."""
    log_scale, freedom, centre = noise.log_scale(features), noise.freedom, draws.mean(1, keepdim=True)
    shrink, spread, nu = (values[:, None, None] for values in (noise.shrink, noise.spread, freedom))
    apart = spread * scale_scores(draws.shape[1]).to(draws)[:, None]
    inverse = torch.exp(-log_scale)[:, None] * torch.exp(-apart)  # of rows and of draws: no exponential of each pair
    u = torch.addcmul(y[:, None] - centre, draws - centre, -shrink) * inverse
    exponent = -0.5 * (nu + 1) * torch.log1p(u.square() / nu) - apart
    constant = torch.lgamma((freedom + 1) / 2) - torch.lgamma(freedom / 2) - 0.5 * torch.log(freedom * math.pi)
    return exponent.logsumexp(1) - log_scale + (constant - math.log(draws.shape[1]))[:, None]


def fit_noise(
    draws: Tensor, x: Tensor, y: Tensor, *, weight: Tensor, n_steps: int, gaussian: bool = False, seed: int = 0
) -> tuple[StudentNoise, Tensor]:
    r"""The noise model of each output with the best cross-validated likelihood, and that likelihood (a mean over rows).

    Fitted to rows held out from the networks, all standardised: draws `[output, draw, row]`, inputs `[row, feature]`
    and outcomes `[output, row]`. With `gaussian`, ν is infinite rather than fitted.
    """
    n_outputs, n_rows = y.shape
    source = torch.Generator().manual_seed(seed)
    fold = torch.randperm(n_rows, generator=source) % _FOLDS
    held_out = torch.stack([fold == k for k in range(_FOLDS if n_rows <= _MANY_ROWS else 1)])
    weight, y = (weight / weight.mean()).to(y), torch.stack([_without_ties(one, source) for one in y])
    features = noise_features(x, draws)
    start = _initial_noise(draws, features, y, weight, source)
    learned = _LEARNED[:-2] if gaussian else _LEARNED
    if gaussian:
        zeros = torch.zeros_like(start.raw_spread)
        start = replace(start, raw_spread=zeros, log_freedom=zeros + _LIGHT_TAILS)
    penalties = torch.tensor(PENALTIES).to(y)
    shape = (n_outputs, len(penalties), len(held_out))
    penalty = penalties[None, :, None].expand(shape).flatten()
    tested = held_out.to(y)[None, None].expand(*shape, n_rows).flatten(0, 2)
    # Half the draws suffice to separate the penalties.
    many = [values.repeat_interleave(shape[1] * shape[2], 0) for values in (draws[:, ::2], features, y)]
    starts = {name: values.repeat_interleave(shape[1] * shape[2], 0) for name, values in vars(start).items()}
    fitted = _maximise(StudentNoise(**starts), many, weight * (1 - tested), penalty, n_steps, learned)
    with torch.no_grad():
        density = log_density(fitted, *many) * tested
    # [output, penalty, row]: every row is held out in at most one fold.
    density = density.view(*shape, n_rows).sum(2).nan_to_num(nan=-torch.inf)
    rows = held_out.any(0)
    chosen = _simplest_penalty(density[..., rows], weight[rows])
    scores = (density[..., rows] * weight[rows]).sum(-1) / weight[rows].sum()
    noise = _maximise(start, (draws, features, y), weight.expand_as(y), penalties[chosen], n_steps, learned)
    if gaussian:
        noise = replace(noise, log_freedom=torch.full_like(noise.log_freedom, torch.inf))
    return noise, scores.gather(1, chosen[:, None])[:, 0]


def _without_ties(y: Tensor, source: torch.Generator) -> Tensor:
    """Outcomes, moved by up to an eighth of the distance of the values that most of them repeat: grades, counts.

    A draw that equals its outcome, as those of trees may, would otherwise have no noise and an unbounded density.
    """
    values, counts = y.unique(return_counts=True)
    if (often := counts >= max(5, 0.01 * len(y))).sum() < 2 or counts[often].sum() < len(y) / 2:
        return y
    return y + values[often].diff().min() / 4 * (torch.rand(len(y), generator=source).to(y) - 0.5)


def _simplest_penalty(density: Tensor, weight: Tensor) -> Tensor:
    """The strongest penalty within two standard errors of the best, from densities `[output, rising penalty, row]`."""
    share = weight / weight.sum()
    best = (density * share).sum(-1).argmax(1)
    loss = density.gather(1, best[:, None, None].expand(-1, 1, density.shape[2])) - density
    mean = (loss * share).sum(-1)
    error = ((loss - mean[..., None]).square() * share).sum(-1).div(len(weight)).sqrt()
    within = (mean <= _TOLERANCE * error) & mean.isfinite()
    return torch.where(within, torch.arange(density.shape[1], device=density.device), 0).amax(1).maximum(best)


def _initial_noise(draws: Tensor, features: Tensor, y: Tensor, weight: Tensor, source: torch.Generator) -> StudentNoise:
    n_outputs, n_features = len(y), features.shape[2]
    # A Gaussian's deviation is 1.5 medians of its errors; the steps are too few to come down from that of outliers.
    error, order = (y - draws.mean(1)).abs().sort(1)
    median = error.gather(1, (weight[order].cumsum(1) / weight.sum() < 0.5).sum(1, keepdim=True))[:, 0]
    deviation = (error.square() * weight[order]).mean(1).sqrt()
    residual = torch.minimum(deviation, (2.5 * median).maximum(0.02 * deviation)).clamp(min=1e-6).log()
    first = torch.randn(n_features, _HIDDEN, generator=source).to(y) / math.sqrt(n_features)
    zeros = y.new_zeros(n_outputs)
    return StudentNoise(
        first=first.expand(n_outputs, -1, -1).clone(),
        first_bias=zeros[:, None, None].expand(-1, 1, _HIDDEN).clone(),
        second=zeros[:, None, None].expand(-1, 1, _HIDDEN).clone(),
        second_bias=(residual - 0.3)[:, None],  # the core of a heavy-tailed residual is narrower
        log_shrink=zeros - 0.5,
        raw_spread=zeros + 0.3,
        log_freedom=zeros + 1.0,
        feature_mean=features.mean(1, keepdim=True),
        feature_scale=features.std(1, unbiased=False, keepdim=True).clamp(min=1e-6),
    )


def _maximise(
    noise: StudentNoise, rows: Sequence[Tensor], weight: Tensor, penalty: Tensor, n_steps: int, learned: Sequence[str]
) -> StudentNoise:
    """The penalised maximum-likelihood fit of each model to rows (draws, features, y), by Adam with cosine decay."""
    noise = replace(noise, **{name: getattr(noise, name).clone().requires_grad_() for name in learned})
    parameters = [getattr(noise, name) for name in learned]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    count = weight.sum(1)
    for step in range(n_steps):
        loss = -(log_density(noise, *rows) * weight).sum(1) / count
        squares = noise.first.square().sum((1, 2)) / noise.first.shape[1] + noise.second.square().sum((1, 2))
        # Weak penalties towards plausible values keep κ, s and ν finite where the likelihood is flat.
        pull = 0.5 * (noise.log_shrink.square() + noise.raw_spread.square() + (noise.log_freedom - 2).square())
        gradients = torch.autograd.grad((loss + (penalty * squares + pull) / count).sum(), parameters)
        # Importing torch.optim would take longer than all steps together.
        rate = 0.5 * _LEARNING_RATE * (1 + math.cos(math.pi * step / n_steps))
        shares = [(1 - beta) / (1 - beta ** (step + 1)) for beta in _BETAS]  # moments whose bias is corrected
        with torch.no_grad():
            for parameter, gradient, (first, second) in zip(parameters, gradients, moments, strict=True):
                first.lerp_(gradient, shares[0])
                second.lerp_(gradient.square(), shares[1])
                parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-rate)
    return replace(noise, **{name: getattr(noise, name).detach() for name in learned})
