r"""A perceptron's mean and covariance, propagated layer by layer: Gaussian pre-activations, and their full covariance.

Dropout adds $v (m_i^2 + C_{ii})$ to a unit's variance, a linear layer gives $\mathbf W \mathbf C \mathbf W^T$. For a
non-linearity $\sigma$ of a Gaussian pair, Mehler's series is
$\mathrm{Cov}[\sigma(u_i), \sigma(u_j)] = \sum_{k \ge 1} a_{ik} a_{jk} \rho_{ij}^k$ with
$a_{ik} = \mathbb E[\sigma(m_i + s_i z) h_k(z)]$ for the normalised Hermite polynomials $h_k$.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes.linear.points import gaussian_points
from dropbayes.sampling import Block, Inputs, Perceptron, Profile, Sampling, as_perceptron
from dropbayes.tracing.views import checked_network

_N_TERMS, _N_NODES = 8, 64


@dataclass(frozen=True)
class MomentsPlan:
    """The plan for propagating the moments of a perceptron."""

    direct: Perceptron
    profile: Profile
    only_moments: bool
    max_bytes: int

    exact = True  # no draw is made
    method = "moments"

    def run(self, inputs: Inputs, *, first_row: int = 0) -> Iterator[Block]:
        """The rows block by block: the mean with its variance, or points of the Gaussian as draws."""
        widths = [weight.shape[0] for layer in self.direct.layers for weight in layer.parameters()]
        size = max(1, self.max_bytes // (32 * max(widths) ** 2))
        for start in range(0, inputs.n_rows, size):
            rows = range(start, min(start + size, inputs.n_rows))
            x = inputs.leaves[0][rows.start : rows.stop]
            mean, covariance = propagate(self.direct.layers, x)
            outputs = mean[None] if self.only_moments else gaussian_points(mean, covariance)
            variances = [covariance.diagonal(dim1=1, dim2=2)] if self.only_moments else None
            yield Block(rows, range(1), [outputs.to(x.dtype)], variances)


def moments_plan(net: nn.Module, inputs: Inputs, sampling: Sampling, *, only_moments: bool) -> MomentsPlan:
    """The plan for a perceptron with dropout; an error for any other network."""
    if sampling.positions or sampling.ignored:
        raise ValueError('`positions` and `ignore_modules` need method="linear" or "sampling"; got "moments".')
    direct = as_perceptron(checked_network(net), inputs.leaves[0]) if inputs.is_matrix else None
    if direct is None:
        what = "an nn.Sequential of linear layers, elementwise non-linearities and nn.Dropout"
        needs = f'"moments" needs a perceptron: {what}, and rows `[row, feature]`'
        raise ValueError(f'`method` {needs}. Use method="linear" for any other network.')
    direct.profile.check_random()
    return MomentsPlan(direct, direct.profile, only_moments, sampling.max_bytes or 256 * 2**20)


@torch.no_grad()
def propagate(layers: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean `[row, output]` and the covariance `[row, output, output]` of a perceptron, in float64."""
    mean = x.double()
    covariance = mean.new_zeros(0)  # until the first dropout
    for layer in layers:
        random = covariance.numel() > 0
        if isinstance(layer, nn.Linear):
            weight = layer.weight.double()
            mean = nn.functional.linear(mean, weight, None if layer.bias is None else layer.bias.double())
            covariance = weight @ covariance @ weight.T if random else covariance
        elif isinstance(layer, nn.Dropout) and layer.p == 1:  # all is dropped
            mean, covariance = torch.zeros_like(mean), torch.zeros_like(covariance)
        elif isinstance(layer, nn.Dropout):
            squares = mean.square() + (covariance.diagonal(dim1=1, dim2=2) if random else 0)
            added = torch.diag_embed(layer.p / (1 - layer.p) * squares)
            covariance = covariance + added if random else added
        else:
            mean, covariance = _activate(layer, mean, covariance) if random else (layer(mean), covariance)
    return mean, covariance if covariance.numel() else mean.new_zeros(*mean.shape, mean.shape[1])


def _activate(layer: nn.Module, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of a non-linearity of jointly Gaussian units."""
    std = covariance.diagonal(dim1=1, dim2=2).clamp(min=1e-24).sqrt()
    slope = {nn.ReLU: 0.0, nn.LeakyReLU: getattr(layer, "negative_slope", None)}.get(type(layer))
    terms, square = _by_quadrature(layer, mean, std) if slope is None else _of_ramps(slope, mean, std)
    correlation = (covariance / (std.unsqueeze(1) * std.unsqueeze(2))).clamp(-1, 1)
    result = torch.zeros_like(covariance)
    for term in reversed(terms[1:]):  # Horner's rule
        result = (result + term.unsqueeze(1) * term.unsqueeze(2)) * correlation
    result.diagonal(dim1=1, dim2=2).copy_((square - terms[0].square()).clamp(min=0))  # exact, not a series
    return terms[0], result


def _of_ramps(slope: float, mean: Tensor, std: Tensor) -> tuple[list[Tensor], Tensor]:
    """The coefficients and the second moment of u for positive u and `slope` u for negative ones."""
    ratio = mean / std
    below, density = torch.special.ndtr(ratio), torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    rest = 1 - slope
    terms = [slope * mean + rest * (mean * below + std * density), std * (slope + rest * below)]
    for k in range(2, _N_TERMS):
        polynomial = torch.special.hermite_polynomial_he(ratio, k - 2)
        terms.append(rest * (-1) ** k * std * density * polynomial / math.sqrt(math.factorial(k)))
    whole = mean.square() + std.square()
    return terms, slope**2 * whole + (1 - slope**2) * (whole * below + mean * std * density)


def _by_quadrature(layer: nn.Module, mean: Tensor, std: Tensor) -> tuple[list[Tensor], Tensor]:
    """The coefficients and the second moment of any non-linearity, by the Gauss-Hermite rule."""
    nodes, weights = (torch.from_numpy(z).to(mean) for z in np.polynomial.hermite_e.hermegauss(_N_NODES))
    weights = weights / math.sqrt(2 * math.pi)
    values = layer(mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes)
    polynomials = [torch.special.hermite_polynomial_he(nodes, k) for k in range(_N_TERMS)]
    terms = [values @ (weights * one) / math.sqrt(math.factorial(k)) for k, one in enumerate(polynomials)]
    return terms, values.square() @ weights
