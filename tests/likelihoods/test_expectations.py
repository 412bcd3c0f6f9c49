"""Tests of the paper's predictive formulas: propositions 3 and 4, eq:predictive_dist_reg."""

import itertools
import math

import pytest
import torch
from torch import nn

from dropbayes.likelihoods import (
    Categorical,
    Gaussian,
    predictive_covariance,
    predictive_log_density,
    predictive_mean,
    predictive_misfit_and_noise,
    predictive_variance,
)

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def exhaustive_outputs():
    """A ReLU network's outputs under all 2⁵ masks, with the probability of each: the exact q(ŷ)."""
    first, second = torch.randn(2, 3, dtype=DTYPE), torch.randn(3, 2, dtype=DTYPE)
    x, keep = torch.randn(4, 2, dtype=DTYPE), 0.7
    outputs, probabilities = [], []
    for mask in itertools.product([0.0, 1.0], repeat=5):
        z1, z2 = torch.tensor(mask[:2], dtype=DTYPE), torch.tensor(mask[2:], dtype=DTYPE)
        outputs.append(torch.relu(x * z1 / keep @ first) * z2 / keep @ second)
        probabilities.append(keep ** sum(mask) * (1 - keep) ** (5 - sum(mask)))
    return torch.stack(outputs), torch.tensor(probabilities, dtype=DTYPE)


def test_predictive_moments_are_those_of_the_exact_mixture():
    outputs, probabilities = exhaustive_outputs()
    tau = 3.0
    # Draws in proportion to the masks' probabilities: 0.7 = 7/10, so multiplicities 7^k 3^(5-k) of 10⁵ are exact.
    counts = (probabilities * 10**5).round().long()
    draws = outputs.repeat_interleave(counts, 0)
    mean = torch.einsum("t,trd->rd", probabilities, outputs)
    second = torch.einsum("t,trd,tre->rde", probabilities, outputs, outputs)
    # Var[y*] = τ⁻¹I + E[ŷᵀŷ] - E[ŷ]ᵀE[ŷ]
    covariance = torch.eye(2, dtype=DTYPE) / tau + second - mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(predictive_mean(Gaussian(tau), draws), mean)
    torch.testing.assert_close(predictive_covariance(draws, precision=tau), covariance)
    torch.testing.assert_close(predictive_variance(Gaussian(tau), draws), covariance.diagonal(dim1=-2, dim2=-1))


def test_predictive_log_density_is_that_of_the_mixture_of_gaussians_in_d_dimensions():
    draws, y = torch.randn(6, 5, 3, dtype=DTYPE), torch.randn(5, 3, dtype=DTYPE)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(5, 6, dtype=DTYPE)),
        torch.distributions.Independent(torch.distributions.Normal(draws.movedim(0, 1), 2.5**-0.5), 1),
    )
    torch.testing.assert_close(predictive_log_density(Gaussian(2.5), draws, y), mixture.log_prob(y))


def test_predictive_log_density_is_the_papers_line_for_one_output():
    tau, draws, y = 0.7, torch.randn(9, 4, 1, dtype=DTYPE), torch.randn(4, 1, dtype=DTYPE)
    paper = (
        torch.logsumexp(-0.5 * tau * (y - draws).square().squeeze(-1), 0)
        - math.log(9)
        - 0.5 * math.log(2 * math.pi)
        - 0.5 * math.log(1 / tau)
    )
    torch.testing.assert_close(predictive_log_density(Gaussian(tau), draws, y), paper)


def test_predictive_log_density_survives_precisions_that_underflow_every_density():
    draws, y = torch.zeros(3, 1, 1, dtype=DTYPE), torch.ones(1, 1, dtype=DTYPE)
    expected = 0.5 * math.log(1e12) - 0.5 * math.log(2 * math.pi) - 0.5e12
    torch.testing.assert_close(predictive_log_density(Gaussian(1e12), draws, y).item(), expected)


def test_class_variance_splits_into_epistemic_and_aleatoric():
    # A mixture of one-hot labels has the variance p̄(1 - p̄) of its mean probabilities.
    draws = torch.randn(8, 5, 3, dtype=DTYPE)
    mean = predictive_mean(Categorical(), draws)
    torch.testing.assert_close(predictive_variance(Categorical(), draws), mean * (1 - mean))


def test_weight_averaging_is_the_mc_mean_of_a_linear_network_and_not_of_a_relu_one():
    linear = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 1)).to(DTYPE)
    relu = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(DTYPE)
    x = torch.randn(1, 4, dtype=DTYPE).expand(40_000, 4)
    gap = {}
    for name, net in (("linear", linear), ("relu", relu)):
        draws = net.train()(x)
        gap[name] = (draws.mean() - net.eval()(x[:1])).abs().item() / (draws.std().item() / 200)
    assert gap["linear"] < 4 < gap["relu"]


def test_the_misfit_and_the_noise_of_equation_22_add_up_and_penalise_opposite_precisions():
    torch.manual_seed(0)
    draws, y = torch.randn(7, 3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    terms = []
    for tau in (0.5, 4.0):
        misfit, noise = predictive_misfit_and_noise(Gaussian(tau), draws, y)
        squares = (y - draws).square().sum(-1)
        torch.testing.assert_close(misfit, (-0.5 * tau * squares).logsumexp(0) - math.log(7))
        torch.testing.assert_close(noise, torch.full((3,), math.log(tau / (2 * math.pi)), dtype=torch.float64))
        torch.testing.assert_close(misfit + noise, predictive_log_density(Gaussian(tau), draws, y))
        terms.append((misfit, noise))
    assert (terms[1][0] < terms[0][0]).all() and (terms[1][1] > terms[0][1]).all()
