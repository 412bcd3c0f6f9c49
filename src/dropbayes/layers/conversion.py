r"""Dropout before every weight layer of an existing network, as a copy [GG16, section "Applications"].

The copy has the same modules and state dict: dropout is attached to the weight layers, not inserted between them. The
probabilities of dropout that a network has can be set in a copy, too.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.layers import hooks, recurrent, structure
from dropbayes.layers.noise import Dropping, check_drop_prob
from dropbayes.runtime.validation import check_choice, check_type
from dropbayes.tracing import Site, draw_or_mean
from dropbayes.tracing.views import check_unscripted, checked_network

Rates = Mapping[str, float | Tensor]
"""The drop probability of each module, or of each unit of its input, by the name of the module."""

# The code of the layers that get masks of their own for a whole sequence, and the namesakes that stand in for it.
_RECURRENT: dict[Callable[..., object], type[nn.Module]] = {
    getattr(nn, kind).forward: getattr(recurrent, kind)
    for kind in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
}


class DroppedAttention(nn.MultiheadAttention, Dropping):
    """`nn.MultiheadAttention` with dropout before each of its four projections; made only by `add_dropout`."""

    units: hooks.Units

    def parameter_keep_probs(self) -> dict[str, float]:
        return {name: 1.0 if structure.is_bias(name) else self.keep_prob for name, _ in self.named_parameters()}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> PyTree:
        """As `nn.MultiheadAttention`, with a mask each for query, key, value and the output projection."""
        if not recurrent.is_random(self, query):
            return super().forward(query, key, value, *args, **options)
        row_axis = 0 if self.batch_first else 1
        query, key, value = (self._drop(x, row_axis) for x in (query, key, value))
        # Torch's function ends with the output projection: given the identity instead, it stops exactly before it.
        unprojected = shallow_copy(self)
        identity = torch.eye(self.embed_dim, dtype=query.dtype, device=query.device)
        vars(unprojected)["out_proj"] = SimpleNamespace(weight=identity, bias=None)
        heads, weights = nn.MultiheadAttention.forward(unprojected, query, key, value, *args, **options)
        return self.out_proj(self._drop(heads, row_axis)), weights

    def _drop(self, x: Tensor, row_axis: int) -> Tensor:
        if self.units == "element":
            return F.dropout(x, self.drop_prob, self.training)
        if x.dim() == 2:  # one row without its axis: positions and units
            return self._drop(x[None], 0)[0]
        return hooks.drop_units(x, self.drop_prob, self.training, row_axis, -1)


def _warn(names: list[str], what: str) -> None:
    """Warns of the named modules, if there are any, at the call of `add_dropout`."""
    if names:
        listed = ", ".join(name or "(network)" for name in names[:3])
        warnings.warn(f"{listed}{', ...' if len(names) > 3 else ''} {what}", stacklevel=4)


def _steps(sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a sequence in the order of execution, those of inner sequences among them."""
    for name, module in sequence.named_children():
        yield from _steps(module) if isinstance(module, nn.Sequential) else [(name, module)]


def _already_dropped(net: nn.Module, x: PyTree, layers: list[tuple[str, nn.Module]]) -> set[nn.Module]:
    """The weight layers whose input is dropped already: traced with an input, else known only in `nn.Sequential`."""
    if x is not None:
        called: set[nn.Module] = set()
        with contextlib.ExitStack() as noted:
            for _, module in layers:
                noted.enter_context(module.register_forward_pre_hook(lambda m, args: called.add(m)))
            traced = structure.keep_probs(net, x)
        uncalled = [name for name, layer in layers if layer not in called]
        _warn(uncalled, "are not called on `x` (another module may read their weights): they get no dropout.")
        names = {name.rpartition(".")[0] for name, p in traced.items() if p < 1}
        return {module for name, module in structure.weight_layers(net) if name in names}
    layers_of_net = {module for _, module in structure.weight_layers(net)}
    followers, unplaced = set[nn.Module](), list[str]()
    for path, parent in net.named_modules():
        in_order, dropped = isinstance(parent, nn.Sequential), False
        for name, module in _steps(parent) if in_order else parent.named_children():
            if structure.is_dropout(module):
                dropped = True
                if not in_order and not path.endswith(".lora_dropout"):  # which is before its adapter
                    unplaced.append(f"{path}.{name}".lstrip("."))
            elif not layers_of_net.isdisjoint(module.modules()):
                followers |= {module} if dropped and in_order else set()
                dropped = False
        if in_order and dropped and path and not isinstance(net.get_submodule(path.rpartition(".")[0]), nn.Sequential):
            unplaced.append(path)  # its last dropout: what follows is in the code of another module
    what = "are dropout that `net` already has, and without an input it is not known before which layers"
    _warn(unplaced, f"{what}: they may be given a second one. Pass `x=`, a batch of inputs.")
    return followers


