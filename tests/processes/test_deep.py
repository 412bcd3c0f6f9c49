"""Tests of the deep process."""

import math

import pytest
import torch

from dropbayes.processes import (
    Deep,
    Erf,
    Identity,
    ReLU,
    Step,
    TanH,
    network_prior_draws,
)
from tests.processes.samples import GRID


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


@pytest.mark.slow
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


@pytest.mark.parametrize("width", [1, 4, 16])
def test_one_covariance_for_every_layer_makes_the_weights_a_product_whose_prior_is_not_gaussian(width):
    # [GG16, sect:going_deep, the remark on W₂W₂']: an entry is a sum of K products of two normals, with variance K and
    # excess kurtosis 6/K, and entries of a row are uncorrelated but not independent: Cov(w₁², w₂²) = 2K.
    torch.manual_seed(0)
    first = torch.randn(200_000, 1, width, dtype=torch.float64)
    weights = (first @ torch.randn(200_000, width, 2, dtype=torch.float64)).squeeze(1)
    scaled = weights / width**0.5
    kurtosis = scaled.pow(4).mean(0)
    error = scaled.pow(4).std(0) / 200_000**0.5
    assert ((kurtosis - (3 + 6 / width)).abs() < 4.5 * error).all()
    products = scaled.square().prod(-1)
    assert abs(products.mean() - (1 + 2 / width)) < 4.5 * products.std() / 200_000**0.5
