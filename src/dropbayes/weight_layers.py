r"""The weight layers of a network: their dropout, their number of inputs, and the weight decay their prior implies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dropbayes.precision import Prior
from dropbayes.runtime.validation import check_keep_prob, check_n_data, check_positive

__all__ = [
    "is_bias",
    "is_weight_layer",
    "keep_probs_by_order",
    "kl_coefficients",
    "kl_is_weight_decay",
    "parameter_groups",
    "weight_layers",
]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_weight_layer(module: nn.Module) -> bool:
    """Whether `module` multiplies its input by a weight matrix of its own (linear, convolution, recurrent, table)."""
    # Asked of the class: on a module, an attribute that is not there is slow to miss.
    if hasattr(type(module), "parameter_keep_probs"):
        return True
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):
        return True
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):  # whose weights, of any shape, multiply element by element
        return False
    weight = module._parameters.get("weight")
    return isinstance(weight, nn.UninitializedParameter) or (weight is not None and weight.dim() >= 2)


def kl_is_weight_decay(module: Any) -> bool:
    """Whether a weight layer's KL is, up to a constant, a multiple of its squared weights: all but some of `layers`."""
    return module.kl_is_weight_decay if hasattr(type(module), "kl_is_weight_decay") else True


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
    sources: tuple[Any, ...] = (module, *hooks)
    return next((source.keep_prob for source in sources if hasattr(type(source), "keep_prob")), None)


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
    return weight.shape[0] if "nf" in module.__dict__ else weight[0].numel()


def _parameter_keep_prob(module: Any, parameter: str, keep_prob: float) -> float | None:
    """The keep probability of one parameter of a weight layer; None for a parameter without a prior."""
    if hasattr(type(module), "parameter_keep_probs"):
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
        check_keep_prob(keep_prob)
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
    check_positive("precision", precision)
    check_n_data(n_data)
    for name, module in weight_layers(net):
        if not kl_is_weight_decay(module):
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
