r"""A Gaussian process as the offset of networks: it finds what is linear or smooth, the networks learn what is left.

Networks of a few units learn a nearly linear relation to a percent; the process they approximate [GG16] finds it to the
last digit. With $k(\mathbf x, \mathbf x') = s^2 \exp(-\tfrac12 \sum_d (x_d - x'_d)^2 / l_d^2) + b^2 \mathbf x^\top
\mathbf x' / D$ and at most 800 rows as anchors, its posterior is Gaussian with mean $\mu(\mathbf x)$ and deviation
$\sigma(\mathbf x)$. A network with this offset is trained on $y - \mu_{-n}(\mathbf x_n)$, the error of the process
without that row, and its draw t predicts
$$f_t(\mathbf x) + \mu(\mathbf x) + \epsilon_t\, \sigma(\mathbf x)$$
with one standard normal score $\epsilon_t$ for all rows. The scales maximise the marginal likelihood of each half of
the rows: the errors of one half are those under the scales of the other, predictions are means of both. A small table
may predict its rows better, each without itself, by the linear part alone.

A skewed column is an input twice, once as the normal scores of its ranks: what is smooth in the logarithm of a count is
not smooth in the count, of which most rows share one corner.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dropbayes.estimators.extrapolation import normal_scores
from dropbayes.population.standardisation import moments
from dropbayes.runtime.devices import cpu_threads

MAX_ROWS = 20_000  # Beyond, networks find what so few anchors find.
_ANCHORS = 800
_SCALE_ROWS = 300  # of each half
# The deviation of the logarithm of a scale under its prior, which keeps the scales of many columns from over-fitting;
# that of a length-scale upwards, where a column comes to play no part.
_PRIOR_DEVIATION, _UPWARDS = 1.5, 3.0
_JITTER = 1e-6
_CLIP = 3.0


@dataclass(frozen=True, eq=False)
class Process:
    """The posterior given the anchors under the scales of each half, in standardised units."""

    anchors: Tensor  # inputs [anchor, feature]
    targets: Tensor  # their mean targets [anchor]
    weight: Tensor  # of each anchor, in rows
    log_scales: Tensor  # the logarithms of l of each feature, s, b and the noise, [half, feature + 3]
    y_mean: Tensor  # the standardisation of the targets, one entry, as the next
    y_scale: Tensor
    ranked: Tensor  # the columns that are inputs by their ranks, too
    knots: Tensor  # quantiles of these columns, [column, knot]
    scores: Tensor  # and their normal scores

    @functools.cached_property
    def _factors(self) -> Tensor:
        """The Cholesky factors of the targets' covariances, `[half, anchor, anchor]`."""
        x = self.anchors
        with cpu_threads(1):  # as in the fit, for the same bits after loading
            return torch.stack([_factor(torch.add(*_parts(x, s, x)), s, self.weight) for s in self.log_scales])

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the deviation of the function at standardised rows `[row, feature]`: means over the halves."""
        halves = [self._posterior(x, half) for half in range(len(self.log_scales))]
        mean, variance = (torch.stack(values).mean(0) for values in zip(*halves, strict=True))
        return mean, variance.sqrt()

    def _posterior(self, x: Tensor, half: int) -> tuple[Tensor, Tensor]:
        """The mean and the variance of the function under the scales of one half."""
        x = _inputs(x.double(), self.ranked, self.knots, self.scores)
        scales, factor = self.log_scales[half], self._factors[half]
        weights = torch.cholesky_solve(self.targets[:, None], factor)[:, 0]
        signal, slope = (2 * scales[-3:-1]).exp()

        def moments(block: Tensor) -> Tensor:
            cross = torch.add(*_parts(block, scales, self.anchors))
            prior = signal + slope / x.shape[1] * block.square().sum(1)
            known = torch.linalg.solve_triangular(factor, cross.T, upper=False).square().sum(0)
            return torch.stack([cross @ weights, (prior - known).clamp_min(_JITTER)], 1)

        mean, variance = in_blocks(moments, x).unbind(1)
        return mean, variance

    def leave_one_out(self, index: Tensor, half: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation at training rows, each without its anchor and under the scales of the other half.

        The rows x are standardised; the `index` is that of each row's anchor, -1 for a row that is none.
        """
        error, spread = self.errors()
        mean, variance = (self.targets - error)[index], spread.square()[index]
        for own in range(2):
            rows = (half == own) & (index >= 0)
            variance[rows] -= ((2 * self.log_scales[1 - own, -1]).exp() / self.weight + _JITTER)[index[rows]]
            rows = (half == own) & (index < 0)
            if bool(rows.any()):
                mean[rows], variance[rows] = self._posterior(x[rows], 1 - own)
        return mean, variance.clamp_min(_JITTER).sqrt()

    def errors(self) -> tuple[Tensor, Tensor]:
        """The error and its deviation, as in `leave_one_out`, of each anchor; these belong to the halves in turn."""
        number = torch.arange(len(self.anchors))
        other = 1 - number % 2
        inverse = torch.cholesky_inverse(self._factors)  # too inexact for predictions of what has no noise
        precision = inverse.diagonal(dim1=1, dim2=2)[other, number]
        return (inverse @ self.targets)[other, number] / precision, precision.rsqrt()


