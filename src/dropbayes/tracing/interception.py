"""The mode in which the stochastic operations of PyTorch ask a source for their randomness.

A `TorchFunctionMode` intercepts every torch call of its thread, from any module. Deterministic operations pass through.
A stochastic one is computed here instead, with randomness from a `Source`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import PyTree

from dropbayes.tracing import dropout, layers, random_numbers
from dropbayes.tracing.operations import Arguments, NamedArguments
from dropbayes.tracing.sources import Handlers, RandomMode, Source, UnsupportedStrategy
from dropbayes.tracing.watch import SharedWrite

HANDLERS: Handlers = {**dropout.HANDLERS, **layers.HANDLERS, **random_numbers.HANDLERS}


class Interception(RandomMode):
    """The mode in which stochastic operations ask `source` for their randomness."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Where somebody has replaced it, torch's own F.dropout calls itself by what stands in its place.
        self._handlers = HANDLERS if F.dropout in HANDLERS else {**HANDLERS, F.dropout: HANDLERS[torch.dropout]}
        self._after = None if type(source).after is Source.after else source.after
        self.operations: list[Any] = []  # in their order: another branch shows here
        self._stop: Exception | None = None  # that ends the pass, which another way of running may not meet

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self._stop is not None and self._stop is not raised[1]:  # caught by the network, which has gone another way
            raise self._stop

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> PyTree:
        kwargs = kwargs or {}
        self.operations.append(func)
        handler = self._handlers.get(func)
        try:
            result = func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)
        except Exception as error:
            if self.source.maps or isinstance(error, (SharedWrite, UnsupportedStrategy)):
                self._stop = error
            raise
        if self._after is not None:
            self._after(func, args, kwargs, result)
        return result
