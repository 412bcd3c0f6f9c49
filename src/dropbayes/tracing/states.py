"""The state of a network: what its modules hold, and whether that has changed."""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import itertools
import operator
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type})
_MAX_DEPTH = 4
_COMPARED = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
# Flags are set by the view; state dictionaries and backward passes play no part in a forward pass.
_INTERNAL = frozenset({*nn.Module().__dict__, "_compiled_call_impl"})


class NetworkState:
    """The attributes, tensors, hooks and containers of all modules of a network, as far as a forward pass reads them.

    Plain values are compared by value, everything else by identity: an optimiser's step changes nothing.

    Args:
        net: The network.
        versions: Whether a write into a buffer, a plain tensor or an array counts as a change, too.
    """

    def __init__(self, net: nn.Module, *, versions: bool = False) -> None:
        self._versions = versions
        self._alive: list[weakref.ref[Any]] = []  # an identity counts as long as its object lives
        self._tokens = self._describe(net, None if versions else self._alive)  # a view lives as long as its state

        # Plain values are kept, so that their identity stays theirs; what else may change inside is named by module.
        self._kept: list[Any] = []
        self._deep: dict[int, list[str]] = {}
        for module in () if versions else _modules_of(net):
            own = [(key, value) for key, value in module.__dict__.items() if key not in _INTERNAL]
            self._kept += [value for _, value in own if value.__class__ in _PLAIN]
            self._deep[id(module.__dict__)] = [k for k, v in own if _may_change(v)]
        self._marks = [] if versions else self._mark(net)

    def holds(self, net: nn.Module) -> bool:
        """Whether nothing has changed."""
        marks = [] if self._versions else self._mark(net)
        if self._versions or marks != self._marks:
            if self._describe(net) != self._tokens:
                return False
            self._marks = marks
        return all(map(operator.is_not, map(operator.call, self._alive), itertools.repeat(None)))

    def _mark(self, net: nn.Module) -> list[Any]:
        """The identities of all that the modules hold, in one pass over their dictionaries."""
        modules, token = _modules_of(net), _Tokens(False, None)
        states = [module.__dict__ for module in modules]
        inner = itertools.chain.from_iterable(map(operator.itemgetter("_buffers", *_COMPARED), states))
        values = itertools.chain.from_iterable(map(dict.values, (*states, *filter(None, inner))))
        return [
            *torch_modules._global_forward_hooks,
            *torch_modules._global_forward_pre_hooks,
            *[id(module.__class__.forward) for module in modules],
            *map(id, values),
            *[token(state.get(key)) for state in states if (keys := self._deep.get(id(state))) for key in keys],
        ]

    def changes(self, net: nn.Module) -> list[tuple[str, str]]:
        """What has changed: the path of a module, and an attribute, or a buffer as "_buffers/name"."""
        now, paths = self._describe(net), [path for path, _ in net.named_modules()]
        changed = [
            (path, key)
            for path, before, after in zip(paths, self._tokens[1:], now[1:], strict=False)
            for key in before.keys() | after.keys()
            if before.get(key) != after.get(key) and key not in ("_parameters", _CLASS)
        ]
        return sorted(changed)

    def _describe(self, net: nn.Module, alive: list[Any] | None = None) -> list[Any]:
        """The hooks of all modules of the process, then a dictionary for each module."""
        token = _Tokens(self._versions, alive)
        described: list[Any] = [
            tuple(map(tuple, (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)))
        ]
        for module in _modules_of(net):
            state, kind = module.__dict__, module.__class__
            tokens: dict[str, Any] = {_CLASS: (id(kind), id(kind.forward))}
            for key, value in state.items():
                if key not in _INTERNAL and (value.__class__ not in _CONTAINERS or value):
                    tokens[key] = value if value.__class__ in _PLAIN else token(value)
            for name, buffer in state["_buffers"].items():
                tokens[f"_buffers/{name}"] = token(buffer)
            for key in _COMPARED:
                if inner := state[key]:
                    tokens[key] = tuple(inner), tuple(map(id, inner.values()))
                    token.keep(inner.values())
            described.append(tokens)
        return described


def _modules_of(net: nn.Module) -> list[nn.Module]:
    """All modules of a network, each once, in the order of `net.modules()`."""
    found, seen = [], set[int]()
    pending: list[nn.Module | None] = [net]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            if children := module.__dict__["_modules"]:
                pending.extend(reversed(children.values()))
    return found


_CLASS = "class"
_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple, deque})


class _Tokens:
    """Stand-ins for values that are equal if nothing changed."""

    def __init__(self, versions: bool, alive: list[Any] | None) -> None:
        self.versions, self.alive = versions, alive
        self.seen: set[int] = set()

    def __call__(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)  # its own idea of its class may cost a call of its own code
        if kind in _PLAIN:
            return value
        if id(value) in self.seen:
            return id(value)
        if issubclass(kind, Tensor):
            return (self._identity(value), version(value)) if self.versions else self._identity(value)
        if issubclass(kind, np.ndarray) and self.versions:
            return hashlib.blake2b(value.tobytes()).digest() if value.size else 0
        if issubclass(kind, (bytearray, array.array)):
            return bytes(value)
        if kind is types.MethodType:
            return id(value.__func__), id(value.__self__)
        if depth > _MAX_DEPTH:
            return id(value)
        if issubclass(kind, dict):
            self.seen.add(id(value))
            return tuple((self(k, depth + 1), self(v, depth + 1)) for k, v in value.items())
        if issubclass(kind, (list, tuple, deque)):
            self.seen.add(id(value))
            return tuple(self(item, depth + 1) for item in value)
        if issubclass(kind, (set, frozenset)):
            return frozenset(self(item, depth + 1) for item in value)
        if is_object(value):
            self.seen.add(id(value))
            return id(kind), *((key, self(item, depth + 1)) for key, item in vars(value).items())
        return self._identity(value)

    def _identity(self, value: Any) -> int:
        self.keep((value,))
        return id(value)

    def keep(self, values: Iterable[Any]) -> None:
        """Notes objects whose identity counts."""
        for value in values if self.alive is not None else ():
            with contextlib.suppress(TypeError):  # a built-in that cannot be referred to weakly
                cast(list[Any], self.alive).append(weakref.ref(value))


def _may_change(value: Any) -> bool:
    """Whether a value may hold something else than before and still be the same object."""
    if value.__class__ is tuple:
        return any(item.__class__ not in _PLAIN for item in value)
    return value.__class__ in _CONTAINERS or is_object(value)


def version(tensor: Tensor) -> int:
    """The number of writes into a tensor's memory so far; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def is_object(value: Any) -> bool:
    """Whether a value is a plain object of somebody's own class: an average, a context, a configuration."""
    kind = type(value)
    if not hasattr(value, "__dict__") or hasattr(kind, "__del__"):
        return False
    if issubclass(kind, (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, functools.partial)):
        return False
    module = kind.__module__.partition(".")[0]
    return module not in sys.stdlib_module_names and module not in ("torch", "numpy", "triton")


def cell_value(cell: types.CellType) -> Any:
    """What a variable of a closure holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
