"""Functions of torch that are written in Python, run so that the calls inside them are intercepted."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.utils._pytree import PyTree

from dropbayes.tracing.operations import Operation
from dropbayes.tracing.sources import RandomMode


def _without_dispatch(func: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function of torch without its dispatch to modes, so that they intercept the calls inside it."""
    scope = {**func.__globals__}
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = lambda *_: False
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_COMPOSITES = {func: _without_dispatch(func) for func in (F.multi_head_attention_forward, F.gumbel_softmax)}


def run_intercepted(mode: RandomMode, func: Operation, *args: Any, **kwargs: Any) -> PyTree:
    """A composite function of torch: run with the mode on, so that its random calls are intercepted."""
    with mode:
        return _COMPOSITES[func](*args, **kwargs)
