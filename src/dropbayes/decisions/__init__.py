r"""Actions taken on uncertainty: defer to a person, cascade to a costlier network, explore, weigh costs.

[GG16, section Applications] names them: pass uncertain inputs to a human, use a slow network only where a fast one is
unsure, explore by Thompson sampling. All take tensors or plain callables; draws are axis 0.
"""

from dropbayes.decisions.actions import action_probabilities, expected_cost, least_cost_action, thompson_action
from dropbayes.decisions.cascades import CascadeFrontier, CascadePoint, CascadePrediction, cascade, cascade_frontier
from dropbayes.decisions.deferral import DeferralRule, deferral_for_error, deferral_for_risk, deferral_for_workload

__all__ = [
    "CascadeFrontier",
    "CascadePoint",
    "CascadePrediction",
    "DeferralRule",
    "action_probabilities",
    "cascade",
    "cascade_frontier",
    "deferral_for_error",
    "deferral_for_risk",
    "deferral_for_workload",
    "expected_cost",
    "least_cost_action",
    "thompson_action",
]
