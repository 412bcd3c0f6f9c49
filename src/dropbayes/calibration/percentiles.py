r"""The paper's percentiles: an uncertainty ranked among those of the training points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropbayes.runtime.validation import Array, finite_tensor, row_weights

__all__ = [
    "FAMILIES",
    "UncertaintyReference",
    "empirical_percentile",
    "relative_uncertainty",
    "uncertainty_reference",
]

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
        new = finite_tensor("uncertainty", uncertainty, infinite=True)
        return torch.as_tensor(100 * self._distribution().cdf(new.detach().cpu().numpy()), dtype=new.dtype)

    def density(self, uncertainty: Array) -> Tensor:
        """The fitted density at each uncertainty."""
        new = finite_tensor("uncertainty", uncertainty, infinite=True)
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

    values = finite_tensor("training_uncertainty", training_uncertainty).detach().double().flatten()
    if len(values) < 3 or not bool((values > 0).all()) or values.std() < 1e-9 * values.mean():
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


def empirical_percentile(
    uncertainty: Array, training_uncertainty: Array, *, sample_weight: Array | None = None
) -> Tensor:
    """The percentile, 0 to 100, of each uncertainty among the training points' themselves, ties counted half.

    Without a fitted family there is no extrapolation: everything above the training points is at 100.

    Args:
        uncertainty: Uncertainties of new points.
        training_uncertainty: The uncertainty of each training point, `[row]`.
        sample_weight: The weight of each training point.

    Examples:
        >>> empirical_percentile(torch.tensor([0.5, 2.0, 9.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([  0.0000,  37.5000, 100.0000])
    """
    new = finite_tensor("uncertainty", uncertainty, infinite=True)
    known, order = finite_tensor("training_uncertainty", training_uncertainty, infinite=True).flatten().sort()
    weight = row_weights(sample_weight, len(known), like=known)[order]
    mass = torch.cat([weight.new_zeros(1), weight.cumsum(0)])
    places = [torch.searchsorted(known.to(new), new.contiguous(), right=right) for right in (False, True)]
    return (50 * (mass[places[0]] + mass[places[1]]) / mass[-1]).to(new.dtype)


def relative_uncertainty(uncertainty: Array, training_uncertainty: Array) -> Tensor:
    r"""The uncertainty in units of the median training point's: linear, and free of the data's scale.

    [GG16, section Model Calibration]: "scale the uncertainty linearly to remove data magnitude effects". Two models of
    targets in different units compare; 3 means "three times as unsure as about a typical training point".

    Examples:
        >>> relative_uncertainty(torch.tensor([6.0]), torch.tensor([1.0, 2.0, 30.0]))
        tensor([3.])
    """
    new = finite_tensor("uncertainty", uncertainty, infinite=True)
    typical = finite_tensor("training_uncertainty", training_uncertainty).median()
    if not typical > 0:
        raise ValueError(f"`training_uncertainty` must have a positive median; got {typical.item():.3g}.")
    return new / typical.to(new.dtype)
