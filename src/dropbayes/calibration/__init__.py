r"""Claimed uncertainty against observed: percentiles, reliability, recalibration, tests.

A dropout network's uncertainty is not calibrated, nor is a Gaussian process's [GG16, section Model Calibration]: its
scale follows from the prior and the data. Three remedies, by strength of claim: *rank* a point among the training
points (`uncertainty_reference`), *refit* the scale on held-out data (`std_scale`, `isotonic_recalibration`,
`temperature`, `vector_scaling`, `dirichlet_calibration`, `beta_calibration`), or *guarantee* coverage on exchangeable
data (`dropbayes.conformal`). In every function a row of weight 2 counts as two.
"""

from dropbayes.calibration.percentiles import (
    FAMILIES,
    UncertaintyReference,
    empirical_percentile,
    relative_uncertainty,
    uncertainty_reference,
)
from dropbayes.calibration.recalibration import (
    BetaMap,
    ClassMap,
    IsotonicRecalibration,
    beta_calibration,
    dirichlet_calibration,
    isotonic_recalibration,
    std_scale,
    temperature,
    vector_scaling,
)
from dropbayes.calibration.reliability import (
    CalibrationTest,
    ReliabilityCurve,
    calibration_test,
    class_reliability,
    gaussian_pit,
    interval_reliability,
    quantile_reliability,
    reliability_band,
    uniformity_test,
)

__all__ = [
    "FAMILIES",
    "BetaMap",
    "CalibrationTest",
    "ClassMap",
    "IsotonicRecalibration",
    "ReliabilityCurve",
    "UncertaintyReference",
    "beta_calibration",
    "calibration_test",
    "class_reliability",
    "dirichlet_calibration",
    "empirical_percentile",
    "gaussian_pit",
    "interval_reliability",
    "isotonic_recalibration",
    "quantile_reliability",
    "relative_uncertainty",
    "reliability_band",
    "std_scale",
    "temperature",
    "uncertainty_reference",
    "uniformity_test",
    "vector_scaling",
]
