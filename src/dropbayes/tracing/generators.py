"""Generators that no source stands for: Python's and NumPy's global ones, and torch's own when a network seeds it.

A network that names none of them in its code is run without touching any. Where one does, a pass shows whether it draws
from them; the draws of such a network then run one at a time, with these generators keyed to seed and draw, and put
back as they were. So do those of a network with a random operation of torch that has no handler.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import pickle
import random
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from dropbayes.tracing.sources import Ones
from dropbayes.tracing.states import cell_value

# The seed of torch's generator while a network runs that seeds it, which shows that; its upper half for a keyed draw.
SENTINEL_SEED = 0x64726F70 << 32
_BORROWED = threading.RLock()  # two predictions of such networks do not borrow the generators at once

SETTERS = frozenset({"manual_seed", "seed", "set_rng_state", "set_state", "fork_rng"})
"""Names of functions that set the state of torch's generator."""
_NAMES = SETTERS | {
    "random", "default_rng", "urandom", "getrandbits", "randint", "shuffle", "secrets", "RandomState", "Random",
    "SystemRandom", "uniform", "gauss",
}  # fmt: skip
UNSEEDED = frozenset({"default_rng", "urandom", "secrets", "RandomState", "Random", "SystemRandom"})
"""Names of generators that may be made within a pass, and then have a seed of their own."""


def is_generator(value: object) -> bool:
    """Whether a value is a generator of Python, NumPy or torch."""
    return isinstance(value, (random.Random, np.random.RandomState, np.random.Generator, torch.Generator))


def names_generators(net: nn.Module) -> frozenset[str]:
    """The names in the code of a network's modules that may be a generator of the host, or the seeding of torch's."""
    found: set[str] = set()
    for function, names in _reached(net):
        if is_generator(getattr(function, "__self__", None)):
            found.add("random")  # a generator's own method, under any name
        found |= names & _NAMES
    return frozenset(found)


