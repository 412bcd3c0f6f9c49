"""Probes: forward passes of a network's view with every mask left out, watched; and the comparison of their outputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.runtime.devices import is_out_of_memory
from dropbayes.runtime.rounding import equal_but_for_rounding
from dropbayes.sampling.inputs import Inputs, cloned_leaves
from dropbayes.tracing import NEUTRAL, AtMeans, Interception, Neutral, Recorder, SharedWrite, SiteNames, Watch, is_ours
from dropbayes.tracing.generators import HostDraws
from dropbayes.tracing.operations import tensor_leaves
from dropbayes.tracing.outputs import Structure, split
from dropbayes.tracing.states import description, is_object
from dropbayes.tracing.views import Flags, View, eagerly
from dropbayes.tracing.watch import storage


@dataclass
class Probe:
    """One forward pass with every mask left out: its record and its output."""

    view: View
    recorder: Recorder
    watch: Watch
    host: HostDraws
    tensors: list[Tensor]
    structure: Structure
    changes: list[tuple[str, str]]  # what the pass changed in its view

    def fits(self, other: Probe) -> bool:
        """Whether the outputs have the same structure."""
        return self.structure == other.structure and [t.shape for t in self.tensors] == [t.shape for t in other.tensors]

    def agrees_with(self, other: Probe, *, offsets: bool = True) -> bool:
        """Whether the outputs agree up to rounding, for `offsets` see `equal_but_for_rounding`."""
        same = functools.partial(equal_but_for_rounding, offsets=offsets)
        return self.fits(other) and all(map(same, self.tensors, other.tensors))

    def stands_for(self, plain: Probe) -> bool:
        """Whether the outputs agree: to the bit if the pass moves a state, as a power iteration does in training."""
        still = self.changes == plain.changes
        return self.agrees_with(plain) and (still or all(map(torch.equal, self.tensors, plain.tensors)))

    @property
    def unaccounted(self) -> list[str]:
        """The random numbers that no seed controls, in words."""
        return [*self.watch.unaccounted, *self.host.unkeyed]


class ProbeFailed(Exception):
    """A forward pass that failed, with its record up to then."""

    def __init__(self, recorder: Recorder, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.recorder, self.error = recorder, error


class RowsDepend(ValueError):
    """Rows that give another output in a batch than alone."""


def rows_depend(rule: str, remedy: str = "") -> RowsDepend:
    """The error on a network whose rows depend on each other, with a remedy before the one that every network has."""
    whole = "Pass row_axis=None to take the whole input as one row."
    return RowsDepend(f"`net` {rule}: its rows depend on each other. {remedy}{whole}")


def is_ignored(ignored: tuple[str, ...], name: str, module: nn.Module) -> bool:
    """Whether a module is named in `ignored`: by its class, its name, or the name of a module it is in."""
    return any(type(module).__name__ == one or name == one or name.startswith(f"{one}.") for one in ignored)


def training_flags(ignored: tuple[str, ...], in_evaluation: frozenset[type] = frozenset()) -> Flags:
    """The modules in training mode during a draw: not normalisation, this library's layers, or what is left out."""

    def may_train(name: str, module: nn.Module) -> bool:
        rests = isinstance(module, nn.modules.batchnorm._NormBase) or type(module) in in_evaluation
        return not (rests or is_ours(module) or is_ignored(ignored, name, module))

    return may_train


@dataclass(frozen=True)
class Prober:
    """Makes probes of one network."""

    net: nn.Module
    inputs: Inputs  # of the form of those to probe
    ignored: tuple[str, ...]  # modules whose randomness is not dropout
    named: frozenset[str]  # the generators of the host that the network's code names
    drawn_from: list[object] = field(default_factory=list)  # and those of the host that are its global variables
    owns_parameters: bool = False  # its passes write into their parameters, so that each needs its own
    views: dict[Flags | None, View] = field(default_factory=dict)  # that passes have left as they were

    def __call__(
        self, leaves: list[PyTree] | tuple[Any, ...], may_train: Flags | None, neutral: Neutral = NEUTRAL[0]
    ) -> Probe:
        """One pass of a view with these training flags (None: evaluation mode), every mask left out, watched."""
        view = self.views.pop(may_train, None) or View(self.net, may_train, own_parameters=self.owns_parameters)
        given, leaves, is_changed = leaves, cloned_leaves(leaves), False
        objects = [(leaf, description(leaf)) for leaf in leaves if is_object(leaf)]
        held = [(p, p.data, p.grad, p.requires_grad) for p in view.parameters.values()]
        watch = Watch(self.inputs.tensors_of_rows(leaves), view.unwritable, tensor_leaves(leaves))
        left_out = functools.partial(is_ignored, self.ignored)
        recorder = Recorder(SiteNames(view.paths, view.originals), left_out=left_out, watch=watch, neutral=neutral)
        host = HostDraws(self.named, [*view.generators, *self.drawn_from], self.inputs.device)
        try:
            with host, watch, (AtMeans if neutral.gates else Interception)(recorder):
                output = eagerly(self.inputs.call)(view.net, leaves)
                recorder.seeds_torch |= watch.is_seeded()  # with or without random numbers that follow
        except SharedWrite as write:
            if self.owns_parameters:  # of the network, but not of modules that it holds otherwise
                remedy = "Register it: assign it to an attribute, or hold it in a ModuleList or ModuleDict"
                raise ValueError(f"`net` writes into {write}, which it holds past its module tree. {remedy}.") from None
            raise
        except Exception as error:
            if is_out_of_memory(error):  # says nothing of the network
                raise
            raise ProbeFailed(recorder, error) from error
        finally:  # past the watch, `weight.data = ...` gives a parameter other memory, and `backward` a gradient
            for p, data, gradient, learns in held:
                if storage(p) != storage(data) or p.grad is not gradient or p.requires_grad != learns:
                    p.data, p.grad, p.requires_grad, is_changed = data, gradient, learns, True
        if is_changed:
            raise SharedWrite
        written = [leaf for leaf, before in objects if description(leaf) != before]
        if any(leaf is one for leaf in written for one in given):
            rule = f"holds a {type(written[0]).__name__} that the network writes into and that cannot be copied"
            raise TypeError(f"`x` {rule}. Copy in the forward pass what it writes into, or pass the tensors it holds.")
        watch.writes_input |= bool(written)
        host.moved += ["torch's generator"] if watch.draws_by_generator else []
        host.left["torch's generator"] = watch.draws_by_generator
        tensors, structure = split(output)
        changes = view.state.changes(view.net, watch.written)
        if not (changes or host.moved or host.unkeyed or self.owns_parameters):
            self.views[may_train] = view
        return Probe(view, recorder, watch, host, tensors, structure, changes)

    def in_double(self, rows: Inputs, judge: Callable[[Prober, Inputs], bool], otherwise: bool = False) -> bool:
        """What `judge` says of probes of rows in double precision, the arbiter; `otherwise` if it is not supported."""
        try:
            exact = replace(self, net=copy.deepcopy(self.net).double(), inputs=double_inputs(rows), views={})
            return judge(exact, exact.inputs)
        except Exception:
            return otherwise


def double_inputs(inputs: Inputs) -> Inputs:
    """The inputs with all real numbers in float64."""
    return inputs.with_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
