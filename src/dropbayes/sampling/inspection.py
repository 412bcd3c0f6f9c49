"""A network inspected before it is drawn from, with the network itself as the witness.

A few rows run through views of the network. In evaluation mode, a row alone must give what it gives in its batch. With
every training flag up but those of normalisation, and every mask left out, the output must be that of evaluation mode;
all randomness must come from sites that can be keyed. What fails is refused with what was seen and the remedy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.anatomy import Anatomy, RowLayout, Site, Sites
from dropbayes.sampling.operations import Interception
from dropbayes.sampling.recorder import SENTINEL_SEED, Recorder, Watch
from dropbayes.sampling.trees import Inputs, RowAxis, Structure, as_inputs, own_leaves, split
from dropbayes.sampling.views import View, check_initialised, checked_network, eagerly

_SEVERAL = 3  # rows of a look at how shapes grow
_WITNESS_BYTES = 256 * 2**20  # a batch whose evaluation needs more memory is witnessed by its first rows
_WITNESS_ROWS = 16
_TENSOR_CORES = 5e-3  # products of float32 may be rounded to ten bits there, as cuDNN's recurrent layers are
_ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def sites(net: nn.Module, x: Any, *, row_axis: RowAxis = 0, leave_out: str | Sequence[str] = ()) -> Sites:
    """The places where `net` is random on input `x`: what, where, with which drop probability, before which layer.

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


# What is remembered ---------------------------------------------------------------------------------------------------


@dataclass
class Inspected:
    """A network that was inspected: its anatomy, a view to run, and the strategies that were seen to work."""

    anatomy: Anatomy
    view: View
    strategies: dict[bool, Any] = dataclasses.field(default_factory=dict)  # by whether each row has its own masks
    sizes: dict[Any, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of blocks, where bits agree


_inspected: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Inspected]] = weakref.WeakKeyDictionary()
_MOST_FORMS = 16


def inspected(net: nn.Module, inputs: Inputs, leave_out: tuple[str, ...] = ()) -> Inspected:
    """`inspect`, remembered for inputs of this form until something about the network's modules changes."""
    key = (inputs.signature, inputs.n_rows == 1, leave_out)
    known = _inspected.setdefault(net, {})
    record = known.get(key)
    if record is not None and record.view.is_valid(net):
        return record
    known.pop(key, None)
    record = inspect(net, inputs, leave_out)
    while len(known) >= _MOST_FORMS:
        known.pop(next(iter(known)))
    known[key] = record
    return record


def forget(net: nn.Module) -> None:
    """Drops what is remembered of a network that turned out to behave differently."""
    _inspected.pop(net, None)


class UncertaintyWarning(UserWarning):
    """An uncertainty that is suspiciously small."""


# Looks ----------------------------------------------------------------------------------------------------------------


@dataclass
class Look:
    """One forward pass with every mask left out: what was recorded and what came out."""

    view: View
    recorder: Recorder
    watch: Watch
    tensors: list[Tensor]
    structure: Structure
    moved: list[str]  # the generators of the host whose state moved

    def fits(self, other: Look) -> bool:
        """Whether the outputs are built alike."""
        return self.structure == other.structure and [t.shape for t in self.tensors] == [t.shape for t in other.tensors]

    def agrees_with(self, other: Look) -> bool:
        """Whether the outputs are the same but for rounding."""
        return self.fits(other) and all(map(equal_but_for_rounding, self.tensors, other.tensors))

    @property
    def is_raw(self) -> bool:
        """Whether raw random numbers were drawn: they have no mask to leave out, so outputs cannot be compared."""
        return self.recorder.raw_sites > 0 or bool(self.moved)


