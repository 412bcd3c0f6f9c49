"""Tests of the Gaussian processes, and of the paper's equivalence between them and a dropout network."""

import math
import os
import pathlib
import subprocess
import sys
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch.distributions import MultivariateNormal

from dropbayes.covariances import Cosine, Erf, Identity, ReLU, Step, TanH
from dropbayes.processes import (
    Deep,
    NetworkKernel,
    exact_process,
    finite_rank_process,
    gaussian_process_classifier,
    gpytorch_kernel,
    network_prior_draws,
    prior_draws,
    tuned,
)

PRECISION = 25.0


def toy_data(n_rows=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n_rows, 1, dtype=torch.float64, generator=generator) * 4 - 2
    noise = torch.randn(n_rows, dtype=torch.float64, generator=generator) * PRECISION**-0.5
    return x, torch.sin(2 * x[:, 0]) + noise


GRID = torch.linspace(-3, 3, 9, dtype=torch.float64)[:, None]


# Exact regression


def test_posterior_is_the_gaussian_conditional():
    x, y = toy_data()
    layer = ReLU(0.8, 0.6)
    process = exact_process(layer, x, y, precision=PRECISION)
    gain = layer(GRID, x) @ torch.linalg.inv(layer(x) + torch.eye(15, dtype=x.dtype) / PRECISION)
    torch.testing.assert_close(process.mean(GRID), gain @ y)
    torch.testing.assert_close(process.covariance(GRID), layer(GRID) - gain @ layer(x, GRID))
    torch.testing.assert_close(process.variance(GRID), process.covariance(GRID).diagonal())


def test_log_marginal_likelihood_is_that_of_the_data():
    x, y = toy_data()
    marginal = MultivariateNormal(torch.zeros_like(y), Erf()(x) + torch.eye(15, dtype=x.dtype) / PRECISION)
    process = exact_process(Erf(), x, y, precision=PRECISION)
    assert process.log_marginal_likelihood == pytest.approx(float(marginal.log_prob(y)))


def test_squared_exponential_process_is_scikit_learns_own():
    x, y = toy_data()
    peer = GaussianProcessRegressor(RBF(0.7), alpha=1 / PRECISION, optimizer=None).fit(x.numpy(), y.numpy())
    mean, std = peer.predict(GRID.numpy(), return_std=True)
    process = exact_process(Cosine(0.7), x, y, precision=PRECISION)
    torch.testing.assert_close(process.mean(GRID), torch.as_tensor(mean))
    torch.testing.assert_close(process.variance(GRID).sqrt(), torch.as_tensor(std))


def test_linear_process_is_bayesian_linear_regression():
    x, y = toy_data()
    design = torch.cat([x, torch.ones_like(x)], 1)
    inverse = torch.linalg.inv(PRECISION * design.T @ design + torch.eye(2, dtype=x.dtype))
    process = exact_process(Identity(), x, y, precision=PRECISION)
    at_grid = torch.cat([GRID, torch.ones_like(GRID)], 1)
    torch.testing.assert_close(process.mean(GRID), at_grid @ (inverse @ (PRECISION * design.T @ y)))
    torch.testing.assert_close(process.covariance(GRID), at_grid @ inverse @ at_grid.T)


@pytest.mark.parametrize("n_outputs", [None, 1, 3])
def test_outputs_are_independent_with_one_covariance(n_outputs):
    x, y = toy_data()
    targets = y if n_outputs is None else torch.stack([y * (d + 1) for d in range(n_outputs)], 1)
    features = ReLU().features(1, 40)
    for process, one in (
        (exact_process(ReLU(), x, targets, precision=9.0), exact_process(ReLU(), x, y, precision=9.0)),
        (finite_rank_process(features, x, targets, precision=9.0), finite_rank_process(features, x, y, precision=9.0)),
    ):
        expected = one.mean(GRID)
        if n_outputs is not None:
            expected = torch.stack([expected * (d + 1) for d in range(n_outputs)], 1)
        torch.testing.assert_close(process.mean(GRID), expected)
        torch.testing.assert_close(process.covariance(GRID), one.covariance(GRID))
        torch.testing.assert_close(process.variance(GRID), one.variance(GRID))
        assert process.draws(GRID, n_draws=5).shape == (5, *expected.shape)