@dataclass(frozen=True, eq=False)
class Offset:
    """The mean and deviation that a process predicts for each training row as if it were held out, in units of y."""

    mean: Tensor
    deviation: Tensor
    trust: Tensor  # a factor on what networks learn of each row, less than 1 for outliers of the targets


def in_blocks(function: Callable[[Tensor], Tensor], x: Tensor, n_rows: int = 64) -> Tensor:
    """The outputs `[..., row, output]` of rows in blocks of one size: a row then has the same bits in any batch."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % n_rows))
    return torch.cat([function(block) for block in padded.split(n_rows)], -2)[..., : len(x), :]


def offset_draws(mean: Tensor, deviation: Tensor, n_draws: int) -> Tensor:
    """Draws `[draw, row]` of a process: each has one standard normal score for all rows."""
    return mean + normal_scores(n_draws).to(mean)[:, None] * deviation


def _inputs(x: Tensor, ranked: Tensor, knots: Tensor, scores: Tensor) -> Tensor:
    """The inputs of the kernel: the columns, and the interpolated normal scores of those that are ranked.

    Columns are logarithmic far from the mean: a far value is not a lever.
    """
    clipped = torch.where(x.abs() <= _CLIP, x, x.sign() * (_CLIP + torch.log1p((x.abs() - _CLIP).clamp_min(0))))
    columns = zip(x[:, ranked].T, knots, scores, strict=True)
    ranks = np.array([np.interp(*column) for column in columns]).reshape(len(ranked), len(x))
    return torch.cat([clipped, torch.from_numpy(ranks).T], 1)


def _ranks(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The skewed columns that no straight line maps to their normal scores, with quantiles and the scores of these."""
    level = (torch.arange(64).double() + 0.5) / 64
    knots = x.sort(0).values[(level * len(x)).long()].T.contiguous()
    equal = (knots[:, :, None] == knots[:, None]).double()
    scores = equal @ torch.special.ndtri(level) / equal.sum(2)
    columns = torch.arange(x.shape[1])
    both = torch.stack([x, _inputs(x, columns, knots, scores)[:, x.shape[1] :]])
    both = both - both.mean(1, keepdim=True)
    bent = (both[0] * both[1]).sum(0) < 0.95 * both.norm(dim=1).prod(0)
    ranked = bent & (x.pow(3).mean(0).abs() > 1)  # ranks would close the gap between two humps
    return columns[ranked], knots[ranked], scores[ranked]


