"""The state of a network: what its modules hold, and whether that has changed."""

from __future__ import annotations

import argparse
import array
import dataclasses
import enum
import functools
import hashlib
import itertools
import operator
import sys
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from dropbayes.tracing.watch import storage

PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type})
MAX_DEPTH = 8  #: How deep the containers and objects of a module are followed.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GROUPS = ("_parameters", "_modules", "_buffers", *_HOOKS)
# Flags are set by the view; state dictionaries and backward passes play no part in a forward pass.
BUILTIN = frozenset({*nn.Module().__dict__, "_compiled_call_impl"})


class NetworkState:
    """The attributes, tensors, hooks and containers of all modules of a network, as far as a forward pass reads them.

    Plain values are compared by value, everything else by identity: an optimiser's step changes nothing. With
    `versions`, a write into a buffer, a plain tensor or an array counts as a change, too.
    """

    def __init__(self, net: nn.Module, *, versions: bool = False) -> None:
        self._versions = versions
        self._alive: list[Callable[[], Any]] = []  # an identity counts as long as its object lives
        self._references: list[Any] = [] if versions else [weakref.ref(module) for module in net.modules()]
        self._remember(self._describe(net, None if versions else self._alive))  # a view lives as long as its state

    def _remember(self, tokens: list[Any]) -> None:
        self._tokens = tokens  # with the plain values themselves, so that no other takes the identity of one
        self._identities = self._identify()
        tensors = (t for m in self._references for t in (*m()._parameters.values(), *m()._buffers.values()))
        self._tensors = [weakref.ref(tensor) for tensor in tensors if tensor is not None]
        held_by = zip(self._references, tokens[1:], strict=not self._versions)
        self._mutable = [(module, token) for module, token in held_by if _is_mutable(module(), token)]

    def holds(self, net: nn.Module) -> bool:
        """Whether nothing has changed."""
        if not all(map(operator.is_not, map(operator.call, self._alive), itertools.repeat(None))):
            return False
        if self._references and self._identify() == self._identities:  # as nearly always, and in half the time
            token = _Tokens(False, None)
            if all(self._describe_module(module(), token) == tokens for module, tokens in self._mutable):
                return True
        now = self._describe(net)
        if is_same := now == self._tokens:
            self._remember(now)
        return is_same

    def writes(self) -> int:
        """How often the parameters and buffers were written to so far, by an optimiser, say."""
        return sum(version(tensor) for reference in self._tensors if (tensor := reference()) is not None)

    def changes(self, net: nn.Module, written: Collection[int] = ()) -> list[tuple[str, str]]:
        """What has changed: the path of a module, and an attribute, or a buffer as "_buffers/name".

        Memory that was `written`, by address, counts as changed: a write to `tensor.data` is not among its versions.
        Hooks that refer to nothing, and the flag by which they are registered once, do not: a view may keep them.
        """
        described = zip(net.named_modules(), self._tokens[1:], self._describe(net, written=written)[1:], strict=False)
        changed = [
            (path, key, module.__dict__.get(key), before.get(key))
            for (path, module), before, after in described
            for key in before.keys() | after.keys()
            if before.get(key) != after.get(key) and key != "class"
        ]
        adds = [key in _HOOKS and _only_adds(value, before) for _, key, value, before in changed]
        raises = [value is True for _, _, value, _ in changed]
        if any(adds) and any(raises):
            changed = [one for one, *is_kept in zip(changed, adds, raises, strict=True) if not any(is_kept)]
        return sorted((path, key) for path, key, _, _ in changed)

    def _identify(self) -> list[Any]:
        """The names of all that the modules hold, and the identities of what a forward pass may read."""
        found: list[Any] = [_process_hooks()]
        for reference, tokens in zip(self._references, self._tokens[1:], strict=not self._versions):
            module = reference()
            kind, state = module.__class__, module.__dict__
            found += (*state, *map(id, (kind, kind.forward, *map(state.get, tokens))))
            for key in filter(state.get, _GROUPS):
                found += state[key]
                found += map(id, state[key].values())
        return found

    def _describe(self, net: nn.Module, alive: list[Any] | None = None, written: Collection[int] = ()) -> list[Any]:
        """The hooks of all modules of the process, then a dictionary for each module."""
        token = _Tokens(self._versions, alive, written)
        return [_process_hooks(), *(self._describe_module(module, token) for module in net.modules())]

    def _describe_module(self, module: nn.Module, token: _Tokens) -> dict[str, Any]:
        kind = module.__class__
        state = module.__dict__ | held(module)[1] if hasattr(kind, "__slots__") else module.__dict__
        tokens: dict[str, Any] = {"class": (id(kind), id(kind.forward))}
        for key in state.keys() - BUILTIN:
            value = state[key]
            if value.__class__ in PLAIN:
                tokens[key] = value
            elif value.__class__ not in _CONTAINERS or value:
                tokens[key] = token(value)
        for key in filter(state.get, _GROUPS):
            if key == "_buffers" and self._versions:
                tokens |= {f"{key}/{name}": token(buffer) for name, buffer in state[key].items()}
                continue
            # What the hooks of a view hold is not written back: there, their identity counts alone.
            stand_in = token if key in _HOOKS and not self._versions else id
            tokens[key] = tuple(state[key]), tuple(map(stand_in, state[key].values()))
        if token.alive is not None:
            token.keep((kind, kind.forward, *itertools.chain(*(state[key].values() for key in _GROUPS))))
        return tokens