def _reached(net: nn.Module) -> Iterator[tuple[Any, set[str]]]:
    """The functions that the code of a network's modules reaches, with the names that are in each."""
    seen: set[Any] = set()
    pending: list[Any] = []
    for module in net.modules():
        for cls in type(module).__mro__:
            if cls in seen or cls.__module__.partition(".")[0] in ("torch", "dropbayes", "builtins"):
                continue
            seen.add(cls)
            functions = {name: value for name, value in vars(cls).items() if hasattr(value, "__code__")}
            pending += [value for name, value in functions.items() if name != "__init__"]  # which no pass runs
        held = [*vars(module).values(), *module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        pending += [value for value in held if callable(value) and not isinstance(value, nn.Module)]
    while pending:
        function = pending.pop()
        if isinstance(function, functools.partial):
            pending.append(function.func)
        code, home = getattr(function, "__code__", None), str(getattr(function, "__module__", "")).partition(".")[0]
        names = set[str]()
        if code is not None and code not in seen and home not in ("torch", "dropbayes"):
            names = {name for part in _parts(code) for name in part.co_names + part.co_freevars}
        yield function, names
        if not names:
            continue
        seen.add(code)
        pending += [f for f in map(function.__globals__.get, names) if callable(f) and _is_near(f, function)]
        pending += [*filter(callable, map(cell_value, function.__closure__ or ())), *(function.__defaults__ or ())]


def _parts(code: types.CodeType) -> list[types.CodeType]:
    """A function's code, and that of the functions in it."""
    return [code, *(part for one in code.co_consts if isinstance(one, types.CodeType) for part in _parts(one))]


def _modules_read(function: Any, variables: set[str], names: set[str], own: dict[int, nn.Module]) -> list[nn.Module]:
    """Those of a network's own modules that a function reads as one of these variables, or by name from an object."""
    closed = [value for value in map(cell_value, function.__closure__ or ()) if not isinstance(value, nn.Module)]
    seen = [*map(function.__globals__.get, variables), *closed]
    parts = (vars(value).get for value in seen if hasattr(value, "__dict__"))
    return [own[key] for key in own.keys() & {*map(id, seen), *(id(part(name)) for part in parts for name in names)}]


def _is_near(function: Any, other: Any) -> bool:
    """Whether two functions are of the same package, or one is a generator's method."""
    if is_generator(getattr(function, "__self__", None)):
        return True
    homes = [str(getattr(one, "__module__", "")).partition(".")[0] for one in (function, other)]
    return isinstance(function, types.FunctionType) and homes[0] == homes[1]


def state_of(generator: Any) -> bytes:
    """The state of a generator of Python, NumPy or torch, comparable."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    bits = generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator
    return pickle.dumps(bits.state)


@contextlib.contextmanager
def unmoved_globals(net: nn.Module) -> Iterator[list[object]]:
    """The host's generators that are global variables of a network's code; these, and torch's, are then put back."""
    held, own = dict[int, Any](), {id(module): module for module in net.modules()}
    for function, names in _reached(net):
        read = {id(value): value for value in map(getattr(function, "__globals__", {}).get, names)}
        held |= read
        if not ("training" in names or own.keys() & read or (names and function.__closure__)):
            continue  # as nearly all
        modules = _modules_read(function, names, names, own)
        if modules:  # perhaps: `self.model` is no global variable of that name
            steps = (step for part in _parts(function.__code__) for step in dis.get_instructions(part))
            modules = _modules_read(function, {s.argval for s in steps if s.opname == "LOAD_GLOBAL"}, names, own)
        children = (module._modules.get(name) for module in modules for name in names)
        parts = [m for m in (*modules, *children) if m is not None and m is not net]  # which may drop by their own flag
        if modules and ("training" in names or any("training" in code for m in parts for _, code in _reached(m))):
            raise ValueError(
                f"`net` reads its mode, or a module, by a global variable or an object, in {function.__name__}: a draw "
                "is made by a copy of its modules, and what is read there is the network itself. Read self.training "
                "and modules of self, or pass them on."
            )
    found = [value for value in held.values() if is_generator(value)]
    with contextlib.ExitStack() as putting_back:
        for generator in found:
            if hasattr(generator, "bit_generator"):
                putting_back.callback(setattr, generator.bit_generator, "state", generator.bit_generator.state)
            elif hasattr(generator, "setstate"):
                putting_back.callback(generator.setstate, generator.getstate())
            else:
                putting_back.callback(generator.set_state, generator.get_state())
        yield [generator for generator in found if not hasattr(generator, "manual_seed")]


def _global_states() -> dict[str, Any]:
    numpy_state = pickle.dumps(np.random.get_state(legacy=False))  # which holds an array
    return {"Python's random": random.getstate(), "numpy.random": numpy_state}


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    np.random.set_state(pickle.loads(states["numpy.random"]))


class HostDraws:
    """A watch over the global generators during one pass of a network, which are afterwards as they were.

    Args:
        named: The generators that the network's code names. If none, and other threads run, a moved state is theirs.
        private: The network's own generators.
        device: Where it runs: a GPU has a generator of torch of its own.
    """

    def __init__(self, named: frozenset[str], private: list[Any], device: torch.device | None = None) -> None:
        self.moved: list[str] = []  # the global generators that the pass drew from
        self.left: dict[str, Any] = {}  # their states at its end: passes that begin alike show what they drew
        self.unkeyed: list[str] = []  # and those that no seed controls
        self._named, self._seeds, self._private = bool(named), bool(named & {"manual_seed", "seed"}), private
        self._looks = self._named or threading.active_count() == 1
        self._device = device

    def __enter__(self) -> HostDraws:
        self._before_private = [state_of(generator) for generator in self._private]
        if not self._looks:
            return self
        _BORROWED.acquire()
        device = self._device
        of_gpu = [torch.cuda.default_generators[device.index]] if device and device.type == "cuda" else []
        self._of_gpu = [(own, own.get_state()) for own in of_gpu]
        self._before, self._torch = _global_states(), torch.default_generator.get_state()
        if self._named:  # away from where an earlier pass, which may seed them, has left them
            random.random(), np.random.random()
        self._began = _global_states() if self._named else self._before
        if self._seeds:
            torch.default_generator.manual_seed(SENTINEL_SEED)
        self._start, self._start_seed = torch.default_generator.get_state(), torch.default_generator.initial_seed()
        return self

    def __exit__(self, *error: Any) -> None:
        for generator, before in zip(self._private, self._before_private, strict=True):
            if state_of(generator) != before:
                self.unkeyed.append(f"a {type(generator).__name__} of its own")
        if not self._looks:
            return
        try:
            self.left = _global_states()
            self.moved = [name for name, state in self._began.items() if self.left[name] != state]
            if self.moved or self._named:
                _restore(self._before)
            seeded = torch.default_generator.initial_seed() != self._start_seed
            watched = ((torch.default_generator, self._start), *self._of_gpu)
            if not seeded and not all(torch.equal(own.get_state(), start) for own, start in watched):
                self.unkeyed.append("torch's generator, outside of what can be watched (another thread or library)")
            if self._seeds or seeded or self.unkeyed:
                for own, start in (*self._of_gpu, (torch.default_generator, self._torch)):
                    own.set_state(start)
        finally:
            _BORROWED.release()


class Advancing(Ones):
    """Every mask left out, while torch's borrowed generator moves on at each site: two equal states are one mask."""

    def __init__(self) -> None:
        self.states: list[bytes] = []
        self._seed = torch.default_generator.initial_seed()

    def keep(self, *site: object) -> None:
        self.states.append(state_of(torch.default_generator))
        torch.rand(1, generator=torch.default_generator, device="cpu")

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        if not (fixed := generator is not None or torch.default_generator.initial_seed() != self._seed):
            self.keep()
        return fixed


def seed_generators(seed: int | None) -> None:
    """Seeds the global generators, which are borrowed (None: only torch's, with the sentinel)."""
    torch.default_generator.manual_seed(SENTINEL_SEED + (seed or 0) % 2**32)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)


@contextlib.contextmanager
def keyed_generators(seed: int | None) -> Iterator[None]:
    """The global generators borrowed and seeded, and put back as they were."""
    with _BORROWED:
        states, torch_state = _global_states(), torch.default_generator.get_state()
        try:
            seed_generators(seed)
            yield
        finally:
            _restore(states)
            torch.default_generator.set_state(torch_state)
