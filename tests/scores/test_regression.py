"""Scores of a regression against closed forms, scikit-learn and uncertainty-toolbox."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
import uncertainty_toolbox.metrics as toolbox

from dropbayes import scores
from tests.scores.samples import normal


def test_point_errors_agree_with_scikit_learn():
    mean, y = normal(30), normal(30, seed=1)
    assert scores.rmse(mean, y).item() == pytest.approx(sklearn.metrics.root_mean_squared_error(y, mean))
    assert scores.mae(mean, y).item() == pytest.approx(sklearn.metrics.mean_absolute_error(y, mean))


def test_mixture_log_likelihood_agrees_with_torch_mixture_of_gaussians():
    draws, y, precision = normal(7, 5), normal(5, seed=1), 3.0
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(5, 7, dtype=torch.float64)),
        torch.distributions.Normal(draws.T, precision**-0.5),
    )
    torch.testing.assert_close(
        scores.gaussian_mixture_log_likelihood(draws, y, precision=precision), mixture.log_prob(y), rtol=1e-12, atol=0.0
    )


def test_mixture_log_likelihood_counts_every_output_of_a_row():
    # With one draw the mixture is a single D-dimensional Gaussian: the constant is D/2 log(τ / 2π), not ½.
    draw, y, precision = normal(1, 4, 3), normal(4, 3, seed=1), 0.7
    expected = torch.distributions.Normal(draw[0], precision**-0.5).log_prob(y).sum(-1)
    torch.testing.assert_close(scores.gaussian_mixture_log_likelihood(draw, y, precision=precision), expected)


def test_mixture_log_likelihood_survives_densities_that_underflow():
    value = scores.gaussian_mixture_log_likelihood(
        torch.zeros(10, 1, dtype=torch.float64), torch.tensor([1e3], dtype=torch.float64), precision=1e3
    )
    assert value.item() == pytest.approx(-0.5e9 + 0.5 * math.log(1e3 / (2 * math.pi)))


def test_gaussian_log_likelihood_agrees_with_uncertainty_toolbox_and_torch():
    mean, std, y = normal(40), normal(40, seed=1).exp(), normal(40, seed=2)
    ours = scores.gaussian_log_likelihood(mean, std.square(), y)
    torch.testing.assert_close(ours, torch.distributions.Normal(mean, std).log_prob(y))
    assert -ours.mean().item() == pytest.approx(toolbox.nll_gaussian(mean.numpy(), std.numpy(), y.numpy()))


def test_mixture_and_moment_matched_log_likelihoods_agree_for_gaussian_draws_and_differ_for_two_modes():
    y = normal(6, seed=3)
    gaussian = normal(200_000, 1).expand(-1, 6)
    variance = torch.full((6,), 1 + 1 / 4.0, dtype=torch.float64)  # epistemic 1, aleatoric 1/τ
    moment_matched = scores.gaussian_log_likelihood(torch.zeros(6, dtype=torch.float64), variance, y)
    mixture = scores.gaussian_mixture_log_likelihood(gaussian, y, precision=4.0)
    torch.testing.assert_close(mixture, moment_matched, atol=0.02, rtol=0.0)
    two_modes = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    at_a_mode = torch.ones(1, dtype=torch.float64)
    mixture = scores.gaussian_mixture_log_likelihood(two_modes, at_a_mode, precision=100.0)
    moment_matched = scores.gaussian_log_likelihood(torch.zeros(1), torch.tensor([1.01]), at_a_mode)
    assert mixture > moment_matched + 2


def test_interval_scores_and_sharpness_agree_with_uncertainty_toolbox():
    mean, std, y = normal(50), normal(50, seed=1).exp(), normal(50, seed=2)
    # The toolbox averages over p = 0.01 ... 0.99 central intervals.
    values = []
    for level in np.linspace(0.01, 0.99, 99):
        half = scipy.stats.norm.ppf(0.5 + level / 2) * std
        values.append(scores.interval_score(mean - half, mean + half, y, level=level).mean())
    theirs = toolbox.interval_score(mean.numpy(), std.numpy(), y.numpy())
    assert torch.stack(values).mean().item() == pytest.approx(theirs, rel=1e-10)
    assert scores.sharpness(std).item() == pytest.approx(toolbox.sharpness(std.numpy()))


def test_interval_score_is_least_at_the_true_quantiles():
    y = normal(100_000)

    def loss(z):
        return scores.interval_score(torch.full_like(y, -z), torch.full_like(y, z), y, level=0.8).mean()

    true = scipy.stats.norm.ppf(0.9)
    assert loss(true) < min(loss(0.8 * true), loss(1.2 * true))


def test_coverage_of_true_quantiles_is_the_level():
    y = normal(20_000)
    z = torch.full_like(y, scipy.stats.norm.ppf(0.95))
    assert scores.coverage(-z, z, y).item() == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 20_000))


def test_a_column_against_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"`mean` and `y` must have one shape.*y\[:, None\]"):
        scores.rmse(torch.zeros(3, 1), torch.zeros(3))


def test_numpy_arrays_are_accepted_even_read_only_reversed_or_integer():
    y = np.arange(5)
    y.setflags(write=False)
    assert scores.mae(y[::-1], y).item() == pytest.approx(2.4)


@pytest.mark.parametrize("score", [scores.rmse, scores.mae])
def test_a_row_of_weight_two_counts_as_two_in_errors(score):
    mean, y, weight = normal(20, 2), normal(20, 2, seed=1), torch.arange(20) % 3
    repeated = torch.repeat_interleave(torch.arange(20), weight)
    torch.testing.assert_close(score(mean, y, sample_weight=weight), score(mean[repeated], y[repeated]))
    torch.testing.assert_close(score(mean, y, sample_weight=weight * 1e9), score(mean[repeated], y[repeated]))


def test_weights_reach_coverage_and_sharpness():
    y, one = torch.tensor([0.5, 3.0, 3.0]), torch.ones(3)
    assert scores.coverage(0 * one, one, y, sample_weight=[2, 1, 0]).item() == pytest.approx(2 / 3)
    assert scores.sharpness(torch.tensor([1.0, 7.0]), sample_weight=[3, 1]).item() == pytest.approx(math.sqrt(13))


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_quantile_score_agrees_with_scikit_learn_and_is_least_at_the_quantile(level):
    y = normal(50_000)
    for shift in (-0.3, 0.0, 0.3):
        q = torch.full_like(y, scipy.stats.norm.ppf(level) + shift)
        ours = scores.quantile_score(q, y, level=level).mean().item()
        assert ours == pytest.approx(sklearn.metrics.mean_pinball_loss(y, q, alpha=level))
        best = scores.quantile_score(q - shift, y, level=level).mean().item()
        assert ours > best or shift == 0


def test_twice_the_quantile_score_integrates_to_the_crps():
    levels = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    y = torch.tensor([0.7], dtype=torch.float64)
    quantiles = torch.special.ndtri(levels)
    integral = 2 * sum(
        scores.quantile_score(q[None], y, level=float(a)).item() for q, a in zip(quantiles, levels, strict=True)
    )
    ours = scores.crps(torch.zeros(1, 1, dtype=torch.float64), y, noise_variance=1.0)
    assert integral / 4000 == pytest.approx(ours.item(), rel=1e-4)


def test_impossible_input_is_refused_by_name():
    one = torch.ones(2)
    with pytest.raises(ValueError, match="`y` must not contain NaN"):
        scores.coverage(one, one, torch.tensor([math.nan, 1.0]))
    with pytest.raises(ValueError, match="`y` must be finite"):
        scores.coverage(one, one, torch.tensor([math.inf, 1.0]))
    with pytest.raises(ValueError, match="`variance` must be positive; got 0"):
        scores.gaussian_log_likelihood(one, 0 * one, one)
    with pytest.raises(ValueError, match="`lower` must not exceed `upper`"):
        scores.coverage(2 * one, one, one)


def test_an_interval_of_too_few_rows_is_infinite_and_covers():
    ends = torch.full((2,), math.inf)
    assert scores.coverage(-ends, ends, torch.ones(2)) == 1
