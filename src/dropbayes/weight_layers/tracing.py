r"""Keep probabilities of the inputs of all weights, by tracing a forward pass.

The pass is that of `dropbayes.tracing`, in which dropout is not applied but recorded with its output. The record
follows the tensor through operations that preserve a mask: reshapes, elementwise products, non-linearities with
σ(0) = 0. A product with a parameter ends the record, which gives the keep probability of its input.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dropbayes.tracing import Interception, Recorder, SiteNames
from dropbayes.weight_layers.structure import (
    is_bias,
    kl_is_weight_decay,
    layer_parameters,
    parameter_value,
    stated_keep_prob,
    weight_layers,
)


@contextlib.contextmanager
def _preserve_state(net: nn.Module) -> Iterator[None]:
    """Restores buffers (running statistics) and the random state."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def trace(net: nn.Module, x: Any) -> list[tuple[str, float]]:
    r"""The uses of the weights of `net` on input `x`, in order: the parameter's name, and $p$ of its input.

    A weight used twice appears twice. Flags, buffers and the random state are not changed.

    Args:
        net: Any network.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments.

    Example:
        >>> drop, fc = nn.Dropout(0.5), nn.Linear(3, 3)
        >>> trace(nn.Sequential(fc, nn.ReLU(), drop, fc), torch.ones(1, 3))
        [('0.weight', 1.0), ('0.weight', 0.5)]
    """
    # A computed weight (weight_norm) is computed once, so that it can be recognised by its identity.
    with torch.nn.utils.parametrize.cached(), _preserve_state(net):
        names = {
            id(parameter_value(module, parameter)): f"{layer}.{parameter}".lstrip(".")
            for layer, module in reversed(list(weight_layers(net)))  # a tied weight has its first name
            for parameter in layer_parameters(module)
            if not is_bias(parameter)
        }
        paths = {id(module): path for path, module in net.named_modules()}
        recorder = Recorder(SiteNames(paths), weights=names, every_dropout=True)
        recorder.freezes_statistics = True
        with Interception(recorder):
            if isinstance(x, Mapping):
                net(**x)
            else:
                net(*x) if isinstance(x, (tuple, list)) else net(x)
    return recorder.uses


def keep_probs(net: nn.Module, x: Any) -> dict[str, float]:
    r"""The keep probability $p$ with which the input of every weight of `net` is kept, by parameter name.

    Found by a forward pass of `x`, so registration order, functional dropout and a dropout module used in several
    places make no difference. A dropout that no weight multiplies (on a residual branch) counts for no weight. A
    weight used more than once has the smallest of its keep probabilities. Weights that the input does not reach are
    absent, and so are layers whose KL is not a weight decay.

    Args:
        net: Any network; it is not changed.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments. One row suffices.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1))
        >>> keep_probs(net, torch.zeros(1, 2))
        {'0.weight': 1.0, '3.weight': 0.75}
    """
    layers = dict(weight_layers(net))
    by_parameter: dict[str, float] = {}
    for name, keep_prob in trace(net, x):
        by_parameter[name] = min(keep_prob, by_parameter.get(name, 1.0))
    for layer, module in layers.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and kl_is_weight_decay(module):
            by_parameter[f"{layer}.weight".lstrip(".")] = stated_keep_prob(module)
    decaying = {layer for layer, module in layers.items() if kl_is_weight_decay(module)}
    return {name: p for name, p in by_parameter.items() if _layer_of(name, layers) in decaying}


def complete_keep_probs(net: nn.Module, x: Any, given: Mapping[str, float] | None) -> dict[str, float]:
    """The traced keep probabilities of every weight whose layer `given` does not name, and `given`."""
    given = dict(given or {})
    try:
        traced = keep_probs(net, x)
    except Exception as error:  # code that fails inside a function mode or on few rows
        warnings.warn(f"`net` could not be traced ({error}): its dropout is read off its structure.", stacklevel=3)
        return given
    layers = dict(weight_layers(net))
    return {name: p for name, p in traced.items() if _layer_of(name, layers) not in given} | given


def _layer_of(parameter: str, layers: Mapping[str, nn.Module]) -> str:
    owner = parameter.rpartition(".")[0]
    while owner not in layers and owner:
        owner = owner.rpartition(".")[0]
    return owner
