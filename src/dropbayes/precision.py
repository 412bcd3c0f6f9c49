r"""The identity that ties model precision $\tau$, weight decay $\lambda$ and prior length-scale $l$ into one number.

With the prior $\mathcal N(0, l^{-2} \mathbf I)$ on the weights and dropout of keep probability $p$ before them, the
negative evidence lower bound divided by $\tau N$ is the dropout loss $E + \sum_i \lambda_i \|\mathbf M_i\|^2$
[GG16, eq:L:dropout, eq:L:GP-MC-reg-lengthscale] exactly when $\lambda = l^2 p / (2 N \tau)$.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

__all__ = [
    "Prior",
    "keep_probs_by_order",
    "kl_coefficients",
    "model_precision",
    "optimizer_weight_decay",
    "parameter_groups",
    "weight_decay",
]


def _check_positive(name: str, value: float, *, allow_zero: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 or (allow_zero and value == 0))):
        rule = "a finite number, zero or more" if allow_zero else "a positive finite number"
        raise ValueError(f"`{name}` must be {rule}; got {value!r}.")


def _check_keep_prob(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(
            f"`keep_prob` must lie in (0, 1]; got {value!r}. It is the paper's p, the probability that a unit stays: "
            "one minus the `p` of torch.nn.Dropout."
        )


def _check_n_data(value: float) -> None:
    if not (math.isfinite(value) and value >= 1):
        raise ValueError(f"`n_data` must be at least 1, the number of training rows; got {value!r}.")


def model_precision(*, weight_decay: float, keep_prob: float, length_scale: float, n_data: int) -> float:
    r"""The model precision $\tau = l^2 p / (2 N \lambda)$ [GG16, eq:tau_weightdecay_relation].

    Args:
        weight_decay: $\lambda > 0$, the factor of $\|\mathbf M\|^2$ in the loss [GG16, eq:L:dropout]. A torch
            optimiser's `weight_decay` is twice this number.
        keep_prob: $p$, the probability that a unit before this layer is kept.
        length_scale: $l$, the prior is $\mathcal N(0, l^{-2} \mathbf I)$. For a layer after the first one the paper
            takes $l^2 = K$, its number of inputs [GG16, eq:L:GP-MC-reg-lengthscale].
        n_data: $N$, the number of training rows.

    Example:
        >>> model_precision(weight_decay=1e-6, keep_prob=0.9, length_scale=2.0, n_data=1000)
        1800.0
    """
    _check_positive("weight_decay", weight_decay)
    _check_positive("length_scale", length_scale)
    _check_keep_prob(keep_prob)
    _check_n_data(n_data)
    return length_scale**2 * keep_prob / (2 * n_data * weight_decay)


def weight_decay(*, precision: float, keep_prob: float, length_scale: float, n_data: int) -> float:
    r"""The weight decay $\lambda = l^2 p / (2 N \tau)$ of the loss $E + \sum \lambda \|\mathbf M\|^2$.

    [GG16, eq:weightdecay_tau_relation]. The inverse of `model_precision`.

    Args:
        precision: $\tau > 0$, in units of 1/y². For classification, and for any loss that is the mean negative
            log-likelihood itself, take 1.
        keep_prob: $p$, the probability that a unit before this layer is kept (1 for a bias that is not dropped).
        length_scale: $l$ (for a layer after the first one the paper has $l^2 = K$; for biases $l'$).
        n_data: $N$, the number of training rows.

    Example:
        >>> weight_decay(precision=1800.0, keep_prob=0.9, length_scale=2.0, n_data=1000)
        1e-06
    """
    _check_positive("precision", precision)
    _check_positive("length_scale", length_scale)
    _check_keep_prob(keep_prob)
    _check_n_data(n_data)
    return length_scale**2 * keep_prob / (2 * n_data * precision)


def optimizer_weight_decay(*, precision: float, keep_prob: float, length_scale: float, n_data: int) -> float:
    r"""The `weight_decay` of a torch optimiser that means $\lambda$: $2\lambda = l^2 p / (N \tau)$.

    `torch.optim.SGD` and `Adam` add $w\,\theta$ to the gradient, the gradient of $\tfrac{w}{2}\|\theta\|^2$. `AdamW`
    shrinks the weights apart from the gradient and so optimises no such loss.

    Example:
        >>> optimizer_weight_decay(precision=1800.0, keep_prob=0.9, length_scale=2.0, n_data=1000)
        2e-06
    """
    return 2 * weight_decay(precision=precision, keep_prob=keep_prob, length_scale=length_scale, n_data=n_data)


@dataclass(frozen=True)
class Prior:
    r"""The Gaussian prior $\mathcal N(0, l^{-2} \mathbf I)$ of a network's weights, with its own $l'$ for biases.

    Torch scales what dropout keeps by $1/p$: a stored weight $\theta$ acts as $\mathbf M = \theta / p$ when it is
    kept, and $\theta$ is its mean. `describes` says which of the two the length-scale speaks of. The default,
    `"mean"`, puts $\lambda = l^2 p / (2N\tau)$ on the stored $\theta$, as the authors' experiments do; `"kept"` is the
    paper's derivation to the letter, $\lambda\|\theta/p\|^2$. They differ by $l \to l\,p$.

    Args:
        length_scale: $l > 0$ of the first weight layer, and of all when `following_length_scale` is None.
        bias_length_scale: $l' \ge 0$ of every bias; None takes `length_scale`, 0 leaves biases free (a flat prior).
        following_length_scale: $l$ of the weight layers after the first; `"fan_in"` is the paper's $l^2 = K$, the
            number of inputs of each unit [GG16, eq:L:GP-MC-reg-lengthscale].
        per_layer: Length-scales by module or parameter name (`"2"`, `"out.bias"`), before all others.
        describes: `"mean"` or `"kept"`, see above.

    Example:
        >>> Prior(length_scale=0.01, bias_length_scale=0.0).bias_length_scale
        0.0
    """

    length_scale: float = 1.0
    bias_length_scale: float | None = None
    following_length_scale: float | Literal["fan_in"] | None = None
    per_layer: Mapping[str, float] = field(default_factory=dict, hash=False)
    describes: Literal["mean", "kept"] = "mean"

    def __post_init__(self) -> None:
        _check_positive("length_scale", self.length_scale)
        if self.bias_length_scale is not None:
            _check_positive("bias_length_scale", self.bias_length_scale, allow_zero=True)
        if self.following_length_scale not in (None, "fan_in"):
            _check_positive("following_length_scale", self.following_length_scale)  # type: ignore[arg-type]
        for name, value in self.per_layer.items():
            _check_positive(f"per_layer[{name!r}]", value, allow_zero=True)
        if self.describes not in ("mean", "kept"):
            raise ValueError(f'`describes` must be "mean" or "kept"; got {self.describes!r}.')

    def of_weight(self, layer: str = "", *, parameter: str = "", first: bool = True, fan_in: int = 1) -> float:
        r"""The $l$ of one weight matrix."""
        for name in (f"{layer}.{parameter}".lstrip("."), layer):
            if name in self.per_layer:
                return self.per_layer[name]
        if first or self.following_length_scale is None:
            return self.length_scale
        return math.sqrt(fan_in) if self.following_length_scale == "fan_in" else self.following_length_scale

    def of_bias(self, layer: str = "", *, parameter: str = "") -> float:
        r"""The $l'$ of one bias vector."""
        name = f"{layer}.{parameter}".lstrip(".")
        if name in self.per_layer:
            return self.per_layer[name]
        return self.length_scale if self.bias_length_scale is None else self.bias_length_scale

    def of_kept(self, length_scale: float, keep_prob: float) -> float:
        r"""The length-scale of the kept value $\mathbf M = \theta / p$ that `length_scale` implies."""
        return length_scale * keep_prob if self.describes == "mean" else length_scale


# --- reading a network ---------------------------------------------------------------------------------------------

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_weight_layer(module: nn.Module) -> bool:
    """Whether `module` multiplies its input by a weight matrix of its own (linear, convolution, recurrent, table)."""
    if hasattr(module, "parameter_keep_probs"):
        return True
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):
        return True
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):  # whose weights, of any shape, multiply element by element
        return False
    weight = module._parameters.get("weight")
    return isinstance(weight, nn.UninitializedParameter) or (weight is not None and weight.dim() >= 2)


