"""Tests of the covariance functions: their definition and independent oracles."""

import math

import pytest
import scipy.integrate
import scipy.stats
import torch
from sklearn.gaussian_process.kernels import RBF, DotProduct

from dropbayes.processes import (
    Cosine,
    Erf,
    Identity,
    Quadrature,
    ReLU,
    Sigmoid,
    Step,
    TanH,
)
from tests.cases import slow_except
from tests.processes.layers import ALL, SCALES, inputs


@pytest.mark.parametrize("layer", [*(c(*s) for c in ALL for s in SCALES[:3]), Cosine(0.8)], ids=repr)
def test_covariance_is_the_mean_of_its_monte_carlo_terms(layer):
    x, y = inputs(4), inputs(3, seed=1)
    features = layer.features(3, width=200_000, seed=2)
    terms = features(x)[:, None, :] * features(y)[None, :, :] * features.width
    standard_error = terms.std(-1) / features.width**0.5
    deviations = (terms.mean(-1) - layer(x, y)) / standard_error.clamp_min(1e-12)
    assert deviations.abs().max() < 4.5
    assert standard_error.max() < 0.02 * layer.diagonal(x).max()  # the comparison is a sharp one


def test_two_cosine_exponentials_become_the_squared_exponential_as_the_phase_spreads():
    x = inputs()
    torch.testing.assert_close(Cosine(1.3, bias_scale=8.0)(x), Cosine(1.3)(x), rtol=0, atol=1e-15)
    minus = Quadrature(1.3, 0.4, function=lambda u: math.sqrt(2) * torch.cos(u))(x) - Cosine(1.3)(x)
    squared_sum = (x[:, None] + x[None]).square().sum(-1)
    torch.testing.assert_close(minus, torch.exp(-squared_sum / (2 * 1.3**2) - 2 * 0.4**2), rtol=0, atol=1e-9)


def test_cosine_is_scikit_learns_squared_exponential():
    x = inputs()
    torch.testing.assert_close(Cosine(0.6)(x), torch.as_tensor(RBF(0.6)(x.numpy())))


def test_identity_is_scikit_learns_linear_kernel():
    x = inputs()
    torch.testing.assert_close(Identity(1.0, 0.7)(x), torch.as_tensor(DotProduct(0.7)(x.numpy())))


@pytest.mark.parametrize(
    ("layer", "variance_of"),
    [
        (ReLU(2.0, 0.5), lambda s: s / 2),
        (Step(2.0, 0.5), lambda s: torch.full_like(s, 0.5)),
        (Identity(2.0, 0.5), lambda s: s),
        (Cosine(2.0), lambda s: torch.ones_like(s)),
        (Erf(2.0, 0.5), lambda s: 2 / math.pi * torch.asin(2 * s / (1 + 2 * s))),
    ],
    ids=["ReLU", "Step", "Identity", "Cosine", "Erf"],
)
def test_prior_variance_is_the_textbook_one(layer, variance_of):
    x = inputs()
    preactivation = x.square().sum(-1) / 4 + 0.25
    torch.testing.assert_close(layer.diagonal(x), variance_of(preactivation))
    torch.testing.assert_close(layer(x).diagonal(), variance_of(preactivation))


@pytest.mark.parametrize("covariance", ALL)
def test_length_scale_divides_the_inputs(covariance):
    x = inputs()
    torch.testing.assert_close(covariance(2.5)(x), covariance(1.0)(x / 2.5))


@pytest.mark.parametrize("covariance", [c for c in ALL if c is not Cosine])
def test_bias_is_one_more_input(covariance):
    x = inputs()
    extended = torch.cat([x, torch.full((len(x), 1), 0.6 * 1.4, dtype=x.dtype)], 1)
    torch.testing.assert_close(covariance(1.4, 0.6)(x), covariance(1.4, 0.0)(extended), rtol=1e-9, atol=1e-9)


