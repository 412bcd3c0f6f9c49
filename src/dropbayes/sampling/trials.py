"""The choice of a strategy by trial: the fastest that lays the same masks in the same places as the plain loop.

The masks of a trial hold a different number for every unit, and its rows differ: a mask that is laid in the wrong place
changes the output. Units of several entries in a row have other numbers in every row. The row compared stands second
among copies of another, under the second draw: it has another place if the network sorts or reverses its rows, or if
draws and rows are exchanged. Zeros and ones come as well, for a network that takes no others or asks only what drops.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dropbayes.runtime.devices import autocast_dtype, changed_setting
from dropbayes.runtime.rounding import equal_but_for_rounding
from dropbayes.sampling.inputs import Inputs, cloned_leaves
from dropbayes.sampling.inspection import Inspection, compared_rows
from dropbayes.sampling.masks import Keys
from dropbayes.sampling.probes import double_inputs
from dropbayes.sampling.source import MaskSpec, NetworkChanged, UnsupportedStrategy
from dropbayes.sampling.strategies import (
    BY_BRANCH,
    BY_PATH,
    DRAW_BY_DRAW,
    FOLDED,
    MAPPED,
    MAPPED_ROWS,
    ONE_BY_ONE,
    ROW_BY_ROW,
    Strategy,
    Work,
    evaluate,
)
from dropbayes.tracing import Site
from dropbayes.tracing.views import View

# Mapped calls take longer to launch, so mapping needs at least this share of a forward pass before the first site, and
# on a GPU at least this many operations saved.
_MAPPING_PAYS = {"cpu": (0.05, 0.0), "cuda": (0.2, 1e12)}
_SMALL_NETWORK = 1e5  # operations of a row: fewer take no longer than their calls
Alone = dict[int, list[Tensor]]  #: What rows have alone, by their place in a block.


def chosen_strategy(inspection: Inspection, inputs: Inputs, spec: MaskSpec, *, invariant: bool = False) -> Strategy:
    """The fastest strategy that agrees, on a few rows and draws, with one row of one draw at a time.

    For blocks that are `invariant` to the batch, one that has the same bits for any number of rows comes first.
    """
    profile = spec.profile
    device = "cpu" if inputs.device.type == "cpu" else "cuda"
    saved = profile.prefix_cost * inputs.n_rows * (spec.keys.n_draws - 1)
    least_share, least_saved = _MAPPING_PAYS[device]
    if invariant and device == "cpu" and profile.of_vectors:
        least_share = 0.5  # folded, a lone vector has products of all draws
    shares_prefix = profile.prefix_share > least_share and saved >= least_saved
    key = (spec.per_row, shares_prefix, spec.positions is None, autocast_dtype(inputs.device))
    if key not in inspection.strategies:
        candidates = _candidates(spec, shares_prefix, inputs.is_one_row)
        inspection.strategies[key] = first_that_agrees(inspection, inputs, spec, candidates)
    return inspection.strategies[key]


def _candidates(spec: MaskSpec, shares_prefix: bool, is_one_row: bool) -> list[Strategy]:
    """The strategies worth a trial, from the fastest on; the plain loop needs none."""
    profile, per_row = spec.profile, spec.per_row
    together = is_one_row or not (profile.rows_depend or profile.one_row)
    apart = [] if is_one_row or profile.host_random or profile.seeds_torch else [BY_BRANCH]
    in_turn = profile.draws_branch or profile.host_random
    rows_apart = not together or profile.ranks_rows or (per_row and not profile.moves_rows)
    followed = profile.moves_rows and not (rows_apart or profile.rows_branch)
    sent = [FOLDED] if followed and (profile.asks_counts or not in_turn) else []
    if profile.rows_branch or (in_turn and rows_apart):
        return apart
    if in_turn:
        by_path = profile.gates and profile.rows_together and not (is_one_row or profile.moves_rows)
        return [*sent, *([BY_PATH] if by_path else []), DRAW_BY_DRAW]
    if not together:
        # A batch may do where the number is seen to vary with the rows: the trial then shows that it does no harm.
        together = profile.numbers_vary and not (per_row or profile.one_row or profile.ranks_rows)
        return [*([DRAW_BY_DRAW] if together else []), *apart, ROW_BY_ROW]
    if is_one_row:
        return [MAPPED, DRAW_BY_DRAW]
    candidates = [MAPPED_ROWS, *([] if profile.ranks_rows else [DRAW_BY_DRAW]), ROW_BY_ROW]
    if profile.moves_rows:  # together, mapped over draws, they would be taken to be in order
        return [*sent, *candidates]
    if profile.rows_together and (profile.sites_have_rows or not per_row):
        folded = [FOLDED] if profile.sites_have_rows else []
        candidates = [*([MAPPED, *folded] if shares_prefix else [*folded, MAPPED]), *candidates]
    return candidates if not per_row or profile.sites_have_rows else [MAPPED_ROWS, ROW_BY_ROW]


@torch.inference_mode(False)
@torch.no_grad()
def first_that_agrees(inspection: Inspection, inputs: Inputs, spec: MaskSpec, candidates: list[Strategy]) -> Strategy:
    """The first candidate that gives a row under a draw, among others, what the plain loop gives it."""
    rows = replace(inputs, copied=inspection.copied).different_rows()
    inspection.alike |= (rows if inputs.n_rows > 1 else inputs).are_alike()  # those that differ the most
    if not rows.is_one_row:
        rows = replace(rows, leaves=tuple(rows.rows([0, rows.n_rows - 1, 0, 0])), n_rows=4)
    second = min(1, rows.n_rows - 1)
    # By chance, few units may have the zeros and ones of others; and a row that is sorted among those of all draws may
    # come to stand where it was, though not under every draw.
    in_turn = spec.profile.draws_branch or spec.profile.host_random  # so that every draw takes a pass of its own
    most = 3 if in_turn else 16 if spec.profile.prefix_cost + spec.profile.suffix_cost < _SMALL_NETWORK else 6
    units = min((math.prod(s.shape) or 99 for s in spec.profile.sites if s.is_random and s.layout), default=99)
    n_masks = min(64 // units, most) if units < (8 if in_turn else 16) else 0
    n_draws = max(2 + n_masks, 8 if spec.profile.reorders or spec.profile.gates else 2)
    spec = replace(spec, integrate=False, trial=True)

    def run(strategy: Strategy, rows: Inputs = rows, network: Any = inspection.network, *, alone: bool = False) -> Any:
        work = Work(network, rows, cloned_leaves(rows.leaves), tried, range(rows.n_rows), learned={})
        work = replace(work.row(second), draws=tried[1:]) if alone else work
        with _without_fallbacks() if strategy.draws == "mapped" else contextlib.nullcontext():
            return _in_full_precision(inspection, inputs, lambda: evaluate(strategy, spec, work))

    def agrees_in_double(strategy: Strategy, otherwise: bool) -> bool:
        try:
            view = View(cast(nn.Module, inspection.net()), inspection.flags, own_parameters=True)
            view.net.double()
            exact = double_inputs(rows), lambda: view
            return agrees(run(strategy, *exact), run(ONE_BY_ONE, *exact, alone=True), second, 1)
        except Exception:  # the network supports one precision only
            return otherwise

    expected = list[Tensor]()
    for tried in (range(n_draws), range(2, 18)) if candidates else ():  # at last under zeros and ones alone
        spec = replace(spec, keys=Keys(spec.keys.seed, tried.stop, spec.keys.sampler))
        with contextlib.suppress(Exception):
            expected = run(ONE_BY_ONE, alone=True)
            if not any(bool(tensor.isnan().any()) for tensor in expected if tensor.is_floating_point()):
                break
    for strategy in candidates:
        try:
            outputs = run(strategy)
        except Exception:  # control flow that depends on data, an operation without a rule, too little memory, ...
            continue
        same = agrees(outputs, expected, second, 1)
        # A few numbers may agree by chance, or where a non-linearity saturates, if not to their last digits.
        are_many = sum(tensor.numel() for tensor in expected) > 8
        if same and (are_many or agrees(outputs, expected, second, 1, within=1e-5)):
            return strategy
        # Tensor cores round to ten bits, and a small number may be the difference of large ones.
        if (same or agrees(outputs, expected, second, 1, within=0.05)) and agrees_in_double(strategy, same):
            return strategy
    return ONE_BY_ONE


def learned_sites(spec: MaskSpec, work: Work) -> tuple[Site, ...] | None:
    """The sites that one draw of some rows is the first to meet; None unless a row that meets each is as alone."""
    new, met = dict[str, Site](), dict[str, Site]()
    with contextlib.suppress(UnsupportedStrategy):  # a mask that is laid in another way
        together = evaluate(DRAW_BY_DRAW, spec, replace(work, learned=new))
        for row in range(len(work.rows)):
            one = replace(work.row(row), learned=met)
            if not agrees(together, evaluate(ONE_BY_ONE, spec, one), row, 0):
                return None
            if new.keys() <= met.keys():
                return tuple(new.values())
    return None


def rows_alone(strategy: Strategy, spec: MaskSpec, work: Work, n_rows: int) -> Alone:
    """Rows of the last draws by the plain loop, to compare with the first block as large as this one."""
    # A trial has few rows: of many, the last sent on may find no room, and one that is read may decide for all.
    if strategy.rows != "together":
        return {}
    decides = spec.profile.reads_rows and not spec.profile.numbers_vary  # true or false, of one row or of all
    move = spec.profile.are_sent or (spec.profile.sorts_rows and strategy == FOLDED)  # the last may stay
    some = range(n_rows)[-8:] if move or decides else range(n_rows)[-1:]
    units = [(s.drop_prob, math.prod(s.shape)) for s in spec.profile.sites if s.is_random and s.layout and s.drop_prob]
    few = any((1 - 2 * p * (1 - p)) ** number > 0.01 for p, number in units)  # of which two masks may be one
    n = 1 + few * (1 if strategy.draws == "single" else 15 // len(some))
    return {row: evaluate(ONE_BY_ONE, spec, replace(work.row(row), draws=work.draws[-n:])) for row in some}


def check_block(
    known: Inspection, strategy: Strategy, spec: MaskSpec, work: Work, n_rows: int, outputs: list[Tensor], alone: Alone
) -> None:
    """Raises unless a block gives rows what they have alone, and other operations than before do not misplace masks."""
    unclear = [row for row, one in alone.items() if not agrees(outputs, one, row, len(work.draws) - len(one[0]))]
    tried = replace(spec, integrate=False, trial=True)  # whose masks all have an effect
    for masks in (spec, tried) if unclear else ():
        outputs = evaluate(strategy, masks, work) if masks.trial else outputs
        alone = {row: evaluate(ONE_BY_ONE, masks, replace(work.row(row), draws=work.draws[-4:])) for row in unclear}
        if not all(agrees(outputs, one, row, len(work.draws) - len(one[0]), 0.05) for row, one in alone.items()):
            compared_rows(cast(nn.Module, known.net()), work.inputs, known, None)  # raises if they depend on each other
            raise UnsupportedStrategy("a network that does otherwise with many rows")
    if strategy.rows == "together" and known.runs and work.runs - known.runs and not spec.profile.by_name:
        known.strategies.clear()  # a global or an argument may have chosen another branch
        known.findings.clear()
        some = replace(work.inputs, leaves=tuple(work.leaves)).block(0, n_rows)
        if first_that_agrees(known, some, spec, [strategy]) != strategy:
            raise NetworkChanged("other operations, under which masks lie otherwise")
    known.runs |= work.runs


def agrees(outputs: list[Tensor], expected: list[Tensor], row: int, draw: int, within: float = 0.0) -> bool:
    """Whether a row's output from a draw on, among others, is the one it has alone; or as a whole, within a share.

    The share is of its size or, as a small output may be the difference of large numbers, of that of all on average.
    """
    if len(outputs) != len(expected):
        return False
    for whole, one in zip(outputs, expected, strict=True):
        actual, wanted = whole[draw : draw + len(one), row], one[:, 0]
        if within and actual.shape == wanted.shape and actual.is_floating_point():
            typical = whole.double().norm() * math.sqrt(len(one) / math.prod(whole.shape[:2]))
            if not float((actual - wanted).norm()) <= within * float(wanted.norm().maximum(typical)):  # or if it is nan
                return False
        elif not equal_but_for_rounding(actual, wanted, whole[:, row] if len(whole) > 1 else whole[0]):
            return False
    return True


def _in_full_precision(inspection: Inspection, inputs: Inputs, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The outputs, without autocast if the network allows it: rounding then hides no difference."""
    if autocast_dtype(inputs.device) is None or inspection.needs_autocast:
        return run()
    run()  # it must work as it will be run, too
    with torch.autocast(inputs.device.type, enabled=False):
        return run()


def _without_fallbacks() -> contextlib.AbstractContextManager[None]:
    """Makes an operation without a batching rule an error: mapped one draw at a time, it would be slow."""
    functorch: Any = torch._C._functorch
    return changed_setting(functorch._set_vmap_fallback_enabled, False, functorch._is_vmap_fallback_enabled())
