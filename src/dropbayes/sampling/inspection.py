"""The inspection of a network before sampling, with the network itself as the reference.

A few rows run through views of the network, as a batch and alone. In evaluation mode, the view must give what the
network gives. With every training flag set except those of normalisation, and every mask left out, the output must be
that of evaluation mode; a row alone must give what it gives in its batch; all randomness must come from sites that can
be keyed. Otherwise an error states the observation and the remedy.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import PyTree

from dropbayes.runtime.devices import autocast_dtype, is_out_of_memory
from dropbayes.runtime.rounding import equal_but_for_rounding
from dropbayes.sampling.inputs import Inputs, as_inputs, cloned_leaves
from dropbayes.sampling.layouts import Layouts, output_layouts, row_of, site_layouts, site_names, whole_arguments
from dropbayes.sampling.masks import named_site
from dropbayes.sampling.probes import Probe, ProbeFailed, Prober, RowsDepend, rows_depend
from dropbayes.sampling.profile import Profile
from dropbayes.sampling.sequences import form, with_positions
from dropbayes.sampling.settings import Sampling, check_sampling
from dropbayes.sampling.strategies import Strategy
from dropbayes.sampling.training_mode import check_accounted, check_masks_differ, check_repeatable, training_probe
from dropbayes.tracing import Neutral, Ones, RowLayout, SharedWrite, Site, Sites, Source, reads_of, view_at_sites
from dropbayes.tracing.generators import UNSEEDED, keyed_generators, names_generators, unmoved_globals
from dropbayes.tracing.outputs import split
from dropbayes.tracing.states import NetworkState
from dropbayes.tracing.views import Flags, View, check_modules, checked_network, eagerly

_MAX_FORMS = 64
_MANY_ROWS = 64  # of which some are sent to other experts than the first few
_MAX_BRANCHES = 6  # random numbers under which branches are looked for


def sites(net: nn.Module, x: PyTree, *, sampling: Sampling = Sampling()) -> Sites:
    """The sites where `net` is random on input `x`: module, operation, drop probability and next weight layer.

    Args:
        net: Any network; it is not changed.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments.
        sampling: The axis of the rows and the modules to ignore.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        >>> print(sites(net, torch.zeros(5, 2)))
        site  path  kind     drop_prob  shape  before weight layer
        ----  ----  -------  ---------  -----  -------------------
        0     2     dropout  0.1        1x8    3
        1 site; 80 % of a forward pass is shared by all draws
    """
    check_sampling(sampling)
    profile = inspect(checked_network(net), as_inputs(x, net, row_axis=sampling.row_axis), sampling.ignored).profile
    return Sites(profile.sites + profile.left_out, profile.prefix_share)


@dataclass
class Inspection:
    """A network that was inspected: its profile, how to run it, and the strategies that passed their trial."""

    net: weakref.ref[nn.Module]
    profile: Profile
    flags: Flags
    owns_parameters: bool
    view: View
    copied: bool = False  # a lone row was seen beside a copy of itself, as the network takes no other
    needs_autocast: bool = False
    strategies: dict[object, Strategy] = field(default_factory=dict)  # by the inputs of the choice
    findings: dict[object, Any] = field(default_factory=dict)  # what else was found out, by who asked
    largest_block: int = 0  # the most rows and draws at once in which a row was seen to be as it is alone
    most_rows: int = 2**62  # that a pass takes, as far as is known
    runs: set[int] = field(default_factory=set)  # hashes of the operations under which its strategy agreed
    seen: Tensor | None = None  # the least and the largest sizes of the rows that were compared with their batch
    alike: bool = False  # rows that were alike have shown it, or a strategy: all zeros, say
    writes: tuple[int, int] = (0, 0)  # into the parameters, at the first inspection and at the next

    def network(self, *, at_sites: bool = False) -> View:
        """The view to run, with the mode `at_sites` alone if it may be; for a network with a state, a new one."""
        if self.profile.is_stateful:
            return View(cast(nn.Module, self.net()), self.flags, own_parameters=self.owns_parameters)
        if at_sites and "at sites" not in self.findings:
            last = {self.profile.sites[-1].before or ""} if self.profile.last_layer else set()  # it may be integrated
            self.findings["at sites"] = self.view_at_sites(Ones(), last)
        return (self.findings["at sites"] if at_sites else None) or self.view

    def view_at_sites(self, otherwise: Source, also: Collection[str] = ()) -> View | None:
        """A view whose modules enter the mode of a pass themselves; None if others may ask for random numbers."""
        net, paths = self.net(), {site.path for site in self.profile.sites}.union(also)
        if net is None or not self.profile.asks_at_sites:
            return None
        return view_at_sites(net, self.flags, paths, otherwise)


_inspections: weakref.WeakKeyDictionary[nn.Module, tuple[NetworkState, dict[Any, Inspection]]] = (
    weakref.WeakKeyDictionary()
)


@temporarily_clear_interpreter_stack()  # of torch.func: inside a transform, no watch sees what is written
def inspect(
    net: nn.Module, inputs: Inputs, ignored: tuple[str, ...] = (), *, positions: bool = False,
    any_length: bool = False, trusted: bool = False,
) -> Inspection:  # fmt: skip
    """The inspection of a network on inputs of this form, remembered until something about its modules changes.

    With `any_length`, an inspection of one length serves others: for sites and axes, but not for costs and shapes. With
    `trusted`, one that is remembered is taken as it is: whoever uses it asks afterwards whether it `is_current`.
    """
    described = form(inputs) if any_length else inputs.signature
    key = described, repr(inputs.spec), inputs.n_rows == 1, ignored, positions, any_length  # no hash in torch 2.6
    if (known := _inspections.get(net)) is None:
        check_modules(net)
    if known is None or not (trusted or known[0].holds(net)):
        known = _inspections[net] = (NetworkState(net), {})
    forms, writes = known[1], known[0].writes()
    first, due = forms[key].writes if key in forms else (writes, writes)
    if key not in forms or writes > due:  # weights that begin at zero hide what they multiply
        forms[key] = replace(_inspect(net, inputs, ignored, positions), writes=(first, 2 * writes - first))
        while len(forms) > _MAX_FORMS:
            forms.pop(next(iter(forms)), None)
    inspection = forms[key]
    if not _holds_for_rows(net, inputs, ignored, inspection):
        inspection = forms[key] = replace(_inspect(net, inputs, ignored, positions), writes=inspection.writes)
    return inspection


def is_current(net: nn.Module) -> bool:
    """Whether nothing about a network's modules has changed since it was inspected, if it was."""
    known = _inspections.get(net := checked_network(net))
    return known is None or known[0].holds(net)