def is_bias(parameter: str) -> bool:
    """Whether a weight layer adds its parameter of this name rather than multiplying by it (`bias_hh_l0`)."""
    return "bias" in parameter.split(".")[-1]


def weight_layers(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The weight layers of `net` in registration order, less the parts of one (an attention's `out_proj`)."""
    inside: set[nn.Module] = set()
    for name, module in net.named_modules():
        if module not in inside and is_weight_layer(module):
            inside.update(module.modules())
            yield name, module


def _own_keep_prob(module: nn.Module) -> float | None:
    """The keep probability a layer states itself or one of its hooks (`add_dropout`) states for it."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for source in (module, *hooks):
        keep_prob = getattr(source, "keep_prob", None)
        if isinstance(keep_prob, float):
            return keep_prob
    return None


def keep_probs_by_order(net: nn.Module) -> dict[str, float]:
    r"""The keep probability $p$ before every weight layer of `net`, read off its structure.

    A layer's own statement comes first (the layers of `dropbayes.layers` and networks made by `add_dropout`). Else a
    layer takes the `nn.Dropout` modules registered between the preceding weight layer and itself, which is exact for
    `nn.Sequential` and for modules that register their parts in the order of use; with none it takes 1. Dropout called
    as a function, or registered once and used in several places, cannot be seen this way: name such layers in the
    `keep_probs=` argument of `parameter_groups`, `kl_coefficients` and `negative_elbo`.

    Example:
        >>> keep_probs_by_order(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1)))
        {'0': 1.0, '3': 0.75}
    """
    layers = dict(weight_layers(net))
    found: dict[str, float] = {}
    pending = 1.0
    for name, module in net.named_modules():
        if name in layers:
            own = _own_keep_prob(module)
            found[name] = pending if own is None else own
            pending = 1.0
        elif isinstance(module, _DROPOUTS):
            pending *= 1.0 - module.p
    return found


def _fan_in(module: nn.Module, weight: torch.Tensor) -> int:
    """The paper's K: how many inputs each unit of the layer adds up."""
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return weight.shape[0] // module.groups * weight[0, 0].numel()
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 1  # a lookup adds up one row
    # A class outside torch.nn (the Conv1D of GPT-2) may keep its matrix as inputs x outputs, and then says nf.
    return weight.shape[0] if hasattr(module, "nf") else weight[0].numel()


