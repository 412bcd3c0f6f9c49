r"""Keep probabilities of the inputs of all weights, by tracing a forward pass.

The pass is that of `dropbayes.tracing`, in which dropout is not applied but recorded with its output. The record
follows the tensor through operations that preserve a mask: reshapes, elementwise products, non-linearities with
σ(0) = 0 [GG16, section "Insights"]. A product with a parameter ends the record, which gives the keep probability of its
input. (The factor 1/p passes only a positively homogeneous σ: after another one a kept unit's weight is θ, not θ/p.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dropbayes.layers.structure import (
    KeepProbs,
    is_bias,
    kl_is_weight_decay,
    layer_parameters,
    parameter_value,
    stated_keep_prob,
    weight_layers,
)
from dropbayes.tracing import Interception, Recorder, SiteNames
from dropbayes.tracing.operations import LOOKUPS
from dropbayes.tracing.views import check_modules


class _Reading(Recorder):
    """A recorder that also finds the weight layers whose input has passed no other weight layer.

    `weights` are their names by id, `layers` the layer of each parameter, `inputs` what the network is called with.
    """

    def __init__(
        self, names: SiteNames, weights: dict[int, str], layers: list[tuple[Tensor, str]], inputs: list[Tensor]
    ) -> None:
        super().__init__(names, weights=weights, every_dropout=True)
        self.freezes_statistics = True
        self.input_layers: set[str] = set()
        # By tensor: whether it holds values of the input, and the layers whose weights it holds.
        self._origins: Any = WeakIdKeyDictionary()
        for tensor, layer in layers:  # a tied weight belongs to several
            self._origins[tensor] = False, self._origins.get(tensor, (False, frozenset()))[1] | {layer}
        self._origins.update((tensor, (True, frozenset())) for tensor in inputs)

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        super().after(func, args, kwargs, result)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        origins = [self._origins[leaf] for leaf in leaves if leaf in self._origins]
        if not origins:
            return
        reads = func in LOOKUPS or any(of_input for of_input, _ in origins)
        before = frozenset().union(*(layers for of_input, layers in origins if of_input))
        weights = frozenset().union(*(layers for of_input, layers in origins if not of_input))
        if reads and not before:
            self.input_layers |= weights
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._origins[leaf] = reads, before | weights


def _read(net: nn.Module, x: Any) -> _Reading:
    check_modules(net)
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    # A computed weight (weight_norm) is computed once, so that it can be recognised by its identity.
    with torch.nn.utils.parametrize.cached(), torch.random.fork_rng(devices=[]), torch.no_grad():
        weights: dict[int, str] = {}
        layers: list[tuple[Tensor, str]] = []
        for layer, module in weight_layers(net):
            values = {parameter: parameter_value(module, parameter) for parameter in layer_parameters(module)}
            for parameter, value in values.items():
                if not is_bias(parameter):
                    weights.setdefault(id(value), f"{layer}.{parameter}".lstrip("."))  # a tied weight: its first name
            layers += [(value, layer) for value in (*values.values(), *module.parameters(recurse=False))]
        paths = {id(module): path for path, module in net.named_modules()}
        inputs = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
        reading = _Reading(SiteNames(paths), weights, layers, inputs)
        try:
            with Interception(reading):
                if isinstance(x, Mapping):
                    net(**x)
                else:
                    net(*x) if isinstance(x, (tuple, list)) else net(x)
        finally:
            for buffer, value in buffers:  # such as running statistics
                buffer.copy_(value)
    return reading


def trace(net: nn.Module, x: Any) -> list[tuple[str, float]]:
    r"""The uses of the weights of `net` on input `x`, in order: the parameter's name, and $p$ of its input.

    A weight used twice appears twice. Flags, buffers and the random state are not changed. `x` is one batch of the
    input: a tensor, a tuple of positional or a dict of named arguments.

    Example:
        >>> drop, fc = nn.Dropout(0.5), nn.Linear(3, 3)
        >>> trace(nn.Sequential(fc, nn.ReLU(), drop, fc), torch.ones(1, 3))
        [('0.weight', 1.0), ('0.weight', 0.5)]
    """
    return _read(net, x).uses


def keep_probs(net: nn.Module, x: Any) -> KeepProbs:
    r"""The keep probability $p$ with which the input of every weight of `net` is kept, by parameter name.

    Found by a forward pass of `x`, so registration order, functional dropout and a dropout module used in several
    places make no difference. A dropout that no weight multiplies (on a residual branch) counts for no weight. A
    weight used more than once has the smallest of its keep probabilities. Weights that the input does not reach are
    absent, and so are layers whose KL is not a weight decay. The result also knows which layers read the input, so that
    a `Prior` with a `hidden_length_scale` reaches the others. `x` is as for `trace`; one row suffices.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1))
        >>> keep_probs(net, torch.zeros(1, 2))
        {'0.weight': 1.0, '3.weight': 0.75}
    """
    reading = _read(net, x)
    decaying = [(layer, module) for layer, module in weight_layers(net) if kl_is_weight_decay(module)]
    names = {f"{layer}.{name}".lstrip(".") for layer, module in decaying for name in layer_parameters(module)}
    tables = [(layer, module) for layer, module in decaying if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    lookups = [(f"{layer}.weight".lstrip("."), stated_keep_prob(module)) for layer, module in tables]
    found: dict[str, float] = {}
    for name, keep_prob in (*reading.uses, *lookups):
        if name in names:
            found[name] = min(keep_prob, found.get(name, 1.0))
    return KeepProbs(found, frozenset(reading.input_layers))