class LookFailed(Exception):
    """A forward pass that failed, with what was recorded until then."""

    def __init__(self, recorder: Recorder, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.recorder, self.error = recorder, error


Flags = Callable[[str, nn.Module], bool]
_LOOKING = threading.RLock()  # a look borrows torch's generator, which all threads share


def _down(name: str, module: nn.Module) -> bool:
    return False


def _is_normalisation(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def flags_up(leave_out: tuple[str, ...], lowered: frozenset[type] = frozenset()) -> Flags:
    """The training flags of a draw: up, but for normalisation, this library's own layers and what is left out."""

    def up(name: str, module: nn.Module) -> bool:
        ours = type(module).__module__.startswith("dropbayes.")
        lowered_class = type(module) in lowered
        return not (_is_normalisation(module) or ours or lowered_class or is_left_out(leave_out, name, module))

    return up


def is_left_out(leave_out: tuple[str, ...], name: str, module: nn.Module) -> bool:
    """Whether a module is named in `leave_out`: by its class, its name, or the name of a module it is in."""
    return any(type(module).__name__ == one or name == one or name.startswith(f"{one}.") for one in leave_out)


def look(
    net: nn.Module, inputs: Inputs, leaves: list[Any], flags: Flags, leave_out: tuple[str, ...], honours: bool = False
) -> Look:
    """One forward pass of a view with these training flags, every mask left out, watched."""
    view = View(net, flags)
    recorder = Recorder(view.paths, lambda name, module: is_left_out(leave_out, name, module), honours)
    leaves, moved = own_leaves(leaves), list[str]()
    held = (*view.net.parameters(), *view.net.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    watch = Watch(recorder, held)
    with _LOOKING, unchanged_generators(moved), _refusing_originals(view), watch, Interception(recorder):
        torch.default_generator.manual_seed(SENTINEL_SEED)
        before = torch.default_generator.get_state()
        try:
            output = eagerly(inputs.call)(view.net, leaves)
        except Exception as error:
            raise LookFailed(recorder, error) from error
        seeded = torch.default_generator.initial_seed() != SENTINEL_SEED
        if not seeded and not torch.equal(before, torch.default_generator.get_state()) and not watch.unaccounted:
            watch.unaccounted.append("torch's generator, outside of what can be watched (another thread or library)")
    tensors, structure = split(output)
    return Look(view, recorder, watch, tensors, structure, moved)


@contextlib.contextmanager
def unchanged_generators(moved: list[str] | None = None) -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch; adds to `moved` those of the host that were used."""
    numpy_random = sys.modules.get("numpy.random")
    python, numpy = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    own = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if random.getstate() != python:
            _note(moved, "Python's random")
            random.setstate(python)
        if numpy_random is not None and numpy is not None and _numpy_moved(numpy, numpy_random.get_state()):
            _note(moved, "numpy.random")
            numpy_random.set_state(numpy)
        torch.default_generator.set_state(own)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _note(moved: list[str] | None, name: str) -> None:
    if moved is not None:
        moved.append(name)


def _numpy_moved(before: Any, after: Any) -> bool:
    return before[2:] != after[2:] or before[0] != after[0] or bool((before[1] != after[1]).any())


@contextlib.contextmanager
def _refusing_originals(view: View) -> Iterator[None]:
    """Raises if a module of the network itself ran: something still refers to it where its view should run."""
    originals: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "forward" and view.is_original(frame.f_locals.get("self")):
            originals.append(type(frame.f_locals["self"]).__name__)

    before = sys.getprofile()  # of this thread alone
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
    if originals:
        raise ValueError(
            f"`net` reaches its own {originals[0]} past its module tree (by a closure, a global or a library's hook), "
            "where it cannot be watched. Register the module as a submodule and call it from there."
        )


def equal_but_for_rounding(a: Tensor, b: Tensor, batch: Tensor | None = None) -> bool:
    """Whether two outputs agree up to what another order of summation can change, measured by the batch they are in."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    dtype = a.dtype if not a.is_complex() else torch.float32
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    scale = max(_largest(b), _largest(batch) if batch is not None else 0.0)
    share = _ROUNDING.get(dtype, 1e-2) if a.device.type == "cpu" else max(_ROUNDING.get(dtype, 1e-2), _TENSOR_CORES)
    return torch.allclose(a, b, rtol=0, atol=share * scale + 1e-30, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)].abs()
    return float(finite.max()) if finite.numel() else 0.0


# The inspection -------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # in which tensors have no versions, by which writing to them is seen
@torch.no_grad()
def inspect(net: nn.Module, inputs: Inputs, leave_out: tuple[str, ...] = ()) -> Inspected:
    """The anatomy of a network on inputs of this form; an error where it could not be drawn from rightly."""
    check_initialised(net)
    _check_names(net, leave_out)
    versions = {name: buffer._version for name, buffer in net.named_buffers() if not buffer.is_inference()}
    one = inputs.rows([0])
    try:
        plain = look(net, inputs, one, _down, leave_out)
    except LookFailed as failed:
        raise failed.error from None
    chosen, lowered = _chosen_look(net, inputs, one, plain, leave_out)
    _check_accounted(chosen, plain)
    flags = flags_up(leave_out, lowered)
    several = _several_rows(net, inputs, flags, leave_out, chosen)
    outputs = _output_layouts(inputs, plain, several)
    _witness_evaluation(net, inputs, plain, outputs, leave_out)
    for name, buffer in net.named_buffers():
        if name in versions and buffer._version != versions[name]:
            raise ValueError(f"`net` must not write to its own buffers past its module tree; {name!r} was changed.")
    sites, together = _site_layouts(inputs, chosen, several)
    recorder = chosen.recorder
    anatomy = Anatomy(
        sites=sites,
        left_out=tuple(recorder.sites_left_out),
        off_calls=frozenset(recorder.off_calls),
        lowered=lowered,
        prefix_cost=recorder.prefix_cost,
        suffix_cost=recorder.suffix_cost,
        pair_bytes=chosen.watch.peak_bytes,
        outputs=outputs,
        structure=chosen.structure,
        last_layer=recorder.is_integrable(chosen.tensors),
        rows_together=together,
        host_random=bool(chosen.moved),
        seeds_itself=recorder.seeds_itself,
        stateful=bool(plain.view.changes()) or bool(chosen.view.changes()),
    )
    return Inspected(anatomy, View(net, flags, own_buffers=anatomy.stateful))


def _check_names(net: nn.Module, leave_out: tuple[str, ...]) -> None:
    known = {name for name, _ in net.named_modules()} | {type(module).__name__ for module in net.modules()}
    unknown = [name for name in leave_out if name not in known]
    if unknown:
        raise ValueError(f"`leave_out` must name modules or classes of `net`; {unknown[0]!r} is none.")


def _chosen_look(
    net: nn.Module, inputs: Inputs, row: list[Any], plain: Look, leave_out: tuple[str, ...]
) -> tuple[Look, frozenset[type]]:
    """The look with every training flag up that only drops, and the classes whose flag therefore stays down."""
    full: Look | None = None
    try:
        full = look(net, inputs, row, flags_up(leave_out), leave_out, honours=True)
    except LookFailed as failed:  # a training branch may want what a prediction has not: targets, a process group
        if isinstance(failed.error, NotImplementedError):
            raise failed.error from None
    if full is not None:
        _check_accounted(full, plain)
        if full.agrees_with(plain) or (full.fits(plain) and _more_raw(full, plain)):
            return full, frozenset()
    classes = sorted({type(m) for n, m in net.named_modules() if flags_up(leave_out)(n, m)}, key=lambda c: c.__name__)
    dropping = {cls for cls in classes if _only_drops(net, inputs, row, cls, plain, leave_out)}
    lowered = frozenset(classes) - dropping
    chosen = look(net, inputs, row, flags_up(leave_out, lowered), leave_out) if dropping else plain
    if not chosen.fits(plain):
        raise ValueError(f"`net` gives an output of another form in training: {_described(chosen)}.")
    if full is not None:
        _check_none_missing(full, chosen)
    return chosen, lowered


def _more_raw(seen: Look, plain: Look) -> bool:
    return seen.recorder.raw_sites > plain.recorder.raw_sites or bool(seen.moved)


def _only_drops(
    net: nn.Module, inputs: Inputs, row: list[Any], cls: type, plain: Look, leave_out: tuple[str, ...]
) -> bool:
    """Whether the training flag of one class brings on dropout and nothing else; an error where it does both."""

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
        f"`net` holds a {cls.__name__} whose training branch draws ({_described(seen)}) and changes its output in "
        f"another way as well, so that its randomness alone cannot be switched on. Leave it out with "
        f"leave_out={cls.__name__!r} if it is not dropout, or let its output differ by dropout only."
    )


def _refuse_or_warn(cls: type, failed: LookFailed, plain: Look) -> None:
    """A class whose training branch fails stays in evaluation mode, but never in silence."""
    n_sites, n_plain = len(failed.recorder.sites), len(plain.recorder.sites)
    if isinstance(failed.error, NotImplementedError) or n_sites > n_plain:
        raise failed.error
    warnings.warn(
        f"the {cls.__name__} of the network stays in evaluation mode, since its training branch fails ({failed}). "
        f"Name it in leave_out={cls.__name__!r} if it holds no dropout.",
        UncertaintyWarning,
        stacklevel=2,
    )


def _described(seen: Look) -> str:
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
            "`net` draws from a torch.Generator of its own that goes on from call to call: `seed` cannot control it. "
            "Seed it in the forward pass, or draw from torch's own generator."
        )


