r"""The evidence lower bound as a loss: the data's misfit under drawn weights plus their divergence from the prior."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.layers import Bernoulli, Prior, decays, input_layers, kl_from_density, kl_is_weight_decay, weight_layers
from dropbayes.layers.family import in_full_precision
from dropbayes.likelihoods import Likelihood, Quantiles
from dropbayes.runtime.validation import Array, check_n_data, check_type, to_tensor


@dataclass(frozen=True)
class Objective:
    r"""The bound on the evidence that `fit` optimises.

    Args:
        alpha: The α of an α-divergence in [0, 1] (Li and Gal 2017), estimated with ten draws per step; 0 is the
            evidence lower bound. See `negative_elbo`.
        learn_precision: Whether the τ of a `Gaussian`, one or one for each output, is trained with the network,
            starting from its value. The τ of the returned weights is `history.precision[history.best_epoch - 1]`.
    """

    alpha: float = 0.0
    learn_precision: bool = False


def kl_divergence(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None = None) -> Tensor:
    r"""The divergence $\mathrm{KL}(q(\omega) \| p(\omega))$ of a network's weights from their prior, a scalar.

    A layer of `dropbayes.layers` whose divergence is not a weight decay ($\sigma > 0$, a learned drop probability, a
    mixture) states its own: exact, or an upper bound. Any other weight layer is dropout, for which proposition 1 leaves
    $\tfrac{l^2 p}{2} \|\mathbf M\|^2 - QK\log l - Q\,\mathcal H(p)$ for weights and $\tfrac{l'^2}{2} \|\mathbf m\|^2 -
    K\log l'$ for biases [GG16, prop:KL_mixture_of_Gaussians, eq:L:GP-MC, eq:L:GP-MC-reg-lengthscale], and
    $-(\log\sigma + \tfrac12)$ per weight besides, which is infinite as $\sigma \to 0$ and left out.

    `keep_probs` are by module or parameter name: `dropbayes.layers.keep_probs(net, x)` finds them by tracing an input;
    by default they are read off the structure.
    """
    return divergence_of(net, prior=prior, keep_probs=keep_probs)()


def divergence_of(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None) -> Callable[[], Tensor]:
    """`kl_divergence` as a function of the network's current weights; its structure is read once."""
    decaying = list(decays(net, prior=prior, keep_probs=keep_probs))
    others: list[Any] = [(name, module) for name, module in weight_layers(net) if not kl_is_weight_decay(module)]
    if not others and not decaying:
        raise ValueError("`net` must have a weight layer to put the prior on; got a network without one.")
    first = input_layers(net, prior, keep_probs) if others else frozenset()
    layer_terms = [functools.partial(layer.kl, prior, name=name, first=name in first) for name, layer in others]
    # A bias that is a point, or dropped, under a prior that is not Gaussian.
    dense = [(d, d.density) for d in decaying if d.density is not None]
    decaying = [d for d in decaying if d.density is None]
    learned = [d for d in decaying if isinstance(d.length_scale, Tensor)]
    fixed = [(0.5 * d.coefficient, d) for d in decaying if not isinstance(d.length_scale, Tensor)]
    constant = sum(d.constant for _, d in fixed)

    def divergence() -> Tensor:
        # Host numbers are scalar factors, never tensors: a CUDA graph cannot capture a copy to the device.
        squares = [(half, in_full_precision(d.value).flatten()) for half, d in fixed if half]
        terms = [term() for term in layer_terms]
        for d, density in dense:
            active = in_full_precision(d.value)[:, None] / d.keep_prob
            terms.append(kl_from_density(Bernoulli(active, d.keep_prob), density))
        terms += [0.5 * d.coefficient * in_full_precision(d.value).square().sum() + d.constant for d in learned]
        terms += [half * (value @ value) for half, value in squares]
        if terms:
            return torch.stack(terms).sum() + constant
        return in_full_precision(next(net.parameters())).new_tensor(constant)

    return divergence


def negative_elbo(
    net: nn.Module,
    output: Tensor,
    y: Array,
    *,
    likelihood: Likelihood,
    prior: Prior,
    n_data: int,
    keep_probs: Mapping[str, float] | None = None,
    alpha: float = 0.0,
) -> Tensor:
    r"""The negative evidence lower bound per training row, $-\mathcal L_{\text{GP-VI}} / N$, from one mini-batch.

    $$-\frac 1M \sum_{n \in S} \log p(\mathbf y_n \mid \widehat{\mathbf y}_n) + \frac 1N \mathrm{KL}(q \| p)$$

    [GG16, eq:L:GP-VI, eq:L:GP-MC-reg-SVI], for a mini-batch $S$ of $M$ rows drawn uniformly from $N$. `output` is the
    network's in training mode, where dropout draws one distinct mask per row; with leading draw axes
    (`[draw, row, ...]`) it is averaged over the draws. Divided by $N$, so that the learning rate does not depend on
    the size of the data.

    When it is a bound: the data term is an unbiased estimate of the expected log-likelihood under training's masks, and
    the KL is exact for Gaussian families and $\sigma > 0$ and an upper bound for mixtures, so that the expectation of
    `-n_data * negative_elbo(...)` does not exceed $\log p(\mathbf Y \mid \mathbf X)$ of the network under `prior` where
    every layer has such a family. (Layers with learned probabilities draw relaxed masks in training, close to $q$;
    outputs drawn by `dropbayes.draws` are $q$'s own.) With $\sigma = 0$, that is with dropout, the KL is infinite and
    there is no bound (Hron, Matthews and Ghahramani 2018): the value is the limit less $-(\log\sigma + \tfrac12)$ per
    weight, so differences between networks of one shape are differences of bounds, and gradients are the bound's. Where
    length-scales are 1 and nothing is dropped, that is the log joint density of MAP.

    For `Gaussian(precision)` with $D$ outputs it is, term by term, the dropout loss [GG16, eq:L:dropout] under the
    identities of `dropbayes.layers`:

    $$\tau \Big( E + \sum_i \lambda_i \|\mathbf M_i\|^2 \Big) + \frac D2 \log \frac{2\pi}{\tau} + \frac CN,$$

    with $C$ of `dropbayes.layers.kl_constant`; for `Categorical` it is $E + \sum_i \lambda_i \|\mathbf M_i\|^2 +
    C/N$ with $\tau = 1$. $\tau$ and the length-scales may be tensors that require gradients.

    Args:
        net: The network that gave `output`.
        output: $\widehat{\mathbf y}$ of the mini-batch, `[..., row, *event]`.
        y: Targets of the mini-batch, `[row, *event]` or class labels `[row]`.
        likelihood: $p(\mathbf y \mid \widehat{\mathbf y})$.
        prior: The length-scales.
        n_data: $N$, the number of rows in the whole training set (not the mini-batch).
        keep_probs: As for `kl_divergence`.
        alpha: The $\alpha$ of an $\alpha$-divergence in [0, 1] (Li and Gal 2017): the misfit of a row is
            $-\tfrac1\alpha \log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)^\alpha$ over the draws of
            `output`, which must have a draw axis. 0 is the evidence lower bound; 1 fits the predictive density, and
            cures some of the bound's over-confidence. Not a bound for $\alpha > 0$.

    Example:
        >>> from dropbayes.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 1))
        >>> x, y = torch.zeros(4, 3), torch.zeros(4, 1)
        >>> loss = negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=Prior(length_scale=1.0), n_data=100)
        >>> loss.backward()
    """
    check_n_data(n_data)
    check_type("likelihood", likelihood, Likelihood, "say what the output means, as Gaussian(1.0) does")
    check_type("net", net, nn.Module, "be the network that gave `output`")
    check_type("output", output, Tensor, "be the network's output, a tensor")
    y = to_tensor(y, name="y").to(output.device)
    if not y.dim():
        raise ValueError(f"`y` must hold the targets of the mini-batch, one for each row; got the number {y.item():g}.")
    if len(y) > n_data:
        raise ValueError(f"`n_data` must count the whole training set; got {n_data!r} for {len(y)} rows of `y`.")
    misfit = row_misfit(likelihood, output, y, alpha=alpha).mean()
    return misfit + kl_divergence(net, prior=prior, keep_probs=keep_probs) / n_data


def row_misfit(likelihood: Likelihood, output: Tensor, y: Tensor, *, alpha: float = 0.0) -> Tensor:
    r"""The data term of `negative_elbo` per row, averaged over draws according to $\alpha$: `[row]`."""
    if not (hasattr(alpha, "__float__") and 0 <= alpha <= 1):
        raise ValueError(f"`alpha` must lie in [0, 1]; got {alpha!r}. 0 is the evidence lower bound.")
    # A density between quantiles has no bound where they meet: the loss of which they are the minimum takes its place.
    full = in_full_precision(output)
    rows = -likelihood.pinball_loss(full, y) if isinstance(likelihood, Quantiles) else likelihood.log_density(full, y)
    draws = rows.reshape(-1, len(y))
    if alpha == 0:
        return -draws.mean(0)
    if len(draws) < 2:
        raise ValueError("`output` must be [draw, row, ...] with two draws or more for `alpha` above 0.")
    return -(torch.logsumexp(alpha * draws, 0) - math.log(len(draws))) / alpha
