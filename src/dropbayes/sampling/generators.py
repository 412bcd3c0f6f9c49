"""The global generators of Python, NumPy and torch, left as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["seed_host", "unchanged_generators"]


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
