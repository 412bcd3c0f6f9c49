r"""The Gaussian process of finite rank $K$ in weight space."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.processes.covariances import Features
from dropbayes.processes.exact import Process, checked_data


@dataclass(frozen=True)
class FiniteRankProcess(Process):
    r"""The posterior of $\mathbf f = \Phi \mathbf W_2$ with $\mathbf w_d \sim \mathcal N(0, \mathbf I_K)$.

    $$\mathbf w_d \mid \mathbf y_d \sim \mathcal N(\mathbf m_d, \tau^{-1} (\mathbf R^T \mathbf R)^{-1}), \quad
    \mathbf R^T \mathbf R = \Phi^T \Phi + \tau^{-1} \mathbf I_K$$

    Args:
        features: $\boldsymbol\phi$: the hidden layer.
        weights: $\mathbf m_d$, the posterior mean of $\mathbf W_2$, `[unit]` or `[unit, output]`.
        root: $\mathbf R$, `[unit, unit]`, upper triangular.
        precision: $\tau$.
        output_bias: $\mathbf b_L$.
        log_evidence: $\log p(\mathbf Y \mid \mathbf X, \mathbf W_1, \mathbf b)$.
    """

    features: Features
    weights: Tensor
    root: Tensor
    precision: float
    output_bias: float
    log_evidence: float

    def _spread(self, x: Tensor) -> Tensor:
        r"""$\tau^{-1/2} \Phi \mathbf R^{-1}$: a square root of the posterior covariance."""
        return torch.linalg.solve_triangular(self.root, self.features(x), upper=True, left=False) * self.precision**-0.5

    def mean(self, x: Tensor) -> Tensor:
        return self.features(x) @ self.weights + self.output_bias

    def covariance(self, x: Tensor) -> Tensor:
        spread = self._spread(x)
        return spread @ spread.T

    def variance(self, x: Tensor) -> Tensor:
        return self._spread(x).square().sum(-1)

    def draws(self, x: Tensor, *, n_draws: int, seed: int = 0) -> Tensor:
        # A separate stream ("draw" in ASCII): with the features' seed, the noise would equal their weights.
        generator = torch.Generator().manual_seed(seed ^ 0x64726177)
        noise = torch.randn(n_draws, *self.weights.shape, generator=generator, dtype=torch.float64).to(x)
        spread = torch.einsum("nk,sk...->sn...", self._spread(x), noise)
        return self.mean(x) + spread

    @property
    def noise_variance(self) -> float:
        return 1 / self.precision

    @property
    def log_marginal_likelihood(self) -> float:
        return self.log_evidence


def finite_rank_process(
    features: Features, x: Tensor, y: Tensor, *, precision: float, output_bias: float = 0.0
) -> FiniteRankProcess:
    r"""The posterior of the process with covariance $\widehat{\mathbf K} = \Phi\Phi^T$, in $\mathcal O(N K^2)$.

    The auxiliary weights of [GG16, eq:cond-prob-with-aux],

    $$\mathcal N(\mathbf y_d; 0, \Phi\Phi^T + \tau^{-1} \mathbf I_N) = \int \mathcal N(\mathbf y_d; \Phi\mathbf w_d,
    \tau^{-1} \mathbf I_N) \mathcal N(\mathbf w_d; 0, \mathbf I_K) \, d\mathbf w_d,$$

    make it a ridge regression, solved here as the least squares problem of $\Phi$ stacked on $\tau^{-1/2} \mathbf I_K$.

    Args:
        features: $\boldsymbol\phi$, from `Layer.features`.
        x: $\mathbf X$, `[row, input]`.
        y: $\mathbf Y$, `[row]` or `[row, output]`.
        precision: $\tau$.
        output_bias: The constant mean function $\mathbf b_L$.

    Example:
        >>> from dropbayes.processes import ReLU
        >>> x = torch.linspace(-1, 1, 1000, dtype=torch.float64)[:, None]
        >>> process = finite_rank_process(ReLU().features(1, width=50), x, x[:, 0].sin(), precision=100.0)
        >>> bool((process.mean(x) - x[:, 0].sin()).abs().max() < 0.05)
        True
    """
    checked_data(x, y, precision, noise_free=False)
    phi = features(x)
    if y.dtype != phi.dtype:
        raise ValueError(f"`y` must have the dtype of `x`; got {y.dtype} and {x.dtype}.")
    targets = (y - output_bias).reshape(len(y), -1)
    n_rows, n_units = phi.shape
    ridge = torch.eye(n_units, dtype=phi.dtype, device=phi.device) * precision**-0.5
    # Forming ΦᵀΦ would square the condition number; orthogonal factors of the stacked matrix do not.
    basis, root = torch.linalg.qr(torch.cat([phi, ridge]))
    weights = torch.linalg.solve_triangular(root, basis[:n_rows].T @ targets, upper=True)
    # The quadratic form is τ times the minimum of the least squares; the determinant lemma gives the other term.
    quadratic = precision * (targets - phi @ weights).square().sum() + weights.square().sum()
    log_determinant = 2 * root.diagonal().abs().log().sum() - (n_rows - n_units) * math.log(precision)
    n_outputs = targets.shape[1]
    log_evidence = -0.5 * (quadratic + n_outputs * (log_determinant + n_rows * math.log(2 * math.pi)))
    weights = weights[:, 0] if y.dim() == 1 else weights
    return FiniteRankProcess(features, weights, root, precision, output_bias, float(log_evidence))
