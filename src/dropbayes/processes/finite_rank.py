r"""Networks of finite width: the Gaussian process of rank $K$ in weight space, and the evidence of deeper ones."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from dropbayes.processes.covariances import Features, Layer
from dropbayes.processes.deep import checked_layers
from dropbayes.processes.exact import Process, checked_data
from dropbayes.runtime.validation import check_count, check_type


@dataclass(frozen=True)
class FiniteRankProcess(Process):
    r"""The posterior of $\mathbf f = \Phi \mathbf W_2$ with $\mathbf w_d \sim \mathcal N(0, \mathbf I_K)$.

    $$\mathbf w_d \mid \mathbf y_d \sim \mathcal N(\mathbf m_d, \tau^{-1} (\mathbf R^T \mathbf R)^{-1}), \quad
    \mathbf R^T \mathbf R = \Phi^T \Phi + \tau^{-1} \mathbf I_K$$
    """

    features: Features
    weights: Tensor  # m, [unit] or [unit, output]
    root: Tensor  # R, upper triangular
    output_bias: float
    noise_variance: float
    log_marginal_likelihood: float  # log p(Y | X, W_1, b)

    def _spread(self, x: Tensor) -> Tensor:
        r"""$\tau^{-1/2} \Phi \mathbf R^{-1}$: a square root of the posterior covariance."""
        whitened = torch.linalg.solve_triangular(self.root, self.features(x), upper=True, left=False)
        return whitened * self.noise_variance**0.5

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
        noise = torch.randn(n_draws, *self.weights.shape, generator=generator, dtype=torch.float64, device="cpu").to(x)
        return self.mean(x) + torch.einsum("nk,sk...->sn...", self._spread(x), noise)


def finite_rank_process(
    features: Features, x: Tensor, y: Tensor, *, precision: float, output_bias: float = 0.0
) -> FiniteRankProcess:
    r"""The posterior of the process with covariance $\widehat{\mathbf K} = \Phi\Phi^T$, in $\mathcal O(N K^2)$.

    The auxiliary weights of [GG16, eq:cond-prob-with-aux],

    $$\mathcal N(\mathbf y_d; 0, \Phi\Phi^T + \tau^{-1} \mathbf I_N) = \int \mathcal N(\mathbf y_d; \Phi\mathbf w_d,
    \tau^{-1} \mathbf I_N) \mathcal N(\mathbf w_d; 0, \mathbf I_K) \, d\mathbf w_d,$$

    make it a ridge regression, solved here as the least squares problem of $\Phi$ stacked on $\tau^{-1/2} \mathbf I_K$.
    `features` are from `Layer.features`; the other arguments are those of `exact_process`, with finite $\tau$.

    Example:
        >>> from dropbayes.processes import ReLU
        >>> x = torch.linspace(-1, 1, 1000, dtype=torch.float64)[:, None]
        >>> process = finite_rank_process(ReLU().features(1, width=50), x, x[:, 0].sin(), precision=100.0)
        >>> bool((process.mean(x) - x[:, 0].sin()).abs().max() < 0.05)
        True
    """
    check_type("features", features, Features, "be the features of a layer, such as ReLU().features(1, width=50)")
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
    log_evidence = -0.5 * (quadratic + targets.shape[1] * (log_determinant + n_rows * math.log(2 * math.pi)))
    weights = weights[:, 0] if y.dim() == 1 else weights
    return FiniteRankProcess(features, weights, root, output_bias, 1 / precision, float(log_evidence))


@dataclass(frozen=True)
class Evidence:
    r"""The logarithm of an unbiased estimate of $p(\mathbf Y \mid \mathbf X)$, and the estimate's relative error.

    With few `effective_draws`, $(\sum w)^2 / \sum w^2$ of the importance weights, the error is not reliable.
    """

    log_evidence: float
    standard_error: float
    effective_draws: float


def network_evidence(
    layers: Layer | Sequence[Layer],
    x: Tensor,
    y: Tensor,
    *,
    width: int | Sequence[int],
    precision: float,
    n_draws: int = 4000,
    seed: int = 0,
) -> Evidence:
    r"""The evidence $p(\mathbf Y \mid \mathbf X) = \int \mathcal N(\mathbf Y; 0, \Phi\Phi^T + \tau^{-1}\mathbf I)\,
    p(\mathbf W_1)\,p(\mathbf b)$ of a network of any depth [GG16, sect:gp_approx_model, sect:going_deep].

    The last layer is integrated exactly, the weights and biases of the hidden layers by importance sampling: a few
    rounds adapt a Gaussian to the posterior, and the last draws from a mixture of it and the prior. For small networks:
    the posterior of a wide or deep one is so concentrated that few draws count, which `effective_draws` shows.

    The covariance of each of the `layers`, first layer first, gives its $\sigma$, $p(\mathbf w)$ and $p(b)$; `width` is
    $K$, of the one hidden layer or of each. There are `n_draws` per round; the data are those of `exact_process`.

    Example:
        >>> from dropbayes.processes import TanH
        >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
        >>> estimate = network_evidence(TanH(), x, x[:, 0], width=2, precision=10.0, n_draws=500)
        >>> estimate.standard_error < 0.2
        True
    """
    checked_data(x, y, precision, noise_free=False)
    layers = [layers] if isinstance(layers, Layer) else layers
    checked_layers(layers)
    widths = [width] if isinstance(width, int) else list(width)
    check_count("n_draws", n_draws, at_least=2)
    if len(widths) != len(layers) or min(widths, default=0) < 1:
        raise ValueError(f"`width` must be one positive width for each of the {len(layers)} layers; got {width!r}.")
    generator = torch.Generator().manual_seed(seed)
    sizes = [(n_inputs + 1, n_units) for n_inputs, n_units in itertools.pairwise([x.shape[1], *widths])]
    size = sum(map(math.prod, sizes))
    x, targets = x.double(), y.double().reshape(len(y), -1)
    zero, eye = x.new_zeros(size), torch.eye(size, dtype=x.dtype, device=x.device)
    mean, root = zero, eye  # the parameters as functions of standard normal numbers
    share = 0.3  # of draws from the prior, which bounds the importance weights by 1/0.3 times those of the prior
    for _ in range(4):  # adapts the proposal; only the last round gives the estimate, so that it is unbiased
        noise = torch.randn(n_draws, size, generator=generator, dtype=x.dtype, device="cpu").to(x.device)
        uniform = torch.rand(n_draws, 1, generator=generator, dtype=x.dtype, device="cpu").to(x.device)
        draws = torch.where(uniform < share, noise, mean + noise @ root.T)
        prior = MultivariateNormal(zero, scale_tril=eye).log_prob(draws)
        adapted = MultivariateNormal(mean, scale_tril=root).log_prob(draws)
        proposal = torch.logaddexp(prior + math.log(share), adapted + math.log1p(-share))
        log_weights = _conditional_evidence(layers, sizes, x, targets, draws, precision) + prior - proposal
        weights = log_weights.softmax(0)
        mean = weights @ draws
        centred = draws - mean
        root = torch.linalg.cholesky(torch.einsum("t,ti,tj->ij", weights, centred, centred) * 1.5 + 1e-2 * eye)
    effective = 1 / weights.square().sum()
    error = (n_draws * weights - 1).square().mean().sqrt() / math.sqrt(n_draws)
    return Evidence(float(log_weights.logsumexp(0)) - math.log(n_draws), float(error), float(effective))


def _conditional_evidence(
    layers: Sequence[Layer], sizes: Sequence[tuple[int, int]], x: Tensor, y: Tensor, draws: Tensor, precision: float
) -> Tensor:
    r"""$\log \mathcal N(\mathbf Y; 0, \Phi\Phi^T + \tau^{-1}\mathbf I)$ of each draw of the hidden layers."""
    phi = x
    for layer, shape, normal in zip(layers, sizes, draws.split([math.prod(s) for s in sizes], 1), strict=True):
        parameters = normal.unflatten(1, shape)
        weights, bias = parameters[:, :-1] / layer.length_scale, layer.biases(parameters[:, -1:])
        phi = layer.nonlinearity(phi @ weights + bias) * shape[1] ** -0.5
    covariance = phi @ phi.mT + torch.eye(len(x), dtype=x.dtype, device=x.device) / precision
    return MultivariateNormal(x.new_zeros(len(x)), covariance).log_prob(y.T[:, None]).sum(0)