def add_dropout(
    net: nn.Module,
    drop_prob: float = 0.1,
    *,
    where: Callable[[str, nn.Module], bool] | Collection[str] | None = None,
    units: hooks.Units = "channel",
    row_axis: int | None = None,
    x: PyTree = None,
    copy: bool = True,
) -> nn.Module:
    r"""A copy of `net` with dropout before every weight layer: draws of a $q(\omega)$ over all its weights.

    [GG16, sections 3 and "Applications"]. A weight matrix acts at every position of a row with the same weights, so a
    draw of them is one mask of its input units per row. Linear layers drop the units of their input, with one mask for
    all tokens or time steps of a row; convolutions drop input channels; an attention drops the units of its query, key,
    value and output projections; recurrent layers and cells drop the units of their input and of their state with one
    mask per sequence; an `nn.Embedding` drops word types. In evaluation mode the copy computes what `net` computes; in
    training mode, and under `dropbayes.predict`, it is random.

    With `units="element"` every element has its own mask, at every pixel and token, as in `nn.Dropout`. These are not
    draws of a distribution over weights, and their effect on an average over positions is smaller.

    The copy has the same state dict keys and can be copied and pickled. Layers that have dropout already keep theirs (a
    layer of `dropbayes.layers`; an `nn.Dropout` before them in an `nn.Sequential`, and anywhere if `x` is given);
    `nn.LSTM(dropout=)` becomes one mask per sequence of `drop_prob`. A second call replaces the probability of the
    first. Parametrised layers are included. The experts of a mixture in one tensor are dropped by the columns of their
    matrices, with one mask for all rows; a low-rank adapter of PEFT is given its `lora_dropout`, with one mask for all
    positions of a row, and experts' adapters, for which PEFT has none, are dropped by columns. A warning names the
    layers left unchanged, those with a single input unit, which some draws drop altogether, and, with `x`, those that
    the forward pass does not call. A linear layer called in a loop draws a mask at every call.

    Args:
        net: Any network.
        drop_prob: The probability of dropping a unit, in [0, 1): `p` of `nn.Dropout`, one minus the paper's p.
        where: Limits the change: a predicate of (name, module), or module names (a name includes its submodules).
        units: `"channel"`, or `"element"` for torch's convention in linear, convolution and attention layers.
        row_axis: The axis of the rows in inputs of linear and embedding layers; 1 for `[time, row, ...]`. By default 0,
            with a warning if the network has time-first layers.
        x: A batch of the network's input, to detect the layers that already have dropout.
        copy: Whether the result has its own copy of the weights. With False it shares the parameters and buffers of
            `net`, which saves memory: training one trains the other.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
        >>> bayesian = add_dropout(net, 0.2)
        >>> torch.equal(bayesian(torch.ones(3, 4)), net(torch.ones(3, 4)))
        True
        >>> bayesian.state_dict().keys() == net.state_dict().keys()
        True
    """
    check_drop_prob(drop_prob)
    check_choice("units", units, ("channel", "element"))
    check_choice("row_axis", row_axis, (None, 0, 1))
    if where is not None and not callable(where):
        check_type("where", where, Iterable, "be names of modules or a function of (name, module)")
    check_unscripted(checked_network(net))
    result = _copied(net, weights=copy)
    names = set() if where is None or callable(where) else {where} if isinstance(where, str) else set(where)
    if unknown := names - dict(result.named_modules()).keys():
        got = sorted(unknown, key=str)
        raise ValueError(f"`where` must name modules of `net`; got {got}. List them with net.named_modules().")

    def chosen(name: str, module: nn.Module) -> bool:
        if where is None or callable(where):
            return where is None or bool(where(name, module))
        return any(name == one or name.startswith(f"{one}.") for one in names)

    layers = [(name, layer) for name, layer in structure.weight_layers(result) if chosen(name, layer)]
    stacked = [(name, m) for name, m in result.named_modules() if any(hooks.stacked_matrices(m)) and chosen(name, m)]
    if not layers and not stacked:
        raise ValueError(f"`where` must choose a weight layer of `net`; got {where!r} for a {type(net).__name__}.")
    already = _already_dropped(result, x, layers)
    layers = [(name, layer) for name, layer in layers if layer not in already or _made_here(layer)]
    for name, layer in layers:
        adapted = hooks.adapted_layer(result, name)
        if adapted is None:
            _attach(layer, drop_prob, units, row_axis or 0)
        else:
            _attach_to_adapter(adapted, name.rpartition(".")[2], drop_prob)
    for _, module in stacked:
        _attach_columns(module, hooks.WeightDropout(drop_prob, hooks.stacked_matrices))
    _warn_of_layers(layers, drop_prob, row_axis)
    for module in result.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors only exist on the fused path, which skips submodules
    if any(_has_added_masks(module) for module in result.modules() if module is not result):
        recurrent.share_masks(result)
    return result


