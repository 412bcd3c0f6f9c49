"""Gates at their means: masks that a network makes itself, by comparing random numbers, held at their probability.

`x * (torch.rand_like(x) < keep_prob) / keep_prob` has no random numbers that leave x as it is. With the comparison
replaced by its probability it has: at its mean a gate changes nothing if its network scales it, as in dropout. What
reads true or false (`torch.where`, `masked_fill`, an index) gets the mixture of both.
"""

from typing import Any

import torch
from torch import Tensor

from dropbayes.tracing.interception import Interception
from dropbayes.tracing.operations import LESS, MORE, SHAPES, Arguments, NamedArguments, Operation
from dropbayes.tracing.sources import Source

_CASTS = {"bfloat16", "bool", "byte", "double", "float", "half", "int", "long", "to", "type", "type_as"}
_THROUGH = {  # linear operations, and questions about no values
    "add", "div", "iadd", "imul", "itruediv", "linear", "matmul", "mean", "mul", "neg", "radd", "rmul", "rsub", "sub",
    "sum", "truediv", "dim", "get", "is_complex", "is_floating_point", "len", "numel", "size",
}  # fmt: skip

_BY_KEYWORD = {"eq", "ge", "gt", "le", "lt", "ne", "masked_fill", "where"}
_OPERANDS = ("condition", "input", "mask", "other", "value")  # of these, in the order of their signatures


class AtMeans(Interception):
    """The mode in which a network's own gates are numbers between 0 and 1; its source gives random numbers' means."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # By id: the tensor, its site, and what was added (or None).
        self._uniforms: dict[int, tuple[Tensor, object, Any]] = {}
        self._gates: dict[int, tuple[Tensor, object]] = {}  # by id: the tensor and its site
        self._compared: set[object] = set()  # sites: gates of the same uniforms are not independent

    def __torch_function__(
        self, func: Operation, types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if kwargs and name in _BY_KEYWORD:
            args = (*args, *(kwargs.pop(operand) for operand in _OPERANDS if operand in kwargs))
        if name in ("getitem", "setitem") and isinstance(args[1], tuple):  # an index of several axes
            for _, site, *_ in filter(None, (self._gates.get(id(i)) or self._uniforms.get(id(i)) for i in args[1])):
                self.source.chooses(site, name)
        known = next((i for i, arg in enumerate(args) if id(arg) in self._gates or id(arg) in self._uniforms), None)
        result = None
        if known is not None and id(args[known]) in self._gates:
            result = self._of_gate(func, name, args, kwargs, self._gates[id(args[known])][1])
        elif known is not None:
            result = self._of_uniforms(func, name, args, kwargs, known)
        return self._drawn(func, types, args, kwargs) if result is None else result

    def _drawn(self, func: Operation, types: object, args: Arguments, kwargs: NamedArguments) -> Any:
        """The result of any other operation, remembered if it is of uniforms, or ones and zeros."""
        if func is Tensor.bernoulli_ and not args[0].is_floating_point():
            args = (torch.empty(args[0].shape, device=args[0].device), *args[1:])
        result = super().__torch_function__(func, types, args, kwargs)
        if (site := self.source.drawn()) is None:
            return result
        name = func.__name__.strip("_")
        if name == "bernoulli":
            self._gates[id(result)] = result, site
        elif name in ("rand", "rand_like", "uniform", "randn", "randn_like", "normal"):
            standard = name in ("rand", "rand_like") or (name == "uniform" and len(args) == 1 and not kwargs)
            self._uniforms[id(result)] = result, site, 0.0 if standard else None
        else:
            self.source.chooses(site, name)
        return result

    def _of_uniforms(self, func: Operation, name: str, args: Arguments, kwargs: NamedArguments, index: int) -> Any:
        """What an operation makes of uniforms: a gate, or others; None for one that is computed as it stands."""
        uniforms, site, added = self._uniforms[id(args[index])]
        other = args[1 - index] if len(args) == 2 else None
        if added is not None and site not in self._compared:
            if name == "floor":
                gate = self._gate(site, uniforms, added)
                return self._hold(uniforms.copy_(gate), site) if func.__name__ == "floor_" else gate
            if func in LESS or func in MORE:
                below = other - added
                return self._gate(site, uniforms, below if (func in LESS) == (index == 0) else 1 - below)
        moved = None
        if func in SHAPES or name in _CASTS:
            moved = added
        elif name not in _THROUGH:
            return self.source.chooses(site, name)
        elif isinstance(other, Tensor) and other.numel() > 1:  # they are part of something else now
            return None
        elif added is not None and not kwargs:
            moved = added + other if name.endswith("add") else added - other if name == "sub" and index == 0 else None
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._uniforms[id(result)] = result, site, moved
        return result

    def _gate(self, site: object, like: Tensor, chance: Any) -> Tensor:
        self._compared.add(site)
        chance = torch.as_tensor(chance, dtype=like.dtype, device=like.device).clamp(0, 1)
        shape = torch.broadcast_shapes(like.shape, chance.shape)
        return self._hold(self.source.gate(site, chance.detach().expand(shape).clone()), site)

    def _hold(self, gate: Tensor, site: object) -> Tensor:
        self._gates[id(gate)] = gate, site
        return gate

    def _of_gate(self, func: Operation, name: str, args: Arguments, kwargs: NamedArguments, site: object) -> Any:
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
            at_zero, at_one = func(torch.tensor([0.0, 1.0], device="cpu"), rest[0]).tolist()
            if at_zero != at_one:
                return self._hold(first.view_as(first) if at_one else 1 - first, site)
        whole = any(isinstance(arg, Tensor) and not arg.is_floating_point() for arg in args)  # numbers, or indices
        if name == "where" and is_gate and len(rest) == 2 and not whole:
            return first * rest[0] + (1 - first) * rest[1]
        if name in ("masked_fill", "setitem") and id(rest[0]) in self._gates and not whole:
            gate = rest[0][(..., *(None for _ in range(first.dim() - rest[0].dim())))] if name == "setitem" else rest[0]
            if func.__name__ == "masked_fill":
                return first * (1 - gate) + rest[1] * gate
            return first.copy_(first.clone() * (1 - gate) + rest[1] * gate)
        if name not in _THROUGH:
            self.source.chooses(site, name)
        return None
