r"""Covariance functions that the hidden units of a network imply, in closed form, by quadrature and by Monte Carlo.

A hidden unit with non-linearity $\sigma$, weights $\mathbf w \sim \mathcal N(0, l^{-2} \mathbf I_Q)$ and bias
$b \sim \mathcal N(0, \beta^2)$ defines [GG16, sect:gp_approx_model]

$$\mathbf K(\mathbf x, \mathbf y) = \int p(\mathbf w) p(b) \sigma(\mathbf w^T \mathbf x + b)
\sigma(\mathbf w^T \mathbf y + b) \, d\mathbf w \, db.$$

The pre-activations $u = \mathbf w^T \mathbf x + b$ and $v = \mathbf w^T \mathbf y + b$ are jointly Gaussian, so each
covariance is a function of their standard deviations $s_u$, $s_v$ and of the angle $\theta$ whose cosine is their
correlation.
"""

from dropbayes.covariances.biases import RandomBias
from dropbayes.covariances.layers import (
    Cosine,
    Covariance,
    Erf,
    Features,
    Identity,
    Layer,
    Quadrature,
    ReLU,
    Sigmoid,
    Step,
    TanH,
)
from dropbayes.covariances.pairs import Pairs

__all__ = [
    "Cosine",
    "Covariance",
    "Erf",
    "Features",
    "Identity",
    "Layer",
    "Pairs",
    "Quadrature",
    "RandomBias",
    "ReLU",
    "Sigmoid",
    "Step",
    "TanH",
]