def test_sigmoid_is_half_of_a_tanh_at_half_the_scale_plus_a_half():
    x = inputs()  # σ(u) = (1 + tanh(u/2)) / 2, and tanh has mean zero
    torch.testing.assert_close(Sigmoid(1.2, 0.8)(x), 0.25 + TanH(2.4, 0.4)(x) / 4, rtol=0, atol=1e-10)


@pytest.mark.parametrize("covariance", ALL)
def test_all_zero_inputs_without_bias_have_the_covariance_of_a_constant_unit(covariance):
    layer, x = covariance(1.0, 0.0), torch.zeros(2, 3, dtype=torch.float64)
    at_zero = layer.nonlinearity(torch.zeros(())) ** 2
    torch.testing.assert_close(layer(x), torch.full((2, 2), float(at_zero)).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("covariance", slow_except(ALL, *(set(ALL) - {Sigmoid})))  # by quadrature, as TanH
def test_derivatives_are_those_of_finite_differences(covariance):
    x, y = inputs(2, 2).requires_grad_(), inputs(1, 2, seed=1).requires_grad_()
    length, bias = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.3, 0.7))
    assert torch.autograd.gradcheck(lambda x, y, length, bias: covariance(length, bias)(x, y), (x, y, length, bias))
    assert torch.autograd.gradcheck(lambda x, length, bias: covariance(length, bias).diagonal(x), (x, length, bias))


@pytest.mark.parametrize("layer", [ReLU(1.5, 0.5), Cosine(0.7)], ids=repr)
def test_features_times_their_transpose_are_the_papers_sum(layer):
    x = inputs()
    features = layer.features(3, width=7, seed=3)
    total = torch.zeros(6, 6, dtype=torch.float64)
    for k in range(7):
        unit = layer.nonlinearity(x @ features.weights[:, k] + features.bias[k])
        total += torch.outer(unit, unit) / 7
    phi = features(x)
    torch.testing.assert_close(phi @ phi.T, total)


def test_features_are_those_of_their_seed_in_every_dtype():
    x = inputs()
    one, other = (ReLU(2.0).features(3, 5, seed=1)(z) for z in (x, x.float()))
    assert other.dtype == torch.float32
    torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one, ReLU(2.0).features(3, 5, seed=2)(x))


def test_feature_weights_have_the_scales_of_their_prior():
    features = ReLU(length_scale=4.0, bias_scale=3.0).features(2, 50_000)
    assert abs(features.weights.std() * 4.0 - 1) < 0.02
    assert abs(features.bias.std() / 3.0 - 1) < 0.02


def test_uniform_phase_fills_the_circle():
    bias = Cosine().features(1, 100_000).bias
    assert 0 <= bias.min() < 0.01
    assert 2 * math.pi - 0.01 < bias.max() < 2 * math.pi
    assert abs(bias.mean() - math.pi) < 4 * (2 * math.pi / 12**0.5) / 100_000**0.5


@pytest.mark.parametrize("covariance", ALL)
def test_layer_on_the_linear_process_is_the_layer_on_its_inputs(covariance):
    x = inputs()
    torch.testing.assert_close(covariance(1.2).of_covariance(x @ x.T), covariance(1.2)(x), rtol=1e-7, atol=1e-9)


def test_layer_above_is_the_mean_over_the_process_below():
    x, layer = inputs(4), TanH(0.8, 0.5)
    below = ReLU()(x)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200_000, 4, dtype=torch.float64, generator=generator)
    bias = 0.5 * torch.randn(200_000, 1, dtype=torch.float64, generator=generator)
    unit = torch.tanh(noise @ torch.linalg.cholesky(below).T / 0.8 + bias)
    terms = unit[:, :, None] * unit[:, None, :]
    deviations = (terms.mean(0) - layer.of_covariance(below)) / (terms.std(0) / 200_000**0.5)
    assert deviations.abs().max() < 4.5


