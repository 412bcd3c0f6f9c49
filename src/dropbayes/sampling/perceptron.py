"""Multi-layer perceptrons: plain `nn.Sequential` networks, whose anatomy can be read off their layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy, RowLayout, Site
from dropbayes.sampling.fusion import fused_kernels
from dropbayes.sampling.trees import split
from dropbayes.sampling.views import has_global_hooks

_ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.ReLU6, nn.Softsign, nn.Identity,
)  # fmt: skip
_ONE_TENSOR = split(torch.empty(0))[1]
_COMPACT_WIDTH = 256  # below this width the copies cost more than leaving units out saves
_COMPACT_DROP_PROB = 0.25  # likewise below this share of dropped units


@dataclass(frozen=True)
class Perceptron:
    """The layers of a multi-layer perceptron in order, sequences flattened, dropout of probability 0 left out."""

    layers: tuple[nn.Module, ...]

    @property
    def anatomy(self) -> Anatomy:
        """The anatomy of the network, read off its layers."""
        return _anatomy(tuple([_size(layer) for layer in self.layers]))

    @functools.cached_property
    def kernel_layers(self) -> Any:
        """The layers in the fused kernel's form; None if no kernel supports them."""
        kernels = fused_kernels()
        return None if kernels is None else kernels.affine_layers(self.layers)

    @property
    def is_wide(self) -> bool:
        """Whether leaving dropped units out of the products saves time."""
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        drops = [layer.p for layer in self.layers if isinstance(layer, nn.Dropout)]
        inner = [layer.in_features for layer in linears[1:]]
        return bool(inner) and min(inner) >= _COMPACT_WIDTH and min(drops, default=0.0) >= _COMPACT_DROP_PROB


def _size(layer: nn.Module) -> tuple[int, int, int] | float | None:
    """A linear layer's inputs, outputs and bytes of a number; a dropout's probability; None for an activation."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, layer.weight.element_size()
    return float(layer.p) if isinstance(layer, nn.Dropout) else None


@functools.lru_cache(maxsize=64)
def _anatomy(layers: tuple[tuple[int, int, int] | float | None, ...]) -> Anatomy:
    sites: list[Site] = []
    prefix = suffix = 0.0
    pass_bytes = 0
    for index, layer in enumerate(layers):
        if isinstance(layer, float):
            is_last = index + 1 == len(layers)
            before = None if is_last or not isinstance(layers[index + 1], tuple) else "linear"
            sites.append(Site(len(sites), "", "dropout", layer, (1,), before, RowLayout(0, 1)))
        elif layer is not None:
            n_inputs, n_outputs, n_bytes = layer
            cost = 2.0 * n_inputs * n_outputs
            prefix, suffix = (prefix, suffix + cost) if sites else (prefix + cost, suffix)
            pass_bytes = max(pass_bytes, 4 * n_outputs * n_bytes)
    last_drop_prob = layers[-2] if len(layers) > 1 and isinstance(layers[-1], tuple) else None
    return Anatomy(
        sites=tuple(sites), left_out=(), off_calls=frozenset(), lowered=frozenset(), prefix_cost=prefix,
        suffix_cost=suffix, pass_bytes=pass_bytes, suffix_bytes=pass_bytes, outputs=(RowLayout(0, 1),),
        structure=_ONE_TENSOR,
        last_layer=isinstance(last_drop_prob, float) and last_drop_prob < 1, rows_together=True, host_random=False,
        seeds_itself=False, stateful=False,
    )  # fmt: skip


def perceptron(net: nn.Module, x: Tensor) -> Perceptron | None:
    """The layers of `net` if it is nothing but a plain perceptron that takes `x`; None if it does anything else."""
    if has_global_hooks():
        return None
    layers: list[nn.Module] = []
    pending: list[nn.Module] = [net]
    while pending:
        module = pending.pop()
        state = module.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state.get("_compiled_call_impl")
            or "forward" in state
        ):
            return None
        if type(module) is nn.Sequential:
            pending.extend(reversed(module._modules.values()))
        elif type(module) is nn.Dropout:
            layers += [module] if module.p > 0 else []
        elif type(module) is nn.Linear or type(module) in _ACTIVATIONS:
            layers.append(module)
        else:
            return None
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    fits = bool(linears) and linears[0].in_features == x.shape[1] and all(_accepts(layer, x) for layer in linears)
    return Perceptron(tuple(layers)) if fits else None


def _accepts(layer: nn.Linear, x: Tensor) -> bool:
    """Whether a layer's weights have the device and dtype of the rows."""
    return layer.weight.dtype == x.dtype and layer.weight.device == x.device