def _copied(net: nn.Module, *, weights: bool) -> nn.Module:
    """A copy of the network: of its weights too, or over the same parameters and buffers."""
    shared = () if weights else itertools.chain(net.parameters(), net.buffers())
    held = (value for module in net.modules() for value in vars(module).values())
    # Computed by an earlier pass (weight_norm, prune), which torch does not copy; the next pass computes it again.
    computed = (value for value in held if torch.is_tensor(value) and value.grad_fn is not None)
    return deepcopy(net, {id(t): t for t in shared} | {id(t): t.detach() for t in computed})


def _warn_of_layers(layers: list[tuple[str, nn.Module]], drop_prob: float, row_axis: int | None) -> None:
    """Warns of layers that are dropped in a way, or to an effect, that may not be meant."""
    sequential = (nn.RNNBase, nn.MultiheadAttention)
    time_first = [name for name, module in layers if not getattr(module, "batch_first", True)]
    if row_axis is None and any(not isinstance(module, (*sequential, nn.RNNCellBase)) for _, module in layers):
        remedy = "If the inputs of the other weight layers are [time, row, ...] too, pass `row_axis=1`"
        why = "a row's mask is then the same at all time steps. Pass `row_axis=0` if they are [row, ...]"
        _warn(time_first, f"take sequences time first. {remedy}: {why}.")
    undropped = [name for name, layer in layers if not structure.states_keep_probs(layer) and not _made_here(layer)]
    table = "an nn.EmbeddingBag looks up and sums in one operation"
    own = "a module that multiplies by matrices in its own code, or around that of its base class, hides their inputs"
    left = [name for name in undropped if ".lora_A." not in name]
    _warn(left, f"are left as they are: {table}, and {own} (make them nn.Linear).")
    counts = ((name, getattr(layer, "in_features", getattr(layer, "in_channels", None))) for name, layer in layers)
    single = [name for name, count in counts if count == 1 and drop_prob]
    what = f"has a single input unit, dropped with probability {drop_prob:g}"
    _warn(single, f"{what}: those draws ignore the input altogether. Leave the layer out with `where=`.")
    cells: list[str] = [name for name, module in layers if not name and isinstance(module, nn.RNNCellBase)]
    _warn(cells, "is a cell, which draws new masks at every call: put the loop over time into a module.")


def _has_added_masks(layer: nn.Module) -> bool:
    """Whether `add_dropout` made a recurrent layer draw its masks; others of `dropbayes.layers` keep their own."""
    return "has_added_masks" in vars(layer)


def _made_here(layer: nn.Module) -> bool:
    """Whether an earlier call of `add_dropout` gave the layer its dropout."""
    return isinstance(layer, DroppedAttention) or _has_added_masks(layer) or structure.hook_keep_prob(layer) is not None


