"""The recorder of a forward pass: its stochastic sites, the weights they feed, and its costs."""

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.tracing.operations import (
    CELLS,
    CONVOLUTIONS,
    LESS,
    LOOKUPS,
    MORE,
    PASSES_MASK,
    PRODUCTS,
    READS,
    RECURRENT,
    SHAPES,
    Arguments,
    NamedArguments,
    Operation,
    operands,
    tensor_leaves,
    uses_values,
)
from dropbayes.tracing.sites import Site, SiteNames
from dropbayes.tracing.sources import NEUTRAL, Neutral, Ones, neutral_uniform
from dropbayes.tracing.states import version
from dropbayes.tracing.watch import Watch


class Recorder(Ones):
    """A source that drops nothing and records the requests and the operations around them.

    Args:
        names: The names of the modules that run.
        left_out: Whether the sites of a module are left out, by its name and object.
        weights: The names of the weights whose inputs' keep probabilities are wanted, by id.
        every_dropout: Whether dropout that is switched off counts, too.
        watch: What the dispatcher sees of the same pass.
        neutral: The numbers that stand for no noise.
    """

    def __init__(
        self,
        names: SiteNames,
        *,
        left_out: Callable[[str, nn.Module], bool] = lambda name, module: False,
        weights: Mapping[int, str] | None = None,
        every_dropout: bool = False,
        watch: Watch | None = None,
        neutral: Neutral = NEUTRAL[0],
    ) -> None:
        self.names, self.watch, self.neutral = names, watch, neutral
        self.sites: list[Site] = []
        self.sites_left_out: list[Site] = []
        self.uses: list[tuple[str, float]] = []  # weights and the keep probabilities of their inputs, in order
        self.prefix_cost = self.suffix_cost = 0.0
        self.n_calls = 0
        self.seeds_torch = False  # torch's generator was seeded within the pass, and numbers drawn, or left so
        self.generators: list[bytes] = []  # the states of the network's own generators when it drew from them
        self._left_out, self._weights, self._every = left_out, weights or {}, every_dropout
        self.of_parts = set[str]()  # the sites that may hold some of the parts of the rows only, by name
        self.has_choices = False  # random numbers went into an operation of which their means say nothing
        self._told = 0
        self._drawn: int | None = None  # the site of the last random numbers, by its index
        self._masks: dict[int, tuple[int, float]] = {}  # by a tensor's id: its last site, and the keep probability
        self._lookups: set[int] = set()
        self._scalars: dict[int, int] = {}  # by the id of a single uniform: its site
        self._compared: set[int] = set()
        self.gates: dict[str, float | None] = {}  # sites whose number is compared with this one alone, by name
        self._alive: list[Tensor] = []  # prevents the reuse of those ids
        self._kept_before = 1.0  # the keep probability of what the last site drops
        self._last_output: Tensor | None = None
        self._readers_of_last = 0
        self._final_linear: Tensor | None = None
        self._final_version = 0

    # What the handlers of stochastic operations ask -------------------------------------------------------------------

    def is_off(self, training: bool) -> bool:
        path, module = self.names.caller()
        if module is not None and self._left_out(path, module):
            if training or type(module).__module__.startswith("torch.nn."):  # whose flag is down for that
                self.sites_left_out.append(Site(-1, path, "dropout", None, (), left_out=True))
            return True
        return not (training or self._every or is_ours(module))

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> None:
        path, _ = self.names.caller()
        # Between the layers of a recurrent module, the next weight layer is in the module itself.
        before = path or "(network)" if kind == "recurrent" else None
        self.sites.append(Site(len(self.sites), path, kind, drop_prob, shape, before, name=self.names.next(kind)))
        self._kept_before = self._keep_prob_of(like)
        if self.watch is not None and (0 in shape or self.watch.holds_parts(like)):  # what is empty has no memory
            self.of_parts.add(self.sites[-1].name)

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        path, module = self.names.caller()
        out = module is not None and self._left_out(path, module)
        if out:
            self.sites_left_out.append(Site(-1, path, kind, drop_prob, shape, left_out=True))
        else:
            self._drawn = len(self.sites) if kind in ("rand", "randn", "randperm", "bernoulli") else None
            self.sites.append(Site(len(self.sites), path, kind, drop_prob, shape, name=self.names.next(kind)))
            if self.watch is not None and self.watch.has_dynamic_shapes and shape:  # of a length it may have read
                self.of_parts.add(self.sites[-1].name)
        if len(self.sites) > 500 and self.watch is not None and any(drawn for drawn, _, _ in self.watch.reads):
            raise NotImplementedError(  # since numbers that stand for no noise may never meet the condition
                "`net` draws more than 500 times in a pass and reads what it drew: it may draw until that meets a "
                "condition, as in rejection sampling. Transform the numbers of a single draw instead."
            )
        return neutral_uniform(kind, shape, device) if out else super().uniform(kind, drop_prob, shape, device)

    def bernoulli(self, probability: Tensor, drop_prob: float | None) -> Tensor:
        self.uniform("bernoulli", drop_prob, tuple(probability.shape), probability.device)
        return super().bernoulli(probability, drop_prob)

    def drawn(self) -> int | None:
        drawn, self._drawn = self._drawn, None
        return drawn

    def chooses(self, site: int, operation: str) -> None:
        self.has_choices = True

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        if generator is not None:
            self.generators.append(generator.get_state().numpy().tobytes())
            return True
        fixed = self.watch is not None and self.watch.is_seeded()
        self.seeds_torch |= fixed
        return fixed

    # What happens around them -----------------------------------------------------------------------------------------

    def after(self, func: Callable[..., Any], args: Arguments, kwargs: NamedArguments, result: Any) -> None:
        self.n_calls += 1
        if len(self.sites) > self._told:
            is_first, self._told = self._told == 0, len(self.sites)
            self._note_sites(func, result)
            if func not in RECURRENT:
                return
            if is_first:  # its first layer comes before the site
                cost = _recurrent_operations(args, n_layers=len(self.sites) + 1)
                self.prefix_cost += cost
                self.suffix_cost -= cost
        if self._scalars:
            self._note_use(func, args, kwargs, result)
        if func in READS and self.watch is not None:
            self.watch.note_read(args[0], number=True) if READS[func] else self.watch.note_length(args[0])
            if READS[func] and func is not Tensor.tolist:  # memory given to NumPy may be written to there
                args[0].copy_(args[0])
        if func in RECURRENT or func in CELLS:
            self._use_recurrent(args)
        elif func is F.multi_head_attention_forward:
            self._use_attention(args, kwargs)
        elif isinstance(result, Tensor):
            self._follow(func, args, kwargs, result)
        self._count(func, args, kwargs, result)

    def _note_use(self, func: Operation, args: Arguments, kwargs: NamedArguments, result: Any) -> None:
        """A single uniform compared with one number is a gate: the number gives the site's drop probability."""
        uniform = next((tensor for tensor in operands((*args, *kwargs.values())) if id(tensor) in self._scalars), None)
        if uniform is None or not uses_values(func, result):
            return
        index, chance, number = self._scalars[id(uniform)], None, None
        if func in LESS | MORE and len(args) == 2 and isinstance(args[place := int(args[0] is uniform)], (int, float)):
            number = float(args[place])
            below = min(max(number, 0.0), 1.0)
            chance = below if (func in LESS) == (place == 1) else 1 - below
        # Compared with a second number, with a tensor, or used otherwise, it may choose between more than two branches.
        known = self.sites[index].drop_prob if index in self._compared else chance
        self._compared.add(index)
        self.sites[index] = replace(self.sites[index], drop_prob=chance if known == chance else None)
        self.gates[self.sites[index].name] = number if known == chance else None
        if not self.sites[index].is_random and self.watch is not None:  # switched off, it decides nothing
            self.watch.unmark(result)
        elif chance is not None and self.watch is not None:
            self.watch.mark_gate(result)

    def is_integrable(self, outputs: list[Tensor]) -> bool:
        """Whether the last site is dropout that only the final linear layer reads, whose output is the output."""
        if not self.sites or len(outputs) != 1 or outputs[0] is not self._final_linear or self._readers_of_last != 1:
            return False
        untouched = version(outputs[0]) == self._final_version
        return untouched and self.sites[-1].kind == "dropout" and self.sites[-1].is_random

    def _note_sites(self, func: Operation, result: Any) -> None:
        self._final_linear, self._readers_of_last, self._last_output = None, 0, None
        if self.watch is not None:
            self.watch.mark_drawn(tensor_leaves(result))
        if not isinstance(result, Tensor):
            return
        site = self.sites[-1]
        if site.kind.endswith("dropout"):  # of elements or channels: a factor, or SELU's limit in its place
            self._mark(result, site.index, self._kept_before * (1 - (site.drop_prob or 0.0)))
            self._last_output = result
            return
        self.suffix_cost += 100.0 * math.prod(site.shape)  # about what a random number takes
        if func in (torch.rand, torch.rand_like) and result.numel() == 1:  # others are computed of uniforms
            self._scalars[id(result)] = site.index
            self._alive.append(result)

    def _mark(self, tensor: Tensor, site: int, keep_prob: float) -> None:
        # Forgotten with the tensor: a reference would count as memory that the network needs.
        self._masks[id(tensor)] = site, keep_prob
        weakref.finalize(tensor, self._masks.pop, id(tensor), None)

    def _follow(self, func: Callable[..., Any], args: Arguments, kwargs: NamedArguments, result: Tensor) -> None:
        leaves = operands((*args, *kwargs.values()))
        if func in PRODUCTS:
            keep_prob = self._keep_prob_of(*(leaf for leaf in leaves if id(leaf) not in self._weights))
            for leaf in leaves:
                self._use(leaf, keep_prob)
        elif func in LOOKUPS:
            self._lookups.add(id(result))
            self._alive.append(result)
        read = [leaf for leaf in leaves if id(leaf) in self._masks]
        # A mask of looked-up words belongs to their table.
        passes = func in PASSES_MASK and (func in SHAPES or not any(id(leaf) in self._lookups for leaf in leaves))
        if read and passes:
            self._mark(result, self._masks[id(read[-1])][0], self._keep_prob_of(*read))
        for tensor in read:
            site = self._masks[id(tensor)][0]
            has_weight = func in PRODUCTS and any(isinstance(leaf, nn.Parameter) for leaf in leaves)
            if self.sites[site].before is None and (has_weight or func in CONVOLUTIONS | LOOKUPS | {F.linear}):
                self.sites[site] = replace(self.sites[site], before=self.names.caller()[0] or func.__name__)
            if tensor is self._last_output:
                self._readers_of_last += 1
                is_linear = func is F.linear and _argument(args, kwargs, 0, "input") is tensor
                self._final_linear = result if is_linear else None
                self._final_version = version(result)
        if result is not self._final_linear and any(leaf is self._final_linear for leaf in leaves):
            self._final_linear = None  # an early exit may read the output

    # The weights ------------------------------------------------------------------------------------------------------

    def _keep_prob_of(self, *operands: Any) -> float:
        return math.prod((self._masks.get(id(operand), (0, 1.0))[1] for operand in operands), start=1.0)

    def _use(self, weight: Tensor, keep_prob: float) -> None:
        if id(weight) in self._weights:
            self.uses.append((self._weights[id(weight)], keep_prob))

    def _use_attention(self, args: Arguments, kwargs: NamedArguments) -> None:
        """The weight that is cut into the projections of three inputs; an uncut one is in a product of its own."""
        name = self._weights.get(id(_argument(args, kwargs, 5, "in_proj_weight")))
        if name is not None and all(used != name for used, _ in self.uses[-2:]):
            self.uses.append((name, self._keep_prob_of(_argument(args, kwargs, 0, "query"))))

    def _use_recurrent(self, args: Arguments) -> None:
        between = next((a for a in args if isinstance(a, float)), 0.0)
        for weight in operands(args):
            parameter = self._weights.get(id(weight), "").rpartition(".")[2]
            first = parameter == "weight_ih" or parameter.startswith("weight_ih_l0")
            later = 1.0 - between if parameter.startswith("weight_ih_l") else 1.0
            self._use(weight, self._keep_prob_of(args[0]) if first else later)

    # The costs --------------------------------------------------------------------------------------------------------

    def _count(self, func: Callable[..., Any], args: Arguments, kwargs: NamedArguments, result: Any) -> None:
        out = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(out, Tensor) or func in SHAPES:
            return
        cost = _operations(func, args, kwargs, out)
        self.prefix_cost += 0.0 if self.sites else cost
        self.suffix_cost += cost if self.sites else 0.0


