r"""Claimed uncertainty against observed: percentiles, reliability, recalibration and conformal guarantees.

A dropout network's uncertainty is not calibrated, as a Gaussian process's is not [GG16, section Model Calibration]: its
scale follows from the prior and the data. Three remedies, by strength of claim: *rank* a point among the training
points (`uncertainty_reference`), *refit* the scale on held-out data (`std_scale`, `isotonic_recalibration`,
`temperature`), or *guarantee* coverage on exchangeable data (`conformal_interval`, `conformal_sets`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, float_tensor
from dropbayes.scores import confidence_and_correctness

# ------------------------------------------------------------------------------- the paper's percentiles

FAMILIES = {"gamma": "gamma", "lognormal": "lognorm", "weibull": "weibull_min", "inverse gamma": "invgamma"}
"""Positive two-parameter distributions (shape and scale) and their `scipy.stats` names. All have as many parameters, so
their likelihoods compare directly."""


@dataclass(frozen=True)
class UncertaintyReference:
    """A simple distribution of the training points' uncertainty, against which a new point's is read.

    Args:
        family: The family of largest likelihood, a key of `FAMILIES`.
        shape: Its shape parameter.
        scale: Its scale parameter, in the uncertainty's units.
        log_likelihoods: Each family's mean log-likelihood per training point.
    """

    family: str
    shape: float
    scale: float
    log_likelihoods: dict[str, float]

    def _distribution(self) -> Any:
        import scipy.stats

        return getattr(scipy.stats, FAMILIES[self.family])(self.shape, scale=self.scale)

    def percentile(self, uncertainty: Array) -> Tensor:
        """The percentile, 0 to 100, of each uncertainty among the training points'."""
        new = float_tensor(uncertainty)
        return torch.as_tensor(100 * self._distribution().cdf(new.detach().cpu().numpy()), dtype=new.dtype)

    def density(self, uncertainty: Array) -> Tensor:
        """The fitted density at each uncertainty."""
        new = float_tensor(uncertainty)
        return torch.as_tensor(self._distribution().pdf(new.detach().cpu().numpy()), dtype=new.dtype)


def uncertainty_reference(
    training_uncertainty: Array, *, families: Sequence[str] = tuple(FAMILIES)
) -> UncertaintyReference:
    r"""The distribution fitted to the training set's output uncertainty, the most likely of several families.

    [GG16, section Model Calibration]: "fitting a simple distribution over the training set output uncertainty, and
    using the cumulative distribution function to find the relative ratio of a new data point's uncertainty". The
    percentile compares points across models and data sets of different scale; it makes no claim about errors.

    Args:
        training_uncertainty: The standard deviation (or any positive uncertainty) of each training point.
        families: Keys of `FAMILIES` to choose from by likelihood.

    Returns:
        The fitted reference; call its `percentile` on new uncertainties.

    Examples:
        The paper's example: a standard deviation of 5 is extreme for one model and nothing to another.

        >>> narrow = uncertainty_reference(torch.linspace(0.2, 2, 200))
        >>> wide = uncertainty_reference(torch.linspace(10, 15, 200))
        >>> narrow.percentile(torch.tensor(5.0)) > 99, wide.percentile(torch.tensor(5.0)) < 1
        (tensor(True), tensor(True))
    """
    import scipy.stats

    values = float_tensor(training_uncertainty).detach().double().flatten()
    if (
        len(values) < 3
        or not bool((values > 0).all() and values.isfinite().all())
        or values.std() < 1e-9 * values.mean()
    ):
        raise ValueError(
            "`training_uncertainty` must hold at least 3 positive, finite and differing numbers; got "
            f"{len(values)} from {values.min().item():.3g} to {values.max().item():.3g}. "
            "With zeros or ties throughout, use `empirical_percentile`."
        )
    unknown = set(families) - set(FAMILIES)
    if unknown or not families:
        raise ValueError(f"`families` must be among {sorted(FAMILIES)}; got {sorted(families)}.")
    unit = values.median().item()  # fit in natural units: scipy's optimisers start near one
    scaled = (values / unit).cpu().numpy()
    fits: dict[str, tuple[float, float]] = {}
    likelihoods: dict[str, float] = {}
    for family in families:
        distribution = getattr(scipy.stats, FAMILIES[family])
        shape, _, scale = distribution.fit(scaled, floc=0)
        fits[family] = (float(shape), float(scale) * unit)
        likelihoods[family] = float(distribution.logpdf(scaled, shape, scale=scale).mean()) - math.log(unit)
    best = max(likelihoods, key=lambda family: likelihoods[family])
    return UncertaintyReference(best, *fits[best], likelihoods)


