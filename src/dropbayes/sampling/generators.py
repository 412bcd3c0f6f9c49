"""The generators of Python, NumPy and torch: the global ones left as they were, a network's own ones noticed."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["PrivateDraws", "seed_host", "unchanged_generators"]


def seed_host(seed: int) -> None:
    """Seeds the global generators of Python and, if it is loaded, of NumPy."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


@contextlib.contextmanager
def unchanged_generators(moved: list[str] | None = None) -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch; adds to `moved` those of the host that were used."""
    numpy_random = sys.modules.get("numpy.random")
    python, numpy = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    torch_state = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if random.getstate() != python:
            _note(moved, "Python's random")
            random.setstate(python)
        if numpy_random is not None and numpy is not None and _numpy_state_differs(numpy, numpy_random.get_state()):
            _note(moved, "numpy.random")
            numpy_random.set_state(numpy)
        torch.default_generator.set_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _note(moved: list[str] | None, name: str) -> None:
    if moved is not None:
        moved.append(name)


def _numpy_state_differs(before: Any, after: Any) -> bool:
    return before[2:] != after[2:] or before[0] != after[0] or bool((before[1] != after[1]).any())


class PrivateDraws:
    """The draws of a forward pass from generators of the host that are not the global ones: no seed controls them.

    A generator that was seeded within the pass gives the same numbers every time and does not count. Any other is
    left as it was.

    Args:
        modules: The modules of the network, whose attributes may hold NumPy's generators.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.names: list[str] = []
        self._seeded: set[int] = set()
        self._restore: dict[int, Callable[[], None]] = {}
        self._numpy = [(generator, _numpy_state(generator)) for generator in _numpy_generators(modules)]

    def note(self, frame: Any, event: str, argument: Any) -> None:
        """Notes a call, as a profile function of `sys.setprofile`."""
        if event == "call":
            if frame.f_code is _SEED and frame.f_locals.get("a") is not None:
                self._seeded.add(id(frame.f_locals["self"]))
        elif event == "c_call":
            name, owner = argument.__name__, getattr(argument, "__self__", None)
            if name == "urandom" and not _only_names(frame):
                self.names.append("the operating system's random numbers")
            elif name in ("random", "getrandbits") and isinstance(owner, random.Random) and not _only_names(frame):
                self._note_draw(owner)

    def _note_draw(self, generator: random.Random) -> None:
        if generator is _GLOBAL or id(generator) in self._seeded:
            return
        if id(generator) not in self._restore:
            state = generator.getstate()
            self._restore[id(generator)] = lambda: generator.setstate(state)
        self.names.append("a random.Random of its own")

    def finish(self) -> None:
        """Compares NumPy's generators with their earlier states, and restores all that were used."""
        for restore in self._restore.values():
            restore()
        for generator, state in self._numpy:
            if _numpy_state(generator) != state:
                self.names.append(f"a numpy.random.{type(generator).__name__} of its own")
                _bits(generator).state = pickle.loads(state)


def _only_names(frame: Any) -> bool:
    """Whether a draw only serves to name a temporary file or an object, or to import a module: never an output."""
    while frame is not None:
        if (
            frame.f_globals.get("__name__") in ("tempfile", "uuid")
            or "importlib._bootstrap" in frame.f_code.co_filename
        ):
            return True
        frame = frame.f_back
    return False


_SEED = random.Random.seed.__code__
_GLOBAL: Any = random.random.__self__  # type: ignore[attr-defined]


def _numpy_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """NumPy's generators among the attributes of the modules and in their containers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return []
    kinds = (numpy_random.Generator, numpy_random.RandomState)
    held = [value for module in modules for value in vars(module).values()]
    held += [v for value in held if type(value) in (list, tuple) for v in value]
    held += [v for value in held if type(value) is dict for v in value.values()]
    return list({id(value): value for value in held if isinstance(value, kinds)}.values())


def _bits(generator: Any) -> Any:
    return generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator


def _numpy_state(generator: Any) -> bytes:
    return pickle.dumps(_bits(generator).state)