def is_ours(module: nn.Module | None) -> bool:
    """Whether a module is one of this library's layers, which are random regardless of their flag."""
    return module is not None and type(module).__module__.startswith("dropbayes.")


def _argument(args: Arguments, kwargs: NamedArguments, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _operations(func: Callable[..., Any], args: Arguments, kwargs: NamedArguments, out: Tensor) -> float:
    """Roughly, the floating-point operations of one call: accurate enough to choose the size of a block."""
    first, second = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    if (func is F.linear or func in CONVOLUTIONS) and isinstance(second, Tensor):
        return 2.0 * out.numel() * second.numel() / second.shape[0]
    if func in (torch.addmm, Tensor.addmm, torch.baddbmm) and isinstance(second, Tensor):
        return 2.0 * out.numel() * second.shape[-1]
    if func is torch.einsum and type(first) is str:
        sizes = dict[str, int]()  # by letter, or by digit of the axes that "..." stands for
        for term, x in zip(first.replace(" ", "").partition("->")[0].split(","), operands(args), strict=False):
            sizes.update(zip(term.replace("...", "0123456789"[len(term) + 7 - x.dim() :]), x.shape, strict=False))
        return 2.0 * math.prod(sizes.values())
    if func in PRODUCTS and isinstance(first, Tensor) and first.dim():
        return 2.0 * out.numel() * first.shape[-1]
    if func is F.scaled_dot_product_attention:
        query, key = _argument(args, kwargs, 0, "query"), _argument(args, kwargs, 1, "key")
        return 4.0 * query.numel() * key.shape[-2]
    if func in RECURRENT:
        return _recurrent_operations(args)
    name = getattr(func, "__name__", "")
    decomposes = name in ("det", "inverse", "svd") or (name.startswith("linalg_") and "norm" not in name)
    if decomposes and isinstance(first, Tensor):
        size = max(1, *first.shape[-2:])  # a call for each matrix: measured, about a microsecond a column, and 20 size³
        return first.numel() * (20.0 * size + 1e4 / size)
    return 4.0 * out.numel()


def _recurrent_operations(args: Arguments, n_layers: int = 1) -> float:
    """Those of a recurrent module, or of the first of its layers."""
    weights = [a for a in args if isinstance(a, (list, tuple))][-1]  # after the states, if these are several
    first = weights[: len(weights) // n_layers]
    return 2.0 * args[0].numel() / args[0].shape[-1] * sum(w.numel() for w in first)
