r"""Weight decay as a prior: the identity of $\tau$, $\lambda$ and $l$, and the weight layers of a network."""

from dropbayes.weight_layers.decay import Decay, decays, kl_coefficients, kl_constant, parameter_groups
from dropbayes.weight_layers.precision import Prior, model_precision, optimizer_weight_decay, weight_decay
from dropbayes.weight_layers.structure import (
    DroppedLayer,
    KeepProbs,
    input_layers,
    is_bias,
    is_weight_layer,
    keep_probs_by_order,
    kl_is_weight_decay,
    matrices,
    weight_layers,
)
from dropbayes.weight_layers.tracing import keep_probs, trace

__all__ = [
    "Decay",
    "DroppedLayer",
    "KeepProbs",
    "Prior",
    "decays",
    "input_layers",
    "is_bias",
    "is_weight_layer",
    "keep_probs",
    "keep_probs_by_order",
    "kl_coefficients",
    "kl_constant",
    "kl_is_weight_decay",
    "matrices",
    "model_precision",
    "optimizer_weight_decay",
    "parameter_groups",
    "trace",
    "weight_decay",
    "weight_layers",
]
