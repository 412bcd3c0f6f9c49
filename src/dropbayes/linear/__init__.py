"""Uncertainty in one pass: the network as a linear function of its masks, and what that explains."""

from dropbayes.linear.explanation import Explanation, explain, shapley
from dropbayes.linear.passes import Linear, LinearCheck, check_linear, covariance
from dropbayes.linear.points import N_POINTS

__all__ = ["N_POINTS", "Explanation", "Linear", "LinearCheck", "check_linear", "covariance", "explain", "shapley"]
