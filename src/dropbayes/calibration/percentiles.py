r"""The paper's percentiles: an uncertainty ranked among those of the training points."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, Numbers, extent, finite_tensor, row_weights
from dropbayes.scores.averages import cumulative_weights, weighted_quantile

FAMILIES = {"gamma": "gamma", "lognormal": "lognorm", "weibull": "weibull_min", "inverse gamma": "invgamma"}
"""Positive distributions and their `scipy.stats` names. All have a shape and a scale: likelihoods are comparable."""


@dataclass(frozen=True)
class UncertaintyReference:
    """A simple distribution of the training points' uncertainty, among which a new point's is ranked.

    The `family` of largest likelihood, a key of `FAMILIES`, its parameters, and the mean log-likelihood per training
    point of each family.
    """

    family: str
    shape: float
    scale: float
    log_likelihoods: dict[str, float]

    def percentile(self, uncertainty: Array) -> Tensor:
        """The percentile, 0 to 100, of each uncertainty among the training points'."""
        return 100 * self._values("cdf", uncertainty)

    def density(self, uncertainty: Array) -> Tensor:
        """The fitted density at each uncertainty."""
        return self._values("pdf", uncertainty)

    def _values(self, function: str, uncertainty: Array) -> Tensor:
        import scipy.stats

        new = finite_tensor("uncertainty", uncertainty, infinite=True)
        fitted = getattr(scipy.stats, FAMILIES[self.family])(self.shape, scale=self.scale)
        return torch.as_tensor(getattr(fitted, function)(new.detach().cpu().numpy()), dtype=new.dtype)


def uncertainty_reference(
    training_uncertainty: Array, *, families: Sequence[str] = tuple(FAMILIES), sample_weight: Array | None = None
) -> UncertaintyReference:
    r"""The distribution fitted to the training set's output uncertainty, the most likely of several families.

    [GG16, section Model Calibration]: "fitting a simple distribution over the training set output uncertainty, and
    using the cumulative distribution function to find the relative ratio of a new data point's uncertainty". The
    percentile compares points across models and data sets of different scale; it makes no claim about errors. Any
    positive number may be the uncertainty; `families` are keys of `FAMILIES`.

    Examples:
        The paper's example: a standard deviation of 5 is extreme for one model and small for another.

        >>> narrow = uncertainty_reference(torch.linspace(0.2, 2, 200))
        >>> wide = uncertainty_reference(torch.linspace(10, 15, 200))
        >>> narrow.percentile(torch.tensor(5.0)) > 99, wide.percentile(torch.tensor(5.0)) < 1
        (tensor(True), tensor(True))
    """
    import scipy.stats

    values = finite_tensor("training_uncertainty", training_uncertainty).detach().double().flatten().cpu()
    weight = row_weights(sample_weight, len(values), like=values)
    values, weight = values[weight > 0], (weight / weight.sum())[weight > 0]
    if len(values) < 3 or values.min() <= 1e-100 * values.max() or values.std() < 1e-9 * values.mean():
        rule = "hold at least 3 positive, finite and differing numbers, within a factor of 1e100"
        got = f"{len(values)} from {extent(values)}. With zeros or ties throughout, use `empirical_percentile`"
        raise ValueError(f"`training_uncertainty` must {rule}; got {got}.")
    if not families or not FAMILIES.keys() >= set(families):
        raise ValueError(f"`families` must be among {sorted(FAMILIES)}; got {sorted(families)}.")
    unit = float(values.log().mul(weight).sum().exp())  # natural units: their logarithms are around 0
    x, w = (values / unit).numpy(), weight.numpy()
    fits = {family: _most_likely(family, x, w) for family in families}
    likelihoods: dict[str, float] = {}
    for family, (shape, scale) in fits.items():
        density = getattr(scipy.stats, FAMILIES[family]).logpdf(x, shape, scale=scale)
        likelihoods[family] = float((w * density).sum()) - math.log(unit)
    best = max(fits, key=likelihoods.__getitem__)
    return UncertaintyReference(best, fits[best][0], fits[best][1] * unit, likelihoods)