def empirical_percentile(uncertainty: Array, training_uncertainty: Array) -> Tensor:
    """The percentile, 0 to 100, of each uncertainty among the training points' themselves, ties counted half.

    Without a fitted family there is no extrapolation: everything above the training points is at 100.

    Examples:
        >>> empirical_percentile(torch.tensor([0.5, 2.0, 9.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([  0.0000,  37.5000, 100.0000])
    """
    new, known = float_tensor(uncertainty), float_tensor(training_uncertainty).flatten().sort().values
    known = known.to(new.dtype)
    below, up_to = torch.searchsorted(known, new), torch.searchsorted(known, new, right=True)
    return 50 * (below + up_to).to(new.dtype) / len(known)


def relative_uncertainty(uncertainty: Array, training_uncertainty: Array) -> Tensor:
    r"""The uncertainty in units of the median training point's: linear, and free of the data's scale.

    [GG16, section Model Calibration]: "scale the uncertainty linearly to remove data magnitude effects". Two models of
    targets in different units compare; 3 means "three times as unsure as about a typical training point".

    Examples:
        >>> relative_uncertainty(torch.tensor([6.0]), torch.tensor([1.0, 2.0, 30.0]))
        tensor([3.])
    """
    new, typical = float_tensor(uncertainty), float_tensor(training_uncertainty).median()
    if not typical > 0:
        raise ValueError(f"`training_uncertainty` must have a positive median; got {typical.item():.3g}.")
    return new / typical.to(new.dtype)


# ------------------------------------------------------------------------------------------- reliability


@dataclass(frozen=True)
class ReliabilityCurve:
    """What was claimed, and what was observed where it was claimed.

    Args:
        claimed: The claimed probability, `[point]`.
        observed: The observed frequency, `[point]`.
        count: The number of rows behind each frequency, `[point]`.
    """

    claimed: Tensor
    observed: Tensor
    count: Tensor

    @property
    def standard_error(self) -> Tensor:
        """The standard error of `observed` if the claims were true: the width of honest scatter."""
        return (self.claimed * (1 - self.claimed) / self.count).sqrt()

    @property
    def mean_gap(self) -> Tensor:
        """The mean absolute gap of the curve from the diagonal, every point weighted the same."""
        return (self.observed - self.claimed).abs().mean()


def class_reliability(probabilities: Array, labels: Array, *, n_bins: int = 10) -> ReliabilityCurve:
    """The reliability curve of a classifier: mean confidence and accuracy in bins of equal width; empty bins left out.

    Args:
        probabilities: Predictive probabilities, `[row, class]`.
        labels: Class numbers, `[row]`.
        n_bins: Bins of the unit interval.

    Examples:
        >>> curve = class_reliability(torch.tensor([[0.2, 0.8], [0.3, 0.7]]), torch.tensor([1, 0]), n_bins=2)
        >>> curve.claimed, curve.observed, curve.count
        (tensor([0.7500]), tensor([0.5000]), tensor([2.]))
    """
    confidence, correct = confidence_and_correctness(probabilities, labels)
    bins = (confidence * n_bins).long().clamp_max(n_bins - 1)
    total = torch.zeros(n_bins, dtype=confidence.dtype, device=confidence.device)
    count = total.index_add(0, bins, torch.ones_like(confidence))
    filled = count > 0
    claimed, observed = total.index_add(0, bins, confidence), total.index_add(0, bins, correct)
    return ReliabilityCurve((claimed / count)[filled], (observed / count)[filled], count[filled])


