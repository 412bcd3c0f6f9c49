"""Tests of exact Gaussian processes."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from torch.distributions import MultivariateNormal

from dropbayes.processes import (
    Cosine,
    Deep,
    Erf,
    Identity,
    NetworkKernel,
    ReLU,
    Step,
    TanH,
    exact_process,
    finite_rank_process,
    network_prior_draws,
    prior_draws,
    tuned_covariance,
)
from tests.processes.samples import GRID, PRECISION, X, Y, toy_data


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


def test_tuned_scales_are_the_best_ones_near_them():
    x, y = toy_data(30)
    best = tuned_covariance(ReLU(3.0, 3.0), x, y, precision=PRECISION)

    def evidence(covariance):
        return exact_process(covariance, x, y, precision=PRECISION).log_marginal_likelihood

    assert evidence(best) > evidence(ReLU(3.0, 3.0)) + 1
    for length, bias in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9)):
        assert evidence(best) > evidence(ReLU(best.length_scale * length, best.bias_scale * bias))  # type: ignore[attr-defined]


def test_classifier_probabilities_are_those_of_the_latent_process():
    x = torch.tensor([[-1.5], [-0.5], [0.4], [1.6]], dtype=torch.float64)
    labels = np.array([0, 0, 1, 1])
    layer = ReLU(0.7)
    classifier = GaussianProcessClassifier(NetworkKernel(layer), optimizer=None).fit(x.numpy(), labels)
    at = torch.tensor([[-2.0], [0.0], [1.0]], dtype=torch.float64)
    # The exact answer by importance sampling: functions of the prior weighted by the likelihood of the labels.
    functions = prior_draws(layer, torch.cat([x, at]), n_draws=200_000)
    signs = torch.as_tensor(2.0 * labels - 1)
    weights = torch.sigmoid(functions[:, :4] * signs).prod(1)
    expected = (weights[:, None] * torch.sigmoid(functions[:, 4:])).sum(0) / weights.sum()
    # Laplace's approximation is off by about this much with four labels.
    np.testing.assert_allclose(classifier.predict_proba(at.numpy())[:, 1], expected, atol=0.03)


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


@pytest.mark.parametrize("kind", [exact_process, finite_rank_process])
def test_arrays_are_refused_by_name(kind):
    model = ReLU() if kind is exact_process else ReLU().features(1, 5)
    with pytest.raises(TypeError, match=r"`x` must be a floating-point tensor; got ndarray"):
        kind(model, X.numpy(), Y, precision=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(X[:, 0], Y), r"`x` must be \[row, input\].*\(6,\)"),
        (lambda f: f(X[:0], Y[:0]), r"`x` must be \[row, input\] with at least one of each; got shape \(0, 1\)"),
        (lambda f: f(X, Y[:3]), r"`y` must be \[row\] or \[row, output\].*\(3,\) for x \(6, 1\)"),
        (lambda f: f(X, torch.full_like(Y, math.nan)), "`y` must be finite; 6 of"),
        (lambda f: f(X.masked_fill(X[0] == X, math.nan), Y), "`x` must be finite; 1 of"),
        (lambda f: f(X, Y, precision=0.0), r"`precision` \(τ\) must be positive.*got 0.0"),
        (lambda f: f(X, Y, precision=math.nan), r"`precision` \(τ\) must be positive.*got nan"),
        (lambda f: f(X, Y).mean(torch.zeros(3, 2, dtype=X.dtype)), r"`x` must .*1.*\(3, 2\)"),
        (lambda f: f(X, Y).covariance(torch.full((3, 1), math.nan).double()), "`x` must be finite; 3 of"),
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
        (lambda: tuned_covariance(ReLU(), X, Y, precision=math.inf), "positive and finite; got inf"),
        (lambda: prior_draws(ReLU(), X, n_draws=0), "`n_draws` must be a whole number, at least 1"),
        (lambda: Deep(()), "`layers` must be one or more"),
        (lambda: Deep((torch.relu,)), "`layers` must be one or more"),
        (
            lambda: network_prior_draws([ReLU()], X, widths=[3, 4], n_draws=1),
            r"`widths` must be .* 1 layers; got \[3, 4",
        ),
        (lambda: network_prior_draws([ReLU()], X, widths=[0], n_draws=1), r"`widths`"),
        (lambda: NetworkKernel(ReLU())(X.numpy(), X.numpy(), eval_gradient=True), "`eval_gradient`"),
        (lambda: NetworkKernel(ReLU()).set_params(length_scale=2.0), "Invalid parameter"),
    ],
)
def test_bad_arguments_are_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_output_can_have_a_mean_of_its_own():
    x, y = toy_data()
    bias = torch.tensor([1.0, -2.0], dtype=torch.float64)
    both = exact_process(ReLU(), x, torch.stack([y, y], 1) + bias, precision=PRECISION, output_bias=bias)
    alone = exact_process(ReLU(), x, y, precision=PRECISION)
    torch.testing.assert_close(both.mean(GRID), alone.mean(GRID)[:, None] + bias)
    assert both.draws(GRID, n_draws=3).shape == (3, 9, 2)
    with pytest.raises(ValueError, match="`output_bias` must be a number or one per output"):
        exact_process(ReLU(), x, y, precision=PRECISION, output_bias=bias)