def _holds_for_rows(net: nn.Module, inputs: Inputs, ignored: tuple[str, ...], inspection: Inspection) -> bool:
    """Whether an inspection holds for rows beyond those seen; raises if they differ alone and in their batch."""
    if inspection.alike and not inputs.are_alike():
        return False
    if not inspection.profile.reads_rows or inputs.n_rows == 1:
        return True
    sizes = inputs.row_sizes()
    span = torch.stack([sizes.amin(0), sizes.amax(0)])
    if inspection.seen is not None:
        if bool((span[0] >= inspection.seen[0]).all() and (span[1] <= inspection.seen[1]).all()):
            return True
        probes = compared_rows(net, inputs.different_rows(), inspection, inspection.flags, ignored)
        known = {site.name for site in inspection.profile.sites}
        if any(set(site_names(probe)) != known for probe in probes) and not inspection.profile.by_name:
            return False
        span = torch.stack([torch.minimum(span[0], inspection.seen[0]), torch.maximum(span[1], inspection.seen[1])])
    inspection.seen = span
    return True


@torch.inference_mode(False)
@torch.no_grad()
def compared_rows(
    net: nn.Module, rows: Inputs, inspection: Inspection, flags: Flags | None, ignored: tuple[str, ...] = ()
) -> list[Probe]:
    """The probes of the rows alone; raises if one of them has another output there than in its batch."""
    prober = Prober(net, rows, ignored, names_generators(net), owns_parameters=inspection.owns_parameters)
    probes = {row: _probe_alone(prober, rows, row, flags) for row in range(rows.n_rows)}
    try:
        _check_rows(prober, rows, flags, inspection.profile.outputs, prober(rows.leaves, flags), probes)
    except RowsDepend as error:
        raise ValueError(str(error)) from None
    return list(probes.values())


