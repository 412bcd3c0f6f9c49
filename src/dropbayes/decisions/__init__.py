r"""Decisions under uncertainty: what to hand over, to answer at a higher price, to do, and to query next.

[GG16, section Applications] names them: pass uncertain inputs to a human, use a slow network only where a fast one is
unsure, explore by Thompson sampling. All take tensors or plain callables; draws are axis 0. `dropbayes.acquisition`
chooses the rows to query, in active learning and in Bayesian optimisation.
"""

from dropbayes.decisions.actions import (
    CascadeFrontier,
    CascadePoint,
    DeferralRule,
    action_probabilities,
    cascade,
    cascade_frontier,
    deferral_for_risk,
    deferral_for_workload,
    expected_cost,
    least_cost_action,
    thompson_action,
)

__all__ = [
    "CascadeFrontier",
    "CascadePoint",
    "DeferralRule",
    "action_probabilities",
    "cascade",
    "cascade_frontier",
    "deferral_for_risk",
    "deferral_for_workload",
    "expected_cost",
    "least_cost_action",
    "thompson_action",
]
