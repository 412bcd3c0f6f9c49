r"""Expected products $\mathbb E[\sigma(u) \sigma(v)]$ of any non-linearity over a Gaussian pair."""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Elementwise = Callable[[Tensor], Tensor]

HERMITE_TERMS = 256
r"""Terms of the Hermite series: enough for TanH up to $s = 3$ at any angle, and for any $\sigma$ beyond 25 degrees."""


def expected_product(function: Elementwise, std_u: Tensor, std_v: Tensor, angle: Tensor, *, nodes: int = 48) -> Tensor:
    r"""The expectation $\mathbb E[\sigma(u) \sigma(v)]$ of Gaussians $u$, $v$ with correlation $\cos\theta$.

    A Hermite series calls $\sigma$ for each row and node. The pairs for which it has not converged (nearly equal
    directions of a saturated or kinked $\sigma$) are integrated in polar coordinates, for each pair and node. $s_u$ is
    `[..., x row, 1]`, $s_v$ `[..., 1, y row]` and $\theta$ `[..., x row, y row]`.
    """
    terms_u, rest_u = hermite_coefficients(function, std_u)
    terms_v, rest_v = hermite_coefficients(function, std_v)
    cosine = angle.cos()
    # Differentiated, the series keeps two values for each term and pair: 64 MB in float64 for a block of 2^14 pairs.
    total = _by_rows(_hermite_series, max(1, 2**14 // angle.shape[-1]), terms_u, terms_v, cosine)
    remainder = (rest_u * rest_v).sqrt() * cosine.detach().abs() ** HERMITE_TERMS  # relative to the prior variances
    left = remainder > 1e-10
    if left.any():
        pairs = [z.expand(angle.shape)[left].unsqueeze(-1) for z in (std_u, std_v, angle)]
        polar = functools.partial(polar_quadrature, function, nodes)
        n_pairs = max(1, 2**19 // nodes**2)  # 4 MB in float64
        total = total.masked_scatter(left, _by_rows(polar, n_pairs, *pairs))
    return total


def quadrature_error(function: Elementwise, stds: Tensor, *, nodes: int = 48) -> float:
    r"""The largest relative error of $\mathbb E[\sigma(s z)^2]$ by the rules in use, at some of the deviations $s$."""
    levels = torch.linspace(0, 1, 9, dtype=torch.float64, device=stds.device)
    chosen = torch.quantile(stds.detach().double()[:100_000], levels)[:, None]
    points, weights = (torch.as_tensor(z).to(chosen) for z in normal_rule(4, 4000, 30.0))
    exact = function(chosen * points).square() @ weights
    hermite_points, hermite_weights, _ = (torch.as_tensor(z).to(chosen) for z in _hermite_rule())
    series = function(chosen * hermite_points).square() @ hermite_weights
    polar = polar_quadrature(function, nodes, chosen, chosen, torch.zeros_like(chosen))[:, 0]
    scale = exact.abs().clamp_min(torch.finfo(torch.float64).tiny)
    errors = torch.stack([(series - exact).abs() / scale, (polar - exact).abs() / scale])
    return float(errors[errors.isfinite()].max()) if bool(exact.isfinite().all()) else math.inf


@functools.cache
def normal_rule(n_nodes: int = 8, n_panels: int = 128, radius: float = 9.0) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes in panels for the standard normal: with these, a kink anywhere costs 1e-6 at most."""
    points, weights = np.polynomial.legendre.leggauss(n_nodes)
    edges = np.linspace(-radius, radius, n_panels + 1)
    half, middle = (edges[1] - edges[0]) / 2, (edges[1:] + edges[:-1]) / 2
    points = (middle[:, None] + half * points).ravel()
    return points, np.tile(weights * half, n_panels) * np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)


def hermite_coefficients(function: Elementwise, std: Tensor) -> tuple[Tensor, Tensor]:
    r"""The coefficients $a_k = \mathbb E[\sigma(s z) h_k(z)]$ of $\sigma$ in normalised Hermite polynomials, axis 0.

    The share $1 - \sum_k a_k^2 / \mathbb E[\sigma^2]$ that they leave out bounds the remainder (Cauchy and Schwarz).
    """
    points, weights, polynomials = (torch.as_tensor(z).to(std.device) for z in _hermite_rule())
    values = function(std.to(torch.float64).unsqueeze(-1) * points)  # in float64: rounding would hide the remainder
    coefficients = (values * weights) @ polynomials
    square = values.detach().square() @ weights
    rest = (square - coefficients.detach().square().sum(-1)).abs() / square.masked_fill(square == 0, 1.0)
    return coefficients.movedim(-1, 0).to(std.dtype).contiguous(), rest


def _hermite_series(terms_u: Tensor, terms_v: Tensor, cosine: Tensor) -> Tensor:
    r"""Mehler's series $\sum_k a_k(s_u) a_k(s_v) \cos^k\theta$, by Horner's rule."""
    largest = [terms.detach().abs().flatten(1).amax(1) for terms in (terms_u, terms_v)]
    # 256 terms this small do not reach float64's last digit.
    matters = largest[0] * largest[1] > 1e-19 * largest[0].max() * largest[1].max()
    orders = matters.nonzero().flatten().tolist()  # an odd σ has no even terms, a smooth one no high terms
    powers = {step: cosine**step for step in {*np.diff([0, *orders]).tolist()}}
    total = torch.zeros_like(cosine)
    for order, lower in zip(reversed(orders), [*reversed(orders[:-1]), 0], strict=False):  # none where σ is zero
        total = (total + terms_u[order] * terms_v[order]) * powers[order - lower]
    return total


def polar_quadrature(function: Elementwise, nodes: int, std_u: Tensor, std_v: Tensor, angle: Tensor) -> Tensor:
    r"""The integral in the polar coordinates of two independent standard normals.

    $u$ and $v$ change sign on two lines that cut the circle into arcs of $\pi - \theta$ (equal signs) and $\theta$
    (opposite signs), each twice. With $\alpha$ for an arc and $\pm$ for its sign,

    $$\frac{1}{2\pi} \sum_{\alpha, s = \pm 1} \alpha \int_0^1 dt \int_0^\infty \rho e^{-\rho^2/2} d\rho \;
    \sigma\big(s s_u \rho \sin \alpha (1 - t)\big) \, \sigma\big(\pm s s_v \rho \sin \alpha t\big).$$

    A Gauss-Hermite product rule loses accuracy at a kink or jump of $\sigma$ at zero, or at the steep middle of a
    saturated sigmoid, inside its domain; here both lie at the ends of the arcs.
    """
    arc, arc_weight, radius, radius_weight = (torch.as_tensor(z).to(angle) for z in _polar_rule(nodes))
    std_u, std_v, angle = (z.unsqueeze(-1) for z in (std_u, std_v, angle))
    total = torch.zeros_like(angle.squeeze(-1))
    for length, sign in ((math.pi - angle, 1.0), (angle, -1.0)):
        # 1 - t is t reversed: the rule is symmetric, and 1 - t would lose the digits of a small t.
        u = (std_u * torch.sin(length * arc.flip(0))).unsqueeze(-1) * radius
        v = (std_v * torch.sin(length * arc)).unsqueeze(-1) * (sign * radius)
        products = function(u) * function(v) + function(-u) * function(-v)
        total = total + length.squeeze(-1) * ((products @ radius_weight) @ arc_weight)
    return total / (2 * math.pi)


def _by_rows(formula: Callable[..., Tensor], n_rows: int, *tensors: Tensor) -> Tensor:
    """The formula over blocks of `n_rows` rows (axis -2), its intermediates recomputed in the backward pass."""
    differentiated = torch.is_grad_enabled() and any(z.requires_grad for z in tensors)
    blocks = []
    for start in range(0, max(z.shape[-2] for z in tensors), n_rows):
        block = [z if z.shape[-2] == 1 else z[..., start : start + n_rows, :] for z in tensors]
        blocks.append(checkpoint(formula, *block, use_reentrant=False) if differentiated else formula(*block))
    return torch.cat(blocks, dim=-2)


@functools.cache
def _polar_rule(nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights, concentrated at the arc's two ends and at the centre."""
    if nodes < 2:
        raise ValueError(f"`nodes` must be at least 2; got {nodes}.")
    points, weights = np.polynomial.legendre.leggauss(nodes)
    points, weights = (points + 1) / 2, weights / 2
    arc = points**3 * (10 - 15 * points + 6 * points**2)  # the smooth step whose two derivatives vanish at both ends
    arc_weight = weights * 30 * points**2 * (1 - points) ** 2
    end = 9.0  # exp(-9²/2) is below 3e-18
    radius = end * points**2
    radius_weight = weights * end * 2 * points * radius * np.exp(-(radius**2) / 2)
    return arc, arc_weight, radius, radius_weight


@functools.cache
def _hermite_rule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A Gauss-Legendre rule for the standard normal on each half-line, and the Hermite polynomials at its nodes."""
    # Three times as many nodes as polynomials: with as many, every function would look fully expanded.
    points, weights = normal_rule(3 * HERMITE_TERMS // 2, 2, 12.0)  # exp(-12²/4), a Hermite function's tail: 3e-16
    polynomials = [np.ones_like(points), points]
    for k in range(2, HERMITE_TERMS):
        polynomials.append((points * polynomials[-1] - math.sqrt(k - 1) * polynomials[-2]) / math.sqrt(k))
    return points, weights, np.stack(polynomials, axis=-1)
