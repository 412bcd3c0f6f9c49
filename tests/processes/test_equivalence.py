"""Tests of the paper's equivalence between a process and a dropout network."""

import numpy as np
import pytest
import torch

from dropbayes.processes import (
    Cosine,
    ReLU,
    TanH,
    exact_process,
    finite_rank_process,
)
from tests.processes.samples import GRID, PRECISION, toy_data


def network_covariance_errors(layer, keep_prob, widths, n_networks=200):
    """The root mean squared error of the covariance that a dropout network of each width has over W₂."""
    x = GRID[::2]
    truth = keep_prob * layer(x)
    errors = []
    for width in widths:
        squares = []
        for seed in range(n_networks):
            phi = layer.features(1, width, seed=seed)(x)
            generator = torch.Generator().manual_seed(10_000 + seed)  # not the features' own stream
            masks = (torch.rand(width, dtype=torch.float64, generator=generator) < keep_prob).double()
            squares.append(((phi * masks) @ (phi * masks).T - truth).square().mean())
        errors.append(float(torch.stack(squares).mean().sqrt()))
    return errors


@pytest.mark.parametrize("layer", [ReLU(), TanH(), Cosine(0.7)], ids=repr)
@pytest.mark.parametrize("keep_prob", [1.0, 0.5])
def test_network_covariance_approaches_the_process_as_the_root_of_its_width(layer, keep_prob):
    widths = [10, 30, 100, 300]
    errors = network_covariance_errors(layer, keep_prob, widths)
    rate = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert rate == pytest.approx(-0.5, abs=0.05)


def test_network_draws_become_gaussian_as_the_width_grows():
    """Over all its weights a ReLU network of width K has the process's variance and an excess kurtosis of 15 / K."""
    x = torch.ones(1, 1, dtype=torch.float64)
    layer = ReLU(bias_scale=0.0)
    n_draws = 50_000
    for width in (1, 5, 50):
        features = layer.features(1, width * n_draws, seed=width)
        units = (features(x)[0] * (width * n_draws) ** 0.5).reshape(n_draws, width)
        generator = torch.Generator().manual_seed(100)
        outputs = (units * torch.randn(n_draws, width, dtype=torch.float64, generator=generator)).sum(1) / width**0.5
        second, fourth = outputs.square(), outputs.pow(4)
        assert abs(second.mean() - 0.5) < 4.5 * second.std() / n_draws**0.5
        expected = 0.25 * (3 + 15 / width)
        assert abs(fourth.mean() - expected) < 4.5 * fourth.std() / n_draws**0.5


@pytest.mark.parametrize("layer", [ReLU(), TanH()], ids=repr)
def test_a_mask_before_the_nonlinearity_drops_terms_of_the_covariance_not_weights(layer):
    # [GG16, section "Insights"]: with σ(0) = 0 the mask of a unit's weights and bias passes through σ, and the process
    # of a draw is a sum of the units that are left; a mask of the inputs of the first layer changes every unit instead.
    x, mask = GRID[::4], torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    features = layer.features(1, 5)
    units = layer.nonlinearity((x @ features.weights + features.bias) * mask) * 5**-0.5
    torch.testing.assert_close(units @ units.T, (features(x) * mask) @ features(x).T)
    assert torch.linalg.matrix_rank(units @ units.T) == 2
    dropped_input = layer.nonlinearity(0 * x @ features.weights + features.bias) * 5**-0.5
    assert torch.linalg.matrix_rank(dropped_input @ dropped_input.T) == 1  # the same at every x


def dropout_objective(parameters, x, y, *, keep_prob, precision, masks, nonlinearity, output_bias=0.0):
    """[GG16, eq:L:GP-MC-reg] as a loss, with masks before the second weight layer (p₁ = 1: there is one input)."""
    m_1, m, m_2 = parameters
    units = nonlinearity(x @ m_1 + m) * masks
    output = (units @ m_2)[:, 0] / m.shape[0] ** 0.5 + output_bias
    decay = (m_1.square().sum() + keep_prob * m_2.square().sum() + m.square().sum()) / (2 * precision * len(x))
    return (y - output).square().mean() / 2 + decay