def test_evidence_of_several_outputs_is_the_sum():
    x, y = toy_data()
    features = ReLU().features(1, 40)
    both = torch.stack([y, 2 * y], 1)
    exact = [exact_process(ReLU(), x, t, precision=9.0).log_marginal_likelihood for t in (both, y, 2 * y)]
    finite = [finite_rank_process(features, x, t, precision=9.0).log_marginal_likelihood for t in (both, y, 2 * y)]
    assert exact[0] == pytest.approx(exact[1] + exact[2])
    assert finite[0] == pytest.approx(finite[1] + finite[2])


@pytest.mark.parametrize("kind", ["exact", "finite rank"])
def test_draws_have_the_posterior_mean_and_covariance(kind):
    x, y = toy_data(5)
    if kind == "exact":
        process = exact_process(ReLU(), x, y, precision=9.0)
    else:
        process = finite_rank_process(ReLU().features(1, 20), x, y, precision=9.0)
    at = GRID[::2]
    draws = process.draws(at, n_draws=40_000, seed=1)
    standard_error = process.variance(at).sqrt() / 200
    assert ((draws.mean(0) - process.mean(at)) / standard_error).abs().max() < 4.5
    centred = draws - process.mean(at)
    terms = centred[:, :, None] * centred[:, None, :]
    assert ((terms.mean(0) - process.covariance(at)) / (terms.std(0) / 200)).abs().max() < 4.5
    torch.testing.assert_close(draws, process.draws(at, n_draws=40_000, seed=1), rtol=0, atol=0)


def test_prior_draws_have_the_covariance():
    at = GRID[::3]
    draws = prior_draws(TanH(), at, n_draws=40_000)
    terms = draws[:, :, None] * draws[:, None, :]
    assert ((terms.mean(0) - TanH()(at)) / (terms.std(0) / 200)).abs().max() < 4.5


def test_float32_data_gives_float32_answers_worked_in_float64():
    x, y = toy_data()
    process = exact_process(ReLU(), x.float(), y.float(), precision=PRECISION)
    assert process.mean(GRID.float()).dtype == torch.float32
    expected = exact_process(ReLU(), x, y, precision=PRECISION).mean(GRID).float()
    torch.testing.assert_close(process.mean(GRID.float()), expected, rtol=1e-5, atol=1e-5)


# scikit-learn's contract


@pytest.mark.parametrize(
    "covariance", [ReLU(0.7, 0.4), TanH(0.7, 0.4), Step(0.7, 0.4), Cosine(0.7), Deep((ReLU(0.9), Erf()))]
)
def test_kernel_gradient_is_that_of_finite_differences(covariance):
    kernel = NetworkKernel(covariance)
    x = torch.cat([GRID[::2], GRID[:1]]).numpy()  # with a duplicate
    matrix, gradient = kernel(x, eval_gradient=True)
    np.testing.assert_allclose(matrix, kernel(x), rtol=0, atol=1e-14)
    for i in range(kernel.n_dims):
        step = np.eye(kernel.n_dims)[i] * 1e-5
        upper, lower = (kernel.clone_with_theta(kernel.theta + s)(x) for s in (step, -step))
        np.testing.assert_allclose(gradient[..., i], (upper - lower) / 2e-5, atol=1e-6)


def test_kernel_clones_prints_and_compares_as_kernels_do():
    kernel = NetworkKernel(ReLU(0.5, 2.0))
    assert repr(kernel) == "ReLU(length_scale=0.5, bias_scale=2)"
    assert clone(kernel) == kernel
    moved = kernel.clone_with_theta(np.log([3.0, 4.0])).covariance
    assert (moved.length_scale, moved.bias_scale) == pytest.approx((3.0, 4.0))
    assert kernel.covariance == ReLU(0.5, 2.0)
    np.testing.assert_allclose(kernel.theta, np.log([0.5, 2.0]))
    np.testing.assert_allclose(kernel.bounds, np.log([[1e-3, 1e3]] * 2))
    assert NetworkKernel(Cosine(0.5)).n_dims == 1  # the uniform phase is not a scale to tune
    assert NetworkKernel(ReLU(bias_scale=0.0)).n_dims == 1
    assert NetworkKernel(ReLU(), bounds="fixed").n_dims == 0
    assert repr(NetworkKernel(Deep((ReLU(0.5), TanH())))).startswith("Deep(layer1_length_scale=0.5, layer1_bias")


