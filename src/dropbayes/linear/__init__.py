"""Uncertainty in one pass: the network as a linear function of its masks, and what that explains."""

from dropbayes.linear.control import ControlledPlan, controlled_plan
from dropbayes.linear.explanation import Explanation, explain, shapley
from dropbayes.linear.passes import Linear, LinearCheck, OnePass, check_linear, covariance, one_pass_plan, outputs_by
from dropbayes.linear.points import N_POINTS

__all__ = [
    "N_POINTS",
    "ControlledPlan",
    "Explanation",
    "Linear",
    "LinearCheck",
    "OnePass",
    "check_linear",
    "controlled_plan",
    "covariance",
    "explain",
    "one_pass_plan",
    "outputs_by",
    "shapley",
]