def forget(net: nn.Module) -> None:
    """Forgets the inspections of a network that turned out to behave differently."""
    _inspections.pop(net, None)


def _inspect(net: nn.Module, inputs: Inputs, ignored: tuple[str, ...], positions: bool) -> Inspection:
    """Autocast is off unless the network needs it, so that outputs differ only by the rounding of full precision."""
    known = {one for name, module in net.named_modules() for one in (name, type(module).__name__)}
    if unknown := [name for name in ignored if name not in known]:
        raise ValueError(f"`ignore_modules` must name modules or classes of `net`; {unknown[0]!r} is none.")
    if autocast_dtype(inputs.device) is None:
        return _inspect_in(net, inputs, ignored, positions)
    try:
        with torch.autocast(inputs.device.type, enabled=False):
            return _inspect_in(net, inputs, ignored, positions)
    except RuntimeError:  # weights of low precision that need autocast for this input
        return replace(_inspect_in(net, inputs, ignored, positions), needs_autocast=True)


@torch.inference_mode(False)  # inference tensors have no versions, which reveal writes
@torch.no_grad()
def _inspect_in(net: nn.Module, inputs: Inputs, ignored: tuple[str, ...], positions: bool) -> Inspection:
    with unmoved_globals(net) as generators:
        prober = Prober(net, inputs, ignored, names_generators(net), generators)
        try:
            return _inspect_with(prober, positions)
        except SharedWrite:  # a pass writes into a parameter: each has its own
            return _inspect_with(replace(prober, owns_parameters=True, views={}), positions)


def _inspect_with(prober: Prober, positions: bool) -> Inspection:
    rows, plain = _evaluation_probe(prober)
    try:
        return _inspect_rows(prober, positions, rows, plain)
    except RowsDepend as error:
        if prober.inputs.n_rows > 1:
            raise ValueError(str(error)) from None
    # The only row is right alone, however a batch would be.
    single = prober.inputs.block(0, 1)
    return _inspect_rows(prober, positions, single, prober(single.leaves, None))