def test_kernel_composes_and_tunes_inside_scikit_learn():
    x, y = toy_data(40)
    kernel = ConstantKernel(1.0) * NetworkKernel(Cosine(3.0)) + WhiteKernel(1.0)
    peer = ConstantKernel(1.0) * RBF(3.0, (1e-3, 1e3)) + WhiteKernel(1.0)
    ours, theirs = (GaussianProcessRegressor(k).fit(x.numpy(), y.numpy()) for k in (kernel, peer))
    assert ours.log_marginal_likelihood_value_ == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-4)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-2)


def test_tuned_scales_are_the_best_ones_near_them():
    x, y = toy_data(30)
    best = tuned(ReLU(3.0, 3.0), x, y, precision=PRECISION)

    def evidence(covariance):
        return exact_process(covariance, x, y, precision=PRECISION).log_marginal_likelihood

    assert evidence(best) > evidence(ReLU(3.0, 3.0)) + 1
    for length, bias in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9)):
        assert evidence(best) > evidence(ReLU(best.length_scale * length, best.bias_scale * bias))  # type: ignore[attr-defined]


# Finite rank: weight space is function space


def function_space(features, x):
    """The kernel of the finite-rank covariance, as an oracle of weight space."""
    phi = features(x)
    return phi @ phi.T


