"""The batches of a loader: moved to a network's device, and without the targets that the network does not take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
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


def takes_whole(net: nn.Module, batch: Mapping[str, Any] | Sequence[PyTree]) -> bool:
    """Whether a network takes a mapping or sequence as one argument: it knows none of its names, or has one place."""
    has_names = isinstance(batch, Mapping)
    accepted = _parameters_of(net, inside=has_names) or []  # a wrapper may have more places
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


def loaded_batches(net: nn.Module, loader: Any) -> Iterator[Any]:
    """The batches of a DataLoader, moved to the network's device: tensors, and objects that hold some (graphs)."""
    device = device_of(net)

    def moved(leaf: PyTree) -> PyTree:
        there = leaf.to(device) if hasattr(leaf, "to") else leaf
        return leaf if there is None else there  # some objects move themselves

    for batch in loader:
        yield pytree.tree_map(moved, batch)
