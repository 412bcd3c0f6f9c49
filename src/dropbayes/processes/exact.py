r"""Exact Gaussian process regression by scikit-learn, with a network's covariance as its kernel."""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel
from torch import Tensor
from torch.autograd import forward_ad

from dropbayes.likelihoods.observation import checked_targets, sum_events
from dropbayes.processes.pairs import Covariance, check_covariance, checked_inputs
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import check_count

JITTERS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
"""The jitters tried in turn on the diagonal, in units of the mean prior variance: the first is GPyTorch's default."""


def _array(z: float | Tensor) -> np.ndarray:
    return torch.as_tensor(z).detach().to("cpu", torch.float64).numpy()


class Process(ABC):
    r"""A posterior over functions given data, $p(\mathbf f \mid \mathbf X, \mathbf Y)$."""

    noise_variance: float  #: The variance $\tau^{-1}$ of an observation given $\mathbf f$.
    log_marginal_likelihood: float
    r"""The log evidence $\log p(\mathbf Y \mid \mathbf X)$, summed over independent outputs."""

    @abstractmethod
    def mean(self, x: Tensor) -> Tensor:
        r"""The posterior mean $\mathbb E[\mathbf f(\mathbf x^*)]$, `[row]` or `[row, output]` as the data's `y`."""

    @abstractmethod
    def covariance(self, x: Tensor) -> Tensor:
        r"""The posterior covariance of $\mathbf f$ between rows, `[row, row]`: the same for every output."""

    @abstractmethod
    def variance(self, x: Tensor) -> Tensor:
        r"""The epistemic variance of $\mathbf f(\mathbf x^*)$, `[row]`; that of an observation has $\tau^{-1}$ more."""

    @abstractmethod
    def draws(self, x: Tensor, *, n_draws: int, seed: int = 0) -> Tensor:
        r"""Functions drawn from the posterior, at `x`: `[draw, row]` or `[draw, row, output]`."""

    def log_density(self, x: Tensor, y: Tensor) -> Tensor:
        r"""The predictive log-density $\log p(\mathbf y^* \mid \mathbf x^*, \mathbf X, \mathbf Y)$ of each row.

        $\log \mathcal N(\mathbf y^*; \mathbb E[\mathbf f], \mathrm{Var}[\mathbf f] + \tau^{-1})$, summed over outputs.
        """
        mean, std = self.mean(x), (self.variance(x) + self.noise_variance).sqrt()
        density = torch.distributions.Normal(mean, std if mean.dim() == 1 else std[:, None])
        return sum_events(density.log_prob(checked_targets(mean, y)), y)


def checked_data(x: Tensor, y: Tensor, precision: float, *, noise_free: bool) -> None:
    """Raises on data or a precision that regression cannot use."""
    checked_inputs(x, "x")
    if x.dim() != 2 or not isinstance(y, Tensor) or y.dim() not in (1, 2) or len(y) != len(x) or 0 in y.shape:
        got = f"{tuple(getattr(y, 'shape', ()))} for x {tuple(x.shape)}"
        raise ValueError(f"`y` must be [row] or [row, output] with the rows of `x`, [row, input]; got {got}.")
    checked_inputs(y.reshape(len(y), -1), "y")
    if not isinstance(precision, (int, float)) or not precision > 0 or (precision == math.inf and not noise_free):
        allowed = "positive (math.inf for data without noise)" if noise_free else "positive and finite"
        raise ValueError(f"`precision` (τ) must be {allowed}; got {precision!r}.")