def _inspect_rows(prober: Prober, positions: bool, rows: Inputs, plain: Probe) -> Inspection:
    """The inspection on some rows, whose probe in evaluation mode is given."""
    made = len([*plain.view.net.parameters()]) > len([*prober.net.parameters()])
    if made and any(site.kind in ("rand", "randn") for site in plain.recorder.sites):
        raise ValueError("`net` must be initialised: its forward pass draws weights. Run it once on a batch: net(x).")
    chosen, flags = training_probe(prober, rows, plain)
    check_accounted(chosen, plain)
    check_masks_differ(prober, rows, flags)
    if prober.named & UNSEEDED:
        check_repeatable(prober, rows, flags, chosen)
    alone, probes = chosen, [chosen]
    if rows.n_rows > 1:
        # An extreme row and one between: where rows are mixed, the largest may be left as it is.
        alone, other = (_probe_alone(prober, rows, row, flags) for row in (0, 1))
        probes += [alone, other]
        sites, together = _sites_of_rows(probes, rows.n_rows)
        outputs = output_layouts(alone, chosen, rows.n_rows)
        if chosen.host.moved and not plain.host.moved:  # rows that draw from a generator are seen in evaluation mode
            singles = {row: _probe_alone(prober, rows, row, None) for row in (0, 1)}
            _check_rows(prober, rows, None, outputs, plain, singles)
        _check_rows(prober, rows, flags, outputs, chosen, {0: alone, 1: other})
        ranks = chosen.watch.asks or chosen.watch.ranked != alone.watch.ranked
        if ranks and prober.inputs.n_rows > rows.n_rows:  # of more rows, others go elsewhere or find no room
            many = prober.inputs.block(0, min(_MANY_ROWS, prober.inputs.n_rows))
            with contextlib.suppress(ProbeFailed):  # it may take no more
                probes.append(prober(many.leaves, flags))
                last = {row: _probe_alone(prober, many, row, flags) for row in range(many.n_rows)[-2:]}
                _check_rows(prober, many, flags, outputs, probes[-1], last)
    else:
        sites, together = tuple(chosen.recorder.sites), rows.is_one_row
        outputs = tuple(None if rows.is_one_row or t.shape[:1] != (1,) else RowLayout(0, 1) for t in chosen.tensors)
    _check_faithful(prober, rows, plain, outputs)
    if rows.n_rows > 1:
        sites = _sites_of_all_branches(prober, rows, flags, probes, sites)
    if positions:
        sites = with_positions(prober, flags, alone, sites)
    profile = _profile(chosen, alone, probes, rows.n_rows)
    by_name = profile.by_name or profile.reads_rows or positions  # whatever branch these rows take
    sites = tuple(replace(s, index=i, number=named_site(s.name) if by_name else i) for i, s in enumerate(sites))
    one_row, owns_parameters = rows.n_rows == 1 and not rows.is_one_row, prober.owns_parameters
    is_stateful = bool(plain.changes) or owns_parameters or profile.is_stateful
    view = View(prober.net, flags, own_buffers=is_stateful, own_parameters=owns_parameters)
    view.forget_network()
    is_stateful |= view.moves_weights
    profile = replace(
        profile, sites=sites, outputs=outputs, rows_together=together, one_row=one_row, is_stateful=is_stateful
    )
    inspection = Inspection(weakref.ref(prober.net), profile, flags, owns_parameters, view, rows.copied)
    return replace(inspection, alike=(rows if prober.inputs.n_rows > 1 else prober.inputs).are_alike())


def _sites_of_rows(probes: list[Probe], n_rows: int) -> tuple[tuple[Site, ...], bool]:
    """The sites of a batch with the layout of its rows, and whether several rows can be one batch."""
    batch, alone, _ = probes
    if _skips_sites(probes) or site_names(batch) == site_names(alone):
        sites, together = site_layouts(alone, batch, n_rows)
        pairs = [(a, b) for a, b in zip(alone.recorder.sites, batch.recorder.sites, strict=False) if a.name == b.name]
        other = any(a.drop_prob != b.drop_prob and "rand" not in a.kind for a, b in pairs) and not batch.host.moved
        if other or any(site.kind == "randperm" and site.layout for site in sites):
            rule = "permutes its rows, or drops with a probability that depends on them all"
            remedy = "If it is augmentation, name its module in Sampling(ignore_modules=...)"
            raise RowsDepend(f"`net` {rule}. {remedy}; otherwise row_axis=None takes the input as one row.")
        some = RowLayout(0, 0)
        if of_parts := _sites_of_parts(probes):  # a row may have several entries in one place
            lie = {s.name: some for s in sites if s.name in of_parts and (s.layout is None or "rand" not in s.kind)}
            lie |= {s.name: RowLayout(0, 1) for s in sites if s.name not in of_parts and s.layout == some}  # or one
            return tuple(replace(s, layout=lie.get(s.name, s.layout)) for s in sites), False
        if any(probe.watch.sends_rows for probe in probes):  # a site without an axis for all may hold some rows
            sites = tuple(replace(s, layout=some) if s.layout is None and len(s.shape) > 1 else s for s in sites)
        return sites, together and batch.watch.ranked == alone.watch.ranked
    return tuple(alone.recorder.sites), False  # a site for each row, or a branch on the values of the rows


