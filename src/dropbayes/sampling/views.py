"""Views of a network, which run in its place so that the network itself is never changed.

A view is made of new module objects over the same parameters and hooks, with its own training flags, buffers,
lists and dictionaries. Methods and functions bound to modules of the network are bound to those of the view.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from dropbayes.sampling.module_states import ModuleState, differences, identities_of, snapshot

_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)


def checked_network(net: Any) -> nn.Module:
    """The plain module behind `net`, unwrapped from DataParallel, DDP and torch.compile."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"`net` must be a torch.nn.Module; got {type(net).__name__}.")
    return unwrap(net)


def check_modules(net: nn.Module) -> None:
    """Raises on scripted modules, and on uninitialised lazy ones: inspection would initialise them."""
    scripted = [name or "(network)" for name, m in net.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise TypeError(
            f"`net` must be an ordinary module: {scripted[0]} is scripted or traced, which hides its operations (and "
            "its dropout). Pass the module it was made from."
        )
    lazy = [name for name, m in net.named_modules() if getattr(m, "has_uninitialized_params", lambda: False)()]
    if lazy:
        raise ValueError(f"`net` must be initialised; {lazy[0]!r} is lazy. Run it once on a batch: net(x).")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DataParallel, DDP and torch.compile."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules:  # torch.compile: draws run the original module
            module = cast(nn.Module, module._modules["_orig_mod"])
        else:
            return module


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules of the process."""
    return any(_GLOBAL_HOOKS)


class View:
    """A network's stand-in: `net` runs in its place.

    Args:
        net: The network, as `checked_network` gives it.
        in_training: The modules, by name and object, whose training flag is set; by default none.
        own_buffers: Whether the view has copies of the buffers, for a forward pass that may write to them. Otherwise it
            shares the network's buffers, whose values stay up to date.
    """

    def __init__(
        self,
        net: nn.Module,
        in_training: Callable[[str, nn.Module], bool] | None = None,
        *,
        own_buffers: bool = True,
    ) -> None:
        self._own_buffers = own_buffers
        self._clones: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self.net = self._clone(net, "")
        originals = self._originals(net)
        for module in originals:
            self._fill(module)
        if in_training is not None:
            self._raise_flags(originals, in_training)
        self._global_hooks = _global_hooks()
        self._forwards = [(cls, cls.forward) for cls in {type(module) for module in originals}]
        self._states = [ModuleState(module) for module in net.modules()]
        self._identities = identities_of(net)
        self._before = {id(module): snapshot(self._clones[id(module)]) for module in originals}

    @property
    def paths(self) -> dict[int, str]:
        """The name of each module of the view, by the module's id."""
        return {id(clone): self._names[original] for original, clone in self._clones.items()}

    def is_original(self, value: Any) -> bool:
        """Whether `value` is a module of the network itself."""
        return id(value) in self._clones and isinstance(value, nn.Module) and self._clones[id(value)] is not value

    def is_valid(self, net: nn.Module) -> bool:
        """Whether only values of the network have changed, which the view shares."""
        if self._global_hooks != _global_hooks() or any(cls.forward is not forward for cls, forward in self._forwards):
            return False
        # Unchanged children lead to all modules of the tree.
        if self._states[0].module() is not net:
            return False
        return (self._identities is not None and self._identities.hold()) or all(s.holds() for s in self._states)

    def changes(self) -> list[str]:
        """The attributes, buffers and containers that running the view has changed, by name."""
        return [
            f"{self._names[original]}.{key}".lstrip(".")
            for original, before in self._before.items()
            for key in differences(before, snapshot(self._clones[original]))
        ]

    def commit(self, net: nn.Module) -> None:
        """Copies the attributes and buffers that running the view has changed to the network."""
        for module in self._originals(net):
            clone, before = self._clones[id(module)], self._before[id(module)]
            for key in differences(before, snapshot(clone)):
                group, _, name = key.partition("/")
                if name and group == "_buffers" and name in module._buffers and name in clone._buffers:
                    _assign_buffer(module, clone, name)
                elif not name and not self._holds_modules(clone.__dict__.get(group)):
                    module.__dict__[group] = _detach(clone.__dict__.get(group))

    # Making it ------------------------------------------------------------------------------------------------------

    def _originals(self, net: nn.Module) -> list[nn.Module]:
        modules, seen = [net], {id(net)}
        for module in modules:  # grows during the loop
            for child in module._modules.values():
                inner = None if child is None else unwrap(child)
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    modules.append(inner)
        return modules

    def _clone(self, module: nn.Module, name: str) -> nn.Module:
        module = unwrap(module)
        if id(module) in self._clones:
            return self._clones[id(module)]
        clone = object.__new__(type(module))
        self._clones[id(module)], self._names[id(module)] = clone, name
        children = {
            key: child if child is None else self._clone(child, f"{name}.{key}".lstrip("."))
            for key, child in module._modules.items()
        }
        clone.__dict__["_modules"] = children
        return clone

    def _fill(self, module: nn.Module) -> None:
        clone = self._clones[id(module)]
        for key, value in module.__dict__.items():
            if key == "_modules":
                continue
            if key == "_buffers":
                clone.__dict__[key] = {name: self._buffer(buffer) for name, buffer in value.items()}
            elif key == "_parameters":
                clone.__dict__[key] = dict(value)
            elif type(value) in _IMMUTABLE:
                clone.__dict__[key] = value
            else:
                clone.__dict__[key] = self._rebind(value)
        clone.__dict__["training"] = False
        clone.__dict__["_compiled_call_impl"] = None

    def _buffer(self, buffer: Tensor | None) -> Tensor | None:
        return buffer.clone() if buffer is not None and self._own_buffers else buffer

    def _raise_flags(self, originals: list[nn.Module], in_training: Callable[[str, nn.Module], bool]) -> None:
        if any(type(module).train is not nn.Module.train or "train" in module.__dict__ for module in originals):
            try:
                self.net.train()  # an overridden `train` may keep submodules in evaluation mode
            except NotImplementedError as error:  # a graph of torch.export
                raise TypeError(
                    "`net` must be an ordinary module: it was exported, and its training mode cannot be set. Pass the "
                    "module it was made from."
                ) from error
        else:
            for clone in self._clones.values():
                clone.__dict__["training"] = True
        for module in originals:
            if not in_training(self._names[id(module)], module):
                self._clones[id(module)].__dict__["training"] = False

    def _rebind(self, value: Any, depth: int = 0) -> Any:
        """`value` with every reference to a module of the network replaced by one to the view's."""
        if type(value) in _IMMUTABLE or depth > 4:
            return value
        if isinstance(value, nn.Module):
            return self._clones.get(id(value), value)
        if isinstance(value, types.MethodType):
            owner = self._rebind(value.__self__, depth + 1)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            rebound = functools.partial(
                self._rebind(value.func, depth + 1),
                *(self._rebind(a, depth + 1) for a in value.args),
                **{k: self._rebind(v, depth + 1) for k, v in value.keywords.items()},
            )
            rebound.__dict__.update(value.__dict__)
            return rebound
        if isinstance(value, types.FunctionType):
            return self._rebound_function(value, depth)
        if type(value) in (dict, OrderedDict):
            return type(value)((k, self._rebind(v, depth + 1)) for k, v in value.items())
        if type(value) in (list, set, tuple, deque):
            made = [self._rebind(v, depth + 1) for v in value]
            return deque(made, value.maxlen) if isinstance(value, deque) else type(value)(made)
        return value

    def _rebound_function(self, function: types.FunctionType, depth: int) -> Any:
        cells = function.__closure__ or ()
        contents = [_cell_value(cell) for cell in cells]
        rebound = [self._rebind(content, depth + 1) if _refers(content) else content for content in contents]
        if all(a is b for a, b in zip(contents, rebound, strict=True)):
            return function
        closure = tuple(
            cell if a is b else types.CellType(b) for cell, a, b in zip(cells, contents, rebound, strict=True)
        )
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
        )
        made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, dict(function.__dict__)
        return made

    def _holds_modules(self, value: Any) -> bool:
        items = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else [value]
        )
        return any(isinstance(item, (nn.Module, types.MethodType, functools.partial)) for item in items)


_IMMUTABLE = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, bytes})


def _refers(content: Any) -> bool:
    """Whether the content of a closure may refer to modules; containers are shared by those who close over them."""
    return isinstance(content, (nn.Module, types.MethodType, functools.partial, types.FunctionType))


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _global_hooks() -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(hooks) for hooks in _GLOBAL_HOOKS)


def _assign_buffer(module: nn.Module, clone: nn.Module, name: str) -> None:
    mine, theirs = module._buffers[name], clone._buffers[name]
    if mine is not None and theirs is not None and mine.shape == theirs.shape and mine.dtype == theirs.dtype:
        with torch.no_grad():
            mine.copy_(theirs)
    else:
        module._buffers[name] = _detach(theirs)


def _detach(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch.compile switched off inside it: compiled code could not be intercepted."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled before the compiler is loaded, which takes seconds
        return function

    def run_uncompiled(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):  # for compiled functions that the network calls
            return torch.compiler.disable(function)(*args, **kwargs)

    return run_uncompiled
