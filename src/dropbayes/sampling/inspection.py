"""The inspection of a network before sampling, with the network itself as the reference.

A few rows run through views of the network. In evaluation mode, a row alone must give what it gives in its batch. With
every training flag set except those of normalisation, and every mask left out, the output must be that of evaluation
mode; all randomness must come from sites that can be keyed. Otherwise an error states the observation and the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dropbayes.sampling.anatomy import Anatomy, Sites
from dropbayes.sampling.graphs import Graphs, graphs_of_network
from dropbayes.sampling.lengths import form, with_positions
from dropbayes.sampling.looks import Look, LookFailed, autocast_dtype, flags_down, flags_up, is_left_out, look
from dropbayes.sampling.rows import (
    SEVERAL,
    check_rows,
    check_single_row,
    look_at_several_rows,
    output_layouts,
    site_layouts,
)
from dropbayes.sampling.trees import Inputs, RowAxis, as_inputs
from dropbayes.sampling.views import View, check_modules, checked_network


def sites(net: nn.Module, x: Any, *, row_axis: RowAxis = 0, leave_out: str | Sequence[str] = ()) -> Sites:
    """The sites where `net` is random on input `x`: module, operation, drop probability and next weight layer.

    Args:
        net: Any network; it is not changed.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments.
        row_axis: The axis of the rows in the inputs, 1 for sequence-first networks; None if the input is one row.
        leave_out: Modules, by name or class name, whose randomness in training is not dropout (an augmentation).

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        >>> print(sites(net, torch.zeros(5, 2)))
        site  path  kind     drop_prob  shape  before weight layer
        ----  ----  -------  ---------  -----  -------------------
        0     2     dropout  0.1        1x8    3
        1 site; 80 % of a forward pass is shared by all draws
    """
    anatomy = inspect(checked_network(net), as_inputs(x, row_axis=row_axis), names_of(leave_out)).anatomy
    return Sites(anatomy.sites + anatomy.left_out, anatomy.prefix_share)


def names_of(leave_out: str | Sequence[str]) -> tuple[str, ...]:
    """The names in `leave_out`, in order."""
    names = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"`leave_out` must hold names of modules or classes; got {leave_out!r}.")
    return tuple(sorted(names))


# The cache -----------------------------------------------------------------------------------------------------------


@dataclass
class Inspection:
    """A network that was inspected: its anatomy, a view to run, and the strategies that passed their trial."""

    anatomy: Anatomy
    view: View
    needs_autocast: bool = False
    strategies: dict[Any, Any] = dataclasses.field(default_factory=dict)  # by the inputs of the choice
    sizes: dict[Any, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # block sizes in which bits agree

    @functools.cached_property
    def graphs(self) -> Graphs:
        """The CUDA graphs of repeated evaluations."""
        return graphs_of_network(self.view.net)


_inspections: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Inspection]] = weakref.WeakKeyDictionary()
_MOST_FORMS = 16


def inspect_cached(
    net: nn.Module,
    inputs: Inputs,
    leave_out: tuple[str, ...] = (),
    *,
    positions: bool = False,
    any_length: bool = False,
) -> Inspection:
    """`inspect`, remembered for inputs of this form until something about the network's modules changes.

    With `any_length`, an inspection of one length serves others: for sites and axes, but not for costs and shapes.
    """
    described = form(inputs) if any_length else inputs.signature
    key = (described, inputs.spec, inputs.n_rows == 1, leave_out, positions, any_length)
    known = _inspections.setdefault(net, {})
    record = known.get(key)
    if record is not None and record.view.is_valid(net):
        return record
    known.pop(key, None)
    record = inspect(net, inputs, leave_out, positions=positions)
    while len(known) >= _MOST_FORMS:
        known.pop(next(iter(known)))
    known[key] = record
    return record


def forget(net: nn.Module) -> None:
    """Forgets the inspection of a network that turned out to behave differently."""
    _inspections.pop(net, None)


class UncertaintyWarning(UserWarning):
    """An uncertainty that is suspiciously small."""


# The inspection -------------------------------------------------------------------------------------------------------


def inspect(net: nn.Module, inputs: Inputs, leave_out: tuple[str, ...] = (), *, positions: bool = False) -> Inspection:
    """The anatomy of a network on inputs of this form; raises if its draws would be wrong.

    Autocast is off unless the network needs it, so that outputs differ only by the rounding of full precision.
    """
    if autocast_dtype(inputs.device) is None:
        return _inspect(net, inputs, leave_out, positions)
    try:
        with torch.autocast(inputs.device.type, enabled=False):
            return _inspect(net, inputs, leave_out, positions)
    except RuntimeError:  # weights of low precision that need autocast for this input
        return replace(_inspect(net, inputs, leave_out, positions), needs_autocast=True)


@torch.inference_mode(False)  # inference tensors have no versions, which reveal writes
@torch.no_grad()
def _inspect(net: nn.Module, inputs: Inputs, leave_out: tuple[str, ...], positions: bool) -> Inspection:
    check_modules(net)
    _check_names(net, leave_out)
    versions = {name: buffer._version for name, buffer in net.named_buffers() if not buffer.is_inference()}
    one = inputs.rows([0])
    try:
        plain = look(net, inputs, one, flags_down, leave_out)
    except LookFailed as failed:
        check_single_row(net, inputs, failed, leave_out)
        raise failed.error from None
    chosen, lowered = _chosen_look(net, inputs, one, plain, leave_out)
    _check_accounted(chosen, plain)
    flags = flags_up(leave_out, lowered)
    several = look_at_several_rows(net, inputs, flags, leave_out, chosen)
    outputs = output_layouts(inputs, plain, several)
    check_rows(net, inputs, plain, outputs, leave_out)
    for name, buffer in net.named_buffers():
        if name in versions and buffer._version != versions[name]:
            raise ValueError(f"`net` must not write to its own buffers past its module tree; {name!r} was changed.")
    sites, together = site_layouts(inputs, chosen, several)
    if positions:
        sites = with_positions(net, inputs, flags, leave_out, chosen, sites)
    recorder = chosen.recorder
    anatomy = Anatomy(
        sites=sites,
        left_out=tuple(recorder.sites_left_out),
        off_calls=frozenset(recorder.off_calls),
        lowered=lowered,
        prefix_cost=recorder.prefix_cost,
        suffix_cost=recorder.suffix_cost,
        pass_bytes=_bytes_of_a_row(chosen, several, lambda look: look.watch.peak_bytes),
        suffix_bytes=_bytes_of_a_row(chosen, several, lambda look: look.watch.peak_suffix_bytes),
        outputs=outputs,
        structure=chosen.structure,
        last_layer=recorder.is_integrable(chosen.tensors),
        rows_together=together,
        host_random=bool(chosen.moved),
        seeds_itself=recorder.seeds_itself,
        stateful=bool(plain.view.changes()) or bool(chosen.view.changes()),
    )
    return Inspection(anatomy, View(net, flags, own_buffers=anatomy.stateful))


def _bytes_of_a_row(one: Look, several: Look | None, peak_bytes: Callable[[Look], int]) -> int:
    """The memory that another row adds to a pass; copies of weights do not grow with the rows."""
    return peak_bytes(one) if several is None else max(1, (peak_bytes(several) - peak_bytes(one)) // (SEVERAL - 1))


def _check_names(net: nn.Module, leave_out: tuple[str, ...]) -> None:
    known = {name for name, _ in net.named_modules()} | {type(module).__name__ for module in net.modules()}
    unknown = [name for name in leave_out if name not in known]
    if unknown:
        raise ValueError(f"`leave_out` must name modules or classes of `net`; {unknown[0]!r} is none.")


def _chosen_look(
    net: nn.Module, inputs: Inputs, row: list[Any], plain: Look, leave_out: tuple[str, ...]
) -> tuple[Look, frozenset[type]]:
    """The look with the training flags of classes that only drop, and the classes whose flag stays unset."""
    full: Look | None = None
    try:
        full = look(net, inputs, row, flags_up(leave_out), leave_out, honours=True)
    except LookFailed as failed:  # a training branch may need targets or a process group
        if isinstance(failed.error, NotImplementedError):
            raise failed.error from None
    if full is not None:
        _check_accounted(full, plain)
        if full.agrees_with(plain):
            return full, frozenset()
        _check_repeatable(net, inputs, row, full, leave_out)
        if full.fits(plain) and _more_raw(full, plain):
            return full, frozenset()
    classes = sorted({type(m) for n, m in net.named_modules() if flags_up(leave_out)(n, m)}, key=lambda c: c.__name__)
    dropping = {cls for cls in classes if _only_drops(net, inputs, row, cls, plain, leave_out)}
    lowered = frozenset(classes) - dropping
    chosen = look(net, inputs, row, flags_up(leave_out, lowered), leave_out) if dropping else plain
    if not chosen.fits(plain):
        raise ValueError(f"`net` gives an output of another form in training: {_describe(chosen)}.")
    if full is not None:
        _check_none_missing(full, chosen)
    return chosen, lowered


def _check_repeatable(net: nn.Module, inputs: Inputs, row: list[Any], full: Look, leave_out: tuple[str, ...]) -> None:
    """Raises if a second look gives another output: with all masks left out, nothing should be random."""
    try:
        again = look(net, inputs, row, flags_up(leave_out), leave_out, honours=True)
    except LookFailed:
        return
    if not again.agrees_with(full):
        raise NotImplementedError(
            "`net` gives different outputs in training with every mask left out: it draws random numbers that cannot "
            "be keyed to a seed, from a generator of its own. Draw them with torch.rand, torch.randn or "
            "torch.bernoulli, or leave the module out by name with leave_out= if it is not dropout."
        )


def _more_raw(seen: Look, plain: Look) -> bool:
    return seen.recorder.raw_sites > plain.recorder.raw_sites or bool(seen.moved)


def _only_drops(
    net: nn.Module, inputs: Inputs, row: list[Any], cls: type, plain: Look, leave_out: tuple[str, ...]
) -> bool:
    """Whether the training flag of one class enables dropout and nothing else; raises if it does both."""

    def flags(name: str, module: nn.Module) -> bool:
        return type(module) is cls and not is_left_out(leave_out, name, module)

    try:
        seen = look(net, inputs, row, flags, leave_out)
    except LookFailed as failed:
        _refuse_or_warn(cls, failed, plain)
        return False
    n_new = len(seen.recorder.sites) - len(plain.recorder.sites)
    if n_new <= 0 and not (seen.moved and not plain.moved):
        return False
    if seen.agrees_with(plain) or (seen.fits(plain) and _more_raw(seen, plain)):
        return True
    raise ValueError(
        f"`net` holds a {cls.__name__} whose training branch draws ({_describe(seen)}) and changes its output in "
        f"another way as well, so that its randomness alone cannot be switched on. Leave it out with "
        f"leave_out={cls.__name__!r} if it is not dropout, or let its output differ by dropout only."
    )


def _refuse_or_warn(cls: type, failed: LookFailed, plain: Look) -> None:
    """Raises or warns about a class whose training branch fails and which stays in evaluation mode."""
    n_sites, n_plain = len(failed.recorder.sites), len(plain.recorder.sites)
    if isinstance(failed.error, NotImplementedError) or n_sites > n_plain:
        raise failed.error
    warnings.warn(
        f"the {cls.__name__} of the network stays in evaluation mode, since its training branch fails ({failed}). "
        f"Name it in leave_out={cls.__name__!r} if it holds no dropout.",
        UncertaintyWarning,
        stacklevel=2,
    )


def _describe(seen: Look) -> str:
    site = seen.recorder.sites[-1] if seen.recorder.sites else None
    return ", ".join(seen.moved) or (f"{site.kind} in {site.path or 'the network'}" if site else "nothing")


def _check_none_missing(full: Look, chosen: Look) -> None:
    count = Counter((s.path, s.kind) for s in full.recorder.sites)
    count.subtract(Counter((s.path, s.kind) for s in chosen.recorder.sites))
    missing = [f"{kind} in {path or 'the network'}" for (path, kind), number in count.items() if number > 0]
    missing += [name for name in full.moved if name not in chosen.moved]
    if missing:
        raise ValueError(
            f"`net` draws in training what cannot be switched on alone: {missing[0]}. Its training branch changes more "
            "than dropout. Leave the module out by name with leave_out=, or let its output differ by dropout only."
        )


def _check_accounted(chosen: Look, plain: Look) -> None:
    if chosen.watch.unaccounted:
        raise NotImplementedError(
            f"`net` draws random numbers that cannot be keyed to a seed: {chosen.watch.unaccounted[0]}. Draw them with "
            "torch.rand, torch.randn or torch.bernoulli in the thread of the forward pass, or leave the module out by "
            "name with leave_out= if it is not dropout."
        )
    if chosen.recorder.generator_states[: len(plain.recorder.generator_states)] != plain.recorder.generator_states:
        raise NotImplementedError(
            "`net` draws from its own torch.Generator, whose state continues between calls: `seed` cannot control it. "
            "Seed it in the forward pass, or draw from torch's own generator."
        )
