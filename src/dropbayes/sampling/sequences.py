"""The axes of a network's masks that hold positions, found by probes of inputs of two other lengths.

Every sequence of the input is made longer by a different number. An axis that grows by that number, and by another one
in a second probe, holds the sequence's positions. An axis that grows in any other way is an error that names the site.
"""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from dropbayes.sampling.inputs import Inputs, is_cache
from dropbayes.sampling.layouts import site_names
from dropbayes.sampling.probes import Probe, ProbeFailed, Prober
from dropbayes.tracing import PositionAxis, Site
from dropbayes.tracing.views import Flags

# The increases in length: the network's own (or its encoder's), its decoder's, and one that it attends to.
_LONGER = ((1, 2, 4), (3, 5, 9))

_SEQUENCES = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "cache_position")
_WITHOUT = "leave `positions` out (generating and scoring texts need it)"
_COUNTED = ("position_ids", "decoder_position_ids", "cache_position")  # continued when made longer


def with_positions(prober: Prober, flags: Flags, chosen: Probe, sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites with the axes that hold positions; raises, naming the site, if they cannot be found."""
    axes = sequence_axes(inputs := prober.inputs)
    if not any(axes):
        raise ValueError("`positions` needs an input with positions, [row, position, ...]; got none. Leave it out.")
    if any(map(is_cache, inputs.leaves)):  # the contents of a cache have one length: the probe omits it
        inputs = _without_caches(inputs)
        prober = replace(prober, inputs=inputs, views={})
        chosen = prober(inputs.rows([0]), flags)
    growths, probes = _probes(prober, axes, flags, chosen)
    known = {
        site.name: _positions(site, [seen.recorder.sites[index].shape for seen in probes], growths)
        for index, site in enumerate(chosen.recorder.sites)
    }
    ranks = {site.name: len(site.shape) for site in chosen.recorder.sites}
    for site in sites:
        if ranks.get(site.name) != len(site.shape):
            why = "the network meets it with a cache only, or in another form than without"
            remedy = f"Name the module in Sampling(ignore_modules=...), or {_WITHOUT}"
            raise ValueError(f"`positions` cannot be found for {site.name!r}: {why}. {remedy}.")
    return tuple(replace(site, positions=known[site.name]) for site in sites)


def _without_caches(inputs: Inputs) -> Inputs:
    """The inputs as whole sequences: no cache, and masks of the new positions alone."""
    new = _new_lengths(inputs)
    leaves: list[PyTree] = []
    for leaf, pairs in zip(inputs.leaves, sequence_axes(inputs), strict=True):
        for axis, sequence in pairs:
            if new[sequence] and leaf.shape[axis] > new[sequence]:
                leaf = leaf.narrow(axis, leaf.shape[axis] - new[sequence], new[sequence])
        leaves.append(None if is_cache(leaf) else leaf)
    axes = tuple(None if leaf is None else axis for leaf, axis in zip(leaves, inputs.axes, strict=True))
    return replace(inputs, leaves=tuple(leaves), axes=axes)


def sequence_axes(inputs: Inputs) -> list[tuple[tuple[int, int], ...]]:
    """The axes of each leaf that hold positions, each with the number of its sequence."""
    names = inputs.arguments
    decodes = any(name.startswith("decoder_") for name in names)
    known = any(_sequence_name(name) in _SEQUENCES for name in names)
    pairs = []
    for leaf, row_axis, name in zip(inputs.leaves, inputs.axes, names, strict=True):
        sequence = 1 if name.startswith("decoder_") else 2 if name.startswith("encoder_") and not decodes else 0
        pairs.append(tuple((axis, sequence) for axis in _axes(leaf, row_axis, name, known)))
    return pairs


def _sequence_name(name: str) -> str:
    return name.removeprefix("decoder_").removeprefix("encoder_")


def _axes(leaf: PyTree, row_axis: int | None, name: str, known: bool) -> tuple[int, ...]:
    plain = _sequence_name(name)
    if not isinstance(leaf, Tensor) or (known and plain not in (*_SEQUENCES, "outputs", "hidden_states")):
        return ()
    if plain in _COUNTED:
        return (leaf.dim() - 1,)
    if plain == "attention_mask" and leaf.dim() == 4:  # [row, head, query, key]
        return (2, 3)
    return (1 if row_axis == 0 else 0,) if row_axis is not None and leaf.dim() > 1 else ()


def sequence_lengths(inputs: Inputs) -> tuple[int, ...]:
    """The number of positions of each sequence of the input, including those in a cache."""
    lengths = _new_lengths(inputs)
    decoder = 1 if lengths[1] else 0
    masks = _lengths(inputs, ("attention_mask",))
    for cache in filter(is_cache, inputs.leaves):
        past: int | None = None
        with contextlib.suppress(ValueError):  # the states of a recurrence have no length
            past = int(cache.get_seq_length())
        if past is None and masks[decoder] <= lengths[decoder]:
            rule = f"needs the length of the cache, which {type(cache).__name__} of this network does not say"
            remedy = 'Pass an attention_mask of all positions, or take positions="tied"'
            raise ValueError(f'`positions` "per_position" {rule}. {remedy}.')
        lengths[decoder] = masks[decoder] if past is None else past + lengths[decoder]
    return tuple(lengths)


def _new_lengths(inputs: Inputs) -> list[int]:
    """The number of positions of each sequence that the input itself holds."""
    return _lengths(inputs, ("", "input_ids", "inputs_embeds", "outputs", "hidden_states"))


def _lengths(inputs: Inputs, names: tuple[str, ...]) -> list[int]:
    """The longest of the arguments with these names, for each sequence; of all, where none has a known name."""
    lengths = [0, 0, 0]
    for leaf, pairs, name in zip(inputs.leaves, sequence_axes(inputs), inputs.arguments, strict=True):
        for axis, sequence in pairs:
            if _sequence_name(name) in names:
                lengths[sequence] = max(lengths[sequence], leaf.shape[axis])
    return lengths


def form(inputs: Inputs) -> tuple[Any, ...]:
    """The form of the computation without lengths: the signature, with every sequence as one or many positions."""
    described: list[Any] = []
    for entry, leaf, pairs in zip(inputs.signature, inputs.leaves, sequence_axes(inputs), strict=True):
        if isinstance(leaf, Tensor):
            position_axes = {axis for axis, _ in pairs}
            entry = (tuple(min(n, 2) if a in position_axes else n for a, n in enumerate(entry[0])), *entry[1:])
        described.append((entry, is_cache(leaf) and _is_filled(leaf)))
    return tuple(described)


def _is_filled(cache: Any) -> bool:
    """Whether a cache is non-empty: a network may then take another path."""
    for value in vars(cache).values():
        for layer in value if isinstance(value, list) else [value] if is_cache(value) else []:
            held = [*vars(layer).values()] if hasattr(layer, "__dict__") else []
            held += [entry for one in held if isinstance(one, dict) for entry in one.values()]
            if any(isinstance(one, Tensor) and one.numel() for one in held) or (is_cache(layer) and _is_filled(layer)):
                return True
    return False


def _probes(
    prober: Prober, axes: list[Any], flags: Flags, chosen: Probe
) -> tuple[tuple[tuple[int, ...], ...], list[Probe]]:
    """Probes of inputs of two other lengths, and how much longer (or shorter) their sequences are."""
    failure: Exception | None = None
    for growths in (_LONGER, tuple(tuple(-by for by in growth) for growth in _LONGER)):
        try:
            probes = [prober(_resize(prober.inputs, axes, by), flags) for by in growths]
        except (ProbeFailed, ValueError) as failed:
            failure = failure or failed
            continue
        for seen in probes:
            _check_same_sites(chosen, seen)
        return growths, probes
    rule = f"cannot be found: the network takes its input in no other length ({failure})"
    raise ValueError(f"`positions` {rule}. Pass a shorter input, or {_WITHOUT}.")


def _resize(inputs: Inputs, axes: list[tuple[tuple[int, int], ...]], growth: tuple[int, ...]) -> list[Any]:
    """The first row with every sequence longer (or shorter) by its growth."""
    leaves = inputs.rows([0])
    for index, (pairs, name) in enumerate(zip(axes, inputs.arguments, strict=True)):
        for axis, sequence in pairs:
            leaves[index] = _resize_along(leaves[index], axis, growth[sequence], name in _COUNTED)
    return leaves


def _resize_along(tensor: Tensor, axis: int, by: int, counted: bool) -> Tensor:
    size = tensor.shape[axis]
    if size + by < 1:
        raise ValueError("an input of one position cannot be shorter")
    if by < 0:
        return tensor.narrow(axis, 0, size + by)
    last = tensor.narrow(axis, size - 1, 1).repeat_interleave(by, axis)
    if counted:  # along the last axis
        last += torch.arange(1, by + 1, device=tensor.device)
    return torch.cat([tensor, last], dim=axis)


def _check_same_sites(chosen: Probe, seen: Probe) -> None:
    names, others = site_names(chosen), site_names(seen)
    if names == others:
        return
    differing = next((a for a in [*others, *names] if (a in names) != (a in others)), names[0])
    raise ValueError(
        f"`positions` cannot be found for {differing!r}: the network passes it another number of times when its input "
        "has another length (a loop over positions, or a branch). Write the loop as one operation on a tensor with an "
        f"axis for positions, or {_WITHOUT}."
    )


def _positions(site: Site, shapes: list[tuple[int, ...]], growths: Any) -> tuple[PositionAxis, ...]:
    """The axes of a site that grow as a sequence does, in every probe."""
    axes: list[PositionAxis] = []
    for axis, size in enumerate(site.shape):
        grown = tuple(shape[axis] - size if len(shape) == len(site.shape) else None for shape in shapes)
        if not any(grown) and None not in grown:
            continue
        known = [sequence for sequence, by in enumerate(zip(*growths, strict=True)) if by == grown]
        if not known or len(axes) == 2:
            raise ValueError(
                f"`positions` cannot be found for the {site.kind} in {site.path or 'the network'}: its mask of shape "
                f"{site.shape} becomes {shapes[0]} when the input has another length, which is no axis of positions. "
                f"Name the module in Sampling(ignore_modules=...), or {_WITHOUT}."
            )
        axes.append(PositionAxis(axis, known[0]))
    return tuple(axes)