# Rows -----------------------------------------------------------------------------------------------------------------


def _several_rows(
    net: nn.Module, inputs: Inputs, flags: Flags, leave_out: tuple[str, ...], chosen: Look
) -> Look | None:
    """A look at several rows as one batch; None where the network takes one row at a time."""
    if inputs.is_one_row:
        return None
    index = [place % inputs.n_rows for place in range(_SEVERAL)]
    try:
        return look(net, inputs, inputs.rows(index), flags, leave_out, honours=chosen.recorder.honours_flags)
    except LookFailed as failed:
        if isinstance(failed.error, NotImplementedError):
            raise failed.error from None
        return None


def _layout(one: tuple[int, ...], several: tuple[int, ...]) -> RowLayout | str | None:
    """The layout of rows in shapes that one row and several gave; None without rows, a word where there is none."""
    if len(one) != len(several):
        return "another number of axes"
    grown = [axis for axis, (a, b) in enumerate(zip(one, several, strict=True)) if a != b]
    if not grown:
        return None
    if len(grown) > 1 or several[grown[0]] != _SEVERAL * one[grown[0]]:
        return "more than one axis" if len(grown) > 1 else "not in proportion"
    return RowLayout(grown[0], one[grown[0]])


def _site_layouts(inputs: Inputs, chosen: Look, several: Look | None) -> tuple[tuple[Site, ...], bool]:
    recorded = chosen.recorder.sites
    if inputs.is_one_row:
        return tuple(recorded), True
    if several is None or len(several.recorder.sites) != len(recorded):
        return tuple(recorded), False
    layouts = [_layout(a.shape, b.shape) for a, b in zip(recorded, several.recorder.sites, strict=True)]
    together = not any(isinstance(layout, str) for layout in layouts)
    pairs = zip(recorded, layouts, strict=True)
    return tuple(replace(s, layout=None if isinstance(y, str) else y) for s, y in pairs), together