def test_batches_of_inputs_are_covariances_of_each():
    x = torch.stack([inputs(seed=0), inputs(seed=1)])
    for layer in (ReLU(), TanH()):
        torch.testing.assert_close(layer(x), torch.stack([layer(x[0]), layer(x[1])]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_of_half_precision_are_taken_as_float32(dtype):
    x = inputs(seed=0).to(dtype)
    for layer in (ReLU(), TanH(), Cosine(bias_scale=math.inf)):
        assert torch.equal(layer(x, x[:2]), layer(x.float(), x[:2].float()))
        assert torch.equal(layer.diagonal(x), layer.diagonal(x.float()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ReLU()(torch.zeros(3)), ValueError, r"`x` must be \[row, input\].*\(3,\).*x\[:, None\]"),
        (lambda: ReLU()(torch.zeros(0, 2)), ValueError, r"`x` must be \[row, input\].*\(0, 2\)"),
        (lambda: ReLU()(torch.zeros(2, 3), torch.zeros(2, 4)), ValueError, r"agree.*\(2, 3\).*\(2, 4\)"),
        (lambda: ReLU()(torch.zeros(2, 3), torch.zeros(2, 3).double()), ValueError, "agree.*float32.*float64"),
        (lambda: ReLU()(torch.tensor([[math.nan], [1.0]])), ValueError, "`x` must be finite; 1 of"),
        (lambda: ReLU().diagonal(torch.tensor([[math.inf]])), ValueError, "`x` must be finite"),
        (lambda: ReLU()(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "`x` must be a floating-point"),
        (lambda: ReLU()([[1.0]]), TypeError, "`x` must be a floating-point tensor; got list"),
        (lambda: ReLU().of_covariance(torch.eye(3)[:2]), ValueError, r"square.*\(2, 3\)"),
        (lambda: ReLU().of_covariance(torch.ones(3, 3).triu()), ValueError, "symmetric"),
        (lambda: ReLU().of_covariance(-torch.eye(3)), ValueError, "variances on its diagonal"),
        (lambda: ReLU(length_scale=0.0), ValueError, "`length_scale` must be a positive finite number; got 0.0"),
        (lambda: ReLU(bias_scale=-1.0), ValueError, "`bias_scale` must be a finite number, zero or more"),
        (lambda: ReLU(bias_scale=math.inf), ValueError, "`bias_scale` must be a finite number, zero or more; got inf"),
        (lambda: Cosine(length_scale=math.nan), ValueError, "`length_scale`"),
        (lambda: ReLU().features(1, 0), ValueError, "`width` must be a whole number, at least 1; got 0"),
        (lambda: ReLU().features(2, 3)(torch.zeros(4, 1).double()), ValueError, r"2 inputs.*\(4, 1\)"),
        (lambda: Quadrature(function=torch.relu, nodes=1)(torch.ones(1, 1)), ValueError, "`nodes`"),
    ],
)
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_overflow_is_named():
    with pytest.raises(ValueError, match=r"overflows torch\.float32"):
        Erf(length_scale=1e-8)(torch.tensor([[1e12], [2e12]]))


@pytest.mark.parametrize(
    "layer", [ReLU(bias_scale=0.7), TanH(bias_scale=1.3), Cosine(), Cosine(bias_scale=0.5)], ids=repr
)
def test_the_covariance_of_given_vectors_is_the_integral_over_their_biases(layer):
    # [GG16, sect:going_deep], K₂ of two vectors of three units, each with its own bias.
    x, y = torch.tensor([[0.3, -1.2, 0.8]], dtype=torch.float64), torch.tensor([[1.1, 0.4, -0.5]], dtype=torch.float64)

    def integrand(z, k):
        bias = layer.biases(torch.tensor(z, dtype=torch.float64))
        return float(layer.nonlinearity(x[0, k] + bias) * layer.nonlinearity(y[0, k] + bias)) * scipy.stats.norm.pdf(z)

    expected = sum(scipy.integrate.quad(integrand, -9, 9, args=(k,), limit=200)[0] for k in range(3)) / 3
    assert layer.of_vectors(x, y).item() == pytest.approx(expected, abs=1e-6)
    both = torch.cat([x, y])
    torch.testing.assert_close(layer.of_vectors(both), layer.of_vectors(both).T)
    torch.testing.assert_close(layer.of_vectors(both)[:1, 1:], layer.of_vectors(x, y))
