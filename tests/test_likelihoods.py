"""Tests of the observation models against torch.distributions, and of the paper's predictive formulas."""

import itertools
import math

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    predictive_covariance,
    predictive_log_density,
    predictive_mean,
    predictive_variance,
)

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_gaussian_log_density_is_that_of_torch_distributions():
    output, y = torch.randn(7, 5, 3, dtype=DTYPE), torch.randn(5, 3, dtype=DTYPE)
    expected = torch.distributions.Normal(output, 4.0**-0.5).log_prob(y).sum(-1)
    torch.testing.assert_close(db.Gaussian(precision=4.0).log_density(output, y), expected)


def test_column_output_against_flat_targets_is_refused():
    with pytest.raises(ValueError, match=r"`y` must have the shape"):
        db.Gaussian(precision=1.0).log_density(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("precision", [1e-12, 1e12])
def test_gaussian_is_finite_and_right_at_extreme_precisions(precision):
    likelihood, output = Gaussian(precision), torch.zeros(3, 2, dtype=DTYPE)
    y = torch.full((3, 2), precision**-0.5, dtype=DTYPE)
    expected = torch.full((3,), 2 * (0.5 * math.log(precision) - 0.5 * math.log(2 * math.pi) - 0.5), dtype=DTYPE)
    torch.testing.assert_close(likelihood.log_density(output, y), expected)
    torch.testing.assert_close(likelihood.variance(output), torch.full_like(output, 1 / precision))


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_precisions_are_refused(precision):
    with pytest.raises(ValueError, match=r"`precision` \(τ\) must be a positive number"):
        Gaussian(precision)


def test_heteroscedastic_log_density_is_that_of_torch_distributions():
    output, y = torch.randn(7, 5, 6, dtype=DTYPE), torch.randn(5, 3, dtype=DTYPE)
    normal = torch.distributions.Normal(output[..., :3], torch.exp(0.5 * output[..., 3:]))
    likelihood = HeteroscedasticGaussian()
    torch.testing.assert_close(likelihood.log_density(output, y), normal.log_prob(y).sum(-1))
    torch.testing.assert_close(likelihood.mean(output), normal.mean)
    torch.testing.assert_close(likelihood.variance(output), normal.variance)


def test_heteroscedastic_with_constant_log_variance_is_the_gaussian():
    mean, y = torch.randn(5, 2, dtype=DTYPE), torch.randn(5, 2, dtype=DTYPE)
    output = torch.cat([mean, torch.full_like(mean, -math.log(3.0))], -1)
    torch.testing.assert_close(HeteroscedasticGaussian().log_density(output, y), Gaussian(3.0).log_density(mean, y))


def test_odd_heteroscedastic_outputs_are_refused():
    with pytest.raises(ValueError, match="even last axis"):
        HeteroscedasticGaussian().mean(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("shape", "class_axis"), [((5, 4), -1), ((6, 5, 4), -1), ((5, 4, 3, 2), -3), ((6, 5, 4, 3, 2), -3), ((5, 3, 4), -1)]
)
def test_categorical_log_density_is_that_of_torch_distributions(shape, class_axis):
    output = torch.randn(shape, dtype=DTYPE)
    draws = 1 if shape[0] == 6 else 0
    event = [size for axis, size in enumerate(shape[draws:]) if axis != len(shape) - draws + class_axis]
    y = torch.randint(4, event)
    expected = torch.distributions.Categorical(logits=output.movedim(class_axis, -1)).log_prob(y)
    expected = expected.flatten(draws + 1).sum(-1) if len(event) > 1 else expected
    torch.testing.assert_close(Categorical(class_axis).log_density(output, y), expected)


def test_categorical_moments_are_those_of_one_hot_labels():
    output = torch.randn(4, 3, dtype=DTYPE)
    oracle = torch.distributions.OneHotCategorical(logits=output)
    torch.testing.assert_close(Categorical().mean(output), oracle.mean)
    torch.testing.assert_close(Categorical().variance(output), oracle.variance)


@pytest.mark.parametrize(
    ("y", "rule"),
    [
        (torch.zeros(4), "class labels"),
        (torch.zeros(4, 3, dtype=torch.long), "less its class axis"),
        (torch.zeros(5, dtype=torch.long), "less its class axis"),
        (torch.tensor(0), "less its class axis"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y, rule):
    with pytest.raises(ValueError, match=rule):
        Categorical().log_density(torch.zeros(4, 3), y)


@pytest.mark.parametrize("likelihood", [Gaussian(4.0), HeteroscedasticGaussian(), Categorical()])
def test_samples_have_the_stated_moments(likelihood):
    n = 40_000
    output = torch.tensor([0.5, -0.7], dtype=DTYPE).expand(n, 2)
    sample = likelihood.sample(output, generator=torch.Generator().manual_seed(1))
    if isinstance(likelihood, Categorical):
        sample = nn.functional.one_hot(sample, 2).to(DTYPE)
    mean, variance = likelihood.mean(output)[0], likelihood.variance(output)[0]
    assert ((sample.mean(0) - mean).abs() < 4 * (variance / n).sqrt()).all()
    centred = (sample - mean).square()
    assert ((centred.mean(0) - variance).abs() < 4 * centred.std(0) / math.sqrt(n)).all()


@pytest.mark.parametrize("likelihood", [Gaussian(4.0), HeteroscedasticGaussian()])
def test_log_densities_differentiate(likelihood):
    y = torch.randn(3, 2, dtype=DTYPE)
    width = 4 if isinstance(likelihood, HeteroscedasticGaussian) else 2
    output = torch.randn(3, width, dtype=DTYPE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda out: likelihood.log_density(out, y), output)


def test_categorical_log_density_differentiates():
    output = torch.randn(3, 4, dtype=DTYPE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda out: Categorical().log_density(out, torch.tensor([0, 3, 1])), output)


# --- propositions 3 and 4, eq:predictive_dist_reg ------------------------------------------------------------------


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
