"""Whether a network's code reads nothing but its arguments, its modules and names that can be watched.

The bytecode of every method that a forward pass may run is read once. The globals and class attributes it refers to are
noted with their values: as long as they and the modules are unchanged, so is the function that the code computes.
"""

from __future__ import annotations

import dis
import operator
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_BUILTINS = frozenset(
    {
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "issubclass", "len",
        "list", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super",
        "tuple", "zip", "AssertionError", "NotImplementedError", "RuntimeError", "ValueError",
    }
)  # fmt: skip
_OUTSIDE = frozenset(  # instructions that read or write what is neither local nor watched
    {
        "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME", "IMPORT_FROM", "LOAD_NAME",
        "STORE_NAME", "LOAD_BUILD_CLASS", "YIELD_VALUE", "SEND", "GET_AWAITABLE",
    }
)  # fmt: skip
_OVERRIDDEN = ("__call__", "__getattr__", "__getattribute__", "_call_impl", "_wrapped_call_impl")


class Reference(NamedTuple):
    """A name that the code reads, and its value: a global of a module, or an attribute of a class."""

    owner: Any
    name: str
    value: Any

    def holds(self) -> bool:
        """Whether the name still has this value."""
        now = self.owner.get(self.name) if isinstance(self.owner, dict) else getattr(self.owner, self.name, None)
        return now is self.value


class Impure(Exception):
    """Code that depends on more than its arguments and its modules."""


def references(net: nn.Module) -> tuple[Reference, ...] | None:
    """The names that the forward passes of a network's own classes read; None if they may depend on anything else."""
    try:
        return tuple(_references(net))
    except Impure:
        return None


def _references(net: nn.Module) -> Iterator[Reference]:
    modules = list(net.modules())
    for module in modules:
        _check_attributes(module)
    own = list(dict.fromkeys(cls for module in modules for cls in _own_classes(type(module))))
    pending: list[types.FunctionType] = []
    names, seen = {"forward"}, set[types.CodeType]()
    known: set[tuple[int, str]] = set()
    while True:
        for cls in own:
            for name in [name for name in names if name in cls.__dict__ and (id(cls), name) not in known]:
                known.add((id(cls), name))
                yield Reference(cls, name, getattr(cls, name, None))
                pending += _functions(cls, cls.__dict__[name])
        if not pending:
            return
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield Reference(function, "__code__", function.__code__)
        for reference in _globals_of(function):
            yield reference
            if isinstance(reference.value, types.FunctionType) and not _is_trusted(reference.value):
                pending.append(reference.value)
        names |= {name for code in _nested_codes(function.__code__) for name in code.co_names}


def _own_classes(cls: type) -> list[type]:
    """The classes of the user among a module's bases; raises if one replaces how modules are called or read."""
    own = [base for base in cls.__mro__ if base is not object and not _is_trusted(base)]
    for base in own:
        if any(name in base.__dict__ for name in _OVERRIDDEN):
            raise Impure(f"{base.__name__} replaces how modules are called")
    return own


def _check_attributes(module: nn.Module) -> None:
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        raise Impure(f"{type(module).__name__} has hooks or a forward of its own")
    of_torch = _is_trusted(type(module))
    for name, value in module.__dict__.items():
        skipped = name in _MODULE_ATTRIBUTES or (of_torch and name.startswith("_"))
        if not skipped and not _is_plain(value):
            raise Impure(f"the attribute {name} of {type(module).__name__}")


_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


def _is_plain(value: Any) -> bool:
    """Whether a change of a module's attribute is noticed: a constant, a module, or a container of such."""
    if isinstance(value, (dict, list, tuple)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, nn.Module) or _is_constant(value)


def _is_constant(value: Any) -> bool:
    """Whether a value can be replaced but not changed."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _PLAIN) or (callable(value) and _is_trusted(value))


def _is_trusted(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return str(name).partition(".")[0] in ("torch", "math", "collections")


def _functions(cls: type, value: Any) -> list[types.FunctionType]:
    """The functions behind a class attribute."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, types.FunctionType):
        return [value]
    if _is_constant(value):
        return []
    raise Impure(f"the attribute {cls.__name__}.{value!r}")


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_codes(constant)


def _globals_of(function: types.FunctionType) -> Iterator[Reference]:
    """The globals that a function reads; raises if it reads or writes anything else outside."""
    has_state = any(not name.startswith("_torchscript") for name in function.__dict__)
    if set(function.__code__.co_freevars) - {"__class__"} or has_state:
        raise Impure(f"the closure or the attributes of {function.__qualname__}")
    if not all(map(_is_constant, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))):
        raise Impure(f"the defaults of {function.__qualname__}")
    for code in _nested_codes(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname in _OUTSIDE:
                raise Impure(f"{instruction.opname} in {function.__qualname__}")
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
                yield _global(function, instruction.argval)


def _global(function: types.FunctionType, name: str) -> Reference:
    if name in function.__globals__:
        value = function.__globals__[name]
        if isinstance(value, types.FunctionType) or _is_constant(value) or _is_trusted(value):
            return Reference(function.__globals__, name, value)
    elif name in _BUILTINS:
        return Reference(function.__globals__, name, None)
    raise Impure(f"the global {name} in {function.__qualname__}")


def all_unchanged(noted: tuple[Reference, ...]) -> bool:
    """Whether every name still has the value that was noted."""
    return all(map(operator.methodcaller("holds"), noted))
