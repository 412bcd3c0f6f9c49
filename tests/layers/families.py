"""Families with arbitrary parameters, for tests."""

import math

import torch

from dropbayes.layers import Bernoulli, Concrete, DiagonalGaussian, Mixture, multiplicative_gaussian

DTYPE = torch.float64


def matrix(*shape):
    return torch.randn(shape, dtype=DTYPE)


def families():
    locs = matrix(3, 3, 2)
    probs = torch.tensor([0.5, 0.2, 0.3], dtype=DTYPE)
    stds = torch.rand(3, 3, 2, dtype=DTYPE) + 0.2
    return {
        "bernoulli": Bernoulli(matrix(3, 2), 0.7),
        "non-diminishing bernoulli": Bernoulli(matrix(3, 2), 0.7, std=0.4),
        "gaussian": DiagonalGaussian(matrix(3, 2), torch.tensor(0.3, dtype=DTYPE)),
        "multiplicative gaussian": multiplicative_gaussian(matrix(3, 2), 0.5),
        "mixture": Mixture(probs, locs, stds),
        "low-rank mixture": Mixture(probs, locs, stds, matrix(3, 3, 2, 1)),
        "concrete": Concrete(matrix(3, 2), torch.tensor(-0.4, dtype=DTYPE), temperature=1e-3),
    }


NAMES = list(families())
WITH_DENSITY = [name for name in NAMES if name not in ("bernoulli", "concrete")]


def assert_within_standard_errors(samples, truth, k=4.5):
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - truth).abs() <= k * error + 1e-9).all()


def rebuilt(name, kept, second):
    """The family as a function of two differentiable tensors."""
    probs = torch.tensor([0.5, 0.5], dtype=DTYPE)
    if name == "bernoulli":
        return Bernoulli(kept * second, 0.7)
    if name == "non-diminishing bernoulli":
        return Bernoulli(kept * second, 0.7, std=0.4)
    if name == "gaussian":
        return DiagonalGaussian(kept, second.exp())
    if name == "multiplicative gaussian":
        return multiplicative_gaussian(kept * second, 0.5)
    if name == "concrete":
        return Concrete(kept, second.sum(), temperature=0.5)
    factors = None if name == "mixture" else torch.stack([kept, second])[..., None]
    return Mixture(probs, torch.stack([kept, second]), torch.stack([second, kept]).exp(), factors)


def kl_monte_carlo(q, *, length_scale, n_draws):
    """The Monte Carlo KL of any family with a density, and its standard error."""
    draws = q.sample(n_draws)
    prior = torch.distributions.Normal(torch.zeros((), dtype=draws.dtype), 1 / length_scale)
    ratios = q.log_density(draws) - prior.log_prob(draws).sum((-2, -1))
    return ratios.mean(), ratios.std() / math.sqrt(n_draws)