def _output_layouts(inputs: Inputs, plain: Look, several: Look | None) -> tuple[RowLayout | None, ...]:
    if inputs.is_one_row:
        return (None,) * len(plain.tensors)
    if several is None or len(several.tensors) != len(plain.tensors):
        return tuple(RowLayout(0, 1) if t.shape[:1] == (1,) else None for t in plain.tensors)
    layouts = []
    for one, more in zip(plain.tensors, several.tensors, strict=True):
        layout = _layout(tuple(one.shape), tuple(more.shape))
        if isinstance(layout, str):
            raise ValueError(
                f"`net` gives an output of shape {tuple(one.shape)} for one row, {tuple(more.shape)} for {_SEVERAL}: "
                "its rows depend on each other. Pass row_axis=None to take the whole input as one row."
            )
        layouts.append(layout)
    return tuple(layouts)


def _witness_evaluation(
    net: nn.Module, inputs: Inputs, plain: Look, outputs: tuple[RowLayout | None, ...], leave_out: tuple[str, ...]
) -> None:
    """Refuses a network whose rows alone, evaluated by a view, differ from what they are in the network's own batch."""
    n_rows = inputs.n_rows
    if plain.moved or (inputs.is_one_row and (plain.recorder.sites or plain.view.changes())):
        return  # the host's generators, or masks that cannot be left out, differ between the two runs
    if n_rows * max(plain.watch.peak_bytes, _bytes_of(plain.tensors)) > _WITNESS_BYTES:
        n_rows = min(n_rows, _WITNESS_ROWS)
    leaves = list(inputs.leaves) if n_rows == inputs.n_rows else inputs.rows(range(n_rows))
    reference = _reference(net, inputs, leaves, plain, leave_out)
    for row in {0, n_rows - 1}:
        alone = plain.tensors if row == 0 else look(net, inputs, inputs.rows([row]), _down, leave_out).tensors
        for whole, expected, layout in zip(reference, alone, outputs, strict=True):
            actual = _row_of(whole, layout, row, n_rows)
            if actual is None or not equal_but_for_rounding(actual, expected, whole):
                if actual is not None and _agrees_in_double(net, inputs, leaves, outputs, row, n_rows):
                    continue  # a small difference of large numbers
                _refuse_dependence(inputs, whole, expected, row)