def _most_likely(family: str, x: Numbers, weight: Numbers) -> tuple[float, float]:
    """The shape and scale of largest likelihood of points `x` whose weights sum to 1."""
    import scipy.special

    if family == "inverse gamma":
        shape, scale = _most_likely("gamma", 1 / x, weight)
        return shape, 1 / scale
    if family == "lognormal":
        centre = weight @ np.log(x)
        return math.sqrt(weight @ (np.log(x) - centre) ** 2), math.exp(centre)
    if family == "gamma":
        mean = float(weight @ x)
        ratio = x / mean
        # log E[x] - E[log x], term by term at least 0, and with its digits where points are almost equal
        gap = float(weight @ (ratio - 1 - np.log(ratio)))

        def slope_of_gamma(a: float) -> float:
            """The gap less log a - ψ(a), by its series where the difference would lose its digits."""
            return gap - (1 / (2 * a) + 1 / (12 * a * a) if a > 1e4 else math.log(a) - scipy.special.digamma(a))

        shape = _root(slope_of_gamma)
        return shape, mean / shape
    logs = np.log(x)

    def slope(shape: float) -> float:
        """The slope of the Weibull likelihood: the mean logarithm weighted by x^shape, less 1/shape and the mean."""
        powers = weight * np.exp(shape * (logs - logs.max()))
        return float(powers @ logs / powers.sum() - 1 / shape - weight @ logs)

    shape = _root(slope)
    powers = weight @ np.exp(shape * (logs - logs.max()))
    return shape, math.exp(logs.max() + math.log(powers) / shape)


def _root(rising: Callable[[float], float]) -> float:
    """The positive number at which a rising function is 0."""
    import scipy.optimize

    return math.exp(scipy.optimize.brentq(lambda log: rising(math.exp(log)), -20.0, 45.0, xtol=1e-13))


def empirical_percentile(
    uncertainty: Array, training_uncertainty: Array, *, sample_weight: Array | None = None
) -> Tensor:
    """The percentile, 0 to 100, of each uncertainty among those of the training points, ties counted half.

    Without a fitted family there is no extrapolation: everything above the training points is at 100. `sample_weight`
    is the weight of each training point.

    Examples:
        >>> empirical_percentile(torch.tensor([0.5, 2.0, 9.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([  0.0000,  37.5000, 100.0000])
    """
    new = finite_tensor("uncertainty", uncertainty, infinite=True)
    known = finite_tensor("training_uncertainty", training_uncertainty, infinite=True).flatten()
    below, up_to, total = cumulative_weights(known.to(new), row_weights(sample_weight, len(known), like=known), new)
    return (50 * (below + up_to) / total).to(new.dtype)


def relative_uncertainty(
    uncertainty: Array, training_uncertainty: Array, *, sample_weight: Array | None = None
) -> Tensor:
    r"""The uncertainty divided by that of the median training point: linear, and independent of the data's scale.

    [GG16, section Model Calibration]: "scale the uncertainty linearly to remove data magnitude effects". 3 means "three
    times as unsure as about a typical training point". `sample_weight` is the weight of each training point.

    Examples:
        >>> relative_uncertainty(torch.tensor([6.0]), torch.tensor([1.0, 2.0, 30.0]))
        tensor([3.])
    """
    new = finite_tensor("uncertainty", uncertainty, infinite=True)
    known = finite_tensor("training_uncertainty", training_uncertainty).detach().flatten()
    weight = row_weights(sample_weight, len(known), like=known)
    typical = weighted_quantile(known, weight, 0.5 * weight.sum())
    if not typical > 0:
        raise ValueError(f"`training_uncertainty` must have a positive median; got {typical.item():.3g}.")
    return new / typical.to(new.dtype)