def _sites_of_parts(probes: list[Probe]) -> set[str]:
    """The names of the sites where a row may have any number of its parts, which the network sends to places."""
    takes = any(probe.watch.selects_parts for probe in probes[1:3])  # of a row alone
    return set().union(*(probe.recorder.of_parts for probe in probes[:3])) if takes else set()


def _skips_sites(probes: list[Probe]) -> bool:
    """Whether a draw, or a row among others, may skip sites, which are then known by name and not by number."""
    draws_branch = any(drawn for drawn, _, _ in reads_of(*(probe.watch for probe in probes)))
    return draws_branch or any(probe.host.moved or probe.watch.sends_rows for probe in probes)


def _sites_of_all_branches(
    prober: Prober, rows: Inputs, flags: Flags, probes: list[Probe], sites: tuple[Site, ...]
) -> tuple[Site, ...]:
    """The sites that are met under some random numbers, if the network may choose a branch by their value."""
    moved = any(probe.host.moved for probe in probes)
    if not moved and not any(drawn and number for drawn, _, number in reads_of(*(probe.watch for probe in probes))):
        return sites
    known = {site.name: site for site in sites}
    for seed in range(_MAX_BRANCHES):
        neutral = Neutral((seed + 0.5) / _MAX_BRANCHES, float(seed % 2))
        with keyed_generators(seed) if moved else contextlib.nullcontext():
            alone = prober(rows.rows([0]), flags, neutral)
        with keyed_generators(seed) if moved else contextlib.nullcontext():
            batch = prober(rows.leaves, flags, neutral)
        for site in site_layouts(alone, batch, rows.n_rows)[0]:
            is_some = known.get(site.name, site).layout == RowLayout(0, 0) and site.name not in _sites_of_parts(probes)
            if site.name not in known or is_some:
                known[site.name] = site
    return tuple(known.values())


def _profile(batch: Probe, alone: Probe, probes: list[Probe], n_rows: int) -> Profile:
    """What the probes with the training flags of a draw show together."""
    reads = reads_of(*(probe.watch for probe in probes))
    draws_branch, by_name = any(drawn for drawn, _, _ in reads), _skips_sites(probes)
    rows_branch = any(drawn and rowed for drawn, rowed, _ in reads)
    rows_branch |= not by_name and any(site_names(probe) != site_names(alone) for probe in probes[1:])
    recorder, ranked = alone.recorder, {*batch.watch.ranked} - {*alone.watch.ranked}
    # Calls that another row adds, in a loop of Python: without reads, by which a pass may be longer than another.
    n_calls = 0.0 if reads else (batch.recorder.n_calls - recorder.n_calls) / max(1, n_rows - 1)

    def of_a_row(one: float, several: float) -> float:
        """The work or memory that another row adds to a pass; what is made of weights does not grow with the rows."""
        return one if n_rows == 1 else max(0.0, (several - one) / (n_rows - 1))

    costs = [(recorder.prefix_cost, batch.recorder.prefix_cost), (recorder.suffix_cost, batch.recorder.suffix_cost)]
    prefix, suffix = (one if reads else of_a_row(one, several) for one, several in costs)
    return Profile(
        sites=(),
        left_out=tuple(recorder.sites_left_out),
        prefix_cost=prefix,
        suffix_cost=suffix + 3e4 * max(0.0, n_calls),
        n_calls=recorder.n_calls,
        shared_cost=recorder.suffix_cost - suffix,
        pass_bytes=int(of_a_row(alone.watch.peak_bytes, batch.watch.peak_bytes)),
        suffix_bytes=int(of_a_row(alone.watch.peak_suffix_bytes, batch.watch.peak_suffix_bytes)),
        outputs=(),
        structure=batch.structure,
        last_layer=recorder.is_integrable(alone.tensors) and not draws_branch,
        reads_rows=any(rowed for _, rowed, _ in reads),
        rows_depend=any(rowed and number and not drawn for drawn, rowed, number in reads)
        or any(probe.host.left != batch.host.left for probe in probes),  # other numbers of the host for other rows
        draws_branch=draws_branch,
        gates=_gates(probes) if draws_branch else (),
        asks_counts=not any(drawn for drawn, _, _ in reads_of(*(probe.watch for probe in probes), counts=False)),
        rows_branch=rows_branch,
        numbers_vary=any(probe.watch.numbers != probes[0].watch.numbers for probe in probes),
        reorders=any(probe.watch.reorders for probe in probes),
        ranks_rows=any(how != "sort" for how, _ in ranked),
        sorts_rows={how for how, _ in ranked} == {"sort"},
        are_sent=any(probe.watch.sends_rows for probe in probes),
        sends_parts=bool(_sites_of_parts(probes)),
        by_name=by_name,
        host_random=any(probe.host.moved for probe in probes),
        seeds_torch=any(probe.recorder.seeds_torch for probe in probes),
        is_stateful=any(probe.changes for probe in probes),
        writes_input=any(probe.watch.writes_input for probe in probes),
    )


