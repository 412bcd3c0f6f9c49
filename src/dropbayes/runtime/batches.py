"""What a network takes of an input: batches of a loader without their targets, and hints where one does not fit."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import PyTree

from dropbayes.runtime.devices import device_of


def network_arguments(net: nn.Module, batch: PyTree) -> PyTree:
    """The arguments in a batch without its targets: `labels`, and what the forward pass does not accept."""
    if isinstance(batch, Mapping):
        if takes_whole(net, batch):
            return batch
        accepted, targets = _parameters_of(net), {"labels"}
        if accepted is not None and not any(p.kind is p.VAR_KEYWORD for p in accepted):
            targets |= {"label", "y", "target", "targets"} - {p.name for p in accepted}
        arguments = {name: value for name, value in batch.items() if name not in targets}
        shift: Any = getattr(net, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and batch.get("labels") is not None and "decoder_input_ids" not in batch:
            arguments["decoder_input_ids"] = shift(labels=batch["labels"])  # as the model does for its loss
        return arguments
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        accepted = _parameters_of(net)
        if accepted is not None and not any(p.kind is p.VAR_POSITIONAL for p in accepted):
            positional = [p for p in accepted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            required = [p for p in positional if p.default is p.empty]
            # The last entry is the target, unless the network cannot do without it.
            taken = min(len(positional), max(len(required), len(batch) - 1))
            return batch[0] if taken <= 1 else batch[:taken]
    return batch


def given_arguments(net: nn.Module, x: PyTree) -> PyTree:
    """The arguments in an input as it is given by hand: a mapping may be a batch with its targets, a tuple is not."""
    return network_arguments(net, x) if isinstance(x, Mapping) else x


def labelled_batch(net: nn.Module, batch: PyTree, name: str) -> tuple[PyTree, PyTree]:
    """The arguments and the targets in a batch: a pair, or a mapping with `labels` or targets by another usual name."""
    what = type(batch).__name__
    if isinstance(batch, Mapping):
        own = {p.name for p in _parameters_of(net) or []} - {"labels"}  # which a model takes for its own loss
        known = [key for key in ("labels", "label", "targets", "target", "y") if key in batch and key not in own]
        if known and batch[known[0]] is not None:
            taken = network_arguments(net, batch)  # all of it for a network that takes the mapping itself
            return {key: taken[key] for key in taken if taken is batch or key != known[0]}, batch[known[0]]
        what += f" with {', '.join(map(repr, batch))}"
    elif isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1]
        what += f" of {len(batch)}"
    rule = "must be a DataLoader of pairs (input, target) or of dicts with `labels`"
    raise TypeError(f"`{name}` {rule}; got batches of {what}.")


def takes_whole(net: nn.Module, batch: Mapping[str, Any] | Sequence[PyTree]) -> bool:
    """Whether a network takes a mapping or sequence as one argument: it knows none of its names, or has one place."""
    has_names = isinstance(batch, Mapping)
    of_tensors = all(type(child).__module__.startswith("torch.nn.") for child in net.children())  # none takes a mapping
    accepted = _parameters_of(net, inside=has_names and not of_tensors) or []  # a wrapper may have more places
    if has_names:
        return bool(accepted) and not any(p.kind is p.VAR_KEYWORD or p.name in batch for p in accepted)
    places = [p.kind for p in accepted if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    return len(batch) > 1 and len(places) == 1 and places[0] != inspect.Parameter.VAR_POSITIONAL


def _parameters_of(net: nn.Module, *, inside: bool = True) -> list[inspect.Parameter] | None:
    try:
        accepted = list(inspect.signature(net.forward).parameters.values())
    except (TypeError, ValueError):  # written in C
        return None
    inner = set(net.children())
    passes_on = [p.kind for p in accepted] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    return _parameters_of(inner.pop()) if inside and passes_on and len(inner) == 1 else accepted  # of what it wraps


def input_hints(net: nn.Module, leaves: Sequence[PyTree], message: str) -> list[str]:
    """Hints beyond torch's message when an input, of which the first tensor is a batch, does not fit the network."""
    if not (tensors := [leaf for leaf in leaves if isinstance(leaf, Tensor)]):
        return []
    if "must be Tensor, not" in message and len(leaves) > 1:
        return [f"`x` holds {len(leaves)} entries, which `net` takes as one argument. Leave targets out of `x`."]
    weights = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
    kind = tensors[0].type().rpartition(".")[2].removesuffix("Tensor")  # Long, as torch's message has it
    given = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or kind in message}
    if "type" in message and len(weights) == 1 and given - weights:
        expected = next(iter(weights))
        return [f"`x` has {next(iter(given - weights))} and the network's weights {expected}: pass x.to({expected})."]
    devices, device = {str(parameter.device) for parameter in net.parameters()}, str(tensors[0].device)
    if "device" in message and len(devices) == 1 and device not in devices:
        return [f"`x` is on {device} and the network on {min(devices)}: pass x.to({min(devices)!r})."]
    if "shape" in message or "size" in message:
        return [f"`x` must be a batch of rows that `net` takes, [row, ...]; got the shape {tuple(tensors[0].shape)}."]
    return []


def loaded_batches(net: nn.Module, loader: Any) -> Iterator[Any]:
    """The batches of a DataLoader, moved to the network's device: tensors, and objects that hold some (graphs)."""
    device = device_of(net)

    def moved(leaf: PyTree) -> PyTree:
        there = leaf.to(device) if hasattr(leaf, "to") else leaf
        return leaf if there is None else there  # some objects move themselves

    with torch.random.fork_rng(devices=[]):  # from whose generator a DataLoader draws a seed for its workers
        pairs, batch = iter(loader), None
    for batch in pairs:
        yield pytree.tree_map(moved, batch)
    if batch is None:
        raise ValueError("`x` must have at least one batch; got an empty DataLoader.")