def _attach(layer: Any, drop_prob: float, units: hooks.Units, row_axis: int) -> None:
    code = type(layer).forward  # a subclass that has its own keeps it, without dropout
    if code in (nn.MultiheadAttention.forward, DroppedAttention.forward):
        layer.__class__ = DroppedAttention
        layer.drop_prob, layer.units = drop_prob, units
    elif code in _RECURRENT or _has_added_masks(layer):
        layer.__class__ = _RECURRENT.get(code, type(layer))
        layer.dropout, layer.has_added_masks = 0.0, True
        layer.set_drop_probs(drop_prob)
    elif not structure.states_keep_probs(layer) and not isinstance(layer, nn.EmbeddingBag):
        _detach(layer)
        if isinstance(layer, nn.Embedding):
            layer.register_forward_hook(hooks.WordDropout(drop_prob, row_axis=row_axis), with_kwargs=True)
            return
        # A module of unknown code looks like a linear layer if it has a `weight`, no other matrix and no submodules.
        is_plain = next(layer.children(), None) is None and set(structure.matrices(layer)) <= {"weight"}
        if is_plain or isinstance(layer, (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)):
            layer.register_forward_pre_hook(hooks.InputDropout(drop_prob, units, row_axis=row_axis), with_kwargs=True)


def _attach_to_adapter(adapted: Any, adapter: str, drop_prob: float) -> None:
    if hasattr(adapted, "parameter_name"):  # the adapter of a tensor, not of a layer: it has no input to drop
        matrices = functools.partial(hooks.adapter_matrices, adapter=adapter)
        _attach_columns(adapted, hooks.WeightDropout(drop_prob, matrices))
        return
    present = adapted.lora_dropout[adapter]
    if getattr(present, "p", 0) == 0 or isinstance(present, hooks.AdapterDropout):
        adapted.lora_dropout[adapter] = hooks.AdapterDropout(drop_prob).train(adapted.training)


def _attach_columns(module: nn.Module, dropout: hooks.WeightDropout) -> None:
    _detach(module)
    module.register_forward_pre_hook(dropout.begin)
    module.register_forward_hook(dropout.end, always_call=True)


def _detach(layer: nn.Module) -> None:
    """Removes the hooks that an earlier call attached."""
    for attached in (layer._forward_pre_hooks, layer._forward_hooks):
        for key, hook in list(attached.items()):
            if isinstance(getattr(hook, "__self__", hook), hooks.AttachedDropout):
                del attached[key]


def settable_drop_probs(net: nn.Module, sites: Iterable[Site]) -> dict[str, float]:
    """The drop probabilities of a network that can be set, by the names of their modules."""
    found: dict[str, float] = {}
    for site in sites:
        rate = site.drop_prob if site.is_random and "alpha" not in site.kind else None  # whose mean depends on it
        if rate is not None and any(_holders(checked_network(net).get_submodule(site.path), rate)):
            found[site.path] = rate
    if not found:
        remedy = "Write nn.Dropout in place of nn.functional.dropout, or use dropbayes.add_dropout"
        raise ValueError(f"`net` must have a dropout module whose probability can be set; it has none. {remedy}.")
    return found


def with_drop_probs(net: nn.Module, present: Mapping[str, float], drop_probs: Rates, *, copy: bool) -> nn.Module:
    """A copy of the network with other drop probabilities in place of the present ones; `copy` as in `add_dropout`."""
    net = _copied(net, weights=copy)
    for path, rate in drop_probs.items():
        module, alike = checked_network(net).get_submodule(path), 0.0 if isinstance(rate, Tensor) else rate
        for owner, name in _holders(module, present[path]):
            setattr(owner, name, alike)
        if isinstance(rate, Tensor):
            module.register_forward_pre_hook(functools.partial(_drop_units, rate))
    return net


def _holders(module: nn.Module, drop_prob: float) -> Iterator[tuple[Any, str]]:
    """The objects, and their attributes, that hold a drop probability: a module, one it has, hooks of `add_dropout`."""
    names = ("p", "drop_prob", "recurrent_drop_prob", "dropout", "attention_dropout", "attn_dropout")  # by any library
    owners = (module, *structure.hook_owners(module))
    held = ((owner, name, getattr(owner, name, None)) for owner in owners for name in names)
    places = ((value, "p") if isinstance(value, nn.Dropout) else (owner, name) for owner, name, value in held)
    return ((owner, name) for owner, name in places if getattr(owner, name, None) == drop_prob)


def _drop_units(drop_probs: Tensor, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook: each unit of the layer's input is dropped with a probability of its own."""
    x, keep = args[0], 1 - drop_probs.to(args[0])
    dropped = draw_or_mean(lambda: x * torch.bernoulli(keep.expand_as(x)) / keep, x, training=layer.training)
    return dropped, *args[1:]
