"""The state of a network's modules: attributes, tensors, hooks and containers, and whether they have changed."""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TENSORS = ("_parameters", "_buffers")
_PLAIN = (bool, int, float, str, type(None))


class ModuleState:
    """The state of a module except its training flag, arranged for a fast comparison before every prediction."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)  # a strong reference would keep it alive
        attributes = {key: value for key, value in module.__dict__.items() if key not in _IGNORED}
        filled = {key: value for key, value in attributes.items() if isinstance(value, _CONTAINERS) and value}
        plain = {key: value for key, value in filled.items() if isinstance(value, dict) and key != "_modules"}
        plain = {key: value for key, value in plain.items() if not any(map(_is_nested, value.values()))}
        self.keys = frozenset(module.__dict__)
        self.children = tuple(module._modules), tuple(map(id, module._modules.values()))
        self.entries = [(key, tuple(value), tuple(value.values())) for key, value in plain.items()]
        others = filled.keys() - plain.keys() - {"_modules"}
        self.contents = [(key, tuple(_contents(attributes[key]))) for key in others]
        self.empty = [key for key, value in attributes.items() if isinstance(value, _CONTAINERS) and not value]
        self.names = [key for key in attributes if key not in filled and key != "_modules"]
        self.values = [_by_identity(attributes[key]) for key in self.names]

    def holds(self) -> bool:
        """Whether the module is unchanged."""
        module = self.module()
        if module is None:
            return False
        attributes = module.__dict__
        if attributes.keys() != self.keys or any(map(attributes.__getitem__, self.empty)):
            return False
        children = module._modules
        if (tuple(children), tuple(map(id, children.values()))) != self.children:
            return False
        for key, names, values in self.entries:
            value = attributes[key]
            if type(value) not in _DICTS or tuple(value) != names or not all(map(operator.is_, value.values(), values)):
                return False
        for key, known in self.contents:
            value = attributes[key]
            if not isinstance(value, _CONTAINERS) or not _is_same(tuple(_contents(value)), known):
                return False
        now = list(map(attributes.__getitem__, self.names))
        return all(map(operator.is_, now, self.values)) or all(map(_is_same, map(_by_identity, now), self.values))


_DICTS = (dict, OrderedDict)
_COMPARED = (dict, list, set)


class Identities:
    """The objects that all modules of a network hold, compared one by one in a few calls.

    Equal identities mean an unchanged network; others may still be equal in value, which `ModuleState` decides.
    """

    def __init__(self, attributes: list[dict[str, Any]]) -> None:
        containers = [value for one in attributes for value in one.values() if isinstance(value, _COMPARED)]
        self.empty, self.filled = [c for c in containers if not c], [*attributes, *(c for c in containers if c)]
        self.mappings = [container for container in self.filled if isinstance(container, dict)]
        self.lengths = list(map(len, self.filled))
        self.objects = tuple(self._objects())

    def _objects(self) -> Iterator[Any]:
        """Keys and elements, then values."""
        return itertools.chain(*self.filled, *map(dict.values, self.mappings))

    def hold(self) -> bool:
        """Whether every module holds the same objects."""
        same_lengths = not any(self.empty) and list(map(len, self.filled)) == self.lengths
        return same_lengths and all(map(operator.is_, self._objects(), self.objects))


def identities_of(net: nn.Module) -> Identities | None:
    """The identities of a network's objects; None if holding them could keep the network itself alive."""
    attributes = [module.__dict__ for module in net.modules()]
    held = (value for one in attributes for key, value in one.items() if key != "_modules")
    return None if any(map(_may_refer, held)) else Identities(attributes)


def _may_refer(value: Any) -> bool:
    """Whether an attribute may refer back to the network, or changes without being replaced."""
    if isinstance(value, (*_COMPARED, tuple)):
        return any(map(_may_refer, value.values() if isinstance(value, dict) else value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None
    return isinstance(value, (nn.Module, types.MethodType, functools.partial, deque))


def _is_nested(value: Any) -> bool:
    """Whether an entry is compared by its contents, or must not be kept alive."""
    return isinstance(value, (nn.Module, tuple, *_PLAIN, *_CONTAINERS)) and value is not None


_IGNORED = ("training", "_compiled_call_impl")


def _by_identity(value: Any) -> Any:
    """The value to compare: for a module its id, so that it is not kept alive."""
    return id(value) if isinstance(value, nn.Module) else value


def snapshot(module: nn.Module) -> dict[str, Any]:
    """The state of a module: attributes, and the entries of its dictionaries of tensors, hooks and containers."""
    entries: dict[str, Any] = {}
    for key, value in module.__dict__.items():
        if key == "_modules":
            entries[key] = tuple((name, id(child)) for name, child in value.items())
        elif key in _HOOKS:
            entries[key] = tuple(value)
        elif key in _TENSORS:
            for name, tensor in value.items():
                entries[f"{key}/{name}"] = tensor
                if key == "_buffers" and tensor is not None:
                    entries[f"{key}/{name}/version"] = _version(tensor)
        elif isinstance(value, _CONTAINERS):
            entries[key] = tuple(_contents(value))
        elif isinstance(value, nn.Module):
            entries[key] = id(value)
        else:
            entries[key] = value
    for key in _IGNORED:
        entries.pop(key, None)
    return entries


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _contents(value: Any) -> Iterator[Any]:
    for item in value.items() if isinstance(value, dict) else value:
        for one in item if isinstance(item, tuple) else (item,):
            yield id(one) if isinstance(one, nn.Module) else one


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    if before.keys() == after.keys() and all(_is_same(value, after[key]) for key, value in before.items()):
        return []
    keys = before.keys() | after.keys()
    changed = [key for key in keys if key not in before or key not in after or not _is_same(before[key], after[key])]
    return sorted({key.removesuffix("/version") for key in changed})


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(_is_same, a, b)))
    if isinstance(a, _CONTAINERS):
        return type(a) is type(b) and not a and not b
    if isinstance(a, types.MethodType) and isinstance(b, types.MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return type(a) is type(b) and isinstance(a, _PLAIN) and a == b