def _gates(probes: list[Probe]) -> tuple[tuple[str, float], ...]:
    """The sites of single numbers that decide, by nothing but their sides of one number each, the path of a draw."""
    others = any(drawn for drawn, _, _ in reads_of(*(probe.watch for probe in probes), gates=False))
    gates = probes[0].recorder.gates  # of a batch: alone, a number for each row is a single one, too
    sides = tuple((name, at) for name, at in gates.items() if at is not None)
    alike = all(probe.recorder.gates.get(name, at) == at for probe in probes for name, at in sides)
    return sides if alike and not others and len(sides) == len(gates) else ()


def _evaluation_probe(prober: Prober) -> tuple[Inputs, Probe]:
    """A probe of a few different rows in evaluation mode; of one row if the network takes no more."""
    inputs, rows = prober.inputs, prober.inputs.different_rows()
    try:
        return rows, prober(rows.leaves, None)
    except ProbeFailed as failed:
        if inputs.is_one_row:
            raise failed.error from None
        error = _failure(prober, failed, "some of them") if inputs.n_rows > rows.n_rows else failed.error
        if error is not failed.error:
            raise error from failed.error
        refusal = failed.error
    single, plain = replace(inputs.block(0, 1), copied=True), _probe_alone(prober, inputs, 0, None)
    if inputs.n_rows > 1 and any(tensor.shape[:1] != (1,) for tensor in plain.tensors):
        raise refusal  # of the batch: the output of a row alone has no axis of rows
    copies = single.different_rows()
    try:
        return copies, prober(copies.leaves, None)
    except ProbeFailed:
        return single, plain


def _probe_alone(prober: Prober, rows: Inputs, row: int, flags: Flags | None) -> Probe:
    try:
        return prober(rows.rows([row]), flags)
    except ProbeFailed as failed:
        raise _failure(prober, failed, "a single one") from failed.error


def _failure(prober: Prober, failed: ProbeFailed, rows: str) -> Exception:
    """The error of a network that fails on some rows: its own, or that its rows depend on each other."""
    inputs = prober.inputs
    if inputs.n_rows == 1 or isinstance(failed.error, NotImplementedError):
        return failed.error
    try:
        prober(inputs.leaves, None)
    except ProbeFailed:
        return failed.error
    what = f"`net` takes the batch of {inputs.n_rows} rows but fails on {rows} ({str(failed).splitlines()[0]}):"
    if len(inputs.leaves) == 1 and inputs.leaves[0].dim() == 1:
        return ValueError(f"{what} the numbers of a vector are rows. One row is x[None], a DataLoader needs batches.")
    remedy = f"{whole_arguments(inputs)}Pass row_axis=None to take the whole input as one row."
    return ValueError(f"{what} its rows depend on each other. {remedy}")


