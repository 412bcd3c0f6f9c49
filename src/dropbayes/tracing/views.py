"""Views of a network, which run in its place so that the network itself is never changed.

A view is made of new module objects over the same parameters and hooks, with its own training flags, buffers, plain
tensors and arrays, containers and generators. Methods, functions and weak references bound to modules of the network
are bound to those of the view.
"""

import array
import copy
import functools
import operator
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from dropbayes.tracing.generators import is_generator
from dropbayes.tracing.states import BUILTIN, MAX_DEPTH, PLAIN, NetworkState, cell_value, held, holds_modules, is_object
from dropbayes.tracing.watch import SharedWrite, Watch, storage

Flags = Callable[[str, nn.Module], bool]  #: Whether a module may be in training mode, by its name and object.


def checked_network(net: Any) -> nn.Module:
    """The plain module behind `net`, unwrapped from DataParallel, DDP and torch.compile."""
    if not isinstance(net, nn.Module):
        held = [name for name, value in vars(net).items() if isinstance(value, nn.Module)] if is_object(net) else []
        remedy = f" Pass the network that it holds: .{held[0]}" if held else ""
        raise TypeError(f"`net` must be a torch.nn.Module; got {type(net).__name__}.{remedy}")
    return unwrap(net)


def check_unscripted(net: nn.Module) -> None:
    """Raises on modules that are compiled to TorchScript."""
    if scripted := [n or "(network)" for n, m in net.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
        why = f"{scripted[0]} is scripted or traced, which hides its operations (and its dropout)"
        raise TypeError(f"`net` must be an ordinary module: {why}. Pass the module it was made from.")


def check_modules(net: nn.Module) -> None:
    """Raises on scripted modules, on lazy ones, which inspection would initialise, and on layers of width 0."""
    check_unscripted(net)
    if lazy := [n for n, m in net.named_modules() if getattr(m, "has_uninitialized_params", lambda: False)()]:
        raise ValueError(f"`net` must be initialised; {lazy[0]!r} is lazy. Run it once on a batch: net(x).")
    if absent := [name for name, p in net.named_parameters() if p.is_meta]:
        raise ValueError(f"`net` must hold its weights; {absent[0]!r} is on the meta device. Load them first.")
    if sharded := [name for name, p in net.named_parameters() if type(p).__name__ == "DTensor"]:
        raise ValueError(f"`net` must hold its whole weights; {sharded[0]!r} is sharded. Gather them: net.unshard().")
    weights = ((name, p) for name, p in net.named_parameters() if name.rpartition(".")[2] == "weight")
    if empty := [(name, tuple(p.shape)) for name, p in weights if not p.numel()]:
        raise ValueError(f"`net` must have no layer of width 0; got {empty[0][0]} of shape {empty[0][1]}.")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DataParallel, DDP and torch.compile."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules:  # torch.compile: draws run the original module
            module = cast(nn.Module, module._modules["_orig_mod"])
        else:
            return module


class View:
    """A network's stand-in: `net` runs in its place.

    Args:
        net: The network, as `checked_network` gives it.
        may_train: Which modules may be in training mode, of those that the network's own `train()` puts into it; None
            for the flags of its own `eval()`.
        own_buffers: Whether the view has copies of buffers, plain tensors and arrays, for a pass that may write there.
            Otherwise it shares those of the network, whose values stay up to date.
        own_parameters: Whether it has copies of the parameters, too.
    """

    at_sites = False  #: Whether its modules enter the mode of a pass themselves, by `view_at_sites`.

    @temporarily_clear_interpreter_stack()  # of torch.func: inside a transform, no watch sees what is written
    def __init__(
        self, net: nn.Module, may_train: Flags | None = None, *, own_buffers: bool = True, own_parameters: bool = False
    ) -> None:
        self._own_buffers, self._own_parameters = own_buffers, own_parameters
        try:
            self._build(net, may_train)
        except SharedWrite:  # the network's own `train` or `eval` writes into its weights
            self._own_parameters = True
            self._build(net, may_train)
        self.state = NetworkState(self.net, versions=True)

    def _build(self, net: nn.Module, may_train: Flags | None) -> None:
        self._clones: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._copies: dict[int, Any] = {}  # of tensors, containers and objects: what is shared stays shared
        self._alive: list[Any] = []  # prevents the reuse of ids
        self._unregistered: dict[int, nn.Module] = {}  # modules past the module tree, which are the network's own
        self._memory: dict[int, torch.UntypedStorage] = {}  # copies of memory, by address
        self.generators: list[Any] = []
        self._originals: list[nn.Module] = []
        self.net = self._clone(net, "")
        held_by = (module._parameters.values() for module in self._originals)
        self._parameter_memory = {storage(p) for parameters in held_by for p in parameters if p is not None} - {0}
        self.paths = {id(clone): self._names[original] for original, clone in self._clones.items()}  # names by id
        self._switches = any(_switches(module) for module in self._originals)
        for state, key, value in [entry for module in self._originals for entry in self._fill(module)]:
            state[key] = self._copy(value)
        self.moves_weights = self._switches and not self._switch(may_train is not None)
        if not self._switches:
            for clone in self._clones.values():
                clone.__dict__["training"] = may_train is not None
        for module in self._originals:
            name, clone = self._names[id(module)], self._clones[id(module)]
            if may_train is not None and clone.training and not may_train(name, module):
                clone.__dict__["training"] = False
        if self._switches and not (self._own_parameters or self.moves_weights):
            for module in self._originals:
                self._clones[id(module)].__dict__["_parameters"] = dict(module._parameters)

    @property
    def own_tensors(self) -> set[int]:
        """The ids of the buffers and plain tensors of which it has copies."""
        return {id(value) for value in self._copies.values() if isinstance(value, Tensor)}

    @property
    def originals(self) -> dict[int, nn.Module]:
        """The modules of the network itself, by id."""
        return {id(module): module for module in self._originals}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that the view shares with the network, by name; those that it hides from optimisers, too."""
        shared = () if self._own_parameters or self.moves_weights else self._clones.values()
        held = ((self.paths[id(clone)], *item) for clone in shared for item in clone._parameters.items())
        return {f"{path}.{name}".lstrip("."): value for path, name, value in held if value is not None}

    @property
    def unwritable(self) -> dict[str, Tensor]:
        """What no pass may write into: the shared parameters, their gradients, and modules past the module tree."""
        gradients = {f"{name}.grad": p.grad for name, p in self.parameters.items() if p.grad is not None}
        hidden = ((type(m).__name__, m.named_parameters(), m.named_buffers()) for m in self._unregistered.values())
        past = {f"a {kind} {name}": t for kind, *tensors in hidden for some in tensors for name, t in some}
        return self.parameters | gradients | past

    def forget_network(self) -> None:
        """Drops the references to the network's own modules: a view that is kept must not keep them alive."""
        self._originals, self._alive, self._copies, self._memory, self._unregistered = [], [], {}, {}, {}

    def commit(self, net: nn.Module) -> None:
        """Copies the attributes and buffers that running the view has changed to the network: all of them, or none.

        A flag that says what is there must not come without it: without the hooks, say, that the pass has registered.
        """
        changed = list[tuple[Any, str, object]]()
        for path, key in self.state.changes(self.net):
            module, clone = net.get_submodule(path), self.net.get_submodule(path)
            group, _, name = key.partition("/")
            if name and group == "_buffers" and name in module._buffers and name in clone._buffers:
                changed.append((module._buffers, name, clone._buffers[name]))
            elif group not in BUILTIN and group in clone.__dict__ and not holds_modules(clone.__dict__[group]):
                changed.append((module.__dict__, group, clone.__dict__[group]))
            else:
                return
        for attributes, name, value in changed:
            self._assign(attributes, name, value)

    def _assign(self, attributes: dict[str, Any], key: str, value: Any) -> None:
        """Writes into what the pass has written into, and replaces what it has replaced."""
        before = attributes.get(key)
        written = before if self._copies.get(id(before)) is value else None
        if isinstance(written, Tensor):
            if storage(written) not in self._parameter_memory:
                with torch.no_grad():
                    written.copy_(value)
        elif isinstance(written, np.ndarray):
            written[...] = value
        elif isinstance(written, bytearray):
            written[:] = value
        elif is_object(written):
            _hold(written, *map(_detach, held(value)))
        else:
            attributes[key] = _detach(value)

    # Making it ------------------------------------------------------------------------------------------------------

    def _clone(self, module: nn.Module, name: str) -> nn.Module:
        module = unwrap(module)
        if id(module) in self._clones:
            return self._clones[id(module)]
        kind: Any = type(module)
        if hasattr(kind, "__del__"):  # the user's clean-up must not run when the view is freed
            kind = type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})
        clone = object.__new__(kind)
        self._clones[id(module)], self._names[id(module)] = clone, name
        self._originals.append(module)
        clone.__dict__["_modules"] = {
            key: child if child is None else self._clone(child, f"{name}.{key}".lstrip("."))
            for key, child in module._modules.items()
        }
        return clone

    def _fill(self, module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Fills a module of the view; yields its functions, to be bound last: they may close over what any holds."""
        state = self._clones[id(module)].__dict__
        state["_parameters"] = {name: self._parameter(parameter) for name, parameter in module._parameters.items()}
        state["_buffers"] = {name: self._tensor(buffer) for name, buffer in module._buffers.items()}
        state["_compiled_call_impl"] = None
        # Most of what torch keeps in a module is empty, and no other module holds it.
        state |= {k: type(v)() for k, v in module.__dict__.items() if k in BUILTIN and not v and k not in state}
        for key, value in [item for item in module.__dict__.items() if item[0] not in state]:
            if callable(value) or key in ("_forward_hooks", "_forward_pre_hooks"):
                yield state, key, value
            else:
                state[key] = self._copy(value)
        _hold(self._clones[id(module)], {}, {key: self._copy(value) for key, value in held(module)[1].items()})

    def _parameter(self, parameter: Any) -> Any:
        if parameter is None or not (self._own_parameters or self._switches):
            return parameter
        if id(parameter) not in self._copies:  # an alias while a mode is switched, which may replace a weight
            made = self._cloned(parameter.detach()) if self._own_parameters else parameter.detach()
            is_parameter = isinstance(parameter, nn.Parameter)
            learns = parameter.requires_grad and not parameter.is_inference()
            made = nn.Parameter(made, learns) if is_parameter else made
            self._remember(parameter, made)
        return self._copies[id(parameter)]

    def _tensor(self, tensor: Any) -> Any:
        if tensor is None or not self._own_buffers or isinstance(tensor, nn.Parameter) or tensor.grad_fn is not None:
            return tensor
        if id(tensor) not in self._copies:
            self._remember(tensor, self._cloned(tensor))
        return self._copies[id(tensor)]

    def _cloned(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, over one copy of the memory that it shares with others; itself if it is a parameter's."""
        address = storage(tensor)
        if not address or type(tensor) is not Tensor:  # sparse, nested, or of a class of its own
            return tensor.clone()
        if address in self._parameter_memory and not self._own_parameters:
            return tensor
        if address not in self._memory:
            self._memory[address] = tensor.untyped_storage().clone()
        made = tensor.new_empty(0)
        return made.set_(self._memory[address], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _remember(self, value: Any, made: Any) -> Any:
        self._alive.append(value)
        self._copies[id(value)] = made
        return made

    def _switch(self, to_training: bool) -> bool:
        """Puts the view into a mode by the network's own method; whether that left its weights as they were."""
        shared = dict(self.net.named_parameters())
        before = [value.detach().clone() if self._own_parameters else value for value in shared.values()]
        addresses = list(map(storage, before))
        flags = [(module, module.training) for one in self._unregistered.values() for module in one.modules()]
        for module in self._originals:
            self._clones[id(module)].__dict__["training"] = module.training
        try:
            with Watch(shared={} if self._own_parameters else shared):
                self.net.train() if to_training else self.net.eval()
        except NotImplementedError as error:  # a graph of torch.export
            rule = "be an ordinary module: it was exported, and its training mode cannot be set"
            raise TypeError(f"`net` must {rule}. Pass the module it was made from.") from error
        for module, flag in (switched := [entry for entry in flags if entry[0].training != entry[1]]):
            module.training = flag
        if switched:
            rule = f"switches the mode of a {type(switched[0][0]).__name__} that it holds past its module tree"
            remedy = "Register it: assign it to an attribute, or hold it in a ModuleList or ModuleDict"
            raise ValueError(f"`net` {rule}. {remedy}.")
        after = list(self.net.parameters())
        if not self._own_parameters:
            return all(map(operator.is_, before, after)) and list(map(storage, after)) == addresses
        return len(before) == len(after) and all(map(torch.equal, before, after))

    def _copy(self, value: Any, depth: int = 0) -> Any:
        """`value` as the view holds it: copied where a pass may write to it, bound to the modules of the view."""
        if type(value) in PLAIN or depth > MAX_DEPTH:
            return value
        if type(value) in weakref.ProxyTypes:  # which claims the class of its target
            target = value.__repr__.__self__
            return weakref.proxy(self._clones[id(target)]) if id(target) in self._clones else value
        if isinstance(value, nn.Module):
            known = self._clones if id(value) in self._clones else self._unregistered
            return known.setdefault(id(value), value)
        if id(value) in self._copies:
            return self._copies[id(value)]
        if type(value) in (dict, OrderedDict, list, set) and not value:  # most of what a module holds
            return self._remember(value, type(value)())
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, bytearray, array.array)):
            return self._remember(value, copy.copy(value)) if self._own_buffers else value
        if is_generator(value):
            self.generators.append(value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value))
            return self._remember(value, self.generators[-1])
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self._clones[id(target)]) if id(target) in self._clones else value
        if isinstance(value, (types.MethodType, functools.partial, types.FunctionType)):
            return self._bind(value, depth)
        if isinstance(value, (dict, list, set, tuple, deque)):
            return self._copy_container(value, depth)
        return self._copy_object(value, depth) if is_object(value) else value

    def _copy_container(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple):
            items = [self._copy(item, depth + 1) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        try:
            made = self._remember(value, copy.copy(value))
        except Exception:  # a container that cannot be copied is shared
            return value
        if isinstance(made, dict):
            for key, item in value.items():
                dict.__setitem__(made, key, self._copy(item, depth + 1))
        elif isinstance(made, (list, deque)):
            for index, item in enumerate(value):
                made[index] = self._copy(item, depth + 1)
        else:
            made.clear()
            made.update(self._copy(item, depth + 1) for item in value)
        return made

    def _copy_object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        try:
            made = self._remember(value, kind() if kind is types.SimpleNamespace else object.__new__(kind))
        except TypeError:  # made by its own type only
            return value
        _hold(made, *({key: self._copy(item, depth + 1) for key, item in part.items()} for part in held(value)))
        return made

    def _bind(self, value: Any, depth: int) -> Any:
        """A method, partial or closure with every reference to a module of the network replaced by the view's."""
        if isinstance(value, types.MethodType):
            owner = self._copy(value.__self__, depth + 1)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            partial = functools.partial(
                self._copy(value.func, depth + 1),
                *(self._copy(a, depth + 1) for a in value.args),
                **{k: self._copy(v, depth + 1) for k, v in value.keywords.items()},
            )
            partial.__dict__.update(value.__dict__)
            return partial

        def bound(content: Any) -> Any:  # containers are shared by those who close over them
            refers = isinstance(content, types.FunctionType) or holds_modules(content)
            return self._copy(content, depth + 1) if refers else self._copies.get(id(content), content)

        cells, defaults, named = value.__closure__ or (), value.__defaults__ or (), value.__kwdefaults__ or {}
        contents = [(cell, cell_value(cell)) for cell in cells]
        new_cells = tuple(cell if (b := bound(c)) is c else types.CellType(b) for cell, c in contents)
        new_defaults, new_named = tuple(map(bound, defaults)), {key: bound(v) for key, v in named.items()}
        given = (*cells, *defaults, *named.values())
        if all(map(operator.is_, given, (*new_cells, *new_defaults, *new_named.values()))):
            return value
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, new_defaults or None, new_cells)
        made.__kwdefaults__, made.__dict__ = new_named or None, dict(value.__dict__)
        return made


def _switches(module: nn.Module) -> bool:
    """Whether a module's own `train` or `eval` does more than torch's."""
    kind, state = type(module), module.__dict__
    if kind.train is not nn.Module.train or kind.eval is not nn.Module.eval:
        return not kind.__module__.startswith("torch.nn.")
    return "train" in state or "eval" in state


def _hold(owner: Any, plain: dict[str, Any], slots: dict[str, Any]) -> None:
    """Puts into an object what another holds in its dictionary and its slots."""
    if plain:
        vars(owner).update(plain)
    for name, value in slots.items():
        object.__setattr__(owner, name, value)


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
