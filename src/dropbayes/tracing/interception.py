"""The mode in which the stochastic operations of PyTorch ask a source for their randomness.

A `TorchFunctionMode` intercepts every torch call of its thread, from any module. Deterministic operations pass through.
A stochastic one is computed here instead, with randomness from a `Source`. Interception takes microseconds of every
call: a network that is known to ask nowhere else can enter the mode in the modules of its sites alone.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.tracing import dropout, layers, random_numbers
from dropbayes.tracing.operations import Arguments, NamedArguments, axes_in, operands
from dropbayes.tracing.sources import Handlers, RandomMode, Source, UnsupportedStrategy
from dropbayes.tracing.views import Flags, View
from dropbayes.tracing.watch import SharedWrite

_SHARED = ("because there exists a Tensor", "match the broadcast")  # torch: members write into what is one for all
HANDLERS: Handlers = {**dropout.HANDLERS, **layers.HANDLERS, **random_numbers.HANDLERS}


class Interception(RandomMode):
    """The mode in which stochastic operations ask `source` for their randomness."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        # Where somebody has replaced it, torch's own F.dropout calls itself by what stands in its place.
        self._handlers = HANDLERS if F.dropout in HANDLERS else {**HANDLERS, F.dropout: HANDLERS[torch.dropout]}
        self._after = None if type(source).after is Source.after else source.after
        self.operations: list[Any] = []  # in their order, with their axes: another branch shows here
        self.drawn_elsewhere = False  # in a pass that enters the mode at sites alone, random numbers of torch's own
        self._stop: Exception | None = None  # that ends the pass, which another way of running may not meet

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self._stop is not None and self._stop is not raised[1]:  # caught by the network, which has gone another way
            raise self._stop

    @contextlib.contextmanager
    def at_sites(self) -> Iterator[None]:
        """A pass through a network whose modules enter the mode themselves."""
        before, states = _of_pass.set(self), _generator_states()
        try:
            yield
        finally:
            _of_pass.reset(before)
        if self._stop is not None:
            raise self._stop
        self.drawn_elsewhere = not all(map(torch.equal, states, _generator_states()))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> PyTree:
        kwargs = kwargs or {}
        self.operations += (func, *axes_in(func, args, kwargs))
        handler = self._handlers.get(func)
        try:
            result = func(*args, **kwargs) if handler is None else handler(self, func, *args, **kwargs)
            if self._after is not None:
                self._after(func, args, kwargs, result)
            if self.source.maps and torch.is_tensor(result) and not any(result is one for one in operands(args)):
                self.own.add(id(result))
        except Exception as error:
            if handler is None and any(words in str(error) for words in _SHARED) and self.divides(args[0]):
                return self.__torch_function__(func, types, args, kwargs)
            if self.source.maps or isinstance(error, (SharedWrite, UnsupportedStrategy)):
                self._stop = error
            raise
        return result


_of_pass: ContextVar[Interception | None] = ContextVar("_of_pass", default=None)


def view_at_sites(net: nn.Module, flags: Flags, paths: Collection[str], otherwise: Source) -> View | None:
    """A view in which the modules of these names enter the mode of a pass; outside of one, a mode of `otherwise`.

    None where a site is not in a forward of theirs: in the network's own, or in a hook.
    """
    view = View(net, flags, own_buffers=False)
    view.forget_network()
    modules = dict(view.net.named_modules(remove_duplicate=False))
    for path in paths:
        module = modules.get(path, view.net)
        if module is view.net or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return None
        if not any(path.startswith(f"{outer}.") for outer in paths):
            module.__dict__["forward"] = functools.partial(_run_at_site, weakref.ref(module), otherwise)
    view.at_sites = True
    return view


def _generator_states() -> list[Tensor]:
    return [generator.get_state() for generator in (torch.default_generator, *torch.cuda.default_generators)]


def _run_at_site(reference: weakref.ref[nn.Module], otherwise: Source, *args: Any, **kwargs: Any) -> PyTree:
    module, mode = cast(Any, reference()), _of_pass.get() or Interception(otherwise)
    is_dropout = type(module).forward is nn.Dropout.forward and F.dropout in HANDLERS
    if is_dropout and sys._getframe(1).f_code is nn.Module._call_impl.__code__:  # half the time of torch's way here
        settings = {"p": module.p, "training": module.training, "inplace": module.inplace}
        return mode.__torch_function__(F.dropout, (), args, kwargs | settings)
    with mode:
        return type(module).forward(module, *args, **kwargs)
