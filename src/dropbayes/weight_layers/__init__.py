r"""The weight layers of a network: their dropout, their number of inputs, and the weight decay their prior implies."""

from dropbayes.weight_layers.decay import Decay, decays, kl_coefficients, kl_constant, parameter_groups
from dropbayes.weight_layers.structure import (
    BayesianLayer,
    DroppedLayer,
    is_bias,
    is_weight_layer,
    keep_probs_by_order,
    kl_is_weight_decay,
    matrices,
    weight_layers,
)
from dropbayes.weight_layers.tracing import complete_keep_probs, keep_probs, trace

__all__ = [
    "BayesianLayer",
    "Decay",
    "DroppedLayer",
    "complete_keep_probs",
    "decays",
    "is_bias",
    "is_weight_layer",
    "keep_probs",
    "keep_probs_by_order",
    "kl_coefficients",
    "kl_constant",
    "kl_is_weight_decay",
    "matrices",
    "parameter_groups",
    "trace",
    "weight_layers",
]
