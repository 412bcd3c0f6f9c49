"""Multi-layer perceptrons: plain `nn.Sequential` networks, whose profile can be read off their layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.inputs import split
from dropbayes.sampling.kernels import kernels_on
from dropbayes.sampling.profile import Profile
from dropbayes.tracing import RowLayout, Site
from dropbayes.tracing.views import has_global_hooks

_ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.ReLU6, nn.Softsign, nn.Identity,
)  # fmt: skip
_WITHOUT_SETTINGS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Softsign, nn.Identity)
_ONE_TENSOR = split(torch.empty(0))[1]


Form = tuple[tuple[Any, ...], ...]
"""The settings of each layer besides its weights: its class, then a linear layer's sizes or a dropout's probability."""


@dataclass(frozen=True)
class Perceptron:
    """The layers of a multi-layer perceptron in order, sequences flattened, dropout of probability 0 left out."""

    layers: tuple[nn.Module, ...]
    form: Form

    @property
    def profile(self) -> Profile:
        """The profile of the network, read off its layers."""
        return _profile_of(self.form)

    @property
    def kernel_layers(self) -> Any:
        """The layers in the fused kernel's form; None if no kernel supports them."""
        kernels = kernels_on(next(w for layer in self.layers for w in layer.parameters()).device)
        return None if kernels is None else kernels.affine_layers(self.layers)


def _profile_of(form: Form) -> Profile:
    """The profile of a perceptron of this form."""
    sites: list[Site] = []
    prefix = suffix = 0.0
    pass_bytes = 0
    for index, (kind, *settings) in enumerate(form):
        if kind is nn.Dropout:
            before = "linear" if index + 1 < len(form) and form[index + 1][0] is nn.Linear else None
            number = len(sites)
            sites.append(Site(number, "", "dropout", settings[0], (1,), before, RowLayout(0, 1), number=number))
        elif kind is nn.Linear:
            n_inputs, n_outputs, dtype, _ = settings
            cost = 2.0 * n_inputs * n_outputs
            prefix, suffix = (prefix, suffix + cost) if sites else (prefix + cost, suffix)
            pass_bytes = max(pass_bytes, 4 * n_outputs * dtype.itemsize)
    last = form[-2][1] if len(form) > 1 and form[-1][0] is nn.Linear and form[-2][0] is nn.Dropout else None
    return Profile(
        sites=tuple(sites), left_out=(), prefix_cost=prefix, suffix_cost=suffix, pass_bytes=pass_bytes,
        suffix_bytes=pass_bytes, outputs=(RowLayout(0, 1),), structure=_ONE_TENSOR,
        last_layer=last is not None and last < 1,
    )  # fmt: skip


def as_perceptron(net: nn.Module, x: Tensor) -> Perceptron | None:
    """The layers of `net` if it is nothing but a plain perceptron that takes `x`; None if it does anything else."""
    if has_global_hooks():
        return None
    layers: list[nn.Module] = []
    form: list[tuple[Any, ...]] = []
    width, taken = x.shape[1], (x.dtype, x.device)
    pending: list[nn.Module] = [net]
    while pending:
        module = pending.pop()
        kind: Any = type(module)
        state = module.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state.get("_compiled_call_impl")
            or "forward" in state
        ):
            return None
        if kind is nn.Sequential:
            pending.extend(reversed(state["_modules"].values()))
        elif kind is nn.Linear:
            weight, bias = state["_parameters"].get("weight"), state["_parameters"].get("bias")
            sizes = state["in_features"], state["out_features"]
            if (
                weight is None
                or not weight.numel()
                or "bias" in state["_buffers"]
                or sizes[0] != width
                or weight.shape != sizes[::-1]
                or (weight.dtype, weight.device) != taken
            ):
                return None
            layers.append(module)
            form.append((kind, *sizes, weight.dtype, bias is not None))
            width = sizes[1]
        elif kind is nn.Dropout:
            drop_prob = float(state["p"])
            if drop_prob > 0:
                layers.append(module)
                form.append((kind, drop_prob))
        elif kind in _ACTIVATIONS:
            layers.append(module)
            form.append((kind, None if kind in _WITHOUT_SETTINGS else module.extra_repr()))
        else:
            return None
    if not any(kind is nn.Linear for kind, *_ in form):
        return None
    return Perceptron(tuple(layers), tuple(form))