def trained_dropout_network(x, y, *, width, keep_prob, precision, n_steps, output_bias=0.0, seed=0):
    """The variational network by gradient descent with a fresh mask for every row and step."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, width), (width,), (width, 1)]
    parameters = [torch.randn(s, dtype=x.dtype, generator=generator).requires_grad_() for s in shapes]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    for _ in range(n_steps):
        masks = (torch.rand(len(x), width, generator=generator) < keep_prob).to(x.dtype)
        loss = dropout_objective(
            parameters,
            x,
            y,
            keep_prob=keep_prob,
            precision=precision,
            masks=masks,
            nonlinearity=torch.relu,
            output_bias=output_bias,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return [p.detach() for p in parameters]


def dropout_moments(parameters, x, keep_prob):
    """The mean and variance over masks: exact, as the masked layer is the last one."""
    m_1, m, m_2 = parameters
    units = torch.relu(x @ m_1 + m)
    scale = m.shape[0] ** 0.5
    mean = keep_prob * (units @ m_2)[:, 0] / scale
    variance = keep_prob * (1 - keep_prob) * (units * m_2[:, 0] / scale).square().sum(1)
    return mean, variance


def optimal_last_layer(features, x, y, *, keep_prob, precision):
    """The M₂ that minimises the expected objective for a given first layer: a ridge regression.

    τ/2 E|y - Φ z M₂|² + p/2 |M₂|² has the curvature τ p² Φ'Φ + τ p (1 - p) diag(Φ'Φ) + p I, inverted by Woodbury.
    """
    phi = features(x)
    diagonal = precision * keep_prob * (1 - keep_prob) * phi.square().sum(0) + keep_prob
    scaled = phi / diagonal
    small = torch.eye(len(x), dtype=x.dtype) / (precision * keep_prob**2) + phi @ scaled.T
    right = precision * keep_prob * (phi.T @ y)
    return right / diagonal - scaled.T @ torch.linalg.solve(small, phi @ (right / diagonal))


def test_optimal_last_layer_is_where_the_papers_objective_is_flat():
    x, y = toy_data()
    width, keep_prob = 8, 0.7
    features = ReLU().features(1, width)
    m_2 = optimal_last_layer(features, x, y, keep_prob=keep_prob, precision=PRECISION)[:, None].requires_grad_()
    loss = 0.0
    for bits in range(2**width):  # every mask, with its probability
        masks = torch.tensor([(bits >> k) & 1 for k in range(width)], dtype=torch.float64)
        probability = keep_prob ** float(masks.sum()) * (1 - keep_prob) ** (width - float(masks.sum()))
        parameters = (features.weights, features.bias, m_2)
        loss = loss + probability * dropout_objective(
            parameters, x, y, keep_prob=keep_prob, precision=PRECISION, masks=masks, nonlinearity=torch.relu
        )
    (slope,) = torch.autograd.grad(loss, m_2)
    assert slope.abs().max() < 1e-12


@pytest.mark.slow
def test_variational_variance_falls_as_the_inverse_width_below_that_of_the_process():
    """With keep_prob held fixed the masks average out: a narrow network overstates and a wide one understates."""
    x, y = toy_data()
    truth = exact_process(ReLU(), x, y, precision=PRECISION).variance(GRID).mean()
    widths, ratios = [30, 10_000, 100_000, 1_000_000], []
    for width in widths:
        features = ReLU().features(1, width)
        m_2 = optimal_last_layer(features, x, y, keep_prob=0.9, precision=PRECISION)
        ratios.append(float((0.9 * 0.1 * (features(GRID) * m_2).square().sum(1)).mean() / truth))
    assert ratios[0] > 1 > ratios[1]
    rate = np.polyfit(np.log(widths[1:]), np.log(ratios[1:]), 1)[0]
    assert rate == pytest.approx(-1.0, abs=0.05)


@pytest.mark.slow
def test_trained_variational_network_underestimates_the_variance_of_the_process():
    x, y = toy_data()
    process = exact_process(ReLU(), x, y, precision=PRECISION)
    parameters = trained_dropout_network(x, y, width=300, keep_prob=0.9, precision=PRECISION, n_steps=500)
    at = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    # It has learned from the data, if less than the process: its weights shrink towards zero as the width grows.
    residual = (dropout_moments(parameters, x, 0.9)[0] - y).square().mean().sqrt()
    assert (process.mean(x) - y).square().mean().sqrt() < residual < 0.8 * y.std()
    # It claims about a tenth of the process's variance, and nowhere as much as the process does.
    ratio = dropout_moments(parameters, at, 0.9)[1] / process.variance(at)
    assert 0.02 < ratio.mean() < 0.2
    assert ratio.max() < 0.5


@pytest.mark.slow
def test_variational_network_is_sure_in_a_gap_where_the_process_is_not():
    x = torch.cat([torch.linspace(-2.2, -0.6, 12), torch.linspace(0.8, 2.0, 9)]).double()[:, None]
    y = torch.sin(2 * x[:, 0])
    parameters = trained_dropout_network(x, y, width=100, keep_prob=0.9, precision=100.0, n_steps=800)
    gap = torch.linspace(-0.5, 0.7, 13, dtype=torch.float64)[:, None]
    process = exact_process(ReLU(), x, y, precision=100.0)
    assert process.variance(gap).mean() > 3 * process.variance(x).mean()
    assert dropout_moments(parameters, gap, 0.9)[1].mean() < 0.5 * process.variance(gap).mean()
    assert dropout_moments(parameters, x, 0.9)[1].mean() > process.variance(x).mean()  # but not at the data


@pytest.mark.parametrize("kind", ["exact", "finite rank"])
def test_output_bias_is_the_mean_function(kind):
    x, y = toy_data()
    features = ReLU().features(1, 40)

    def process(targets, bias):
        if kind == "exact":
            return exact_process(ReLU(), x, targets, precision=9.0, output_bias=bias)
        return finite_rank_process(features, x, targets, precision=9.0, output_bias=bias)

    biased, centred = process(y + 7.0, 7.0), process(y, 0.0)
    torch.testing.assert_close(biased.mean(GRID), centred.mean(GRID) + 7.0)
    torch.testing.assert_close(biased.covariance(GRID), centred.covariance(GRID))
    assert biased.log_marginal_likelihood == pytest.approx(centred.log_marginal_likelihood)
    torch.testing.assert_close(biased.draws(GRID, n_draws=3), centred.draws(GRID, n_draws=3) + 7.0)
    # Far from the data, where ReLU's covariance is large, forgetting the bias is seen.
    assert (process(y + 7.0, 0.0).mean(GRID) - biased.mean(GRID)).abs().max() > 0.1


def test_output_bias_of_the_network_shifts_its_training_and_nothing_else():
    x, y = toy_data()
    settings = {"width": 20, "keep_prob": 0.8, "precision": PRECISION, "n_steps": 20}
    centred = trained_dropout_network(x, y, **settings)
    biased = trained_dropout_network(x, y + 7.0, output_bias=7.0, **settings)
    for one, other in zip(centred, biased, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
