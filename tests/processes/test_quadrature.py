"""Tests of quadrature: against product rules, closed forms and its own remainder."""

import math

import numpy as np
import pytest
import torch

from dropbayes.processes import (
    Quadrature,
    Sigmoid,
    TanH,
)
from dropbayes.processes.quadrature import (
    expected_product,
    hermite_coefficients,
    polar_quadrature,
    quadrature_error,
)
from tests.processes.layers import CLOSED_FORMS, SCALES, inputs


@pytest.mark.parametrize("layer", [c(*s) for c in CLOSED_FORMS for s in SCALES], ids=repr)
def test_closed_form_equals_its_quadrature(layer):
    x, y = inputs(), inputs(5, seed=1)
    y = torch.cat([y, x[:1], -x[:1], 0 * x[:1], x[1:2] + 1e-6])
    quadrature = Quadrature(layer.length_scale, layer.bias_scale, function=layer.nonlinearity)
    torch.testing.assert_close(quadrature(x, y), layer(x, y), rtol=0, atol=1e-8)


@pytest.mark.parametrize("layer", [c(*s) for c in (TanH, Sigmoid) for s in [(3.0, 0.8), (4.0, 0.5)]], ids=repr)
def test_quadrature_equals_a_gauss_hermite_product_rule(layer):
    x, y = inputs(), inputs(5, seed=1)
    points, weights = (torch.as_tensor(z) for z in np.polynomial.hermite_e.hermegauss(120))
    weights = weights / weights.sum()
    variance_x, variance_y, covariance = (
        (a * b).sum(-1) / layer.length_scale**2 + layer.bias_scale**2
        for a, b in ((x, x), (y, y), (x[:, None], y[None]))
    )
    u = variance_x.sqrt()[:, None, None, None] * points[:, None]
    slope = covariance / variance_x[:, None]
    rest = (variance_y - slope * covariance).sqrt()
    v = slope[..., None, None] * u + rest[..., None, None] * points
    expected = torch.einsum("...ij,i,j->...", layer.nonlinearity(u) * layer.nonlinearity(v), weights, weights)
    torch.testing.assert_close(layer(x, y), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.nn.functional.softplus, torch.nn.functional.elu])
def test_hermite_series_and_polar_quadrature_agree(function):
    std_u, std_v, angle = torch.full((4, 1), 1.2), torch.full((1, 1), 0.4), torch.tensor([[0.8], [1.5], [2.0], [2.4]])
    std_u, std_v, angle = (z.double() for z in (std_u, std_v, angle))
    series = expected_product(function, std_u, std_v, angle)
    torch.testing.assert_close(series, polar_quadrature(function, 48, std_u, std_v, angle), rtol=0, atol=1e-11)


def test_hermite_series_knows_what_it_leaves_out():
    std = torch.ones(1, 1, dtype=torch.float64)
    assert hermite_coefficients(torch.tanh, std)[1] < 1e-12
    # A unit's Hermite coefficients a_k decay as k^(-5/4) for a kink: the tail of their squares is visible.
    coefficients, rest = hermite_coefficients(torch.relu, std)
    assert 1e-6 < rest < 1e-4
    torch.testing.assert_close(
        coefficients[:3, 0, 0], torch.tensor([1 / math.sqrt(2 * math.pi), 0.5, 0.5 / math.sqrt(math.pi)]).double()
    )


@pytest.mark.parametrize(
    "function",
    [torch.nn.functional.hardtanh, torch.nn.functional.relu6, lambda u: torch.exp(3 * u)],
    ids=["hardtanh", "relu6", "exp"],
)
def test_lost_digits_are_warned_of(function):
    with pytest.warns(UserWarning, match="loses digits"):
        Quadrature(function=function)(4 * inputs())


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, torch.nn.functional.gelu, torch.sin, torch.abs])
def test_smooth_functions_and_kinks_at_zero_are_not(function):
    x = 2 * inputs()
    assert quadrature_error(function, x.norm(dim=-1)) < 1e-6
    Quadrature(function=function)(x)  # a warning would be an error here


def test_the_estimated_error_is_the_error():
    # exp has E[e^{2sz}] = e^{2s²}: the rule's own error is known.
    stds = torch.tensor([3.0], dtype=torch.float64)
    polar = polar_quadrature(torch.exp, 48, stds[:, None], stds[:, None], torch.zeros(1, 1, dtype=torch.float64))
    error = abs(polar.item() / math.exp(18.0) - 1)
    assert quadrature_error(torch.exp, stds) == pytest.approx(error, rel=0.05)
