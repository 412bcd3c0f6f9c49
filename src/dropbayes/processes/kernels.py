"""Network covariances as kernels of scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel
from torch.autograd import forward_ad

from dropbayes.processes.covariances import Cosine, Quadrature
from dropbayes.processes.pairs import Covariance


def _tunable(covariance: Covariance) -> dict[str, float]:
    """The scales that a search over logarithms can change: those neither zero nor infinite."""
    values = {name: float(value) for name, value in covariance.scales.items()}
    return {name: value for name, value in values.items() if 0 < value < math.inf}


class NetworkKernel(Kernel):
    r"""The scikit-learn kernel of a network covariance: it can be cloned, composed, printed and tuned.

    Its hyperparameters are the covariance's scales that are neither zero nor infinite (those are fixed); the
    gradient with respect to their logarithms is exact.

    Args:
        covariance: The covariance function $\mathbf K$, with its scales as the initial values.
        scale_bounds: The lower and upper bound of every scale in a search, or "fixed".

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
        """One numeric hyperparameter for each scale that can be tuned."""
        return [Hyperparameter(name, "numeric", self.scale_bounds) for name in _tunable(self.covariance)]

    @property
    def theta(self) -> np.ndarray:
        """The logarithms of the scales that are not fixed."""
        if self.scale_bounds == "fixed":
            return np.array([])
        return np.log(list(_tunable(self.covariance).values()))

    @theta.setter
    def theta(self, theta: np.ndarray) -> None:
        names = _tunable(self.covariance) if self.scale_bounds != "fixed" else {}
        values = dict(zip(names, np.exp(theta).tolist(), strict=True))
        self.covariance = self.covariance.with_scales(values)

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        """The covariance matrix, and with `eval_gradient` its derivatives with respect to theta on a last axis."""
        if eval_gradient and Y is not None:
            raise ValueError("`eval_gradient` needs `Y` left out; got both.")
        x = torch.as_tensor(np.atleast_2d(X), dtype=torch.float64)
        y = None if Y is None else torch.as_tensor(np.atleast_2d(Y), dtype=torch.float64)
        if not eval_gradient:
            return self.covariance(x, y).numpy()
        names = [parameter.name for parameter in self.hyperparameters if not parameter.fixed]
        theta = torch.as_tensor(self.theta, dtype=torch.float64)
        slopes = torch.empty(len(x), len(x), len(theta), dtype=theta.dtype)
        with forward_ad.dual_level():  # of tensors that can be read, unlike those of `torch.func.jvp` before torch 2.7
            for k, unit in enumerate(torch.eye(len(theta), dtype=theta.dtype)):
                scales = forward_ad.make_dual(theta, unit).exp()
                matrix = self.covariance.with_scales(dict(zip(names, scales, strict=True)))(x)
                slopes[..., k] = forward_ad.unpack_dual(matrix).tangent
        return self.covariance(x).numpy(), slopes.numpy()

    def diag(self, X: Any) -> np.ndarray:
        """The prior variances of the rows of `X`."""
        return self.covariance.diagonal(torch.as_tensor(np.atleast_2d(X), dtype=torch.float64)).numpy()

    def is_stationary(self) -> bool:
        """Whether the kernel depends on differences alone, as that of cosine units with a uniform phase does."""
        return isinstance(self.covariance, Cosine) and float(self.covariance.bias_scale) == math.inf

    def __repr__(self) -> str:
        scales = [f"{name}={float(value):.3g}" for name, value in self.covariance.scales.items()]
        if isinstance(self.covariance, Quadrature):
            scales.append(f"function={getattr(self.covariance.function, '__name__', self.covariance.function)}")
        return f"{type(self.covariance).__name__}({', '.join(scales)})"
