"""The stochastic operations of PyTorch, and their replacements while a network is sampled.

A `TorchFunctionMode` intercepts every torch call of its thread, from any module. Deterministic operations pass through.
A stochastic one is computed here instead, with randomness from a `RandomSource`: keyed masks when drawing, none when a
network is only inspected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dropbayes.sampling.operations import dropout, layers, random_numbers
from dropbayes.sampling.operations.sources import Handlers, RandomMode, RandomSource, scaled_product

__all__ = ["HANDLERS", "Interception", "RandomSource", "scaled_product"]

HANDLERS: Handlers = {**dropout.HANDLERS, **layers.HANDLERS, **random_numbers.HANDLERS}


class Interception(RandomMode):
    """The mode in which stochastic operations ask `source` for their randomness."""

    def __init__(self, source: RandomSource) -> None:
        super().__init__(source)
        self._after = None if type(source).after is RandomSource.after else source.after

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        result = func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)
        if self._after is not None:
            self._after(func, args, kwargs, result)
        return result