class NetworkKernel(Kernel):
    r"""The scikit-learn kernel of a network covariance: it can be cloned, composed, printed and tuned.

    Its hyperparameters are the covariance's scales that are neither zero nor infinite (those are fixed), each within
    the `scale_bounds` in a search, or "fixed"; the gradient with respect to their logarithms is exact.

    Example:
        >>> from sklearn.gaussian_process.kernels import ConstantKernel
        >>> from dropbayes.processes import ReLU
        >>> ConstantKernel(2.0) * NetworkKernel(ReLU(length_scale=0.5))
        1.41**2 * ReLU(length_scale=0.5, bias_scale=1)
    """

    def __init__(self, covariance: Covariance, scale_bounds: tuple[float, float] | str = (1e-3, 1e3)) -> None:
        self.covariance, self.scale_bounds = covariance, scale_bounds

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        names = [name for name, value in self.covariance.scales.items() if 0 < float(value) < math.inf]
        return [Hyperparameter(name, "numeric", self.scale_bounds) for name in names]

    @property
    def _free(self) -> list[str]:
        return [parameter.name for parameter in self.hyperparameters if not parameter.fixed]

    @property
    def theta(self) -> np.ndarray:
        """The logarithms of the scales that are not fixed."""
        return np.log([float(self.covariance.scales[name]) for name in self._free])

    @theta.setter
    def theta(self, theta: np.ndarray) -> None:
        self.covariance = self.covariance.with_scales(dict(zip(self._free, np.exp(theta).tolist(), strict=True)))

    @on_cpu
    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        """The covariance matrix, and with `eval_gradient` its derivatives with respect to theta on a last axis."""
        if eval_gradient and Y is not None:
            raise ValueError("`eval_gradient` needs `Y` left out; got both.")
        x = torch.as_tensor(np.atleast_2d(X), dtype=torch.float64)
        y = None if Y is None else torch.as_tensor(np.atleast_2d(Y), dtype=torch.float64)
        if not eval_gradient:
            return self.covariance(x, y).numpy()
        theta = torch.as_tensor(self.theta, dtype=torch.float64)
        slopes = torch.empty(len(x), len(x), len(theta), dtype=theta.dtype)
        with forward_ad.dual_level():  # of tensors that can be read, unlike those of `torch.func.jvp` before torch 2.7
            for k, unit in enumerate(torch.eye(len(theta), dtype=theta.dtype)):
                scales = forward_ad.make_dual(theta, unit).exp()
                matrix = self.covariance.with_scales(dict(zip(self._free, scales, strict=True)))(x)
                slopes[..., k] = forward_ad.unpack_dual(matrix).tangent
        return self.covariance(x).numpy(), slopes.numpy()

    @on_cpu
    def diag(self, X: Any) -> np.ndarray:
        return self.covariance.diagonal(torch.as_tensor(np.atleast_2d(X), dtype=torch.float64)).numpy()

    def is_stationary(self) -> bool:
        """Whether the kernel depends on differences alone, as that of cosine units with a uniform phase does."""
        return bool(getattr(self.covariance, "bias_scale", 0.0) == math.inf)

    def __repr__(self) -> str:
        scales = [f"{name}={float(value):.3g}" for name, value in self.covariance.scales.items()]
        if function := getattr(self.covariance, "function", None):
            scales.append(f"function={getattr(function, '__name__', function)}")
        return f"{type(self.covariance).__name__}({', '.join(scales)})"


