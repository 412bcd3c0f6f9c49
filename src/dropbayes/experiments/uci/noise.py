r"""A noise model fitted to held-out draws: heavy tails, a scale that varies, a measure of trust in the draws.

Given T draws $f_t(\mathbf x)$ with mean $m(\mathbf x)$ for rows that the networks have not learned,
$$p(y \mid \mathbf x) = \tfrac1T \sum_t \mathcal T_\nu\big(y;\; m + \kappa (f_t - m),\; \sigma(\mathbf z)\big),$$
the predictive mixture of [GG16, eq:predictive_dist] with Student's t for the noise, the spread of the draws rescaled by
κ, and $\log \sigma$ a small network of $\mathbf z$ = (inputs, mean, logarithm of the draws' deviation). With $\nu \to
\infty$, κ = 1 and constant σ this is the paper's predictive density with $\tau = \sigma^{-2}$. The rows are held out
from the networks that made the draws, so their likelihood can be maximised without rewarding over-fitting; how much σ
may vary is chosen by cross-validation among those rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The penalty on the squared weights of log σ, in nats; the last makes σ constant. None is a set's own.
PENALTIES = (0.1, 1.0, 10.0, 1e4)
N_HIDDEN = 16
N_FOLDS = 3
N_STEPS = 400
LEARNING_RATE = 0.02
_FEATURE_LIMIT = 4.0  # in deviations: a test row far outside extrapolates no further


@dataclass(frozen=True, eq=False)
class Noise:
    """Fitted noise models, one per group (axis 0): parameters of log σ, log κ and log(ν − 1)."""

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    log_shrink: Tensor
    log_tail: Tensor
    feature_mean: Tensor
    feature_scale: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All fitted tensors."""
        return (self.first, self.first_bias, self.second, self.second_bias, self.log_shrink, self.log_tail)


def features(x: Tensor, draws: Tensor) -> Tensor:
    """The noise model's inputs `[group, row, feature]`: x, and mean and log-spread of draws `[group, draw, row]`."""
    spread = draws.std(1, unbiased=False).clamp(min=1e-6).log()
    return torch.cat([x, draws.mean(1)[..., None], spread[..., None]], -1)


def log_scale(noise: Noise, z: Tensor) -> Tensor:
    r"""$\log \sigma$ of each row `[group, row]`."""
    standard = ((z - noise.feature_mean) / noise.feature_scale).clamp(-_FEATURE_LIMIT, _FEATURE_LIMIT)
    hidden = torch.tanh(standard @ noise.first + noise.first_bias)
    return (hidden * noise.second).sum(-1) + noise.second_bias


def log_density(noise: Noise, draws: Tensor, z: Tensor, y: Tensor) -> Tensor:
    r"""$\log p(y \mid \mathbf x)$ of each row `[group, row]` from draws `[group, draw, row]`.

    Args:
        noise: The fitted models.
        draws: Sampled means.
        z: `features` of the rows.
        y: Outcomes `[group, row]`.
    """
    centre = draws.mean(1, keepdim=True)
    spread = noise.log_shrink.exp()[:, None, None] * (draws - centre)
    scale = log_scale(noise, z)[:, None]
    nu = 1 + noise.log_tail.exp()[:, None, None]
    error = (y[:, None] - centre - spread) * torch.exp(-scale)
    constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * torch.log(nu * math.pi)
    each = constant - scale - 0.5 * (nu + 1) * torch.log1p(error.square() / nu)
    return each.logsumexp(1) - math.log(draws.shape[1])


def fit_noise(
    draws: Tensor,
    z: Tensor,
    y: Tensor,
    *,
    penalties: Sequence[float] = PENALTIES,
    n_steps: int = N_STEPS,
    seed: int = 0,
) -> tuple[Noise, Tensor]:
    r"""The noise model of each group with the best cross-validated likelihood, and that likelihood (a mean over rows).

    Args:
        draws: Draws of rows held out from their networks, `[group, draw, row]`.
        z: `features` of the rows `[group, row, feature]`.
        y: Outcomes `[group, row]`.
        penalties: Candidate penalties on the weights of $\log \sigma$, in nats.
        n_steps: Adam steps.
        seed: The seed of the initial weights and of the folds.
    """
    n_groups, n_rows = y.shape
    source = torch.Generator().manual_seed(seed)
    fold = torch.randperm(n_rows, generator=source) % N_FOLDS
    # For each group and penalty one fit without each fold and one with all rows, all of them as one larger group axis.
    masks = torch.stack([*(fold != k for k in range(N_FOLDS)), torch.ones(n_rows, dtype=torch.bool)]).to(y)
    shape = (n_groups, len(penalties), N_FOLDS + 1)

    def spread(values: Tensor) -> Tensor:
        return values[:, None].expand(-1, shape[1] * shape[2], *values.shape[1:]).flatten(0, 1)

    penalty = torch.tensor(penalties).to(y)[None, :, None].expand(shape).flatten()
    mask = masks[None, None].expand(*shape, n_rows).flatten(0, 2)
    fitted = _fitted(spread(draws), spread(z), spread(y), mask, penalty, n_steps, source)
    with torch.no_grad():
        density = log_density(fitted, spread(draws), spread(z), spread(y)) * (1 - mask)
    scores = density.sum(1).view(shape).sum(2).nan_to_num(nan=-torch.inf) / n_rows
    groups = torch.arange(n_groups, device=y.device)
    chosen = (groups * shape[1] + scores.argmax(1)) * shape[2] + N_FOLDS
    fields = {name: getattr(fitted, name)[chosen] for name in Noise.__dataclass_fields__}
    return Noise(**fields), scores.amax(1)


def _initial(draws: Tensor, z: Tensor, y: Tensor, source: torch.Generator) -> Noise:
    n_groups, n_features = len(y), z.shape[2]
    residual = (y - draws.mean(1)).square().mean(1).sqrt().clamp(min=1e-6).log()
    first = torch.randn(n_features, N_HIDDEN, generator=source).to(y) / math.sqrt(n_features)
    zeros = torch.zeros(n_groups, device=y.device, dtype=y.dtype)
    return Noise(
        first=first.expand(n_groups, -1, -1).clone(),
        first_bias=zeros[:, None, None].expand(-1, 1, N_HIDDEN).clone(),
        second=zeros[:, None, None].expand(-1, 1, N_HIDDEN).clone(),
        second_bias=(residual - 0.3)[:, None].clone(),  # the core of a heavy-tailed residual is narrower
        log_shrink=zeros - 0.5,
        log_tail=zeros + 1.5,
        feature_mean=z.mean(1, keepdim=True),
        feature_scale=z.std(1, unbiased=False, keepdim=True).clamp(min=1e-6),
    )


def _fitted(
    draws: Tensor, z: Tensor, y: Tensor, mask: Tensor, penalty: Tensor, n_steps: int, source: torch.Generator
) -> Noise:
    """The penalised maximum-likelihood fit of every group on the marked rows."""
    noise = _initial(draws, z, y, source)
    parameters = [p.requires_grad_() for p in noise.parameters]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    count = mask.sum(1)
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = -(log_density(noise, draws, z, y) * mask).sum(1) / count
        weight = noise.first.square().sum((1, 2)) / noise.first.shape[1] + noise.second.square().sum((1, 2))
        # Weak pulls of κ and ν towards plausible values keep them finite where the likelihood is flat.
        prior = 0.5 * (noise.log_shrink.square() + (noise.log_tail - 2).square())
        (loss + (penalty * weight + prior) / count).sum().backward()
        optimizer.step()
        schedule.step()
    for p in parameters:
        p.requires_grad_(False)
    return noise
