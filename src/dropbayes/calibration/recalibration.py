r"""Recalibration by one number or one monotone map, fitted on held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.calibration.reliability import transforms
from dropbayes.conformal import standardised_residuals
from dropbayes.runtime.validation import Array, check_values, class_labels, finite_tensor, row_weights
from dropbayes.scores.averages import weighted_mean

_LOG_TEMPERATURE, _GRID = math.log(20), 15  # the search stays within 1/20 and 20


def std_scale(mean: Array, std: Array | float, y: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The factor $s$ on the standard deviation with the largest Gaussian likelihood.

    $$s^2 = \tfrac1N \sum_n (y_n - \mu_n)^2/\sigma_n^2$$

    Fit on held-out data, then use $s \sigma$. Above 1 the model was over-confident.

    Examples:
        >>> std_scale(torch.zeros(2), torch.ones(2), torch.tensor([3.0, -3.0]))
        tensor(3.)
    """
    return weighted_mean(standardised_residuals(mean, std, y).square(), sample_weight).sqrt()


@dataclass(frozen=True)
class IsotonicRecalibration:
    """A monotone map between the levels a model claims and the levels observed on held-out data.

    Args:
        claimed_levels: The claimed levels from 0 to 1, in increasing order.
        observed_levels: The level observed at each claimed level, from 0 to 1.
    """

    claimed_levels: Tensor
    observed_levels: Tensor

    def observed(self, claimed: Array) -> Tensor:
        """The level to expect where the model claims `claimed` (recalibrates a cumulative probability)."""
        return _interpolate(_levels("claimed", claimed), self.claimed_levels, self.observed_levels)

    def claimed(self, observed: Array) -> Tensor:
        """The level to request from the model so that `observed` is the true level (recalibrates a quantile)."""
        return _interpolate(_levels("observed", observed), self.observed_levels, self.claimed_levels)


def isotonic_recalibration(pit: Array, *, sample_weight: Array | None = None) -> IsotonicRecalibration:
    r"""The recalibration map of predictive levels, piecewise linear through $(u_{(i)}, \tfrac{i}{n+1})$.

    [Kuleshov et al. 2018]. The frequencies of held-out transforms $u_i = F_i(y_i)$ rise with the level, so isotonic
    regression leaves them as they are; $i/(n+1)$ is the expected level of the $i$-th smallest of $n$.

    Args:
        pit: Held-out probability integral transforms, `[row]`; some strictly between 0 and 1.
        sample_weight: The weight of each row.

    Examples:
        >>> recalibration = isotonic_recalibration(torch.tensor([0.4, 0.5, 0.6]))  # claims too wide a spread
        >>> recalibration.claimed(torch.tensor([0.25, 0.5, 0.75]))
        tensor([0.4000, 0.5000, 0.6000])
    """
    values = transforms(pit).detach().flatten()
    weight = row_weights(sample_weight, len(values), like=values)
    levels, group = values.double().unique(return_inverse=True)
    ties = torch.zeros_like(levels).index_add(0, group, weight)
    rank = (ties.cumsum(0) - (ties - 1) / 2) / (ties.sum() + 1)
    ends = levels.new_tensor([0.0, 1.0])
    inside = (levels > 0) & (levels < 1) & (ties > 0)
    if not bool(inside.any()):
        raise ValueError(
            "`pit` must have values strictly between 0 and 1; all are 0 or 1: every target lies outside the claims. "
            "Widen them first (`std_scale`)."
        )
    return IsotonicRecalibration(
        torch.cat([ends[:1], levels[inside], ends[1:]]), torch.cat([ends[:1], rank[inside], ends[1:]])
    )


def _levels(name: str, levels: Array | float) -> Tensor:
    values = finite_tensor(name, levels)
    check_values(name, values, at_most=1)
    return values


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear interpolation through rising `x`, in double precision: levels close to 0 would coincide in single."""
    x, y, points = x.to(at.device, torch.float64), y.to(at.device, torch.float64), at.double().contiguous()
    right = torch.searchsorted(x, points).clamp(1, len(x) - 1)
    share = (points - x[right - 1]) / (x[right] - x[right - 1])
    return (y[right - 1] + share.clamp(0, 1) * (y[right] - y[right - 1])).to(at.dtype)


def temperature(logit_draws: Array, labels: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The temperature with the largest likelihood of the mixture of draws.

    $$\arg\max_\theta \sum_n \log \tfrac1T \sum_t \mathrm{softmax}(\widehat y_t/\theta)_{y_n}$$

    Fit on held-out data, then divide every draw's logits by it. Above 1 the model was over-confident. The search stays
    within 1/20 and 20: held-out data without a single error would ask for 0.

    Args:
        logit_draws: Logits of each draw, `[draw, row, class]` (a deterministic network's as `logits[None]`).
        labels: Class indices, `[row]`.
        sample_weight: The weight of each row.

    Examples:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])  # claims 98 %
        >>> temperature(logits[None], torch.tensor([0, 0, 0, 1]))  # 75 % are right: 4 / log 3
        tensor(3.6410)
    """
    import scipy.optimize

    logits = finite_tensor("logit_draws", logit_draws)
    if logits.dim() != 3:
        raise ValueError(
            f"`logit_draws` must be [draw, row, class]; got {tuple(logits.shape)}. Pass logits[None] for a single draw."
        )
    truth = class_labels(labels, n_rows=logits.shape[1], n_classes=logits.shape[2], device=logits.device)
    weight = row_weights(sample_weight, len(truth), like=logits)
    double, index = logits.detach().double(), truth.expand(logits.shape[:2])[..., None]

    def negative_log_likelihood(log_temperature: float) -> float:
        log_probabilities = (double / math.exp(log_temperature)).log_softmax(-1).gather(2, index)
        return -float((log_probabilities.logsumexp(0).squeeze(-1) * weight).sum() / weight.sum())

    # The likelihood of a mixture may have several maxima: a grid finds the highest, a bounded search refines it.
    grid = [step * _LOG_TEMPERATURE / _GRID for step in range(-_GRID, _GRID + 1)]
    start = min(grid, key=negative_log_likelihood)
    width = _LOG_TEMPERATURE / _GRID
    bounds = max(start - width, -_LOG_TEMPERATURE), min(start + width, _LOG_TEMPERATURE)
    best = scipy.optimize.minimize_scalar(
        negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-9}
    )
    return logits.new_tensor(math.exp(best.x))
