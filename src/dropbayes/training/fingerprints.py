"""The identity of a training run: a digest of everything that its weights depend on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["fingerprint"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def fingerprint(**parts: Any) -> str:
    """A digest of named values: every element of tensors, the architecture of networks, the code of functions.

    Examples:
        >>> fingerprint(seed=1) == fingerprint(seed=1), fingerprint(seed=1) == fingerprint(seed=2)
        (True, False)
    """
    digest = hashlib.sha256()
    _feed(digest, parts, ())
    return digest.hexdigest()


def _feed(digest: Any, value: Any, path: tuple[int, ...]) -> None:
    """Adds a value to the digest; `path` holds the objects it is part of, so that a cycle ends."""
    digest.update(f"<{type(value).__module__}.{type(value).__qualname__}".encode())
    if id(value) in path:
        return
    inner = (*path, id(value))
    if isinstance(value, _PLAIN):
        digest.update(repr(value).encode())
    elif isinstance(value, (Tensor, np.ndarray)):
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _feed(digest, (key, value[key]), inner)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            _feed(digest, item, inner)
    else:
        _feed(digest, _parts(value), inner)
    digest.update(b">")


def _parts(value: Any) -> Any:
    """The components of a network, a function or another object."""
    if isinstance(value, nn.Module):
        return _architecture(value)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        closure = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__qualname__, _code(value.__code__), value.__defaults__, value.__kwdefaults__, closure
    if isinstance(value, type):
        return value.__module__, value.__qualname__
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", None) or type(value).__qualname__


def _architecture(net: nn.Module) -> list[Any]:
    """Every module's class, settings and code, and the shapes of its tensors; training changes their values."""
    modules = []
    for name, module in net.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (*_PLAIN, tuple)) and key != "training" and not key.startswith("_")
        }
        forward = type(module).forward
        code = _code(forward.__code__) if isinstance(forward, types.FunctionType) else None
        modules.append((name, type(module), module.extra_repr(), settings, code))
    tensors = [(name, tuple(value.shape), value.dtype) for name, value in net.state_dict().items()]
    trained = [(name, parameter.requires_grad) for name, parameter in net.named_parameters()]
    return [modules, tensors, trained]


def _code(code: types.CodeType) -> Any:
    """The names and constants of a function, nested ones included, without its position in the file."""
    constants = [_code(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
    return code.co_names, code.co_varnames, constants, code.co_code
