"""One forward pass of a network's view with every mask left out, and the comparison of two of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.sampling.generators import PrivateDraws, seed_host, unchanged_generators
from dropbayes.sampling.operations import Interception
from dropbayes.sampling.recorder import SENTINEL_SEED, Recorder, Watch
from dropbayes.sampling.trees import Inputs, Structure, cloned_leaves, split
from dropbayes.sampling.views import View, eagerly

_TENSOR_CORES = 5e-3  # float32 products, such as cuDNN's recurrent layers, may be rounded to ten bits
_ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@dataclass
class Look:
    """One forward pass with every mask left out: its record and its output."""

    view: View
    recorder: Recorder
    watch: Watch
    tensors: list[Tensor]
    structure: Structure
    moved: list[str]  # the generators of the host whose state moved

    def fits(self, other: Look) -> bool:
        """Whether the outputs have the same structure."""
        return self.structure == other.structure and [t.shape for t in self.tensors] == [t.shape for t in other.tensors]

    def agrees_with(self, other: Look) -> bool:
        """Whether the outputs agree up to rounding."""
        return self.fits(other) and all(map(equal_but_for_rounding, self.tensors, other.tensors))

    @property
    def is_raw(self) -> bool:
        """Whether raw random numbers were drawn: they have no mask to leave out, so outputs cannot be compared."""
        return self.recorder.raw_sites > 0 or bool(self.moved)


class LookFailed(Exception):
    """A forward pass that failed, with its record up to then."""

    def __init__(self, recorder: Recorder, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.recorder, self.error = recorder, error


# The host's generators are seeded for a look, so that it does not depend on their state. The first 24 numbers of both
# from this seed exceed 1/4: a look then skips no layer that is dropped with a smaller probability.
_HOST_SEED = 44192

Flags = Callable[[str, nn.Module], bool]
_LOOKING = threading.RLock()  # a look borrows torch's generator, which all threads share


def flags_down(name: str, module: nn.Module) -> bool:
    """The training flags of evaluation mode: none is set."""
    return False


def _is_normalisation(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def flags_up(leave_out: tuple[str, ...], lowered: frozenset[type] = frozenset()) -> Flags:
    """The training flags of a draw: set, except for normalisation, this library's layers and modules left out."""

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
    leaves, moved = cloned_leaves(leaves), list[str]()
    held = (*view.net.parameters(), *view.net.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    watch, private = Watch(recorder, held), PrivateDraws(view.net.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_LOOKING)
        stack.enter_context(unchanged_generators())
        seed_host(_HOST_SEED)
        stack.enter_context(unchanged_generators(moved))
        for context in (_watched_calls(view, private), watch, Interception(recorder)):
            stack.enter_context(context)
        torch.default_generator.manual_seed(SENTINEL_SEED)
        before = torch.default_generator.get_state()
        try:
            output = eagerly(inputs.call)(view.net, leaves)
        except Exception as error:
            raise LookFailed(recorder, error) from error
        seeded = torch.default_generator.initial_seed() != SENTINEL_SEED
        if not seeded and not torch.equal(before, torch.default_generator.get_state()) and not watch.unaccounted:
            watch.unaccounted.append("torch's generator, outside of what can be watched (another thread or library)")
    watch.unaccounted += private.names
    tensors, structure = split(output)
    return Look(view, recorder, watch, tensors, structure, moved)


@contextlib.contextmanager
def _watched_calls(view: View, private: PrivateDraws) -> Iterator[None]:
    """Notes draws from private generators, and raises if a module of the network itself ran instead of its view."""
    originals: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        private.note(frame, event, argument)
        if event == "call" and frame.f_code.co_name == "forward" and view.is_original(frame.f_locals.get("self")):
            originals.append(type(frame.f_locals["self"]).__name__)

    before = sys.getprofile()  # for this thread only
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        private.finish()
    if originals:
        raise ValueError(
            f"`net` reaches its own {originals[0]} past its module tree (by a closure, a global or a library's hook), "
            "where it cannot be watched. Register the module as a submodule and call it from there."
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast rounds on a device; None if it is off."""
    try:
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    except RuntimeError:  # a device without autocast
        return None


def equal_but_for_rounding(a: Tensor, b: Tensor, batch: Tensor | None = None) -> bool:
    """Whether two outputs agree up to the order of summation, relative to the batch they are in."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    dtype = a.dtype if not a.is_complex() else torch.float32
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    scale = max(_largest_magnitude(b), _largest_magnitude(batch) if batch is not None else 0.0)
    share = _ROUNDING.get(dtype, 1e-2) if a.device.type == "cpu" else max(_ROUNDING.get(dtype, 1e-2), _TENSOR_CORES)
    return torch.allclose(a, b, rtol=0, atol=share * scale + 1e-30, equal_nan=True)


def _largest_magnitude(tensor: Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)].abs()
    return float(finite.max()) if finite.numel() else 0.0