def _only_adds(hooks: dict[int, Any], before: tuple[tuple[int, ...], tuple[int, ...]] | None) -> bool:
    """Whether hooks are those of before, by identity, and functions that close over plain values alone."""
    identities, held = before[1] if before else (), list(hooks.values())
    added = held[len(identities) :]
    if tuple(map(id, held[: len(identities)])) != identities or {*map(type, added)} - {types.FunctionType}:
        return False
    read = itertools.chain(*((*map(cell_value, f.__closure__ or ()), *(f.__defaults__ or ())) for f in added))
    return PLAIN.issuperset(map(type, read))


def _process_hooks() -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)))


def _is_mutable(module: nn.Module, tokens: dict[str, Any]) -> bool:
    """Whether a module holds what can change and stay the same object; its slots count as such."""
    if hasattr(module.__class__, "__slots__") or any(module.__dict__[key] for key in _HOOKS):
        return True
    own = ((tokens.get(key), value) for key, value in module.__dict__.items() if key not in BUILTIN)
    return any(token is not value and token != id(value) for token, value in own)


_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple, deque})


class _Tokens:
    """Stand-ins for values that are equal if nothing changed."""

    def __init__(self, versions: bool, alive: list[Any] | None, written: Collection[int] = ()) -> None:
        self.versions, self.alive, self.written = versions, alive, written
        self.seen: set[int] = set()

    def __call__(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)  # its own idea of its class may cost a call of its own code
        if kind in PLAIN or (kind is tuple and set(map(type, value)) <= PLAIN):
            return value
        if id(value) in self.seen:
            return id(value)
        if issubclass(kind, Tensor):
            if not self.versions:
                return self._identity(value)
            memory = storage(value)  # `tensor.data = other` gives the same object other memory
            return self._identity(value), version(value), memory, memory in self.written
        if issubclass(kind, np.ndarray) and self.versions:
            return hashlib.blake2b(value.tobytes()).digest() if value.size else 0
        if issubclass(kind, (bytearray, array.array)):
            return bytes(value)
        if depth > MAX_DEPTH:
            return self._identity(value)
        if kind is types.MethodType:
            return self(value.__func__, depth + 1), self(value.__self__, depth + 1)
        if kind is functools.partial:
            return tuple(self(part, depth + 1) for part in (value.func, value.args, value.keywords))
        if kind is types.FunctionType:  # a view copies the owners of methods that it closes over, and containers
            read = filter(lambda one: callable(one) or holds_modules(one), map(cell_value, value.__closure__ or ()))
            return self._identity(value), *(self(one, depth + 1) for one in read)
        self.seen.add(id(value))
        if issubclass(kind, dict):
            return tuple((self(k, depth + 1), self(v, depth + 1)) for k, v in value.items())
        if issubclass(kind, (list, tuple, deque)):
            return tuple(self(item, depth + 1) for item in value)
        if issubclass(kind, (set, frozenset)):
            return frozenset(self(item, depth + 1) for item in value)
        if is_object(value):
            items = (item for part in held(value) for item in part.items())
            return id(kind), *((key, self(item, depth + 1)) for key, item in items)
        return self._identity(value)

    def _identity(self, value: Any) -> int:
        self.keep((value,))
        return id(value)

    def keep(self, values: Iterable[Any]) -> None:
        """Notes objects whose identity counts."""
        for value in values if self.alive is not None else ():
            try:
                cast(list[Any], self.alive).append(weakref.ref(value))
            except TypeError:  # a slice, a number of NumPy: no other can take its place while it is kept
                cast(list[Any], self.alive).append(lambda value=value: (value,))


def description(value: object) -> object:
    """What a value holds, in a form that is equal as long as nothing is written into it."""
    return _Tokens(True, None)(value)


def version(tensor: Tensor) -> int:
    """The number of writes into a tensor's memory so far; 0 for an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def is_object(value: Any) -> bool:
    """Whether a value is a namespace, or a plain object of somebody's own class: an average, a configuration."""
    kind = type(value)
    if not (hasattr(value, "__dict__") or hasattr(kind, "__slots__")) or hasattr(kind, "__del__"):
        return False
    if issubclass(kind, (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, functools.partial, enum.Enum)):
        return False
    module = kind.__module__.partition(".")[0]
    foreign = module not in sys.stdlib_module_names and module not in ("torch", "numpy", "triton")
    plain = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
    made_at_run_time = kind.__module__ == "types" and dataclasses.is_dataclass(kind)
    return foreign or kind in plain or made_at_run_time


def holds_modules(value: Any) -> bool:
    """Whether a value is or holds modules, or weights, of which a view has its own."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else [value]
    kinds = (nn.Module, nn.Parameter, weakref.ref, types.MethodType, functools.partial)
    return any(isinstance(item, kinds) for item in items)


def held(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an object holds: in its dictionary, and in the slots of its class."""
    state = object.__getstate__(value)
    plain, slots = state if isinstance(state, tuple) else (state, {})
    return plain or {}, slots


def cell_value(cell: types.CellType) -> Any:
    """What a variable of a closure holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
