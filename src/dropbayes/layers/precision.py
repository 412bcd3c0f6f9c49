r"""The identity that ties model precision $\tau$, weight decay $\lambda$ and prior length-scale $l$ into one number.

With the prior $\mathcal N(0, l^{-2} \mathbf I)$ on the weights and dropout of keep probability $p$ before them, the
negative evidence lower bound divided by $\tau N$ is the dropout loss $E + \sum_i \lambda_i \|\mathbf M_i\|^2$
[GG16, eq:L:dropout, eq:L:GP-MC-reg-lengthscale] exactly when $\lambda = l^2 p / (2 N \tau)$. $\tau$, $\lambda$ and $l$
may be scalar tensors, and are then differentiated; an optimiser's `weight_decay` must be a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dropbayes.runtime.validation import check_choice, check_keep_prob, check_n_data, check_number, check_positive

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributions import Distribution


def model_precision(*, weight_decay: Any, keep_prob: float, length_scale: Any, n_data: int) -> Any:
    r"""The model precision $\tau = l^2 p / (2 N \lambda)$ [GG16, eq:tau_weightdecay_relation].

    Args:
        weight_decay: $\lambda > 0$, the factor of $\|\mathbf M\|^2$ in the loss [GG16, eq:L:dropout]. A torch
            optimiser's `weight_decay` is twice this number. On the stored $\theta = p\,\mathbf M$ of torch the factor
            is $\lambda/p^2$; with $\lambda$ itself on $\theta$, $l$ is that of `Prior(applies_to="stored")`.
        keep_prob: $p$, the probability that a unit before this layer is kept.
        length_scale: $l$, the prior is $\mathcal N(0, l^{-2} \mathbf I)$. For a layer after the first one the paper
            takes $l^2 = K$, its number of inputs [GG16, eq:L:GP-MC-reg-lengthscale].
        n_data: $N$, the number of training rows.

    Example:
        >>> model_precision(weight_decay=1e-6, keep_prob=0.9, length_scale=2.0, n_data=1000)
        1800.0
    """
    check_positive("weight_decay", weight_decay)
    return _counterpart(weight_decay, keep_prob, length_scale, n_data)


def weight_decay(*, precision: Any, keep_prob: float, length_scale: Any, n_data: int) -> Any:
    r"""The weight decay $\lambda = l^2 p / (2 N \tau)$ of the loss $E + \sum \lambda \|\mathbf M\|^2$.

    [GG16, eq:weightdecay_tau_relation]. The inverse of `model_precision`, which has the other arguments; for biases
    that are not dropped $p$ is 1, and $l$ is $l'$. `precision` is $\tau > 0$, in units of 1/y²: 1 for classification,
    and for any loss that is the mean negative log-likelihood itself.

    Example:
        >>> weight_decay(precision=1800.0, keep_prob=0.9, length_scale=2.0, n_data=1000)
        1e-06
    """
    check_positive("precision", precision)
    return _counterpart(precision, keep_prob, length_scale, n_data)


def _counterpart(value: Any, keep_prob: float, length_scale: Any, n_data: int) -> Any:
    r"""The precision of a weight decay, or the weight decay of a precision: $\tau \lambda = l^2 p / (2 N)$."""
    check_positive("length_scale", length_scale)
    check_keep_prob(keep_prob)
    check_n_data(n_data)
    return length_scale**2 * keep_prob / (2 * n_data * value)


def optimizer_weight_decay(*, precision: float, keep_prob: float, length_scale: float, n_data: int) -> float:
    r"""The `weight_decay` of a torch optimiser that means $\lambda$: $2\lambda = l^2 p / (N \tau)$.

    `torch.optim.SGD` and `Adam` add $w\,\theta$ to the gradient, the gradient of $\tfrac{w}{2}\|\theta\|^2$. `AdamW`
    shrinks the weights separately from the gradient and optimises no such loss.

    Example:
        >>> optimizer_weight_decay(precision=1800.0, keep_prob=0.9, length_scale=2.0, n_data=1000)
        2e-06
    """
    check_number("precision", precision)
    check_number("length_scale", length_scale)
    return 2 * weight_decay(precision=precision, keep_prob=keep_prob, length_scale=length_scale, n_data=n_data)


@dataclass(frozen=True)
class Prior:
    r"""The Gaussian prior $\mathcal N(0, l^{-2} \mathbf I)$ of a network's weights, with its own $l'$ for biases.

    It is the prior of the weights $\mathbf W$ that act in a forward pass. Torch scales kept units by $1/p$: a stored
    $\theta$ acts as $\mathbf M = \theta / p$ when it is kept, so that $\lambda\|\mathbf M\|^2$ [GG16, eq:L:dropout] is
    $\lambda/p^2\,\|\theta\|^2$. The authors' experiments put $\lambda$ on the stored $\theta$ instead; that is
    `applies_to="stored"`: the prior $\mathcal N(0, (lp)^{-2} \mathbf I)$ of the active weights, everywhere.

    Args:
        length_scale: $l > 0$ of the weights that read the network's input, and of all when `hidden_length_scale` is
            None. This and the other length-scales may be scalar tensors, to be learned with the bound.
        bias_length_scale: $l' \ge 0$ of every bias; None takes `length_scale`, 0 leaves biases free (a flat prior).
        hidden_length_scale: $l$ of the weights that read other weights' outputs; `"fan_in"` is the paper's $l^2 = K$,
            the number of inputs of each unit [GG16, eq:L:GP-MC-reg-lengthscale].
        per_layer: Length-scales by module or parameter name (`"2"`, `"out.bias"`), which override all others. A name
            that the network does not have raises an error when the prior is applied.
        applies_to: `"active"` or `"stored"`, see above.
        bias_distribution: The density $p(b)$ of every bias in place of a Gaussian one, on the whole line, such as
            `torch.distributions.Laplace(0.0, 1.0)`. It is no weight decay: it needs the objective itself.
    """

    length_scale: float | Tensor = 1.0
    bias_length_scale: float | Tensor | None = None
    hidden_length_scale: float | Tensor | Literal["fan_in"] | None = None
    per_layer: Mapping[str, float | Tensor] = field(default_factory=dict, hash=False)
    applies_to: Literal["active", "stored"] = "active"
    bias_distribution: Distribution | None = None

    def __post_init__(self) -> None:
        check_positive("length_scale", self.length_scale)
        if self.bias_length_scale is not None:
            check_positive("bias_length_scale", self.bias_length_scale, allow_zero=True)
        if self.bias_distribution is not None and str(self.bias_distribution.support) != "Real()":
            rule = "be a density on the whole line, where biases may go"
            remedy = "Take one such as Normal, Laplace or StudentT"
            raise ValueError(f"`bias_distribution` must {rule}; got {self.bias_distribution!r}. {remedy}.")
        hidden = self.hidden_length_scale
        if isinstance(hidden, str) and hidden != "fan_in":
            raise ValueError(f'`hidden_length_scale` must be a number or "fan_in"; got {hidden!r}.')
        if hidden not in (None, "fan_in"):
            check_positive("hidden_length_scale", hidden)
        if not hasattr(self.per_layer, "items"):
            raise TypeError(f'`per_layer` must map names to length-scales, as {{"2": 1.0}}; got {self.per_layer!r}.')
        for name, value in self.per_layer.items():
            check_positive(f"per_layer[{name!r}]", value, allow_zero=True)
        check_choice("applies_to", self.applies_to, ("active", "stored"))

    def of_weight(
        self, layer: str = "", *, parameter: str = "", first: bool = True, fan_in: int = 1, keep_prob: float = 1.0
    ) -> Any:
        r"""The $l$ of one active weight matrix whose inputs are kept with probability $p$."""
        hidden = math.sqrt(fan_in) if self.hidden_length_scale == "fan_in" else self.hidden_length_scale
        default: Any = self.length_scale if first or hidden is None else hidden
        scale = self.per_layer.get(f"{layer}.{parameter}".lstrip("."), self.per_layer.get(layer, default))
        return scale if self.applies_to == "active" else scale * keep_prob

    def of_bias(self, layer: str = "", *, parameter: str = "", keep_prob: float = 1.0) -> Any:
        r"""The $l'$ of one active bias vector; $p$ is 1 unless biases are dropped too."""
        if self.density_of_bias(layer, parameter) is not None:
            rule = "be Gaussian for a weight decay or a process of the network"
            remedy = "Train with fit or negative_elbo; its process is made of processes.RandomBias"
            raise ValueError(f"`prior` must {rule}; got the `bias_distribution` {self.bias_distribution!r}. {remedy}.")
        default = self.length_scale if self.bias_length_scale is None else self.bias_length_scale
        scale = self.per_layer.get(f"{layer}.{parameter}".lstrip("."), default)
        return scale if self.applies_to == "active" else scale * keep_prob

    def density_of_bias(self, layer: str, parameter: str) -> Distribution | None:
        """The density of one bias vector where it is not Gaussian: `bias_distribution`, unless a name overrides it."""
        return None if f"{layer}.{parameter}".lstrip(".") in self.per_layer else self.bias_distribution
