"""Multi-layer perceptrons: plain `nn.Sequential` networks, whose profile can be read off their layers."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from dropbayes.sampling.inputs import split
from dropbayes.sampling.kernels import kernels_on
from dropbayes.sampling.profile import Profile
from dropbayes.tracing import RowLayout, Site

_ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.ReLU6, nn.Softsign,
)  # fmt: skip
_ONE_TENSOR = split(torch.empty(0))[1]


@dataclass(frozen=True)
class Perceptron:
    """The layers of a multi-layer perceptron in order, sequences flattened; those that do nothing are left out."""

    layers: tuple[nn.Module, ...]

    @property
    def profile(self) -> Profile:
        """The profile of the network, read off its layers."""
        sites, prefix, suffix, pass_bytes = list[Site](), 0.0, 0.0, 0
        for layer, following in zip(self.layers, (*self.layers[1:], None), strict=True):
            if isinstance(layer, nn.Dropout):
                before, number = "linear" if isinstance(following, nn.Linear) else None, len(sites)
                sites.append(Site(number, "", "dropout", float(layer.p), (1,), before, RowLayout(0, 1), number=number))
            elif isinstance(layer, nn.Linear):
                cost = 2.0 * layer.in_features * layer.out_features
                prefix, suffix = (prefix, suffix + cost) if sites else (prefix + cost, suffix)
                pass_bytes = max(pass_bytes, 4 * layer.out_features * layer.weight.dtype.itemsize)
        *_, last, final = (None, *self.layers)
        return Profile(
            sites=tuple(sites), left_out=(), prefix_cost=prefix, suffix_cost=suffix, pass_bytes=pass_bytes,
            suffix_bytes=pass_bytes, outputs=(RowLayout(0, 1),), structure=_ONE_TENSOR,
            last_layer=isinstance(final, nn.Linear) and isinstance(last, nn.Dropout) and last.p < 1,
        )  # fmt: skip

    @property
    def kernel_layers(self) -> Any:
        """The layers in the fused kernel's form; None if no kernel supports them."""
        kernels = kernels_on(next(w for layer in self.layers for w in layer.parameters()).device)
        return None if kernels is None else kernels.affine_layers(self.layers)


def as_perceptron(net: nn.Module, x: Tensor) -> Perceptron | None:
    """The layers of `net` if it is nothing but a plain perceptron that takes `x`; None if it does anything else."""
    # What calls the layers, and what they call, may have been replaced.
    homes = {nn.Module.__call__: torch_modules.__name__, F.dropout: F.__name__, F.linear: "torch._C._nn"}
    is_patched = any(function.__module__ != home for function, home in homes.items())
    if is_patched or torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return None
    layers, pending = list[nn.Module](), [net]
    width, taken = x.shape[1], (x.dtype, x.device)
    while pending:
        module = pending.pop()
        kind: Any = type(module)
        state = module.__dict__
        replaced = ("_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl", "forward", "train", "eval")
        of_class = getattr(vars(kind).get("forward"), "__module__", "") != kind.__module__
        if of_class or any(map(state.get, replaced)):
            return None
        if kind is nn.Sequential:
            pending.extend(reversed(state["_modules"].values()))
        elif kind is nn.Linear:
            weight = state["_parameters"].get("weight")
            sizes = state["in_features"], state["out_features"]
            found = None if weight is None else (weight.shape, weight.dtype, weight.device)
            if found != (sizes[::-1], *taken) or sizes[0] != width or 0 in sizes or "bias" in state["_buffers"]:
                return None
            layers.append(module)
            width = sizes[1]
        elif kind in _ACTIVATIONS or (kind is nn.Dropout and float(state["p"]) > 0):
            layers.append(module)
        elif kind not in (nn.Dropout, nn.Identity):
            return None
    return Perceptron(tuple(layers)) if nn.Linear in map(type, layers) else None
