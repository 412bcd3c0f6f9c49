"""Gates at their means: masks that a network makes itself, by comparing random numbers, held at their probability.

`x * (torch.rand_like(x) < keep_prob) / keep_prob` has no random numbers that leave x as it is. With the comparison
replaced by its probability it has: at its mean a gate changes nothing if its network scales it, as in dropout. What
reads true or false (`torch.where`, `masked_fill`, an index) gets the mixture of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dropbayes.tracing.interception import Interception
from dropbayes.tracing.operations import LESS, MORE, SHAPES, Arguments, NamedArguments

__all__ = ["AtMeans"]

_CASTS = {"bfloat16", "bool", "byte", "double", "float", "half", "int", "long", "to", "type", "type_as"}
_THROUGH = {  # linear operations, and questions about no values
    "add", "div", "imul", "itruediv", "linear", "matmul", "mean", "mul", "rmul", "rsub", "sub", "sum", "truediv",
    "dim", "get", "is_complex", "is_floating_point", "len", "numel", "size",
}  # fmt: skip


class AtMeans(Interception):
    """The mode in which a network's own gates are numbers between 0 and 1; its source gives random numbers' means."""

    _uniforms: dict[int, tuple[Tensor, Any, Any]]  # by id: a tensor, its site, and what was added to it
    _gates: dict[int, tuple[Tensor, Any]]  # by id: a tensor and its site

    def __enter__(self) -> AtMeans:
        self._uniforms, self._gates = {}, {}
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        gate = next((arg for arg in args if id(arg) in self._gates), None)
        if gate is None:
            result = None if kwargs else self._gated(func, name, args)
        else:
            result = self._read(func, name, args, kwargs, self._gates[id(gate)][1])
        return self._drawn(func, types, args, kwargs) if result is None else result

    def _drawn(self, func: Callable[..., Any], types: Any, args: Arguments, kwargs: NamedArguments) -> Any:
        """The result of any other operation, remembered if it is of uniforms, or ones and zeros."""
        if func is Tensor.bernoulli_ and not args[0].is_floating_point():
            args = (torch.empty(args[0].shape, device=args[0].device), *args[1:])
        result = super().__torch_function__(func, types, args, kwargs)
        site = self.source.drawn()
        if site is None:
            return result
        name = func.__name__.strip("_")
        if name == "bernoulli":
            self._gates[id(result)] = result, site
        elif name in ("rand", "rand_like", "uniform"):
            if name != "uniform" or len(args) == 1:  # between 0 and 1
                self._uniforms[id(result)] = result, site, 0.0
        else:
            self.source.chooses(site)
        return result

    def _gated(self, func: Callable[..., Any], name: str, args: Arguments) -> Tensor | None:
        """The gate that an operation makes of uniforms."""
        index = next((i for i, arg in enumerate(args) if id(arg) in self._uniforms), None)
        if index is None:
            return None
        uniform, site, added = self._uniforms[id(args[index])]
        if name == "floor":
            return self._gate(site, uniform, added)
        if len(args) < 2:
            return None
        other = args[1 - index]
        if name in ("add", "radd", "iadd") or (name == "sub" and index == 0):
            moved: Tensor = func(*args)
            self._uniforms[id(moved)] = moved, site, added - other if name == "sub" else added + other
            return moved
        if func in LESS or func in MORE:
            below = torch.as_tensor(other - added, dtype=uniform.dtype, device=uniform.device)
            return self._gate(site, uniform, below if (func in LESS) == (index == 0) else 1 - below)
        return None

    def _gate(self, site: Any, like: Tensor, chance: Any) -> Tensor:
        chance = torch.as_tensor(chance, dtype=like.dtype, device=like.device).clamp(0, 1)
        shape = torch.broadcast_shapes(like.shape, chance.shape)
        return self._hold(self.source.gate(site, chance.detach().expand(shape).clone()), site)

    def _hold(self, gate: Tensor, site: Any) -> Tensor:
        self._gates[id(gate)] = gate, site
        return gate

    def _read(self, func: Callable[..., Any], name: str, args: Arguments, kwargs: NamedArguments, site: Any) -> Any:
        """What an operation makes of a gate; None for one that is computed as it stands."""
        first, rest = args[0], args[1:]
        is_gate = id(first) in self._gates
        if func in SHAPES and is_gate and name != "to":
            return self._hold(func(*args, **kwargs), site)
        if name in _CASTS and is_gate and func is not Tensor.__bool__:
            cast: Tensor = func(*args, **kwargs)
            return self._hold(cast if cast.is_floating_point() else first.view_as(first), site)
        if name in ("bitwise_not", "invert", "logical_not") or (name == "rsub" and rest == (1,)):
            return self._hold(1 - first, site)
        if name in ("eq", "ge", "gt", "le", "lt", "ne") and is_gate and isinstance(rest[0], (bool, int, float)):
            at_zero, at_one = func(torch.tensor([0.0, 1.0]), rest[0]).tolist()
            if at_zero != at_one:
                return self._hold(first.view_as(first) if at_one else 1 - first, site)
        if name == "where" and is_gate and len(rest) == 2:
            return first * rest[0] + (1 - first) * rest[1]
        if name in ("masked_fill", "setitem") and id(rest[0]) in self._gates:
            gate = rest[0][(..., *(None for _ in range(first.dim() - rest[0].dim())))] if name == "setitem" else rest[0]
            if func.__name__ == "masked_fill":
                return first * (1 - gate) + rest[1] * gate
            return first.copy_(first.clone() * (1 - gate) + rest[1] * gate)
        if name not in _THROUGH:
            self.source.chooses(site)
        return None