def gaussian_pit(mean: Array, std: Array, y: Array) -> Tensor:
    r"""The probability integral transform $\Phi\big((y - \mu)/\sigma\big)$, uniform for calibrated Gaussians.

    Examples:
        >>> gaussian_pit(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.8413])
    """
    return torch.special.ndtr((float_tensor(y) - float_tensor(mean)) / float_tensor(std))


def mixture_pit(draws: Array, y: Array, *, noise_variance: Array | float) -> Tensor:
    r"""The probability integral transform of the mixture, $\tfrac1T \sum_t \Phi\big((y - \widehat y_t)/\sqrt v\big)$.

    Args:
        draws: Outputs of the network, `[draw, row]`.
        y: The observed targets, `[row]`.
        noise_variance: The observation variance $v > 0$ ($\tau^{-1}$): a number, `[row]` or `[draw, row]`.

    Examples:
        >>> mixture_pit(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), noise_variance=1.0)
        tensor([0.5000])
    """
    drawn = float_tensor(draws)
    std = float_tensor(noise_variance).to(drawn).sqrt()
    return torch.special.ndtr((float_tensor(y).to(drawn) - drawn) / std).mean(0)


def quantile_reliability(pit: Array, *, n_levels: int = 99) -> ReliabilityCurve:
    """The reliability curve of predictive quantiles: how often the target fell below the quantile of each level.

    Args:
        pit: Probability integral transforms, `[row]` (`gaussian_pit`, `mixture_pit`).
        n_levels: Levels, evenly spaced strictly inside the unit interval.

    Examples:
        >>> quantile_reliability(torch.tensor([0.1, 0.2, 0.3, 0.9]), n_levels=1).observed  # below the median
        tensor([0.7500])
    """
    return _level_curve(float_tensor(pit), n_levels)


def interval_reliability(pit: Array, *, n_levels: int = 99) -> ReliabilityCurve:
    """The reliability curve of central intervals: how often the target fell inside the interval of each level.

    Args:
        pit: Probability integral transforms, `[row]` (`gaussian_pit`, `mixture_pit`).
        n_levels: Levels, evenly spaced strictly inside the unit interval.

    Examples:
        >>> interval_reliability(torch.tensor([0.1, 0.3, 0.6, 0.9]), n_levels=1).observed  # in the central half
        tensor([0.5000])
    """
    return _level_curve((2 * float_tensor(pit) - 1).abs(), n_levels)


def _level_curve(values: Tensor, n_levels: int) -> ReliabilityCurve:
    levels = torch.arange(1, n_levels + 1, dtype=values.dtype, device=values.device) / (n_levels + 1)
    below = torch.searchsorted(values.flatten().sort().values, levels, right=True).to(levels.dtype)
    return ReliabilityCurve(levels, below / values.numel(), torch.full_like(levels, values.numel()))


# ----------------------------------------------------------------------------------------- recalibration


def std_scale(mean: Array, std: Array, y: Array) -> Tensor:
    r"""The factor $s$ on the standard deviation with the largest Gaussian likelihood.

    $$s^2 = \tfrac1N \sum_n (y_n - \mu_n)^2/\sigma_n^2$$

    Fit on held-out data, then use $s \sigma$. Above 1 the model was over-confident.

    Examples:
        >>> std_scale(torch.zeros(2), torch.ones(2), torch.tensor([3.0, -3.0]))
        tensor(3.)
    """
    return standardised_residuals(mean, std, y).square().mean().sqrt()


@dataclass(frozen=True)
class IsotonicRecalibration:
    """A monotone map between the levels a model claims and the levels observed on held-out data.

    Args:
        claimed_levels: Rising claimed levels from 0 to 1.
        observed_levels: The level observed at each, from 0 to 1.
    """

    claimed_levels: Tensor
    observed_levels: Tensor

    def observed(self, claimed: Array) -> Tensor:
        """The level to expect where the model claims `claimed` (recalibrates a cumulative probability)."""
        return _interpolated(float_tensor(claimed), self.claimed_levels, self.observed_levels)

    def claimed(self, observed: Array) -> Tensor:
        """The level to ask of the model so that `observed` is what happens (recalibrates a quantile)."""
        return _interpolated(float_tensor(observed), self.observed_levels, self.claimed_levels)