@pytest.mark.parametrize("width", [5, 15, 60])
@pytest.mark.parametrize("precision", [0.5, 1e6])
def test_weight_space_equals_function_space(width, precision):
    x, y = toy_data()
    features = TanH(0.5).features(1, width, seed=1)
    process = finite_rank_process(features, x, y, precision=precision, output_bias=0.3)
    noisy = function_space(features, x) + torch.eye(15, dtype=x.dtype) / precision
    expected = MultivariateNormal(torch.full_like(y, 0.3), noisy).log_prob(y)
    assert process.log_marginal_likelihood == pytest.approx(float(expected), rel=1e-6)
    cross = features(GRID) @ features(x).T
    mean = 0.3 + cross @ torch.linalg.solve(noisy, y - 0.3)
    covariance = function_space(features, GRID) - cross @ torch.linalg.solve(noisy, cross.T)
    torch.testing.assert_close(process.mean(GRID), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(process.covariance(GRID), covariance, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(process.variance(GRID), process.covariance(GRID).diagonal())


def test_weight_space_takes_more_rows_than_a_covariance_matrix_would_allow():
    x = torch.linspace(-2, 2, 100_000, dtype=torch.float64)[:, None]  # its matrix would be 80 GB
    process = finite_rank_process(Cosine(0.7).features(1, 30), x, torch.sin(x[:, 0]), precision=100.0)
    assert (process.mean(GRID[2:-2]) - torch.sin(GRID[2:-2, 0])).abs().max() < 0.01


def test_finite_rank_posterior_approaches_the_exact_one():
    x, y = toy_data()
    exact = exact_process(ReLU(), x, y, precision=PRECISION)
    errors = []
    for width in (30, 30_000):
        features = ReLU().features(1, width, seed=3)
        phi = features(torch.cat([x, GRID]))
        train, test = phi[:15], phi[15:]
        mean = test @ train.T @ torch.linalg.solve(train @ train.T + torch.eye(15, dtype=x.dtype) / PRECISION, y)
        errors.append(float((mean - exact.mean(GRID)).abs().max()))
    assert errors[1] < 0.05 < 0.1 < errors[0]


# GPyTorch


def gpytorch_posterior(covariance, x, y, at):
    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch_kernel(covariance).double()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 1 / PRECISION
    with torch.no_grad():
        return Model(likelihood).eval()(at)


@pytest.mark.parametrize("n_rows", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_gpytorch_gives_the_same_posterior(n_rows):
    x, y = toy_data(n_rows)
    posterior = gpytorch_posterior(ReLU(0.8, 0.6), x, y, GRID)
    process = exact_process(ReLU(0.8, 0.6), x, y, precision=PRECISION)
    # GPyTorch rounds the scales to float32, and above 800 rows solves by conjugate gradients.
    tolerance = 1e-5 if n_rows < 800 else 2e-2
    torch.testing.assert_close(posterior.mean, process.mean(GRID), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(posterior.variance, process.variance(GRID), rtol=10 * tolerance, atol=tolerance)


def test_gpytorch_kernel_learns_positive_scales():
    kernel = gpytorch_kernel(Deep((ReLU(0.8, 0.6), TanH(bias_scale=0.0)))).double()
    names = dict(kernel.named_parameters())
    assert set(names) == {"raw_layer1_length_scale", "raw_layer1_bias_scale", "raw_layer2_length_scale"}
    assert float(kernel.covariance.layers[0].length_scale.detach()) == pytest.approx(0.8)
    kernel(GRID[:3]).to_dense().sum().backward()
    assert all(p.grad.isfinite() and p.grad != 0 for p in kernel.parameters())
    torch.testing.assert_close(kernel(GRID, diag=True), kernel(GRID).to_dense().diagonal())


def test_gpytorch_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(ImportError, match=r"dropbayes\[gp\]"):
        gpytorch_kernel(ReLU())


# Classification


def test_classifier_probabilities_are_those_of_the_latent_process():
    x = torch.tensor([[-1.5], [-0.5], [0.4], [1.6]], dtype=torch.float64)
    labels = np.array([0, 0, 1, 1])
    layer = ReLU(0.7)
    classifier = gaussian_process_classifier(layer).fit(x.numpy(), labels)
    at = torch.tensor([[-2.0], [0.0], [1.0]], dtype=torch.float64)
    # The exact answer by importance sampling: functions of the prior weighted by the likelihood of the labels.
    functions = prior_draws(layer, torch.cat([x, at]), n_draws=200_000)
    signs = torch.as_tensor(2.0 * labels - 1)
    weights = torch.sigmoid(functions[:, :4] * signs).prod(1)
    expected = (weights[:, None] * torch.sigmoid(functions[:, 4:])).sum(0) / weights.sum()
    # Laplace's approximation is off by about this much with four labels.
    np.testing.assert_allclose(classifier.predict_proba(at.numpy())[:, 1], expected, atol=0.03)


# Deep


def test_a_single_layer_is_its_own_deep_process():
    torch.testing.assert_close(Deep((ReLU(0.7, 0.3),))(GRID), ReLU(0.7, 0.3)(GRID))


def test_deep_linear_network_is_linear():
    deep = Deep((Identity(2.0, 0.0), Identity(0.5, 0.3), Identity(1.0, 0.0)))
    torch.testing.assert_close(deep(GRID), GRID @ GRID.T / 4 / 0.25 + 0.09)


def test_deep_recursion_is_one_layer_upon_another():
    layers = (ReLU(0.7, 0.3), TanH(0.8, 0.5), Erf(1.2, 0.1))
    matrix = layers[0](GRID)
    for layer in layers[1:]:
        matrix = layer.of_covariance(matrix)
    torch.testing.assert_close(Deep(layers)(GRID), matrix, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(Deep(layers)(GRID[:2], GRID[2:]), matrix[:2, 2:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(Deep(layers).diagonal(GRID), matrix.diagonal(), rtol=1e-9, atol=1e-9)


def test_deep_rectifiers_without_bias_forget_the_angle():
    """Each layer maps the correlation of ReLU units towards one [the arc-cosine recursion's fixed point]."""
    x = torch.eye(2, dtype=torch.float64)
    correlations = []
    for depth in (1, 2, 8, 32):
        matrix = Deep((ReLU(bias_scale=0.0),) * depth)(x)
        torch.testing.assert_close(matrix.diagonal(), torch.full((2,), 0.5**depth).double())
        correlations.append(float(matrix[0, 1] / matrix[0, 0]))
    assert correlations[0] == pytest.approx(1 / math.pi)
    assert correlations == sorted(correlations) and 0.8 < correlations[2] < 0.97 < correlations[3] < 1


@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("last", [ReLU, Step, Erf, TanH])
def test_deep_covariance_of_hard_inputs_is_positive_semi_definite_and_smooth(last, magnitude):
    x = torch.cat([GRID, GRID[:2], -GRID[:2], 0 * GRID[:2]]) * magnitude
    x.requires_grad_()
    matrix = Deep((ReLU(bias_scale=0.0), Erf(), last()))(x)
    (slope,) = torch.autograd.grad(matrix.sum(), x)
    assert slope.isfinite().all()
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    assert eigenvalues[0] > -1e-7 * eigenvalues[-1]


def test_wide_deep_network_draws_have_the_deep_covariance():
    x = GRID[::4]
    layers = [TanH(0.7, 0.5), ReLU(1.0, 0.4)]
    # Outputs share the hidden layers, so each network counts once; a width of 150 biases by less than that noise.
    draws = network_prior_draws(layers, x, widths=[150, 150], n_draws=1_000, n_outputs=10, seed=1)
    terms = torch.einsum("snd,smd->snm", draws, draws) / 10
    deviations = (terms.mean(0) - Deep(tuple(layers))(x)) / (terms.std(0) / 1_000**0.5)
    assert deviations.abs().max() < 4.5


def test_narrow_deep_network_is_the_papers_generative_model():
    """The features of the second layer see F₁ = Φ₁ W₂: recomputed here from the same random numbers."""
    layers, x = [ReLU(0.7, 0.5), TanH(0.9, 0.4)], GRID
    drawn = network_prior_draws(layers, x, widths=[4, 6], n_draws=1, n_outputs=2, output_bias=0.5, seed=9)[0]
    generator = torch.Generator().manual_seed(9)
    seeds = torch.randint(2**62, (2,), generator=generator).tolist()
    first, second = layers[0].features(1, 4, seed=seeds[0]), layers[1].features(4, 6, seed=seeds[1])
    w_3 = torch.randn(6, 2, dtype=torch.float64, generator=generator)
    phi_1 = torch.relu(x @ first.weights + first.bias) / math.sqrt(4)
    phi_2 = torch.tanh(phi_1 @ second.weights + second.bias) / math.sqrt(6)
    torch.testing.assert_close(drawn, phi_2 @ w_3 + 0.5)


# The equivalence


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
    widths = [10, 30, 100, 300, 1000]
    errors = network_covariance_errors(layer, keep_prob, widths)
    rate = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert rate == pytest.approx(-0.5, abs=0.05)


def test_network_draws_become_gaussian_as_the_width_grows():
    """Over all its weights a ReLU network of width K has the process's variance and an excess kurtosis of 15 / K."""
    x = torch.ones(1, 1, dtype=torch.float64)
    layer = ReLU(bias_scale=0.0)
    n_draws = 200_000
    for width in (1, 5, 50):
        features = layer.features(1, width * n_draws, seed=width)
        units = (features(x)[0] * (width * n_draws) ** 0.5).reshape(n_draws, width)
        generator = torch.Generator().manual_seed(100)
        outputs = (units * torch.randn(n_draws, width, dtype=torch.float64, generator=generator)).sum(1) / width**0.5
        second, fourth = outputs.square(), outputs.pow(4)
        assert abs(second.mean() - 0.5) < 4.5 * second.std() / n_draws**0.5
        expected = 0.25 * (3 + 15 / width)
        assert abs(fourth.mean() - expected) < 4.5 * fourth.std() / n_draws**0.5


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


def test_trained_variational_network_underestimates_the_variance_of_the_process():
    x, y = toy_data()
    process = exact_process(ReLU(), x, y, precision=PRECISION)
    parameters = trained_dropout_network(x, y, width=300, keep_prob=0.9, precision=PRECISION, n_steps=1000)
    at = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    # It has learned from the data, if less than the process: its weights shrink towards zero as the width grows.
    residual = (dropout_moments(parameters, x, 0.9)[0] - y).square().mean().sqrt()
    assert (process.mean(x) - y).square().mean().sqrt() < residual < 0.8 * y.std()
    # It claims about a tenth of the process's variance, and nowhere as much as the process does.
    ratio = dropout_moments(parameters, at, 0.9)[1] / process.variance(at)
    assert 0.02 < ratio.mean() < 0.2
    assert ratio.max() < 0.5


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


@pytest.mark.slow
def test_gallery_page_draws_its_figures(tmp_path):
    root = pathlib.Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "MPLBACKEND": "Agg"}
    script = root / "examples" / "plot_gaussian_processes.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, env=environment)
    names = ("covariance", "convergence", "prior", "posterior", "variance_ratio", "deep")
    assert {f.name for f in tmp_path.iterdir()} == {f"gaussian_processes_{name}.png" for name in names}


# Bad input


def test_duplicates_without_noise_get_a_jitter_and_a_warning():
    x, y = toy_data(6)
    doubled, targets = torch.cat([x, x]), torch.cat([y, y])
    with pytest.warns(RuntimeWarning, match=r"singular \(duplicate rows without noise\?\): added 1e-08.*`precision`"):
        process = exact_process(ReLU(), doubled, targets, precision=math.inf)
    torch.testing.assert_close(process.mean(x), y, rtol=0, atol=1e-5)


def test_distinct_rows_without_noise_are_interpolated_without_a_warning():
    x, y = toy_data(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        process = exact_process(ReLU(), x, y, precision=math.inf)
        torch.testing.assert_close(process.mean(x), y, rtol=0, atol=1e-8)
        assert process.variance(x).max() < 1e-12


def test_an_indefinite_kernel_is_an_error():
    class Indefinite(RBF):
        def __call__(self, X, Y=None, eval_gradient=False):
            return super().__call__(X, Y) - 2.0

    x, y = toy_data(6)
    with pytest.raises(ValueError, match="`covariance` must be positive semi-definite at the data; got a 6 x 6"):
        exact_process(Indefinite(), x, y, precision=math.inf)


X, Y = toy_data(6)


@pytest.mark.parametrize("kind", [exact_process, finite_rank_process])
def test_arrays_are_refused_by_name(kind):
    model = ReLU() if kind is exact_process else ReLU().features(1, 5)
    with pytest.raises(TypeError, match=r"`x` must be a tensor; got ndarray. torch.as_tensor makes one"):
        kind(model, X.numpy(), Y, precision=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(X[:, 0], Y), r"`x` must be \[row, input\].*\(6,\)"),
        (lambda f: f(X[:0], Y[:0]), r"`x` must be \[row, input\] with at least one of each; got shape \(0, 1\)"),
        (lambda f: f(X, Y[:3]), r"`y` must be \[row\] or \[row, output\].*\(3,\) for x \(6, 1\)"),
        (lambda f: f(X, torch.full_like(Y, math.nan)), "`y` must be finite; got 6 NaN"),
        (lambda f: f(X.masked_fill(X[0] == X, math.nan), Y), "`x` must be finite; got 1 NaN"),
        (lambda f: f(X, Y, precision=0.0), r"`precision` \(τ\) must be positive.*got 0.0"),
        (lambda f: f(X, Y, precision=math.nan), r"`precision` \(τ\) must be positive.*got nan"),
        (lambda f: f(X, Y).mean(torch.zeros(3, 2, dtype=X.dtype)), r"`x` must .*1.*\(3, 2\)"),
        (lambda f: f(X, Y).covariance(torch.full((3, 1), math.nan).double()), "`x` must be finite; got 3 NaN"),
    ],
)
@pytest.mark.parametrize("kind", ["exact", "finite rank"])
def test_bad_data_is_one_clear_error(kind, call, message):
    def fitted(x, y, precision=4.0):
        if kind == "exact":
            return exact_process(ReLU(), x, y, precision=precision)
        return finite_rank_process(ReLU().features(1, 5), x, y, precision=precision)

    with pytest.raises(ValueError, match=message):
        call(fitted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: finite_rank_process(ReLU().features(1, 5), X, Y, precision=math.inf), "positive and finite; got inf"),
        (lambda: finite_rank_process(ReLU().features(1, 5), X, Y.float(), precision=1.0), "`y` must have the dtype"),
        (lambda: tuned(ReLU(), X, Y, precision=math.inf), "positive and finite; got inf"),
        (lambda: Deep(()), "`layers` must be one or more"),
        (lambda: Deep((torch.relu,)), "`layers` must be one or more"),
        (
            lambda: network_prior_draws([ReLU()], X, widths=[3, 4], n_draws=1),
            r"`widths` must be .* 1 layers; got \[3, 4",
        ),
        (lambda: network_prior_draws([ReLU()], X, widths=[0], n_draws=1), r"`widths`"),
        (lambda: NetworkKernel(ReLU())(X.numpy(), X.numpy(), eval_gradient=True), "`eval_gradient`"),
        (lambda: NetworkKernel(ReLU()).set_params(length_scale=2.0), "covariance and bounds"),
    ],
)
def test_bad_arguments_are_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
