r"""The weight layers of a network: their prior as weight decay, the distributions $q(\omega)$, and layers that draw.

Each layer that draws (linear, convolutional, embedding, recurrent) is its torch namesake with a `noise`: the stored
weight is the mean of $q$, and evaluation mode computes with it. In training mode every row of the batch gets a distinct
draw, as in the paper's estimator of the bound, shared by all positions of the row (time steps, tokens, pixels);
`row_axis=1` tells a layer that its input is time first. An interceptor of operations (`dropbayes.predict`) makes
evaluation mode random: it intercepts `torch.nn.functional.dropout` and `dropbayes.tracing.draw_or_mean`, and supplies
their draws.
"""

from dropbayes.layers.bernoulli import Bernoulli, Concrete, kl_from_density
from dropbayes.layers.conversion import add_dropout
from dropbayes.layers.decay import Decay, decays, kl_coefficients, kl_constant, parameter_groups
from dropbayes.layers.family import DiagonalGaussian, Family, Mixture, multiplicative_gaussian
from dropbayes.layers.noise import BernoulliNoise, ConcreteNoise, GaussianNoise, MixtureNoise, Noise
from dropbayes.layers.precision import Prior, model_precision, optimizer_weight_decay, weight_decay
from dropbayes.layers.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from dropbayes.layers.structure import (
    DroppedLayer,
    KeepProbs,
    input_layers,
    is_bias,
    keep_probs,
    keep_probs_by_order,
    kl_is_weight_decay,
    matrices,
    trace,
    weight_layers,
)
from dropbayes.layers.weights import Conv1d, Conv2d, Conv3d, Embedding, Linear, WeightLayer

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bernoulli",
    "BernoulliNoise",
    "Concrete",
    "ConcreteNoise",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Decay",
    "DiagonalGaussian",
    "DroppedLayer",
    "Embedding",
    "Family",
    "GRUCell",
    "GaussianNoise",
    "KeepProbs",
    "LSTMCell",
    "Linear",
    "Mixture",
    "MixtureNoise",
    "Noise",
    "Prior",
    "RNNCell",
    "WeightLayer",
    "add_dropout",
    "decays",
    "input_layers",
    "is_bias",
    "keep_probs",
    "keep_probs_by_order",
    "kl_coefficients",
    "kl_constant",
    "kl_from_density",
    "kl_is_weight_decay",
    "matrices",
    "model_precision",
    "multiplicative_gaussian",
    "optimizer_weight_decay",
    "parameter_groups",
    "trace",
    "weight_decay",
    "weight_layers",
]
