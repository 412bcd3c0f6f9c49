r"""A Gaussian process as the offset of networks: it finds what is linear or smooth, the networks learn what is left.

Networks of a few units learn a nearly linear relation to a percent; the process they approximate [GG16] finds it to the
last digit. With $k(\mathbf x, \mathbf x') = s^2 \exp(-\tfrac12 \sum_d (x_d - x'_d)^2 / l_d^2) + b^2 \mathbf x^\top
\mathbf x' / D$ and at most 800 rows as anchors, its posterior is Gaussian with mean $\mu(\mathbf x)$ and deviation
$\sigma(\mathbf x)$. A network with this offset is trained on $y - \mu_{-n}(\mathbf x_n)$, the error of the process
without that row, and its draw t predicts
$$f_t(\mathbf x) + \mu(\mathbf x) + \epsilon_t\, \sigma(\mathbf x)$$
with one standard normal score $\epsilon_t$ for all rows. The scales maximise the marginal likelihood of each half of
the rows: the errors of one half are those under the scales of the other, predictions are means of both.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dropbayes.estimators.extrapolation import normal_scores
from dropbayes.population.standardisation import moments

__all__ = ["MAX_ROWS", "Offset", "Process", "fit_process", "offset_draws"]

MAX_ROWS = 20_000  # Beyond, networks find what so few anchors find.
_ANCHORS = 800
_SCALE_ROWS = 300  # of each half
# The deviation of the logarithm of a scale under its prior, which keeps the scales of many columns from over-fitting.
_PRIOR_DEVIATION = 1.5
_JITTER = 1e-6
_PRODUCT_ROWS = 64  # Products of one size: a row has the same bits in any batch.
_CLIP = 3.0


@dataclass(frozen=True, eq=False)
class Process:
    """The posterior given the anchors under the scales of each half, in standardised units.

    Attributes:
        anchors: Inputs `[anchor, feature]`.
        targets: Their mean targets `[anchor]`.
        weight: The weight of each anchor in rows.
        log_scales: The logarithms of l of each feature, s, b and the noise, `[half, feature + 3]`.
        y_mean, y_scale: The standardisation of the targets, one entry each.
    """

    anchors: Tensor
    targets: Tensor
    weight: Tensor
    log_scales: Tensor
    y_mean: Tensor
    y_scale: Tensor

    @functools.cached_property
    def _inverse(self) -> Tensor:
        """The inverse covariances of the targets, `[half, anchor, anchor]`."""
        return torch.stack([_inverse(_covariance(self.anchors, s), s, self.weight)[0] for s in self.log_scales])

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the deviation of the function at standardised rows `[row, feature]`: means over the halves."""
        halves = [self._posterior(x, half) for half in range(len(self.log_scales))]
        mean, variance = (torch.stack(values).mean(0) for values in zip(*halves, strict=True))
        return mean, variance.sqrt()

    def _posterior(self, x: Tensor, half: int) -> tuple[Tensor, Tensor]:
        """The mean and the variance of the function under the scales of one half."""
        x, scales, inverse = _clipped(x.double()), self.log_scales[half], self._inverse[half]
        means, variances = [], []
        for block in torch.nn.functional.pad(x, (0, 0, 0, -len(x) % _PRODUCT_ROWS)).split(_PRODUCT_ROWS):
            cross = _covariance(block, scales, self.anchors)
            weights = cross @ inverse
            means.append(weights @ self.targets)
            variances.append((_prior_variance(block, scales) - (weights * cross).sum(1)).clamp_min(_JITTER))
        return torch.cat(means)[: len(x)], torch.cat(variances)[: len(x)]

    def leave_one_out(self, index: Tensor, half: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation at training rows, each without its anchor and under the scales of the other half.

        Args:
            index: The anchor of each row; -1 for a row that is none.
            half: The half of each row.
            x: The rows, standardised.
        """
        mean, deviation = torch.empty(len(x)).double(), torch.empty(len(x)).double()
        for own in range(2):
            other = 1 - own
            inverse, precision = self._inverse[other], self._inverse[other].diagonal()
            error = (inverse @ self.targets) / precision
            rows = (half == own) & (index >= 0)
            mean[rows] = (self.targets - error)[index[rows]]
            noise = (2 * self.log_scales[other, -1]).exp() / self.weight + _JITTER
            deviation[rows] = (1 / precision - noise).clamp_min(_JITTER).sqrt()[index[rows]]
            rows = (half == own) & (index < 0)
            if bool(rows.any()):
                mean[rows], variance = self._posterior(x[rows], other)
                deviation[rows] = variance.sqrt()
        return mean, deviation


@dataclass(frozen=True, eq=False)
class Offset:
    """The mean and deviation that a process predicts for each training row as if it were held out, in units of y."""

    mean: Tensor
    deviation: Tensor

    def draws(self, n_draws: int) -> Tensor:
        """Draws `[draw, row]`."""
        return offset_draws(self.mean, self.deviation, n_draws)


def offset_draws(mean: Tensor, deviation: Tensor, n_draws: int) -> Tensor:
    """Draws `[draw, row]` of a process: each has one standard normal score for all rows."""
    return mean + normal_scores(n_draws).to(mean)[:, None] * deviation


def _clipped(x: Tensor) -> Tensor:
    """Standardised inputs, logarithmic far from the mean: a far value is not a lever."""
    return torch.where(x.abs() <= _CLIP, x, x.sign() * (_CLIP + torch.log1p((x.abs() - _CLIP).clamp_min(0))))


def _covariance(a: Tensor, log_scales: Tensor, b: Tensor | None = None) -> Tensor:
    smooth, linear = _parts(a, log_scales, a if b is None else b)
    return smooth + linear


def _parts(a: Tensor, log_scales: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n_columns = a.shape[1]
    length, (signal, slope) = log_scales[:n_columns].exp(), (2 * log_scales[n_columns : n_columns + 2]).exp()
    left, right = a / length, b / length
    squares = left.square().sum(1)[:, None] + right.square().sum(1)
    smooth = signal * torch.addmm(squares, left, right.T, alpha=-2).clamp_min_(0).mul_(-0.5).exp_()
    return smooth, (a @ b.T) * (slope / n_columns)


def _prior_variance(x: Tensor, log_scales: Tensor) -> Tensor:
    n_columns = x.shape[1]
    signal, slope = (2 * log_scales[n_columns : n_columns + 2]).exp()
    return signal + slope / n_columns * x.square().sum(1)


def _inverse(covariance: Tensor, log_scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of the covariance with noise, and the logarithm of its determinant's root."""
    noisy = covariance + torch.diag((2 * log_scales[-1]).exp() / weight + _JITTER)
    factor, failed = torch.linalg.cholesky_ex(noisy)
    if int(failed):
        return torch.full_like(noisy, torch.nan), noisy.new_tensor(torch.nan)
    return torch.cholesky_inverse(factor), factor.diagonal().log().sum()


def _fit_scales(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The scales of the greatest marginal likelihood times prior, by L-BFGS with the gradient written out."""
    from scipy.optimize import minimize

    n_columns = x.shape[1]
    start = torch.cat([torch.full((n_columns,), 0.5 * math.log(n_columns) + 0.3), torch.tensor([0.0, -1.0, -1.0])])
    start = start.double()

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        scales = torch.from_numpy(values)
        smooth, linear = _parts(x, scales, x)
        inverse, log_root = _inverse(smooth + linear, scales, weight)
        if not bool(log_root.isfinite()):
            return 1e10, np.zeros_like(values)
        alpha = inverse @ y
        slope = torch.outer(alpha, alpha) - inverse  # twice the derivative of the log-likelihood by the covariance
        by_smooth, left = slope * smooth, x / scales[:n_columns].exp()
        by_length = (left.square() * by_smooth.sum(1, keepdim=True)).sum(0) - (left * (by_smooth @ left)).sum(0)
        by_noise = (slope.diagonal() / weight).sum() * (2 * scales[-1]).exp()
        gradient = torch.cat([by_length, torch.stack([by_smooth.sum(), (slope * linear).sum(), by_noise])])
        pull = (scales - start) / _PRIOR_DEVIATION**2
        value = 0.5 * (y @ alpha) + log_root + 0.5 * (pull * (scales - start)).sum()
        return float(value), (pull - gradient).numpy()

    found = minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": 40})
    return torch.from_numpy(found.x)


def fit_process(x: Tensor, y: Tensor, weight: Tensor, seed: int) -> tuple[Process, Offset] | None:
    """The process of standardised rows, and what it predicts for each of them; None for too few rows.

    Rows of equal inputs are one anchor: a copy would give away what the row is.

    Args:
        x: Inputs `[row, feature]`.
        y: Targets `[row]`, in their own units.
        weight: Row weights.
        seed: The seed of the choice of anchors.
    """
    y_mean, y_scale = moments(y[:, None], weight)
    weight = weight / weight.mean()
    distinct, place = torch.unique(_clipped(x), dim=0, return_inverse=True)
    if len(distinct) < 20:
        return None
    total = torch.zeros(len(distinct)).double().index_add_(0, place, weight)
    target = torch.zeros(len(distinct)).double().index_add_(0, place, weight * (y - y_mean) / y_scale) / total
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    chosen = order[:_ANCHORS]
    halves = [chosen[own::2][:_SCALE_ROWS] for own in range(2)]
    scales = torch.stack([_fit_scales(distinct[rows], target[rows], total[rows]) for rows in halves])
    process = Process(distinct[chosen], target[chosen], total[chosen], scales, y_mean, y_scale)
    if not bool(process._inverse.isfinite().all()):
        return None
    anchor, half = torch.full((len(distinct),), -1), torch.zeros(len(distinct), dtype=torch.long)
    anchor[chosen] = torch.arange(len(chosen))
    half[order] = torch.arange(len(order)) % 2
    mean, deviation = process.leave_one_out(anchor[place], half[place], x)
    return process, Offset(mean * y_scale + y_mean, deviation * y_scale)