def _parameter_keep_prob(module: Any, parameter: str, keep_prob: float) -> float | None:
    """The keep probability of one parameter of a weight layer; None for a parameter without a prior."""
    if hasattr(module, "parameter_keep_probs"):
        return module.parameter_keep_probs().get(parameter)
    if isinstance(module, nn.RNNBase) and parameter.startswith("weight"):
        if parameter.startswith("weight_hh"):
            return 1.0
        # torch applies an RNN's own dropout between its stacked layers: to the inputs of every layer but the first.
        return keep_prob if parameter.startswith("weight_ih_l0") else 1.0 - float(module.dropout)
    # Dropout before an attention reaches its input projections only; a cell's hidden state is not its input.
    return 1.0 if is_bias(parameter) or parameter in ("weight_hh", "out_proj.weight") else keep_prob


def kl_coefficients(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None = None) -> dict[str, float]:
    r"""The coefficient $c = l^2 p$ of every weight and bias: $\mathrm{KL}(q \| p) = \sum \tfrac c2 \|\theta\|^2 + C$.

    [GG16, prop:KL_mixture_of_Gaussians, eq:L:GP-MC]: for $\sigma \to 0$ and up to a constant. $c = l'^2$ for a bias
    (times its $p$ where it is dropped too), $c = l^2/p$ when `prior.describes == "kept"`. Parameters outside weight
    layers (normalisation, tokens) have no prior: they are absent. A tied parameter counts once.

    Args:
        net: Any network; see `keep_probs_by_order` for what is read off its structure.
        prior: The length-scales.
        keep_probs: Keep probabilities by module name, before what the structure says.
    """
    given = dict(keep_probs or {})
    layers = dict(weight_layers(net))
    unknown = sorted(given.keys() - layers.keys())
    if unknown:
        raise ValueError(f"`keep_probs` must name weight layers of `net`; got {unknown}. They are {sorted(layers)}.")
    for keep_prob in given.values():
        _check_keep_prob(keep_prob)
    coefficients: dict[str, float] = {}
    seen: set[int] = set()
    by_layer = keep_probs_by_order(net) | given
    for position, (layer, module) in enumerate(layers.items()):
        for parameter, value in module.named_parameters():
            if id(value) in seen:
                continue
            seen.add(id(value))
            p = _parameter_keep_prob(module, parameter, by_layer[layer])
            if p is None:
                continue
            if is_bias(parameter):
                scale = prior.of_bias(layer, parameter=parameter)
            else:
                fan_in = _fan_in(module, value)
                scale = prior.of_weight(layer, parameter=parameter, first=position == 0, fan_in=fan_in)
            # p/2 l² ‖M‖² with M = θ/p, where the length-scale of M is l·p or l.
            coefficients[f"{layer}.{parameter}".lstrip(".")] = prior.of_kept(scale, p) ** 2 / p if p > 0 else 0.0
    return coefficients


