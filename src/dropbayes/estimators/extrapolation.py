r"""Far from the training rows: draws spread with the distance, and means stay near the range of the targets.

Networks that drop little agree with one another between the rows they were trained on, and a noise fitted to rows held
out at random never sees a gap. So one network is trained without the rows of a gap, the middle third along the first
principal axis of the inputs, and its errors there show how far the draws should part where no rows are. With
$d(\mathbf x)$ the distance to the nearest of some training rows (anchors) in standardised inputs and r the distance
that 99 % of the training rows stay below, draw t becomes the function
$$f_t(\mathbf x) + \epsilon_t\, g \big(1 - e^{-\max(0,\; d(\mathbf x) / r - 1)}\big),$$
with one standard normal score $\epsilon_t$ for all rows and a deviation g that maximises the likelihood of the gap.
Rows as close to the anchors as training rows are to one another keep their prediction exactly.

A network of rectified units is linear far from its training rows: a sensor that reads fifty deviations off would be
predicted as far off. With $[a, b]$ the range of the training targets widened by its width on either side, so that a
trend may go on, a mean prediction v inside stays as it is, and beyond it becomes
$$b + m \tanh\big((v - b) / m\big),$$
smooth, rising, and never more than the margin m, the width, beyond. All draws move by the same shift: the spread
that shows how far off the row is stays as it was.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.predictive.mixtures import Mixture

_ANCHORS = 1024
_PRINCIPAL_ROWS = 5000
_MIN_ROWS, _MIN_SHARE = 20, 0.1  # of a gap: fewer tell no deviation; the least share of them beyond the reach
_GROWTHS = torch.cat([torch.zeros(1), torch.logspace(-2, 1, 25)]).double()
_SMOOTHED = 1 / 16  # of the variance widens each component instead of moving it: few draws make a smooth density
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, eq=False)
class Extrapolation:
    """The fitted spread, in standardised units of x and y."""

    anchors: Tensor  # training rows [anchor, feature]
    reach: Tensor  # the distance r from the anchors up to which the draws stay as they are
    growth: Tensor  # the deviation g of the draws far from the anchors, one per output

    def deviation(self, x: Tensor) -> Tensor:
        """The deviation that distance adds to the draws, `[row, output]`."""
        excess = (_nearest(x, self.anchors) / self.reach - 1).clamp(min=0)
        return -torch.expm1(-excess)[:, None] * self.growth

    def spread(self, mixture: Mixture, x: Tensor, y_scale: Tensor | float = 1.0) -> Mixture:
        """The mixture `[draw, row, output]` whose draws part with the distance; its mean is unchanged."""
        return _spread(mixture, self.deviation(x) * y_scale)


def _spread(mixture: Mixture, deviation: Tensor) -> Mixture:
    smoothed = _SMOOTHED if mixture.n_draws > 1 else 1.0
    deviation = deviation.to(mixture.location)
    scores = normal_scores(mixture.n_draws).to(deviation).view(-1, *[1] * deviation.dim())
    scale = (mixture.scale.square() + smoothed * deviation.square()).sqrt()
    return Mixture(mixture.location + math.sqrt(1 - smoothed) * scores * deviation, scale, mixture.freedom)


def normal_scores(n: int, step: float = _GOLDEN) -> Tensor:
    """Standard normal scores of mean 0 and variance 1, in an order that no draw's own deviation follows."""
    if n == 1:
        return torch.zeros(1, dtype=torch.float64)
    order = (torch.arange(n, dtype=torch.float64) * step).frac().argsort().argsort()
    scores = torch.special.ndtri((order + 0.5) / n)
    return scores / scores.square().mean().sqrt()


def _nearest(x: Tensor, anchors: Tensor, *, skip_equal: bool = False) -> Tensor:
    """The distance of each row to its nearest anchor, with bits that do not depend on the other rows.

    With `skip_equal`, an anchor equal to the row does not count: it is the row itself.
    """
    blocks = []
    for rows in x.to(anchors).split(4096):
        distance = torch.cdist(rows, anchors, compute_mode="donot_use_mm_for_euclid_dist")
        blocks.append((distance.masked_fill(distance == 0, torch.inf) if skip_equal else distance).amin(1))
    return torch.cat(blocks)


