"""Tests of hard inputs: nearly equal, opposite, zero, tiny and huge ones."""

import mpmath
import pytest
import torch

from dropbayes.processes import (
    Cosine,
    Erf,
    Identity,
    ReLU,
    Sigmoid,
    Step,
    TanH,
)
from tests.processes.layers import ALL, inputs


@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("bias_scale", [0.0, 1.0])
@pytest.mark.parametrize("covariance", ALL)
def test_every_matrix_is_positive_semi_definite(covariance, bias_scale, magnitude):
    x = inputs(20, 2)
    x = torch.cat([x, x[:3], -x[:3], 0 * x[:2], x[:3] * (1 + 1e-7), x[:3] * 1e-3]) * magnitude
    matrix = covariance(1.0, bias_scale)(x)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-14 * float(matrix.max()))
    eigenvalues = torch.linalg.eigvalsh(matrix)
    tolerance = 1e-6 if covariance in (TanH, Sigmoid) and magnitude > 1 else 1e-13
    assert eigenvalues[0] >= -tolerance * eigenvalues[-1]


def exact_value(covariance, x, y, bias_scale):
    """The covariance by the textbook's formula at 60 digits."""
    x, y, bias = [mpmath.mpf(v) for v in x.tolist()], [mpmath.mpf(v) for v in y.tolist()], mpmath.mpf(bias_scale)
    s_u, s_v, c = (sum(p * q for p, q in zip(a, b, strict=True)) + bias**2 for a, b in ((x, x), (y, y), (x, y)))
    if covariance is Identity:
        return c
    if covariance is Cosine:
        squares = [sum((p + sign * q) ** 2 for p, q in zip(x, y, strict=True)) for sign in (-1, 1)]
        return mpmath.exp(-squares[0] / 2) + mpmath.exp(-squares[1] / 2 - 2 * bias**2)
    if covariance is Erf:
        return 2 / mpmath.pi * mpmath.asin(2 * c / mpmath.sqrt((1 + 2 * s_u) * (1 + 2 * s_v)))
    if s_u * s_v == 0:
        return mpmath.mpf(0)
    angle = mpmath.acos(min(max(c / mpmath.sqrt(s_u * s_v), mpmath.mpf(-1)), mpmath.mpf(1)))
    if covariance is Step:
        return (mpmath.pi - angle) / (2 * mpmath.pi)
    return mpmath.sqrt(s_u * s_v) * (mpmath.sin(angle) + (mpmath.pi - angle) * mpmath.cos(angle)) / (2 * mpmath.pi)


def hard_inputs(magnitude, dtype):
    """Generic rows, and their copies, opposites, neighbours a few roundings away, and zero."""
    x = inputs(3, 2).to(dtype)
    eps = torch.finfo(dtype).eps
    return torch.cat([x, x[:1], -x[:1], x[:1] * (1 + 4 * eps), -x[1:2] * (1 + 4 * eps), 0 * x[:1]]) * magnitude


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("bias_scale", [0.0, 1.0])
@pytest.mark.parametrize("covariance", [ReLU, Step, Erf, Identity])
def test_hard_inputs_have_the_covariance_of_sixty_digits(covariance, bias_scale, magnitude, dtype):
    x = hard_inputs(magnitude, dtype)
    matrix = covariance(1.0, bias_scale)(x)
    assert matrix.dtype == dtype
    with mpmath.workdps(60):
        scales = [mpmath.sqrt(exact_value(covariance, row, row, bias_scale)) for row in x]
        for i, row in enumerate(x):
            for j, column in enumerate(x):
                exact, scale = exact_value(covariance, row, column, bias_scale), scales[i] * scales[j]
                error = abs(mpmath.mpf(matrix[i, j].item()) - exact)
                assert error <= 10 * torch.finfo(dtype).eps * scale, (i, j)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("bias_scale", [0.0, 0.4])
def test_hard_inputs_have_the_cosine_covariance_of_sixty_digits(bias_scale, magnitude, dtype):
    x = hard_inputs(magnitude, dtype)
    matrix = Cosine(1.0, bias_scale)(x)
    with mpmath.workdps(60):
        exact = [[float(exact_value(Cosine, row, column, bias_scale)) for column in x] for row in x]
    # An opposite input is told apart by the difference of the norms, which rounds at eps times their magnitude.
    tolerance = 10 * torch.finfo(dtype).eps if magnitude <= 1 else 1e-7
    torch.testing.assert_close(matrix, torch.tensor(exact, dtype=torch.float64).to(dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_exponential_of_hard_inputs(dtype):
    x = hard_inputs(1e-8, dtype)
    torch.testing.assert_close(Cosine()(x), torch.ones(len(x), len(x), dtype=dtype))
    x = hard_inputs(1e8, torch.float64)
    expected = torch.exp(-0.5 * (x[:, None] - x[None]).square().sum(-1))
    torch.testing.assert_close(Cosine()(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_and_sigmoid_have_their_limits_at_extreme_inputs(dtype):
    tolerance = {"rtol": 0, "atol": 5e-6 if dtype == torch.float32 else 1e-6}
    tiny, huge = hard_inputs(1e-8, dtype), hard_inputs(1e8, dtype)
    linear = Identity(bias_scale=0.0)(tiny)
    torch.testing.assert_close(TanH(bias_scale=0.0)(tiny), linear, rtol=1e-5, atol=1e-6 * float(linear.max()))
    torch.testing.assert_close(Sigmoid(bias_scale=0.0)(tiny), torch.full_like(linear, 0.25), **tolerance)
    step = Step(bias_scale=0.0)(huge)[:-1, :-1]  # the last row is zero
    torch.testing.assert_close(Sigmoid(bias_scale=0.0)(huge)[:-1, :-1], step, **tolerance)
    torch.testing.assert_close(TanH(bias_scale=0.0)(huge)[:-1, :-1], 4 * step - 1, rtol=0, atol=4 * tolerance["atol"])
    torch.testing.assert_close(TanH(bias_scale=0.0)(huge)[-1], torch.zeros(len(huge), dtype=dtype), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("bias_scale", [0.0, 1.0])
@pytest.mark.parametrize("covariance", ALL)
def test_derivatives_at_hard_inputs_are_finite(covariance, bias_scale, magnitude, dtype):
    x = hard_inputs(magnitude, dtype).requires_grad_()
    length = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    matrix = covariance(length, bias_scale)(x)
    gradients = torch.autograd.grad(matrix.sum(), (x, length), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


def test_derivative_at_identical_inputs_is_half_that_of_the_prior_variance():
    x = inputs(1).requires_grad_()  # K(x, x) = (|x|² + 1)/2, and each argument has half of its slope, x/2
    (slope,) = torch.autograd.grad(ReLU()(x, x.detach()).sum(), x)
    torch.testing.assert_close(slope, x.detach() / 2)
