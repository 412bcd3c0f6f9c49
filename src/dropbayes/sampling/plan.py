"""The plan for evaluating the draws of a network: its strategy, and blocks of rows, each in chunks of draws.

On a CPU the size of a block follows from the network and the number of draws, not from the batch: a row takes part in
products of the same shape whether it comes alone or among a million, and so has the same bits. Elsewhere blocks are as
large as memory allows.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dropbayes.runtime.batches import input_hints
from dropbayes.runtime.devices import autocast_dtype, cpu_threads, is_out_of_memory
from dropbayes.runtime.rounding import equal_but_for_rounding
from dropbayes.runtime.validation import check_choice
from dropbayes.sampling.inputs import Inputs
from dropbayes.sampling.inspection import Inspection, forget, inspect
from dropbayes.sampling.masks import Keys, Positions
from dropbayes.sampling.perceptron import Perceptron, as_perceptron, prepare
from dropbayes.sampling.probes import rows_depend
from dropbayes.sampling.profile import Profile
from dropbayes.sampling.sequences import sequence_lengths
from dropbayes.sampling.settings import Sampling
from dropbayes.sampling.source import MaskSpec, UnknownSite, UnsupportedStrategy
from dropbayes.sampling.strategies import BY_BRANCH, BY_PATH, FOLDED, MAPPED, ONE_BY_ONE, Strategy, Work, evaluate
from dropbayes.sampling.streaming import mean_over_draws
from dropbayes.sampling.trials import Alone, check_block, chosen_strategy, learned_sites, rows_alone
from dropbayes.tracing import RowLayout
from dropbayes.tracing.views import checked_network

MASKS = ("shared", "row")

# Block sizes. A lone row is padded to a whole block where bits matter, so a block's work is bounded by the overhead of
# its calls, counted in operations. Measured, not derived; any value gives right results.
_FREE_OPERATIONS = {"cpu": 3e7, "cuda": 3e10}
_FREE_OPERATIONS_DIRECT = 4e6
_FREE_OPERATIONS_SMALL = {"cpu": 1e7, "cuda": 3e10}  # of a block in whose place there are larger ones for many rows
_FREE_OPERATIONS_SINGLE = 2e8  # of one draw, where draws run one at a time
_COMPARED_ROWS = 16  # of all draws together, before blocks of another size are taken to have the same bits
_CALL_OPERATIONS = 5e6  # that take the time of a call, with its share in that of masks
_MIN_BLOCKS = 8  # before larger ones are looked for, which takes the time of a few
_MAX_ROWS = {"cpu": 256, "cuda": 4096}
_MIN_PAIRS = 16  # on a CPU, products of so many rows mostly have the bits of those of more
_MIN_PAIRS_DIRECT = 64  # a layer that is one product needs more rows to be fast
_WORKING_BYTES = 32 * 2**20  # on a CPU, about what its caches hold
_WORKING_BYTES_DIRECT = 64 * 2**20
_YIELDED_ROWS = 1024  # the direct path yields its blocks in batches of this many rows
_THREADED_OPERATIONS = 5e7  # a smaller block finishes before other threads have started


class _TooManyRows(UnsupportedStrategy):
    """A network that fails on a block larger than any before, though not on a row of it."""


@dataclass(frozen=True)
class Block:
    """The outputs of some draws of some rows."""

    rows: range
    draws: range
    outputs: list[Tensor]  # each tensor of the output, `[draw, row, ...]`
    variances: list[Tensor] | None = None  # the means over these draws of those over an integrated last layer


@dataclass(frozen=True)
class Plan:
    """The plan for evaluating the draws of one network on inputs of one form."""

    net: nn.Module
    profile: Profile
    spec: MaskSpec
    draws: range
    block_rows: int
    chunk_draws: int
    operations: float  # of a block
    strategy: Strategy = ONE_BY_ONE
    inspection: Inspection | None = None  # None for a perceptron
    direct: Perceptron | None = None
    product_rows: int = 1  # of a perceptron, in one product
    pairs: int = _MIN_PAIRS_DIRECT  # of a draw and a row, in one pass, where they may take different branches
    batch_invariant: bool = True  # blocks are padded to one size
    working_bytes: int = _WORKING_BYTES  # of a pass

    @property
    def exact(self) -> bool:
        """Whether the moments need no draws at all."""
        return self.spec.integrate and self.profile.n_random == 1

    @property
    def method(self) -> str:
        """The method of computing the moments, in words."""
        name = "direct" if self.direct is not None else self.strategy.name
        return "exact" if self.exact else f"last layer integrated, {name}" if self.spec.integrate else name

    @property
    def rows_at_once(self) -> int:
        """The rows that go through the network in one pass, those of folded draws included."""
        return self.block_rows * (self.chunk_draws if self.strategy == FOLDED else 1)

    def replicate(self, number: int) -> Plan:
        """The plan with draws that are independent of those of other replicates."""
        return replace(self, spec=replace(self.spec, keys=replace(self.spec.keys, replicate=number)))

    def arrange(self, tensors: list[Tensor], *, leading: int) -> list[Tensor]:
        """The tensors with their row axis, which follows `leading` axes, moved to the network's position."""
        return [move_row_axis(t, layout, leading) for t, layout in zip(tensors, self.profile.outputs, strict=True)]

    def run(self, inputs: Inputs, *, first_row: int = 0) -> Iterator[Block]:
        """All draws of all rows, block by block; row i is keyed as row `first_row` + i.

        A network that turns out to differ from its profile is inspected again, and then run by the plain loop.
        """
        plan, renewed, start = self, False, 0
        while start < inputs.n_rows:
            rows = range(start, min(start + plan.block_rows, inputs.n_rows))
            position, size = plan.draws.start, plan.chunk_draws
            while left := plan.draws.stop - position:
                draws = range(position, position + math.ceil(left / math.ceil(left / size)))  # no small one at the end
                try:
                    with plan._running():
                        block = plan._block(inputs, rows, first_row + rows.start, draws)
                except _TooManyRows:
                    plan = plan._with_smaller_blocks(inputs)
                    break
                except UnsupportedStrategy as changed:
                    some, seen = inputs.block(rows.start, rows.stop), plan.inspection
                    fewer = seen and seen.most_rows > 1 and not (plan.profile.reads_rows or plan.profile.draws_branch)
                    if isinstance(changed, UnknownSite) and plan.strategy.rows == "together":
                        plan = plan._with_sites_of(some, first_row + rows.start, changed.args[0])
                        if plan.strategy.draws == "single":
                            size = 1  # others may follow: the draws before them are not to be repeated
                    elif renewed and fewer and position == plan.draws.start:
                        plan = plan._with_smaller_blocks(inputs)  # it may cut what it is given into batches of its own
                        break
                    else:
                        plan, renewed = plan._renewed(some, again=renewed), True
                    continue
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error) or (size == 1 and (len(rows) == 1 or position > plan.draws.start)):
                        raise
                    if size == 1:
                        plan = replace(plan, block_rows=len(rows) // 2)
                        break
                    size //= 2
                    continue
                yield block
                position = draws.stop
            else:
                start = rows.stop

    def collected(self, inputs: Inputs, *, first_row: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """All draws `[draw, row, ...]`, and their mean variances `[row, ...]` over an integrated last layer, if any."""
        outputs, variances, draws = list[Tensor](), list[Tensor](), self.draws
        for block in self.run(inputs, first_row=first_row):
            rows, share = slice(block.rows.start, block.rows.stop), len(block.draws) / len(draws)
            outputs = outputs or [out.new_empty((len(draws), inputs.n_rows, *out.shape[2:])) for out in block.outputs]
            for whole, out in zip(outputs, block.outputs, strict=True):
                whole[block.draws.start - draws.start : block.draws.stop - draws.start, rows] = out
            if block.variances is not None:
                variances = variances or [torch.zeros_like(out[0]) for out in outputs]
                for total, variance in zip(variances, block.variances, strict=True):
                    total[rows] += variance * share
        return outputs, variances

    def _with_smaller_blocks(self, inputs: Inputs) -> Plan:
        """The plan with half the rows at once, or fewer; the most that the network takes are remembered."""
        assert self.inspection is not None
        self.inspection.most_rows = 2 ** int(math.log2(max(1, self.rows_at_once - 1)))
        return _with_sizes(self, inputs)

    def _with_sites_of(self, inputs: Inputs, first_row: int, draws: range) -> Plan:
        """The plan with the sites that one of some draws was the first to meet, remembered; or the plain loop."""
        inspection, rows = self.inspection, range(first_row, first_row + inputs.n_rows)
        if inspection is not None and inspection.profile is self.profile:
            with self._running():
                singles = (range(draw, draw + 1) for draw in draws)
                works = (Work(inspection.network, inputs, list(inputs.leaves), one, rows) for one in singles)
                learned = next((new for work in works if (new := learned_sites(self.spec, work)) != ()), None)
            if not learned:
                known = inspection.strategies
                known.update((key, ONE_BY_ONE) for key, one in known.items() if one == self.strategy)
                return replace(self, strategy=ONE_BY_ONE)
            inspection.profile = replace(self.profile, sites=(*self.profile.sites, *learned))
        profile = self.profile if inspection is None else inspection.profile
        return replace(self, profile=profile, spec=replace(self.spec, profile=profile))

    def _renewed(self, inputs: Inputs, *, again: bool) -> Plan:
        """The plan after another inspection; at last the plain loop, in which the sites may depend on the row."""
        if again and self.strategy == ONE_BY_ONE:
            rule = "met other sites in each of several runs on the same input, so that its masks cannot be keyed"
            raise NotImplementedError(f"`net` {rule}. Let its forward depend on its input and its weights only.")
        forget(self.net)
        inspection = inspect(self.net, inputs, self.spec.ignored, positions=self.spec.positions is not None)
        inspection.findings["at sites"] = None  # it may ask for random numbers elsewhere
        profile = inspection.profile
        if (profile.structure, profile.outputs) != (self.profile.structure, self.profile.outputs):
            raise ValueError("`net` gives outputs of another form than on the rows before. Predict them separately.")
        spec = replace(self.spec, profile=profile, integrate=False)
        strategy = chosen_strategy(inspection, inputs, spec)
        if again:
            strategy = inspection.strategies[next(iter(inspection.strategies))] = ONE_BY_ONE
        draws = range(spec.keys.n_draws) if self.exact else self.draws
        return replace(
            self, profile=profile, spec=spec, strategy=strategy, inspection=inspection, direct=None, draws=draws
        )

    def _block(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Block:
        if self.direct is not None:
            return self._direct_block(inputs, rows, first_row, draws)
        assert self.inspection is not None
        is_padded = self.batch_invariant and self.strategy.rows in ("together", "mapped") and not inputs.is_one_row
        size = max(len(rows), self.block_rows) if is_padded else len(rows)
        leaves = inputs.padded_rows(rows.start, rows.stop, size)
        at_sites = self.strategy == FOLDED and inputs.device.type == "cuda"  # which must not wait for the host
        network = functools.partial(self.inspection.network, at_sites=at_sites)
        work = Work(network, inputs, leaves, draws, range(first_row, first_row + size), pairs=self.pairs, parted=set())
        alone: Alone = {}
        n_pairs = (len(rows) if self.profile.are_sent else size) * len(draws)  # copies of a row are sent where it is
        try:
            if n_pairs > self.inspection.largest_block:
                alone = rows_alone(self.strategy, self.spec, work, len(rows))
            outputs = [out[:, : len(rows)] for out in evaluate(self.strategy, self.spec, work)]
        except Exception as error:
            if isinstance(error, UnsupportedStrategy) or is_out_of_memory(error):
                raise
            if not alone or self.rows_at_once == 1:  # as many rows did well before: their number is not at fault
                self.inspection.most_rows = 2**62
                raise
            raise _TooManyRows from error  # of which the first did well: a cache may have room for few
        check_block(self.inspection, self.strategy, self.spec, work, len(rows), outputs, alone)
        for out, layout in zip(outputs, self.profile.outputs, strict=False):
            if layout is None and self.spec.per_row and not inputs.is_one_row and bool((out != out[:1, :1]).any()):
                raise ValueError('`net` drops an output that has no rows, as masks="row" needs. Pass masks="shared".')
        if self.profile.rows_branch and self.profile.sites_have_rows and rows.start == 0:
            self._check_branches(work, outputs)
        self.inspection.largest_block = n_pairs if alone else self.inspection.largest_block
        variances = [mean_over_draws(outputs.pop())] if self.spec.integrate else None
        return Block(rows, draws, outputs, variances)

    def _check_branches(self, work: Work, outputs: list[Tensor]) -> None:
        """Raises unless rows choose branches in a batch as they do alone: where they part, and in the first draws."""
        n_rows = min(outputs[0].shape[1], _COMPARED_ROWS)
        some = work.draws if self.strategy == ONE_BY_ONE else {*work.draws[:2], *sorted(work.parted or ())[:4]}
        leaves = replace(work.inputs, leaves=tuple(work.leaves)).rows(range(n_rows))
        together = dict[int, list[Tensor]]()
        try:
            for draw in some if n_rows > 1 else ():
                one = replace(work, leaves=leaves, draws=range(draw, draw + 1), rows=work.rows[:n_rows])
                together[draw] = evaluate(FOLDED, self.spec, one)
        except Exception:  # no mask can be laid on rows that go different ways
            return
        equal = functools.partial(equal_but_for_rounding, offsets=False, precision=autocast_dtype(work.inputs.device))
        for draw, several in together.items():
            apart = [out[work.draws.index(draw), :n_rows][None] for out in outputs]
            if not all(map(equal, several, apart)):
                rule = "chooses a branch by a value that it takes from all rows of a batch"
                raise ValueError(*rows_depend(rule).args)

    def _direct_block(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Block:
        assert self.direct is not None
        x, spec = inputs.leaves[0][rows.start : rows.stop], self.spec
        outputs, variance = prepare(self.direct, spec, draws, block=self.product_rows, x=x)(x, first_row)
        return Block(rows, draws, [outputs], None if variance is None else [variance])

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """A context without gradients, and with one thread for blocks of little work."""
        threads = 1 if self.operations < _THREADED_OPERATIONS else None
        with torch.inference_mode(False), torch.no_grad(), cpu_threads(threads):
            yield


def move_row_axis(tensor: Tensor, layout: RowLayout | None, leading: int) -> Tensor:
    """The tensor with its row axis, which follows `leading` axes, moved to the layout's position."""
    if layout is None:
        return tensor.select(leading, 0)
    if layout.inner == 1:
        return tensor if layout.axis == 0 else tensor.movedim(leading, leading + layout.axis)
    return tensor.movedim(leading, leading + layout.axis).flatten(leading + layout.axis, leading + layout.axis + 1)


def make_plan(
    net: nn.Module,
    inputs: Inputs,
    *,
    keys: Keys,
    masks: str = "shared",
    sampling: Sampling = Sampling(),
    moments_only: bool = False,
    trusted: bool = False,
) -> Plan:
    """The plan for a network that was checked to be random.

    With `moments_only`, the last site is integrated over, if the last layer allows it; for `trusted` see `inspect`.
    """
    check_choice("masks", masks, MASKS)
    integrate = moments_only and sampling.integrate_last_layer
    on_cpu = inputs.device.type == "cpu"
    invariant = on_cpu if sampling.batch_invariant is None else sampling.batch_invariant
    net, strategy, direct = checked_network(net), ONE_BY_ONE, None
    if on_cpu and inputs.is_matrix and not (sampling.ignored or sampling.positions):
        direct = as_perceptron(net, inputs.leaves[0])
    inspection = _inspect_with_hints(net, inputs, sampling, trusted) if direct is None else None
    profile: Profile = (direct or inspection).profile  # type: ignore[union-attr]
    if profile.moves_rows or profile.numbers_vary:
        invariant = bool(sampling.batch_invariant)  # the rows of a product depend on the others in a block of any size
    profile.check_random()
    spec = mask_spec(profile, inputs, keys=keys, masks=masks, sampling=sampling)
    spec = replace(spec, integrate=integrate and profile.last_layer)
    if inspection is not None:
        strategy = chosen_strategy(inspection, inputs, spec, invariant=invariant)
        spec = replace(spec, integrate=spec.integrate and strategy.draws != "single")
    limit = _WORKING_BYTES if direct is None else _WORKING_BYTES_DIRECT
    if direct is None and inputs.device.type == "cuda":  # smaller blocks of many small layers take longer
        limit = torch.cuda.get_device_properties(inputs.device).total_memory // 16
    plan = Plan(
        net, profile, spec, range(keys.n_draws), 1, 1, 0.0, strategy, inspection, direct, batch_invariant=invariant,
        working_bytes=sampling.max_bytes or limit,
    )  # fmt: skip
    plan = replace(plan, draws=range(1)) if plan.exact else plan
    return _with_sizes(plan, inputs) if direct is None else _with_direct_sizes(plan)


def mask_spec(profile: Profile, inputs: Inputs, *, keys: Keys, masks: str, sampling: Sampling) -> MaskSpec:
    """The masks of a network on these inputs."""
    by_position = None
    if sampling.positions is not None:
        tied = sampling.positions == "tied"
        by_position = Positions(tied, () if tied else sequence_lengths(inputs))
    return MaskSpec(profile, keys, masks == "row", False, by_position, sampling.ignored)


def _inspect_with_hints(net: nn.Module, inputs: Inputs, sampling: Sampling, trusted: bool) -> Inspection:
    try:
        return inspect(net, inputs, sampling.ignored, positions=sampling.positions is not None, trusted=trusted)
    except (RuntimeError, TypeError) as error:
        for hint in input_hints(net, inputs.leaves, str(error)):
            error.add_note(hint)
        raise


def _with_sizes(plan: Plan, inputs: Inputs) -> Plan:
    """The plan with the rows and draws of its blocks."""
    profile, strategy, n_draws = plan.profile, plan.strategy, len(plan.draws)
    assert plan.inspection is not None
    device, pairs = "cpu" if inputs.device.type == "cpu" else "cuda", _fitting_pairs(plan)
    at_once = 1 if strategy.draws == "single" else n_draws
    if inputs.is_one_row or strategy.rows == "single":
        rows, chunk = _COMPARED_ROWS if strategy == ONE_BY_ONE else 1, min(at_once, pairs)
    elif strategy == BY_BRANCH:
        affordable = _FREE_OPERATIONS[device] / (profile.prefix_cost + profile.suffix_cost)
        size = 2 ** int(math.log2(max(1, min(pairs, max(_MIN_PAIRS_DIRECT, affordable), 1024))))
        rows, chunk, plan = max(4, 4 * size // n_draws), n_draws, replace(plan, pairs=size)
    elif not plan.batch_invariant:  # as many pairs as memory holds: all draws of some rows, or some draws of one
        rows = math.ceil(inputs.n_rows / math.ceil(inputs.n_rows / max(1, pairs // at_once)))
        chunk = math.ceil(at_once / math.ceil(at_once / max(1, pairs // rows)))
    else:
        in_turn = at_once == 1 and n_draws > 1
        free = _FREE_OPERATIONS_SINGLE if in_turn else _FREE_OPERATIONS_SMALL[device]
        pairs_of_row = 1 if strategy == MAPPED and profile.of_vectors else n_draws
        least = 1 if in_turn else 2 ** math.ceil(math.log2(_MIN_PAIRS / pairs_of_row))
        rows, chunk = _block_shape(plan, at_once, device, pairs, free, least)
        rows = min(rows, max(rows // 4, _MIN_PAIRS)) if in_turn else rows
    plan = _with_blocks(plan, inputs, rows, chunk)
    fits = strategy.rows in ("together", "mapped") and plan.batch_invariant and not inputs.is_one_row
    return _with_fitting_blocks(plan, inputs) if fits else plan


def _fitting_pairs(plan: Plan) -> int:
    """The pairs of a draw and a row that fit into the memory of one pass."""
    profile, way = plan.profile, plan.strategy.draws
    # Mapped over draws, the layers before the first site are computed once for all of them.
    pairs = plan.working_bytes // max(profile.suffix_bytes if way == "mapped" else profile.pass_bytes, 1)
    assert plan.inspection is not None
    pairs = pairs // len(plan.draws) if plan.strategy == BY_PATH else pairs  # at most all draws take one path
    return max(1, min(pairs, plan.inspection.most_rows) if way == "folded" else pairs)


def _with_blocks(plan: Plan, inputs: Inputs, rows: int, chunk: int) -> Plan:
    """The plan with blocks of at most so many rows and draws."""
    profile, n_draws = plan.profile, len(plan.draws)
    assert plan.inspection is not None
    # Weights that a draw has for all rows; of a whole input, all masks are such, and the pairs count their memory.
    weights = [math.prod(site.shape) for site in profile.sites if site.layout is None and not inputs.is_one_row]
    rows = min(rows, plan.inspection.most_rows)
    chunk = min(chunk, max(1, plan.working_bytes // (24 * max(weights, default=0) + 1)))
    operations = rows * (profile.prefix_cost + chunk * profile.suffix_cost)
    chunk = n_draws if plan.strategy.draws == "single" else math.ceil(n_draws / math.ceil(n_draws / chunk))
    return replace(plan, block_rows=rows, chunk_draws=chunk, operations=operations)


def _with_direct_sizes(plan: Plan) -> Plan:
    """The plan of a perceptron with the rows and draws of its blocks and of its products."""
    profile, pairs = plan.profile, max(1, plan.working_bytes // max(plan.profile.pass_bytes, 1))
    # Rows with their own masks cannot share products, only calls.
    free = _FREE_OPERATIONS["cpu"] if plan.spec.per_row else _FREE_OPERATIONS_DIRECT
    least = 2 ** math.ceil(math.log2(_MIN_PAIRS_DIRECT / len(plan.draws)))
    rows, chunk = _block_shape(plan, len(plan.draws), "cpu", pairs, free, least)
    yielded = max(1, min(_YIELDED_ROWS, 2**18 // chunk) // rows) * rows
    operations = rows * (profile.prefix_cost + chunk * profile.suffix_cost)
    return replace(plan, block_rows=yielded, product_rows=rows, chunk_draws=chunk, operations=operations)


def _with_fitting_blocks(plan: Plan, inputs: Inputs) -> Plan:
    """The plan with blocks that suit the number of rows, if these then have the same bits as in blocks of one size."""
    other = _suited_to_rows(plan, inputs)
    if other.block_rows == plan.block_rows:
        return plan
    assert plan.inspection is not None
    known, way = plan.inspection.findings, (torch.get_num_threads(), autocast_dtype(inputs.device))
    sizes = tuple((one.block_rows, one.chunk_draws) for one in (plan, other))
    key = ("size", sizes, len(plan.draws), plan.spec.integrate, plan.spec.per_row, way)
    if key not in known:
        small, large = (plan, other) if plan.block_rows < other.block_rows else (other, plan)
        known[key] = _have_same_bits(small, large, inputs)
    return other if known[key] else plan


def _suited_to_rows(plan: Plan, inputs: Inputs) -> Plan:
    """The plan with larger blocks for more rows, since each pays for its calls.

    Draws that run one at a time have all rows in one block, and few rows in a smaller one.
    """
    if plan.strategy.draws == "single":
        few = 2 ** math.ceil(math.log2(inputs.n_rows))
        rows = min(inputs.n_rows, _fitting_pairs(plan)) if inputs.n_rows > plan.block_rows else few
        return _with_blocks(plan, inputs, rows, 1)
    if inputs.n_rows < _MIN_BLOCKS * plan.block_rows or inputs.device.type != "cpu":
        return plan
    profile, n_draws, pairs = plan.profile, len(plan.draws), _fitting_pairs(plan)
    a_row = max(1.0, profile.prefix_cost + n_draws * profile.suffix_cost)

    def beside(size: int) -> float:
        """The time of a block's calls and of what its rows share, in rows: of ten times as many, it is hardly any."""
        calls = math.ceil(n_draws / max(1, pairs // size)) * profile.n_calls * _CALL_OPERATIONS
        return (calls + n_draws * profile.shared_cost) / a_row

    sizes = [2**k for k in range(int(max(1, min(pairs, 10 * beside(1), _MAX_ROWS["cpu"]))).bit_length())]
    rows = min(sizes, key=lambda size: math.ceil(inputs.n_rows / size) * (size + beside(size)))  # with the padded ones
    return _with_blocks(plan, inputs, rows, min(n_draws, pairs // rows)) if rows > plan.block_rows else plan


def _have_same_bits(small: Plan, large: Plan, inputs: Inputs) -> bool:
    """Whether the first and the last rows of a block have the same bits in smaller ones: several, one may by chance."""
    single = small.strategy.draws == "single"
    n_draws = math.ceil(2 * _COMPARED_ROWS / inputs.n_rows) if single else 2 * small.chunk_draws - 1
    small, large = (replace(plan, draws=plan.draws[:n_draws]) for plan in (small, large))
    size, n_rows = small.block_rows, min(large.block_rows, inputs.n_rows)
    together = large.collected(inputs.block(0, n_rows))[0]
    first = range(0, n_rows, size)[: math.ceil(_COMPARED_ROWS / (size * len(small.draws)))]
    for start in (*first, max(0, n_rows - size)):
        apart = small.collected(inputs.block(start, min(start + size, n_rows)), first_row=start)[0]
        if not all(map(torch.equal, apart, (out[:, start : start + size] for out in together))):
            return False
    return True


def _block_shape(plan: Plan, n_wanted: int, device: str, pairs: int, free: float, least: float) -> tuple[int, int]:
    """The rows (at least so many, if cheap) and draws of a block, by the network, the draws, and the pairs that fit."""
    profile, n_draws = plan.profile, plan.spec.keys.n_draws
    a_row = max(1.0, profile.prefix_cost + n_wanted * profile.suffix_cost)
    shared = profile.shared_cost / max(profile.suffix_cost, 1.0)  # in rows: with fewer, most of the work is repeated
    if a_row < n_draws * (profile.prefix_cost + profile.suffix_cost) / 16:
        shared = max(shared, 4)  # nearly all work is: four rows cost far less than one row draw by draw
    least = least if least <= min(pairs // n_wanted, 4 * _FREE_OPERATIONS_SINGLE / a_row) else 1.0
    rows = 2 ** int(math.log2(min(max(free / a_row, shared, least, 1.0), _MAX_ROWS[device], pairs)))
    return rows, math.ceil(n_wanted / math.ceil(n_wanted / max(1, pairs // rows)))