@dataclass(frozen=True, eq=False)
class Gap:
    """A gap in the training rows."""

    rows: Tensor  # whether each training row lies in the gap
    anchors: Tensor  # the indices of the rows that are anchors
    reach: float  # the distance r


def find_gap(x: Tensor, seed: int) -> Gap | None:
    """The middle third of standardised rows along their first principal axis; None if it is not far from the others."""
    if len(x) < 3 * _MIN_ROWS:
        return None
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    anchors, some = order[:_ANCHORS], order[:_PRINCIPAL_ROWS]
    position = x @ _principal_axis(x[some])
    low, high = position[some].quantile(torch.tensor([1 / 3, 2 / 3]).to(position))
    rows = (position > low) & (position <= high)
    if not _MIN_ROWS <= int(rows.sum()) <= len(x) - _MIN_ROWS or bool(rows[anchors].all()):
        return None
    distance = _nearest(x[order[: 2 * _ANCHORS]], x[anchors], skip_equal=True)
    reach = max(1e-6, float(distance[distance.isfinite()].quantile(0.99)))
    beyond = _nearest(x[rows.nonzero()[:_ANCHORS, 0]], x[anchors[~rows[anchors]]]) > reach
    return Gap(rows, anchors, reach) if float(beyond.float().mean()) >= _MIN_SHARE else None


def _principal_axis(x: Tensor) -> Tensor:
    """The direction of the greatest variance, by the power method."""
    axis = torch.ones(x.shape[1]).to(x) + torch.arange(x.shape[1]).to(x) / x.shape[1]
    for _ in range(20):
        axis = x.T @ (x @ axis)
        axis = axis / axis.norm().clamp(min=1e-30)
    return axis


def fit_extrapolation(
    gap: Gap, x: Tensor, mixture: Mixture, y: Tensor, rows: Tensor, weight: Tensor
) -> Extrapolation | None:
    """The spread that maximises the log-likelihood of rows in a gap; None if they need none.

    The mixture `[draw, row, output]` is the prediction of networks trained without the gap for some of its `rows`, of
    which y and weight are the outcomes and weights; x are all training inputs, everything standardised.
    """
    outside = gap.anchors[~gap.rows[gap.anchors]]
    unit = torch.ones(y.shape[1], dtype=torch.float64)
    share = Extrapolation(x[outside].float(), torch.tensor(gap.reach), unit).deviation(x[rows].float())
    growth = torch.stack([_best_growth(mixture.output(k), share[:, k], y[:, k], weight) for k in range(y.shape[1])])
    if not bool((growth > 0).any()):
        return None
    return Extrapolation(x[gap.anchors].float(), torch.tensor(gap.reach), growth)


def _best_growth(mixture: Mixture, share: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    densities = torch.stack([_spread(mixture, growth * share).log_density(y) for growth in _GROWTHS])
    return _GROWTHS[((densities * weight).sum(1) / weight.sum()).argmax()]


@dataclass(frozen=True, eq=False)
class Bounds:
    """The range of the training targets, standardised, `[output]`."""

    low: Tensor
    high: Tensor

    def shift(self, mean: Tensor) -> Tensor:
        """The shift of each mean prediction `[row, output]` to its place within the bounds; 0 inside them.

        A prediction beyond the range of floats is not shifted: callers refuse it.
        """
        # The range of a standardised target is at least 2; a constant one is not standardised, and its range is 0.
        margin = (self.high - self.low).clamp_min(1.0).to(mean)
        excess = mean - mean.clamp(self.low.to(mean) - margin, self.high.to(mean) + margin)
        return torch.where(mean.isfinite(), margin * torch.tanh(excess / margin) - excess, 0.0)
