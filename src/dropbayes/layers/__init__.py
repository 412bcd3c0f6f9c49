r"""Weight layers that draw their weights from a chosen $q(\omega)$: linear, convolutional, embedding and recurrent.

Each layer is its torch namesake with a `noise`: the stored weight is the mean of $q$, and evaluation mode computes with
it. In training mode every row of the batch gets a distinct draw, as in the paper's estimator of the bound, shared by
all positions of the row (time steps, tokens, pixels); `row_axis=1` tells a layer that its input is time first. An
interceptor of operations (`dropbayes.predict`) makes evaluation mode random: it intercepts
`torch.nn.functional.dropout` and `dropbayes.tracing.draw_or_mean`, and supplies their draws.
"""

from dropbayes.layers.conversion import add_dropout
from dropbayes.layers.noise import (
    BernoulliNoise,
    ConcreteNoise,
    GaussianNoise,
    MixtureNoise,
    Noise,
)
from dropbayes.layers.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from dropbayes.layers.weights import Conv1d, Conv2d, Conv3d, Embedding, Linear, WeightLayer, mask_shape, word_mask

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BernoulliNoise",
    "ConcreteNoise",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "GRUCell",
    "GaussianNoise",
    "LSTMCell",
    "Linear",
    "MixtureNoise",
    "Noise",
    "RNNCell",
    "WeightLayer",
    "add_dropout",
    "mask_shape",
    "word_mask",
]