@dataclass(frozen=True)
class ExactProcess(Process):
    r"""The posterior of a Gaussian process with mean function $\mu(\mathbf x) = \mathbf b_L$, by scikit-learn."""

    regressor: GaussianProcessRegressor  # fitted to Y - b_L
    output_bias: float | Tensor
    noise_variance: float
    log_marginal_likelihood: float

    def _inputs(self, x: Tensor) -> np.ndarray:
        n_inputs = self.regressor.X_train_.shape[1]
        if checked_inputs(x, "x").dim() != 2 or x.shape[1] != n_inputs:
            raise ValueError(f"`x` must be [row, {n_inputs}], as the data was; got shape {tuple(x.shape)}.")
        return _array(x)

    def mean(self, x: Tensor) -> Tensor:
        # scikit-learn drops the axis of a single output.
        mean = self.regressor.predict(self._inputs(x)).reshape(len(x), *self.regressor.y_train_.shape[1:])
        return torch.as_tensor(mean + _array(self.output_bias)).to(x)

    def covariance(self, x: Tensor) -> Tensor:
        covariance = torch.as_tensor(self.regressor.predict(self._inputs(x), return_cov=True)[1])
        return (covariance[..., 0] if covariance.dim() == 3 else covariance).to(x)

    def variance(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # The variance at noise-free data is zero up to rounding: scikit-learn clips negative values and warns.
            warnings.filterwarnings("ignore", message="Predicted variances smaller than 0")
            std = torch.as_tensor(self.regressor.predict(self._inputs(x), return_std=True)[1])
        return (std[..., 0] if std.dim() == 2 else std).square().to(x)

    def draws(self, x: Tensor, *, n_draws: int, seed: int = 0) -> Tensor:
        samples = self.regressor.sample_y(self._inputs(x), n_samples=n_draws, random_state=seed)
        samples = samples.reshape(len(x), *self.regressor.y_train_.shape[1:], n_draws)
        return torch.as_tensor(np.moveaxis(samples, -1, 0) + _array(self.output_bias)).to(x)


def exact_process(
    covariance: Covariance | Kernel, x: Tensor, y: Tensor, *, precision: float, output_bias: float | Tensor = 0.0
) -> ExactProcess:
    r"""The posterior of the Gaussian process $\mathbf F \sim \mathcal N(\mathbf b_L, \mathbf K)$ given data.

    $\mathbf Y \mid \mathbf F \sim \mathcal N(\mathbf F, \tau^{-1} \mathbf I_N)$ [GG16, eq:generative_model_reg], in
    float64 and $\mathcal O(N^3)$. A matrix that cannot be factorised (duplicate rows without noise) gets the smallest
    jitter on its diagonal that helps, and a warning.

    Args:
        covariance: $\mathbf K$, or a scikit-learn kernel made of it (a scaled one, a sum).
        x: $\mathbf X$, `[row, input]`.
        y: $\mathbf Y$, `[row]` or `[row, output]`; outputs are independent with one covariance.
        precision: $\tau$; `math.inf` for data without noise.
        output_bias: The constant mean function, the bias of the network's output layer: a number, or one per output.

    Example:
        >>> from dropbayes.processes import Cosine
        >>> x = torch.tensor([[0.0]])
        >>> process = exact_process(Cosine(), x, torch.tensor([2.0]), precision=1.0)
        >>> process.mean(x), process.variance(x)
        (tensor([1.]), tensor([0.5000]))
    """
    check_covariance(covariance, Kernel)
    checked_data(x, y, precision, noise_free=True)
    kernel = NetworkKernel(covariance) if isinstance(covariance, Covariance) else covariance
    if isinstance(output_bias, Tensor) and output_bias.dim() and output_bias.shape != y.shape[1:]:
        got = f"{tuple(output_bias.shape)} for y {tuple(y.shape)}"
        raise ValueError(f"`output_bias` must be a number or one per output of `y`; got {got}.")
    inputs, targets = _array(x), _array(y) - _array(output_bias)
    unit = float(np.mean(kernel.diag(inputs)))
    for jitter in (0.0, *JITTERS):
        regressor = GaussianProcessRegressor(kernel, alpha=1 / precision + jitter * unit, optimizer=None)
        try:
            regressor.fit(inputs, targets)
        except np.linalg.LinAlgError:
            continue
        pivots = np.diagonal(regressor.L_) ** 2
        if pivots.min() > len(x) * np.finfo(np.float64).eps * unit:  # below, the factor is rounding error
            if jitter:
                what = "The covariance of the data is singular (duplicate rows without noise?)"
                done = f"added {jitter:.0e} of the mean prior variance to its diagonal"
                remedy = "Lower `precision` to say how noisy the data is"
                warnings.warn(f"{what}: {done}. {remedy}.", RuntimeWarning, stacklevel=2)
            return ExactProcess(regressor, output_bias, 1 / precision, float(regressor.log_marginal_likelihood_value_))
    got = f"a {len(x)} x {len(x)} matrix that {JITTERS[-1]:.0e} of its mean variance on the diagonal does not make so"
    raise ValueError(f"`covariance` must be positive semi-definite at the data; got {got}.")


def tuned_covariance(
    covariance: Covariance, x: Tensor, y: Tensor, *, precision: float, n_restarts: int = 0, seed: int = 0
) -> Covariance:
    r"""The covariance whose scales have the largest log marginal likelihood, found by scikit-learn.

    The search starts at the scales of `covariance`, of which zero and infinite ones stay fixed, and `n_restarts` times
    at random ones, from `seed`; $\tau$ is held fixed. The data are those of `exact_process`.
    """
    check_covariance(covariance)
    checked_data(x, y, precision, noise_free=False)
    search = {"n_restarts_optimizer": n_restarts, "random_state": seed}
    regressor = GaussianProcessRegressor(NetworkKernel(covariance), alpha=1 / precision, **search)
    return regressor.fit(_array(x), _array(y)).kernel_.covariance


def prior_draws(covariance: Covariance | Kernel, x: Tensor, *, n_draws: int, seed: int = 0) -> Tensor:
    r"""Functions drawn from the prior $\mathcal N(0, \mathbf K(\mathbf X, \mathbf X))$ at `x`, `[draw, row]`."""
    check_covariance(covariance, Kernel)
    checked_data(x, x.new_zeros(len(x)), 1.0, noise_free=True)
    check_count("n_draws", n_draws)
    kernel = NetworkKernel(covariance) if isinstance(covariance, Covariance) else covariance
    samples = GaussianProcessRegressor(kernel).sample_y(_array(x), n_samples=n_draws, random_state=seed)
    return torch.as_tensor(samples).mT.to(x)