def isotonic_recalibration(pit: Array) -> IsotonicRecalibration:
    r"""The recalibration map of predictive levels, piecewise linear through $(u_{(i)}, \tfrac{i}{n+1})$.

    [Kuleshov et al. 2018]. The frequencies of held-out transforms $u_i = F_i(y_i)$ rise with the level, so isotonic
    regression leaves them as they are; $i/(n+1)$ is the expected level of the $i$-th smallest of $n$.

    Args:
        pit: Held-out probability integral transforms, `[row]`.

    Examples:
        >>> recalibration = isotonic_recalibration(torch.tensor([0.4, 0.5, 0.6]))  # claims too wide a spread
        >>> recalibration.claimed(torch.tensor([0.25, 0.5, 0.75]))
        tensor([0.4000, 0.5000, 0.6000])
    """
    levels, ties = float_tensor(pit).flatten().unique(return_counts=True)
    ties = ties.to(levels.dtype)
    rank = (ties.cumsum(0) - (ties - 1) / 2) / (ties.sum() + 1)
    ends = levels.new_tensor([0.0, 1.0])
    inside = (levels > 0) & (levels < 1)
    return IsotonicRecalibration(
        torch.cat([ends[:1], levels[inside], ends[1:]]), torch.cat([ends[:1], rank[inside], ends[1:]])
    )


