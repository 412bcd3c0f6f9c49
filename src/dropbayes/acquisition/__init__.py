r"""Acquisition: the rows to query in active learning and in Bayesian optimisation.

Batches need draws that are functions (`masks="shared"`): only then is the joint distribution of several rows right.
"""

from dropbayes.acquisition.optimisation import (
    botorch_model,
    expected_improvement,
    probability_of_improvement,
    upper_confidence_bound,
)
from dropbayes.acquisition.queries import (
    badge_queries,
    bald_queries,
    batch_bald_queries,
    epig_queries,
    expected_information_gain,
    stochastic_queries,
    variance_queries,
)

__all__ = [
    "badge_queries",
    "bald_queries",
    "batch_bald_queries",
    "botorch_model",
    "epig_queries",
    "expected_improvement",
    "expected_information_gain",
    "probability_of_improvement",
    "stochastic_queries",
    "upper_confidence_bound",
    "variance_queries",
]