def _check_rows(
    prober: Prober, rows: Inputs, flags: Flags | None, outputs: Layouts, batch: Probe, alone: dict[int, Probe]
) -> None:
    """Raises on a network whose rows alone differ from the same rows in a batch."""
    if any(probe.host.moved for probe in (batch, *alone.values())):
        return  # each pass took branches of its own
    for row, probe in alone.items():

        def agrees(exact: Prober, rows: Inputs, row: int = row) -> bool:
            one, several = exact(rows.rows([row]), flags), exact(rows.leaves, flags)
            return _are_rows_of(one.tensors, [row], several, outputs, rows.n_rows)

        of_batch = functools.partial(_are_rows_of, probe.tensors, [row], batch, outputs, rows.n_rows)
        if of_batch() or prober.in_double(rows, agrees, of_batch(offsets=False)):
            continue  # at most a small difference of large numbers
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in probe.tensors)
        loss = "" if all(t.dim() for t in probe.tensors) else "If the scalar is a loss, leave the labels out of `x`. "
        where = f"(shape {shapes}) than in its batch of {rows.n_rows} in evaluation mode"
        raise rows_depend(f"gives a row another output alone {where}", loss + whole_arguments(rows))


def _check_faithful(prober: Prober, rows: Inputs, plain: Probe, outputs: Layouts) -> None:
    """Raises if the network itself, or its view where a call would change it, gives its rows other outputs.

    They come in reverse order: in one order alone, sorted rows may come out where they were.
    """
    recorder, net = plain.recorder, prober.net
    if plain.host.moved or plain.watch.unaccounted:
        return
    leaves_it = plain.view.state.holds(plain.view.net) and not (plain.changes or prober.owns_parameters)
    by_view = recorder.sites or recorder.sites_left_out or not leaves_it or any(m.training for m in net.modules())
    reverse = list(range(rows.n_rows))[::-1]

    def agrees(order: list[int], *, offsets: bool = True) -> bool:
        leaves = cloned_leaves(rows.rows(order))
        try:
            tensors = prober(leaves, None).tensors if by_view else split(eagerly(rows.call)(net, leaves))[0]
        except Exception as error:  # of an index, say, that is made of all rows
            if is_out_of_memory(error):
                raise
            return False
        return _are_rows_of(tensors, order, plain, outputs, rows.n_rows, offsets)

    def agrees_in_double(exact: Prober, rows: Inputs) -> bool:
        turned = exact(rows.rows(reverse), None).tensors
        return _are_rows_of(turned, reverse, exact(rows.leaves, None), outputs, rows.n_rows)

    if agrees(reverse):
        return
    if not agrees(reverse[::-1], offsets=False):
        with BaseTorchFunctionMode():  # under any mode, as in a draw, torch does not fuse its transformer layers
            if agrees(reverse):
                warnings.warn(
                    "torch fuses the transformer layers of `net` in evaluation mode, where padded positions are then "
                    "zero. Predictions are those of the layers as they are in training.",
                    stacklevel=2,
                )
                return
        cause = "a forward or hook was patched, or it reads modules past its module tree"
        rule = f"gives another output than a copy of its modules over the same weights: {cause}"
        raise ValueError(f"`net` {rule}. Register what it reads as submodules and buffers.")
    if not prober.in_double(rows, agrees_in_double):
        rule = "gives its rows other outputs in another order: it sorts them, or they depend on each other"
        raise RowsDepend(f"`net` {rule}. {whole_arguments(rows)}Pass row_axis=None to take the whole input as one row.")


def _are_rows_of(
    some: list[Tensor], index: list[int], batch: Probe, outputs: Layouts, n: int, offsets: bool = True
) -> bool:
    """Whether outputs are those that some of the n rows of a batch have in it."""
    if len(some) != len(batch.tensors):
        return False
    for tensor, whole, layout in zip(some, batch.tensors, outputs, strict=True):
        for place, row in enumerate(index):
            given, wanted = row_of(tensor, layout, place, len(index)), row_of(whole, layout, row, n)
            if given is None or wanted is None or not equal_but_for_rounding(given, wanted, whole, offsets=offsets):
                return False
    return True