def parameter_groups(
    net: nn.Module,
    *,
    precision: float,
    prior: Prior,
    n_data: int,
    keep_probs: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    r"""Optimiser groups whose `weight_decay` is $2\lambda = l^2 p/(N\tau)$ for every weight, $l'^2/(N\tau)$ for biases.

    They go with the loss $E = \tfrac{1}{2M}\sum_n \|\mathbf y_n - \widehat{\mathbf y}_n\|^2$ [GG16, eq:NN:reg] and so
    minimise `negative_elbo` for a Gaussian of this precision. With a loss that is the mean negative log-likelihood
    itself (softmax cross-entropy, or a Gaussian one that contains $\tau$) pass `precision=1`. Parameters without a
    prior get no decay. Use them with `torch.optim.SGD` or `Adam`, not `AdamW` (see `optimizer_weight_decay`).

    Args:
        net: Any network; `keep_probs_by_order` says how the dropout before each layer is found.
        precision: $\tau$.
        prior: The length-scales, per layer where wanted.
        n_data: $N$, the number of training rows.
        keep_probs: Keep probabilities by module name where the structure does not tell.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3))
        >>> groups = parameter_groups(net, precision=10.0, prior=Prior(length_scale=2.0), n_data=100)
        >>> [group["weight_decay"] for group in groups]
        [0.0036, 0.004]
    """
    _check_positive("precision", precision)
    _check_n_data(n_data)
    for name, module in weight_layers(net):
        if not getattr(module, "kl_is_weight_decay", True):
            raise ValueError(
                f"`net` must hold layers whose KL is a weight decay; got {type(module).__name__} {name!r}. "
                "Add the KL to the loss instead: negative_elbo(net, output, y, likelihood=..., prior=..., n_data=...)."
            )
    every_name = dict(net.named_parameters(remove_duplicate=False))
    coefficients = {
        id(every_name[name]): coefficient
        for name, coefficient in kl_coefficients(net, prior=prior, keep_probs=keep_probs).items()
    }
    by_decay: dict[float, list[nn.Parameter]] = {}
    for parameter in net.parameters():
        decay = coefficients.get(id(parameter), 0.0) / (n_data * precision)
        by_decay.setdefault(decay, []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in by_decay.items()]
