"""Scores against closed forms, quadrature, scikit-learn, uncertainty-toolbox and torchmetrics."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional.classification as torchmetrics_classification
import torchmetrics.functional.regression as torchmetrics_regression
import uncertainty_toolbox.metrics as toolbox

from dropbayes import scores


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def classified():
    """Probabilities [row, class] too low where low and too high where high, so that the gaps of bins differ in sign."""
    probabilities = (2.5 * normal(400, 4, seed=1)).softmax(-1)
    right = torch.rand(400, generator=generator(2)) < 0.65
    other = (probabilities.argmax(-1) + torch.randint(1, 4, (400,), generator=generator(3))) % 4
    labels = torch.where(right, probabilities.argmax(-1), other)
    return probabilities, labels


# ------------------------------------------------------------------------------------------------ regression


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


def test_crps_of_bare_draws_agrees_with_torchmetrics():
    draws, y = normal(9, 30), normal(30, seed=1)
    ours = scores.crps(draws, y).mean()
    theirs = torchmetrics_regression.continuous_ranked_probability_score(draws.T.contiguous(), y)
    torch.testing.assert_close(ours, theirs)


def test_crps_of_one_noisy_draw_agrees_with_the_gaussian_of_uncertainty_toolbox():
    mean, std, y = normal(30), normal(30, seed=1).exp(), normal(30, seed=2)
    ours = scores.crps(mean[None], y, noise_variance=std.square())
    theirs = toolbox.crps_gaussian(mean.numpy(), std.numpy(), y.numpy())
    assert ours.mean().item() == pytest.approx(theirs, rel=1e-10)


def test_crps_of_the_mixture_is_the_integral_of_its_definition():
    draws, y, variance = normal(4, 1), 0.3, np.array([[0.2], [0.5], [1.0], [0.1]])

    def squared_gap(z):
        cdf = scipy.stats.norm.cdf(z, draws[:, 0].numpy(), np.sqrt(variance[:, 0])).mean()
        return (cdf - (y <= z)) ** 2

    expected = sum(scipy.integrate.quad(squared_gap, *ends, limit=200)[0] for ends in ((-15, y), (y, 15)))
    ours = scores.crps(draws, torch.tensor([y], dtype=torch.float64), noise_variance=variance)
    assert ours.item() == pytest.approx(expected, rel=1e-7)


def test_crps_is_continuous_as_the_noise_vanishes():
    draws, y = normal(5, 8), normal(8, seed=1)
    torch.testing.assert_close(scores.crps(draws, y, noise_variance=1e-16), scores.crps(draws, y), atol=1e-7, rtol=0.0)


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
    with pytest.raises(ValueError, match=r"`y` must have the shape.*y\[:, None\]"):
        scores.rmse(torch.zeros(3, 1), torch.zeros(3))


# -------------------------------------------------------------------------------------------- classification


def test_classification_scores_agree_with_scikit_learn(classified):
    probabilities, labels = classified
    log_loss = sklearn.metrics.log_loss(labels, probabilities)
    assert -scores.class_log_likelihood(probabilities, labels).mean().item() == pytest.approx(log_loss)
    brier = sklearn.metrics.brier_score_loss(labels, probabilities, scale_by_half=False)
    assert scores.brier_score(probabilities, labels).mean().item() == pytest.approx(brier)
    accuracy = sklearn.metrics.accuracy_score(labels, probabilities.argmax(1))
    assert scores.accuracy(probabilities, labels).item() == pytest.approx(accuracy)


def test_class_log_likelihood_of_mean_probabilities_is_the_mixture_over_draws():
    draws, labels = normal(9, 6, 3).softmax(-1), torch.tensor([0, 1, 2, 0, 1, 2])
    log_density = draws.log().gather(2, labels.expand(9, 6)[..., None]).squeeze(-1)
    torch.testing.assert_close(
        scores.class_log_likelihood(draws.mean(0), labels), scores.mixture_log_likelihood(log_density)
    )


@pytest.mark.parametrize("n_bins", [1, 10, 15])
def test_expected_calibration_error_agrees_with_torchmetrics(classified, n_bins):
    probabilities, labels = classified
    theirs = torchmetrics_classification.multiclass_calibration_error(
        probabilities, labels, num_classes=4, n_bins=n_bins, norm="l1"
    )
    ours = scores.expected_calibration_error(probabilities, labels, n_bins=n_bins)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert n_bins == 1 or ours > 0.1


def test_adaptive_calibration_error_agrees_with_a_loop_over_equal_slices(classified):
    # The oracle is written here with numpy: sort, cut into equal slices, average each.
    probabilities, labels = classified[0].numpy(), classified[1].numpy()
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    order = np.argsort(confidence, kind="stable")
    expected = sum(
        len(rows) / 400 * abs(correct[rows].mean() - confidence[rows].mean()) for rows in np.split(order, 16)
    )
    assert scores.adaptive_calibration_error(*classified, n_bins=16).item() == pytest.approx(expected)
    assert scores.expected_calibration_error(*classified, n_bins=16).item() != pytest.approx(expected, rel=1e-3)


def test_calibration_errors_of_a_calibrated_model_are_small_and_of_a_sure_and_wrong_one_are_one():
    probabilities = normal(40_000, 3).softmax(-1)
    labels = torch.multinomial(probabilities, 1, generator=generator(1)).squeeze(1)
    sure, wrong = torch.eye(2, dtype=torch.float64)[[0, 0, 1]], torch.tensor([1, 1, 0])
    for error in (scores.expected_calibration_error, scores.adaptive_calibration_error):
        assert error(probabilities, labels) < 3 * math.sqrt(15 / 40_000)
        assert error(sure, wrong) == 1


def test_logits_and_draws_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="softmax"):
        scores.brier_score(torch.randn(4, 3, generator=generator()), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="Average draws"):
        scores.accuracy(torch.full((2, 4, 2), 0.5), torch.zeros(4, dtype=torch.long))


# ----------------------------------------------------------------------------------- ranking by uncertainty


@pytest.mark.parametrize("digits", [1, 9], ids=["with ties", "without ties"])
def test_detection_areas_agree_with_scikit_learn(digits):
    event = torch.rand(300, generator=generator()) < 0.2
    uncertainty = (normal(300) + event).round(decimals=digits)
    assert scores.auroc(uncertainty, event).item() == pytest.approx(sklearn.metrics.roc_auc_score(event, uncertainty))
    expected = sklearn.metrics.average_precision_score(event, uncertainty)
    assert scores.average_precision(uncertainty, event).item() == pytest.approx(expected)


def test_auroc_of_a_constant_uncertainty_is_one_half_and_of_the_negated_one_the_complement():
    event = torch.tensor([0, 1, 0, 1, 1])
    uncertainty = torch.tensor([0.3, 0.1, 0.2, 0.5, 0.25], dtype=torch.float64)
    assert scores.auroc(torch.ones(5), event) == 0.5
    torch.testing.assert_close(scores.auroc(-uncertainty, event), 1 - scores.auroc(uncertainty, event))


def test_detection_without_both_kinds_is_refused():
    with pytest.raises(ValueError, match="`event` must be true for some rows"):
        scores.auroc(torch.rand(4), torch.zeros(4))


def test_risk_coverage_agrees_with_a_loop_and_does_not_depend_on_the_order_of_ties():
    uncertainty, loss = normal(40).round(decimals=1), normal(40, seed=1).square()
    curve = scores.risk_coverage(uncertainty, loss)
    shuffled = torch.randperm(40, generator=generator())
    torch.testing.assert_close(scores.risk_coverage(uncertainty[shuffled], loss[shuffled]).risk, curve.risk)
    for threshold in uncertainty.unique():
        kept = uncertainty <= threshold
        torch.testing.assert_close(curve.risk[kept.sum() - 1], loss[kept].mean())


def test_area_of_the_oracle_ranking_follows_its_closed_form_and_leaves_no_excess():
    # With error rate r the best ranking has risk (c - (1 - r)) / c beyond coverage 1 - r: area r + (1 - r) log(1 - r).
    wrong = (torch.arange(20_000) < 3_000).double()
    curve = scores.risk_coverage(wrong + 0.5 * torch.rand(20_000, generator=generator(), dtype=torch.float64), wrong)
    assert curve.area.item() == pytest.approx(0.15 + 0.85 * math.log(0.85), rel=1e-3)
    assert curve.excess_area.item() == pytest.approx(0.0, abs=1e-12)


def test_area_of_an_uninformative_ranking_is_the_mean_loss():
    loss = normal(30).square()
    torch.testing.assert_close(scores.risk_coverage(torch.ones(30), loss).area, loss.mean())


def test_numpy_arrays_are_accepted_even_read_only_reversed_or_integer():
    y = np.arange(5)
    y.setflags(write=False)
    assert scores.mae(y[::-1], y).item() == pytest.approx(2.4)
