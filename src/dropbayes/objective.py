r"""The evidence lower bound as a loss: the data's misfit under drawn weights plus their divergence from the prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Likelihood
from dropbayes.precision import Prior
from dropbayes.weight_layers import kl_coefficients, kl_is_weight_decay, weight_layers

__all__ = ["kl_divergence", "negative_elbo"]


def kl_divergence(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None = None) -> Tensor:
    r"""The divergence $\mathrm{KL}(q(\omega) \| p(\omega))$ of a network's weights from their prior, a scalar.

    A layer of `dropbayes.layers` whose divergence is not a weight decay (a learnt drop probability, a mixture) states
    its own. Any other weight layer is dropout, for which proposition 1 leaves, up to a constant,
    $\tfrac{l^2 p}{2} \|\mathbf M\|^2$ for weights and $\tfrac{l'^2}{2} \|\mathbf m\|^2$ for biases
    [GG16, prop:KL_mixture_of_Gaussians, eq:L:GP-MC, eq:L:GP-MC-reg-lengthscale].

    Args:
        net: Any network; see `dropbayes.precision.keep_probs_by_order` for how its keep probabilities are found.
        prior: The length-scales.
        keep_probs: Keep probabilities by module name where the structure does not tell.
    """
    terms: list[Tensor] = []
    weights: list[float] = []
    stated: set[str] = set()
    module: Any
    for position, (layer, module) in enumerate(weight_layers(net)):
        if not kl_is_weight_decay(module):
            terms.append(module.kl(prior, name=layer, first=position == 0))
            weights.append(1.0)
            stated.update(f"{layer}.{parameter}".lstrip(".") for parameter, _ in module.named_parameters())
    parameters = dict(net.named_parameters(remove_duplicate=False))  # a tied weight under any of its names
    for name, coefficient in kl_coefficients(net, prior=prior, keep_probs=keep_probs).items():
        if name not in stated:
            flat = parameters[name].flatten()
            terms.append(flat @ flat)
            weights.append(0.5 * coefficient)
    if not terms:
        raise ValueError("`net` must have a weight layer to put the prior on; got a network without one.")
    values = torch.stack(terms)
    return values @ values.new_tensor(weights)


def negative_elbo(
    net: nn.Module,
    output: Tensor,
    y: Tensor,
    *,
    likelihood: Likelihood,
    prior: Prior,
    n_data: int,
    keep_probs: Mapping[str, float] | None = None,
) -> Tensor:
    r"""The negative evidence lower bound per training row, an unbiased estimate of $-\mathcal L_{\text{GP-VI}} / N$.

    $$-\frac 1M \sum_{n \in S} \log p(\mathbf y_n \mid \widehat{\mathbf y}_n) + \frac 1N \mathrm{KL}(q \| p)$$

    [GG16, eq:L:GP-VI, eq:L:GP-MC-reg-SVI], for a mini-batch $S$ of $M$ rows drawn uniformly from $N$. `output` is the
    network's in training mode, where dropout draws one distinct mask per row; with leading draw axes
    (`[draw, row, ...]`) it is averaged over the draws. Divided by $N$, so that the learning rate does not depend on
    the size of the data; the bound itself is `-n_data * negative_elbo(...)`, and its data term is $N/M$ times the sum
    over the mini-batch. For `Gaussian(precision)` with $D$ outputs it is, term by term, the dropout loss
    [GG16, eq:L:dropout] under the identities of `dropbayes.precision`:

    $$\tau \Big( E + \sum_i \lambda_i \|\mathbf M_i\|^2 \Big) + \frac D2 \log \frac{2\pi}{\tau},$$

    and for `Categorical` it is $E + \sum_i \lambda_i \|\mathbf M_i\|^2$ with $\tau = 1$. The KL leaves out what is
    constant for dropout of fixed probability and $\sigma$; layers whose KL is no weight decay put in all of theirs.

    Args:
        net: The network that gave `output`.
        output: $\widehat{\mathbf y}$ of the mini-batch, `[..., row, *event]`.
        y: Targets of the mini-batch, `[row, *event]` or class labels `[row]`.
        likelihood: $p(\mathbf y \mid \widehat{\mathbf y})$.
        prior: The length-scales.
        n_data: $N$, the number of rows in the whole training set (not the mini-batch).
        keep_probs: Keep probabilities by module name where the network's structure does not tell.

    Example:
        >>> from dropbayes.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 1))
        >>> x, y = torch.zeros(4, 3), torch.zeros(4, 1)
        >>> loss = negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=Prior(length_scale=1.0), n_data=100)
        >>> loss.backward()
    """
    if n_data < 1:
        raise ValueError(f"`n_data` must be at least 1, the number of training rows; got {n_data!r}.")
    if len(y) > n_data:
        raise ValueError(
            f"`n_data` must count the whole training set; got {n_data!r}, fewer than the {len(y)} rows of `y`."
        )
    misfit = -likelihood.log_density(output, y).mean()
    return misfit + kl_divergence(net, prior=prior, keep_probs=keep_probs) / n_data
