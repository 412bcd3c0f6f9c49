r"""The approximating distributions $q(\mathbf W)$ over a weight matrix: their sampling, moments and KL to the prior.

A matrix $\mathbf W$ is `[unit, column]`, $Q \times K$ in the paper, and acts as $\mathbf x \mathbf W$: a unit of the
input owns the weights $\mathbf w_q$ that leave it, and $q(\mathbf W) = \prod_q q(\mathbf w_q)$ for every family [GG16,
eq:variaitonal_dist_1]. The prior is $\mathcal N(0, l^{-2} \mathbf I)$ throughout. `kl` is exact or an upper
bound, so that the evidence lower bound computed from it remains a bound. $\sigma$ and $l$ may be scalar tensors, and
are then differentiated.
"""

from dropbayes.variational.dropout import Bernoulli, Concrete, kl_from_density
from dropbayes.variational.family import Family
from dropbayes.variational.gaussian import DiagonalGaussian, multiplicative_gaussian
from dropbayes.variational.mixture import Mixture

__all__ = [
    "Bernoulli",
    "Concrete",
    "DiagonalGaussian",
    "Family",
    "Mixture",
    "kl_from_density",
    "multiplicative_gaussian",
]
