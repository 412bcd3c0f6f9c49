"""Views of a network: what runs in its place, so that the network itself is never touched.

A view is made of new module objects over the same parameters, buffers and hooks, with training flags of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


def checked_network(net: Any) -> nn.Module:
    """The plain module behind `net`, out of its parallel or compiled hull; an error where it cannot be looked into."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"`net` must be a torch.nn.Module; got {type(net).__name__}.")
    if isinstance(net, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return checked_network(net.module)
    if hasattr(net, "_orig_mod"):  # torch.compile's hull: draws run the module it was made from
        return checked_network(net._orig_mod)
    scripted = [name or "(network)" for name, m in net.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise TypeError(
            f"`net` must be an ordinary module: {scripted[0]} is scripted or traced, which hides its operations (and "
            "its dropout). Pass the module it was made from."
        )
    return net


def view(net: nn.Module, raised: frozenset[type] = frozenset()) -> nn.Module:
    """The network as new module objects over the same tensors and hooks: in evaluation but for `raised` classes."""
    seen: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            return copy(module.module)
        if hasattr(module, "_orig_mod"):
            return copy(cast(nn.Module, module._orig_mod))
        if id(module) in seen:
            return seen[id(module)]
        clone = object.__new__(type(module))
        seen[id(module)] = clone
        clone.__dict__.update(module.__dict__)
        clone.__dict__["training"] = type(module) in raised
        clone.__dict__["_compiled_call_impl"] = None
        if clone.training:  # a training branch may write to buffers
            clone.__dict__["_buffers"] = {k: b if b is None else b.clone() for k, b in module._buffers.items()}
        clone.__dict__["_modules"] = {k: m if m is None else copy(m) for k, m in module._modules.items()}
        return clone

    return copy(net)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch.compile switched off inside it: compiled code could not be intercepted."""
    # Nothing can have been compiled before the compiler was loaded, which takes seconds.
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