def _agrees_in_double(
    net: nn.Module, inputs: Inputs, leaves: list[Any], outputs: tuple[RowLayout | None, ...], row: int, n_rows: int
) -> bool:
    """Whether a row alone is what it is in its batch once rounding is out of the way."""

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    try:
        exact = copy.deepcopy(net).double()
        batch = look(exact, inputs, [double(leaf) for leaf in leaves], _down, ()).tensors
        alone = look(exact, inputs, [double(leaf) for leaf in inputs.rows([row])], _down, ()).tensors
    except Exception:  # made for one precision
        return False
    rows = [_row_of(whole, layout, row, n_rows) for whole, layout in zip(batch, outputs, strict=True)]
    return all(
        actual is not None and equal_but_for_rounding(actual, expected, whole)
        for actual, expected, whole in zip(rows, alone, batch, strict=True)
    )


def _bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _reference(
    net: nn.Module, inputs: Inputs, leaves: list[Any], plain: Look, leave_out: tuple[str, ...]
) -> list[Tensor]:
    """The batch in evaluation: by the network itself where it is in that mode and a call leaves it as it was."""
    itself = not (plain.recorder.sites or plain.moved or plain.view.changes() or plain.recorder.sites_left_out)
    if itself and not any(module.training for module in net.modules()):
        leaves = own_leaves(leaves)
        with unchanged_generators():
            return split(eagerly(inputs.call)(net, leaves))[0]
    try:
        return look(net, inputs, leaves, _down, leave_out).tensors
    except LookFailed as failed:
        raise failed.error from None


def _row_of(whole: Tensor, layout: RowLayout | None, row: int, n_rows: int) -> Tensor | None:
    if layout is None:
        return whole
    if whole.dim() <= layout.axis or whole.shape[layout.axis] != n_rows * layout.inner:
        return None
    return whole.narrow(layout.axis, row * layout.inner, layout.inner)


def _refuse_dependence(inputs: Inputs, whole: Tensor, alone: Tensor, row: int) -> None:
    n_cut = sum(axis is not None for axis in inputs.axes)
    hint = (
        "An argument whose length happens to be the number of rows may have been cut into rows: say which arguments "
        'have rows, as in row_axis={"x": 0, "positions": None}. '
        if n_cut > 1
        else ""
    )
    raise ValueError(
        f"`net` gives row {row} another output alone (shape {tuple(alone.shape)}) than in its batch (shape "
        f"{tuple(whole.shape)}) in evaluation mode: its rows depend on each other, or a forward or hook was patched. "
        f"{hint}Pass row_axis=None to take the whole input as one row."
    )