def _interpolated(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear interpolation through rising `x`."""
    x, y = x.to(at), y.to(at)
    right = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    weight = (at - x[right - 1]) / (x[right] - x[right - 1])
    return y[right - 1] + weight.clamp(0, 1) * (y[right] - y[right - 1])


def temperature(logit_draws: Array, labels: Array) -> Tensor:
    r"""The temperature with the largest likelihood of the mixture of draws.

    $$\arg\max_\theta \sum_n \log \tfrac1T \sum_t \mathrm{softmax}(\widehat y_t/\theta)_{y_n}$$

    Fit on held-out data, then divide every draw's logits by it. Above 1 the model was over-confident. The search stays
    within 1/20 and 20: held-out data without a single error would ask for 0.

    Args:
        logit_draws: Logits of each draw, `[draw, row, class]` (a deterministic network's as `logits[None]`).
        labels: Class numbers, `[row]`.

    Examples:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])  # claims 98 %
        >>> temperature(logits[None], torch.tensor([0, 0, 0, 1]))  # 75 % are right: 4 / log 3
        tensor(3.6410)
    """
    import scipy.optimize

    logits = float_tensor(logit_draws)
    truth = float_tensor(labels).long().to(logits.device)
    if logits.dim() != 3 or truth.shape != logits.shape[1:2]:
        raise ValueError(
            "`logit_draws` must be [draw, row, class] and `labels` [row]; got "
            f"{tuple(logits.shape)} and {tuple(truth.shape)}. Pass logits[None] for a single draw."
        )
    double, index = logits.detach().double(), truth.expand(logits.shape[:2])[..., None]

    def negative_log_likelihood(log_temperature: float) -> float:
        log_probabilities = (double / math.exp(log_temperature)).log_softmax(-1).gather(2, index)
        return -log_probabilities.logsumexp(0).mean().item()

    limit = math.log(20)
    best = scipy.optimize.minimize_scalar(
        negative_log_likelihood, bounds=(-limit, limit), method="bounded", options={"xatol": 1e-9}
    )
    return logits.new_tensor(math.exp(best.x))


# --------------------------------------------------------------------------------------------- conformal


def standardised_residuals(mean: Array, std: Array, y: Array) -> Tensor:
    r"""The residual in standard deviations, $|y - \mu| / \sigma$: the conformal score of a regression (`std=1`: plain).

    Examples:
        >>> standardised_residuals(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]))
        tensor([1.5000])
    """
    centre, spread, outcome = float_tensor(mean), float_tensor(std), float_tensor(y)
    if centre.shape != outcome.shape or (spread.dim() and spread.shape != centre.shape):
        raise ValueError(
            f"`mean`, `std` and `y` must have one shape; got {tuple(centre.shape)}, {tuple(spread.shape)} and "
            f"{tuple(outcome.shape)}. Reshape y (y[:, None] for a one-column output) or squeeze the prediction."
        )
    return (outcome - centre).abs() / spread


def conformal_threshold(scores: Array, *, level: float) -> Tensor:
    r"""The score $q$ that a new row's does not exceed, with probability at least `level`.

    The $\lceil (n+1)\,\text{level} \rceil$-th smallest of $n$ scores. For exchangeable rows and any score whatever
    $P(s_{n+1} \le q) \ge \text{level}$, and without ties $P \le \text{level} + 1/(n+1)$. With too few rows for the
    level it is infinite.

    Args:
        scores: Scores of held-out rows the model was not fitted to, `[row]`.
        level: The probability to guarantee.

    Examples:
        >>> conformal_threshold(torch.arange(1.0, 100.0), level=0.9)  # 99 scores: the 90th
        tensor(90.)
    """
    if not 0 < level < 1:
        raise ValueError(f"`level` must lie strictly between 0 and 1; got {level!r}.")
    held_out = float_tensor(scores).flatten()
    if held_out.isnan().any():
        raise ValueError("`scores` must not contain NaN.")
    # 1e-9 forgives the rounding of e.g. 100 * 0.9 before the ceiling.
    rank = math.ceil((len(held_out) + 1) * level - 1e-9)
    if rank > len(held_out):
        return held_out.new_tensor(math.inf)
    return held_out.kthvalue(rank).values


def conformal_interval(mean: Array, std: Array, *, calibration_scores: Array, level: float) -> tuple[Tensor, Tensor]:
    r"""The split-conformal interval $\mu \pm q\,\sigma$, which holds the target with probability at least `level`.

    The guarantee is over new rows *and* held-out sets, for exchangeable rows; it holds for any model and is an average:
    not for each row. A better uncertainty makes the interval narrower, not more valid.

    Args:
        mean: Predictive mean of the new rows.
        std: Their predictive standard deviation (1 for intervals of one width).
        calibration_scores: `standardised_residuals` of held-out rows.
        level: The coverage to guarantee.

    Returns:
        The lower and the upper ends.

    Examples:
        >>> scores = torch.arange(1.0, 20.0) / 10  # |y - mean| / std of 19 held-out rows
        >>> conformal_interval(torch.tensor([5.0]), torch.tensor([2.0]), calibration_scores=scores, level=0.9)
        (tensor([1.4000]), tensor([8.6000]))
    """
    centre = float_tensor(mean)
    half = conformal_threshold(calibration_scores, level=level).to(centre) * float_tensor(std).to(centre)
    return centre - half, centre + half


def label_scores(probabilities: Array, labels: Array) -> Tensor:
    """The conformal score of a classification, one minus the probability of the label, `[row]`.

    Examples:
        >>> label_scores(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
        tensor([0.2500])
    """
    predicted = float_tensor(probabilities)
    truth = float_tensor(labels).long().to(predicted.device)
    return 1 - predicted.gather(1, truth[:, None]).squeeze(1)


def conformal_sets(probabilities: Array, *, calibration_scores: Array, level: float) -> Tensor:
    """The split-conformal set of classes, which holds the label with probability at least `level`.

    The guarantee is that of `conformal_interval`. A set may be empty: no held-out label was so improbable.

    Args:
        probabilities: Predictive probabilities of the new rows, `[row, class]`.
        calibration_scores: `label_scores` of held-out rows.
        level: The coverage to guarantee.

    Returns:
        True for the classes in the set, `[row, class]`.

    Examples:
        >>> scores = torch.linspace(0.0, 0.6, 19)
        >>> conformal_sets(torch.tensor([[0.6, 0.4], [0.9, 0.1]]), calibration_scores=scores, level=0.9)
        tensor([[ True, False],
                [ True, False]])
    """
    predicted = float_tensor(probabilities)
    return 1 - predicted <= conformal_threshold(calibration_scores, level=level).to(predicted)
