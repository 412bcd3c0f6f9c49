r"""The weight decay that a prior implies for every parameter of a network."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution

from dropbayes.layers import structure
from dropbayes.layers.family import binary_entropy, is_zero, log
from dropbayes.layers.precision import Prior
from dropbayes.runtime.validation import check_keep_prob, check_n_data, check_number, check_positive, check_type
from dropbayes.tracing.views import check_modules


@dataclass(frozen=True)
class Decay:
    r"""A parameter under dropout and a Gaussian prior: its keep probability $p$ and its length-scale $l$."""

    layer: str
    module: nn.Module
    parameter: str
    keep_prob: float
    prior: Prior
    first: bool

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.parameter}".lstrip(".")

    @property
    def value(self) -> Tensor:
        r"""The stored $\theta$."""
        return structure.parameter_value(self.module, self.parameter)

    @property
    def length_scale(self) -> Any:
        r"""The length-scale of the active $\mathbf M = \theta/p$, a number or a scalar tensor; 0 for a flat prior."""
        if structure.is_bias(self.parameter):
            return self.prior.of_bias(self.layer, parameter=self.parameter, keep_prob=self.keep_prob)
        inputs = structure.fan_in(self.module, self.parameter, self.value)
        return self.prior.of_weight(
            self.layer, parameter=self.parameter, first=self.first, fan_in=inputs, keep_prob=self.keep_prob
        )

    @property
    def density(self) -> Distribution | None:
        """The prior of a bias that is not Gaussian: its divergence is no weight decay."""
        return self.prior.density_of_bias(self.layer, self.parameter) if structure.is_bias(self.parameter) else None

    @property
    def coefficient(self) -> Any:
        r"""$c$ in $\tfrac c2 \|\theta\|^2$, that is $p\,l^2\|\mathbf M\|^2/2$ [GG16, eq:L:GP-MC-reg-lengthscale]."""
        return self.length_scale**2 / self.keep_prob

    @property
    def constant(self) -> Any:
        r"""$-QK \log l - Q\,\mathcal H(p)$: the rest of the KL except $-QK(\log\sigma + \tfrac12)$."""
        scale, value = self.length_scale, self.value
        if is_zero(scale):
            return 0.0
        n_masks = structure.n_units(self.module, self.parameter, value)
        return -value.numel() * log(scale) - n_masks * binary_entropy(self.keep_prob)


def decays(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None = None) -> Iterator[Decay]:
    """Every parameter of `net` whose KL is a weight decay; a tied one once, with its smallest keep probability."""
    check_modules(net)
    check_type("prior", prior, Prior, "be a record Prior(...)")
    check_type("keep_probs", keep_probs, (Mapping, type(None)), "be a mapping from names to probabilities")
    given = dict(keep_probs or {})
    layers = dict(structure.weight_layers(net))
    if given or prior.per_layer:
        _check_names(net, layers, prior, given)
    inputs = structure.input_layers(net, prior, keep_probs)
    traced = given.keys() - layers.keys()  # parameter names: layers that the traced input did not reach are not guessed
    stated = {layer for layer, module in layers.items() if structure.states_keep_probs(module)}
    ordered = {} if traced or layers.keys() <= given.keys() | stated else structure.keep_probs_by_order(net)
    found: dict[int, Decay] = {}
    for layer, module in layers.items():
        for parameter in structure.layer_parameters(module):
            p = given.get(f"{layer}.{parameter}".lstrip("."))
            if p is None or structure.is_bias(parameter):
                before = given.get(layer, ordered.get(layer, structure.stated_keep_prob(module)))
                p = structure.parameter_keep_prob(module, parameter, before)
            if p is None or not structure.kl_is_weight_decay(module):
                continue
            check_keep_prob(p)
            value = structure.parameter_value(module, parameter)
            # A computed weight is another object each time it is read.
            key = id(value) if isinstance(value, nn.Parameter) else -len(found) - 1
            first = layer in inputs and structure.reads_input(module, parameter)
            known = found.setdefault(key, Decay(layer, module, parameter, p, prior, first))
            found[key] = replace(known, keep_prob=min(p, known.keep_prob))
    yield from found.values()


def _check_names(net: nn.Module, layers: Mapping[str, nn.Module], prior: Prior, given: Mapping[str, float]) -> None:
    parameters = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    for layer, module in layers.items():
        parameters.update(structure.qualified_names(layer, module))
    if unknown := sorted(given.keys() - layers.keys() - parameters):
        raise ValueError(f"`keep_probs` must name weight layers of `net`; got {unknown}. They are {sorted(layers)}.")
    if stated := sorted(name for name in given.keys() & layers.keys() if structure.states_keep_probs(layers[name])):
        rule = f"must not name layers that state their own dropout; got {stated}"
        raise ValueError(f"`keep_probs` {rule}. Change the layers.")
    if unknown := sorted(prior.per_layer.keys() - {name for name, _ in net.named_modules()} - parameters):
        raise ValueError(f"`prior.per_layer` must name layers or parameters of `net`; got {unknown}.")


def kl_coefficients(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None = None) -> dict[str, Any]:
    r"""The coefficient $c = l^2/p$ of every parameter: $\mathrm{KL}(q \| p) = \sum \tfrac c2 \|\theta\|^2 + C$.

    [GG16, prop:KL_mixture_of_Gaussians, eq:L:GP-MC]: for $\sigma \to 0$, with $C$ in `kl_constant`. $c = l'^2$ for a
    bias (over its $p$ where it is dropped too), $c = l^2 p$ when `prior.applies_to == "stored"`. Parameters outside
    weight layers (normalisation, tokens) have no prior: they are absent, as are layers whose KL is not a weight decay.
    A tied parameter counts once, with the smallest keep probability of its uses. `keep_probs` are by module or
    parameter name, from `keep_probs(net, x)` or by hand; missing ones are read off the structure.
    """
    return {decay.name: decay.coefficient for decay in decays(net, prior=prior, keep_probs=keep_probs)}


def kl_constant(net: nn.Module, *, prior: Prior, keep_probs: Mapping[str, float] | None = None) -> Any:
    r"""The $C$ of `kl_coefficients`: $-\sum (QK \log l + Q\,\mathcal H(p))$, the part of the KL without the weights.

    It contains the terms in length-scales and keep probabilities, so that bounds of networks that differ in them can be
    compared; $-QK(\log\sigma + \tfrac12)$, infinite for dropout and the same for all of one shape, is left out.
    """
    return sum((decay.constant for decay in decays(net, prior=prior, keep_probs=keep_probs)), 0.0)


def parameter_groups(
    net: nn.Module, *, precision: float, prior: Prior, n_data: int, keep_probs: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    r"""Optimiser groups whose `weight_decay` is $2\lambda/p^2 = l^2/(pN\tau)$, and $l'^2/(N\tau)$ for biases.

    That is $\lambda = l^2 p/(2N\tau)$ on $\mathbf M = \theta/p$ [GG16, eq:weightdecay_tau_relation]. They go with the
    loss $E = \tfrac{1}{2M}\sum_n \|\mathbf y_n - \widehat{\mathbf y}_n\|^2$ [GG16, eq:NN:reg] and so minimise
    `negative_elbo` for a Gaussian of this precision. With a loss that is the mean negative log-likelihood itself
    (softmax cross-entropy, or a Gaussian one that contains $\tau$) pass `precision=1`. Parameters without a prior get
    no decay. Use them with `torch.optim.SGD` or `Adam`, not `AdamW` (see `optimizer_weight_decay`). $\tau$ and the
    length-scales are numbers: learned ones need the loss itself, `negative_elbo`. `keep_probs` are as for
    `kl_coefficients`.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3))
        >>> groups = parameter_groups(net, precision=10.0, prior=Prior(length_scale=2.0), n_data=100)
        >>> [round(group["weight_decay"], 6) for group in groups]
        [0.004444, 0.004]
    """
    check_number("precision", precision)
    check_positive("precision", precision)
    check_n_data(n_data)
    layers, found = structure.weight_layers(net), list(decays(net, prior=prior, keep_probs=keep_probs))
    other = [f"{type(m).__name__} {name!r}" for name, m in layers if not structure.kl_is_weight_decay(m)]
    other += [f"{one.name!r}, computed from others" for one in found if not isinstance(one.value, nn.Parameter)]
    if other:
        remedy = "Add the KL to the loss instead: negative_elbo(net, output, y, likelihood=..., prior=..., n_data=...)"
        raise ValueError(f"`net` must hold plain parameters whose KL is a weight decay; got {other[0]}. {remedy}.")
    for decay in found:
        check_number("prior.length_scale", decay.coefficient)
    coefficients = {id(decay.value): decay.coefficient for decay in found}
    by_decay = defaultdict[float, list[nn.Parameter]](list)
    for parameter in net.parameters():
        by_decay[coefficients.get(id(parameter), 0.0) / (n_data * precision)].append(parameter)
    return [{"params": parameters, "weight_decay": rate} for rate, parameters in by_decay.items()]