def _parts(a: Tensor, log_scales: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    length, (signal, slope) = log_scales[:-3].exp(), (2 * log_scales[-3:-1]).exp()
    left, right = a / length, b / length
    distance = (left.square().sum(1)[:, None] + right.square().sum(1)).addmm_(left, right.T, alpha=-2)
    smooth = distance.clamp_(0, 1000).mul_(-0.5).exp_().mul_(signal)  # far beyond, denormal numbers are slow
    return smooth, (a @ b.T).mul_(slope / a.shape[1])


def _factor(covariance: Tensor, log_scales: Tensor, weight: Tensor) -> Tensor:
    """The Cholesky factor of the covariance, to which noise is added in place; NaN where it has none."""
    covariance.diagonal().add_((2 * log_scales[-1]).exp() / weight + _JITTER)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    return torch.full_like(factor, torch.nan) if int(failed) else factor


def _fit_halves(x: Tensor, y: Tensor, weight: Tensor, linear: bool, begin: Tensor | None = None) -> Tensor:
    """The scales of either half of the rows, which belong to the halves in turn."""
    rows = [slice(own, 2 * _SCALE_ROWS, 2) for own in range(2)]
    begins = (None, None) if begin is None else begin
    return torch.stack([_fit_scales(x[r], y[r], weight[r], linear, b) for r, b in zip(rows, begins, strict=True)])


def _held_out_score(process: Process) -> float:
    """The log-likelihood of the anchors, each without itself, up to a constant: Student's, or outliers would decide."""
    error, deviation = process.errors()
    return float((-2.5 * torch.log1p((error / deviation).square() / 4) - deviation.log()).sum().nan_to_num(-torch.inf))


def _trust(error: Tensor, deviation: Tensor) -> Tensor:
    """The weight at which an error counts as one of three deviations at most."""
    return (3 * deviation / error.abs()).clamp_max(1).square()


def _without_outliers(process: Process, linear: bool) -> Process:
    """The process in which targets far off count less, while that makes the errors of all smaller."""
    for _ in range(3):
        error, _ = process.errors()
        typical = 1.5 * error.abs().median()  # the deviation of a Gaussian
        if not float(error.square().mean().sqrt()) > 2 * float(typical):
            break
        weight = process.weight * _trust(error, typical)
        scales = _fit_halves(process.anchors, process.targets, weight, linear, process.log_scales)
        robust = replace(process, weight=weight, log_scales=scales)
        if not float(robust.errors()[0].abs().mean()) < 0.8 * float(error.abs().mean()):
            break
        process = robust
    return process


def _fit_scales(x: Tensor, y: Tensor, weight: Tensor, linear: bool, begin: Tensor | None) -> Tensor:
    """The scales of the greatest marginal likelihood times prior, by L-BFGS with the gradient written out."""
    from scipy.optimize import minimize

    n_columns = x.shape[1]
    start = torch.cat([torch.full((n_columns,), 0.5 * math.log(n_columns) + 0.3), torch.tensor([0.0, -1.0, -1.0])])
    start, is_length = start.double(), torch.arange(len(start)) < n_columns

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        scales = torch.from_numpy(values)
        smooth, straight = _parts(x, scales, x)
        factor = _factor(smooth + straight, scales, weight)
        if not bool((log_root := factor.diagonal().log().sum()).isfinite()):
            return 1e10, np.zeros_like(values)
        inverse = torch.cholesky_inverse(factor)
        alpha = inverse @ y
        slope = torch.outer(alpha, alpha).sub_(inverse)  # twice the derivative of the log-likelihood by the covariance
        by_smooth, left = smooth.mul_(slope), x / scales[:n_columns].exp()
        by_length = (left.square() * by_smooth.sum(1, keepdim=True)).sum(0) - (left * (by_smooth @ left)).sum(0)
        by_noise = (slope.diagonal() / weight).sum() * (2 * scales[-1]).exp()
        gradient = torch.cat([by_length, torch.stack([by_smooth.sum(), straight.mul_(slope).sum(), by_noise])])
        deviation = torch.where(is_length & (scales > start), _UPWARDS, _PRIOR_DEVIATION)
        pull = (scales - start) / deviation**2
        value = 0.5 * (y @ alpha) + log_root + 0.5 * (pull * (scales - start)).sum()
        return float(value), (pull - gradient).numpy()

    first, bounds = start if begin is None else begin, [(-7.0, 9.0)] * len(start)  # or distances are all rounding
    if linear:
        start[-3], bounds[-3] = -7.0, (-7.0, -7.0)
    found = minimize(loss, first.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
    return torch.from_numpy(found.x)


def fit_process(x: Tensor, y: Tensor, weight: Tensor, seed: int, small: int = 0) -> tuple[Process, Offset] | None:
    """The process of standardised inputs and targets in their own units, and what it predicts for each row.

    It may be linear for fewer than `small` distinct rows, and is None for too few. Rows of equal inputs are one anchor:
    a copy would give away what the row is.
    """
    y_mean, y_scale = moments(y[:, None], weight)
    weight = weight / weight.mean()
    ranks = _ranks(x)
    distinct, place = torch.unique(_inputs(x, *ranks), dim=0, return_inverse=True)
    if len(distinct) < 20:
        return None
    total = torch.zeros(len(distinct)).double().index_add_(0, place, weight)
    target = torch.zeros(len(distinct)).double().index_add_(0, place, weight * (y - y_mean) / y_scale) / total
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    chosen = order[:_ANCHORS]
    rows = distinct[chosen], target[chosen], total[chosen]
    kinds = (False, True) if len(distinct) < small else (False,)
    tried = [_without_outliers(Process(*rows, _fit_halves(*rows, k), y_mean, y_scale, *ranks), k) for k in kinds]
    process = max(tried, key=_held_out_score)
    if not bool(process._factors.isfinite().all()):
        return None
    anchor, half = torch.full((len(distinct),), -1), torch.zeros(len(distinct), dtype=torch.long)
    anchor[chosen] = torch.arange(len(chosen))
    half[order] = torch.arange(len(order)) % 2
    mean, deviation = process.leave_one_out(anchor[place], half[place], x)
    error = (y - y_mean) / y_scale - mean
    noise, has_outliers = (2 * process.log_scales[:, -1]).exp().mean(), process.weight is not rows[2]
    trust = _trust(error, (deviation.square() + noise).sqrt()) if has_outliers else torch.ones_like(error)
    return process, Offset(mean * y_scale + y_mean, deviation * y_scale, trust)
