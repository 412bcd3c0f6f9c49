"""The sites of a network: every place where it is random, found by watching one row go through it.

What runs is a view of the network with all training flags down, so normalisation acts as in evaluation; they are up
only on modules whose own code hides dropout behind `self.training`, and only where one look at the result shows that
nothing but dropout came on.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.sampling.operations import Interception, Noise
from dropbayes.sampling.trees import Inputs, Structure, as_inputs, split
from dropbayes.sampling.views import checked_network, eagerly, view


@dataclass(frozen=True)
class Site:
    """One place in a forward pass where the network is random."""

    index: int
    path: str
    kind: str
    drop_prob: float | None
    shape: tuple[int, ...]
    before: str | None = None  # the weight layer it feeds

    @property
    def is_random(self) -> bool:
        """Whether two draws can differ here."""
        return self.drop_prob is None or 0 < self.drop_prob < 1


@dataclass(frozen=True)
class Anatomy:
    """What one row shows of a network: its sites, its costs, and how its output is laid out."""

    sites: tuple[Site, ...]
    raised: frozenset[type]
    prefix_cost: float  # floating-point operations before the first site, for one row
    suffix_cost: float  # and after it, for one row of one draw
    pair_bytes: int  # the largest tensor after the first site, for one row of one draw
    row_axes: tuple[int | None, ...]  # of each tensor of the output
    structure: Structure
    last_layer: bool  # the last site is dropout that only the final linear layer reads

    @property
    def prefix_share(self) -> float:
        """The share of one forward pass that does not depend on the draw."""
        return self.prefix_cost / max(self.prefix_cost + self.suffix_cost, 1.0)


@dataclass(frozen=True)
class Sites:
    """The sites of a network in the order of execution; prints as a table."""

    entries: tuple[Site, ...]
    prefix_share: float

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Site:
        return self.entries[index]

    def __str__(self) -> str:
        head = ("site", "path", "kind", "drop_prob", "shape", "before weight layer")
        body = [
            (
                str(site.index),
                site.path or "(network)",
                site.kind,
                "-" if site.drop_prob is None else f"{site.drop_prob:g}",
                "x".join(map(str, site.shape)) or "scalar",
                site.before or "no",
            )
            for site in self.entries
        ]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *body)]
        lines.insert(1, "  ".join("-" * width for width in widths))
        count = (
            f"{len(self)} site{'' if len(self) == 1 else 's'}" if self.entries else "no site: nothing here is random"
        )
        lines.append(f"{count}; {100 * self.prefix_share:.0f} % of a forward pass is shared by all draws")
        return "\n".join(line.rstrip() for line in lines)


def sites(net: nn.Module, x: Any, *, row_axis: int = 0) -> Sites:
    """The places where `net` is random on input `x`: what, where, with which drop probability, before which layer.

    Args:
        net: Any network; it is not changed.
        x: One batch of its input: a tensor, a tuple of positional or a dict of named arguments. Only one row is used.
        row_axis: The axis of the rows in the inputs, 1 for sequence-first networks.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        >>> print(sites(net, torch.zeros(5, 2)))
        site  path  kind     drop_prob  shape  before weight layer
        ----  ----  -------  ---------  -----  -------------------
        0     2     dropout  0.1        1x8    3
        1 site; 80 % of a forward pass is shared by all draws
    """
    anatomy = examine(checked_network(net), as_inputs(x, row_axis=row_axis))
    return Sites(anatomy.sites, anatomy.prefix_share)


_anatomies: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Anatomy]] = weakref.WeakKeyDictionary()


def _modules(net: nn.Module) -> list[nn.Module]:
    """Every module of the network, a shared one as often as it is used; as `modules()` but quicker."""
    found = [net]
    for module in found:  # grows while it is walked
        found.extend(child for child in module._modules.values() if child is not None)
    return found


def anatomy(net: Any, inputs: Inputs) -> tuple[nn.Module, Anatomy]:
    """The plain module behind `net` and its anatomy, remembered for inputs of this form until its modules change."""
    if isinstance(net, nn.Module) and not hasattr(net, "_orig_mod"):
        modules = _modules(net)
        drop_probs = [m.p for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        key = (inputs.signature, tuple(map(type, modules)), tuple(drop_probs))
        known = _anatomies.get(net)
        if known is not None and key in known:
            return net, known[key]
        plain = checked_network(net)
        if plain is net:
            found = examine(net, inputs)
            _anatomies.setdefault(net, {})[key] = found
            return net, found
        return anatomy(plain, inputs)
    return anatomy(checked_network(net), inputs)


@torch.no_grad()
def examine(net: nn.Module, inputs: Inputs) -> Anatomy:
    """The anatomy of a network, from one row of its inputs run through a view of it with every mask left out."""
    row = inputs.rows(torch.zeros(1, dtype=torch.long))
    seen = _look(net, inputs, row, frozenset())
    candidates = {type(m) for m in net.modules() if _reads_training_flag(type(m))}
    if candidates:
        everything = _look_or_none(net, inputs, row, frozenset(candidates))
        if everything is not None and everything.agrees_with(seen):
            seen = everything
        else:
            accepted = {c for c in candidates if _raises_only_dropout(net, inputs, row, c, seen)}
            seen = _look(net, inputs, row, frozenset(accepted)) if accepted else seen
    axes = _row_axes(net, inputs, seen)
    return replace(seen.anatomy(), row_axes=axes)


@dataclass
class _Seen:
    """One look at a network: what was recorded and what came out."""

    recorder: _Recorder
    raised: frozenset[type]
    tensors: list[Tensor]
    structure: Structure

    def agrees_with(self, other: _Seen) -> bool:
        """Whether the outputs are the same but for rounding."""
        return self.fits(other) and all(
            torch.allclose(
                a.double(), b.double(), rtol=1e-3, atol=1e-3 * float(b.double().abs().mean()), equal_nan=True
            )
            for a, b in zip(self.tensors, other.tensors, strict=True)
        )

    def fits(self, other: _Seen) -> bool:
        """Whether the outputs are built alike."""
        return self.structure == other.structure and [t.shape for t in self.tensors] == [t.shape for t in other.tensors]

    def anatomy(self) -> Anatomy:
        r = self.recorder
        output = self.tensors[0] if len(self.tensors) == 1 else None
        last_layer = bool(r.sites) and output is not None and output is r.final_linear and r.readers_of_last == 1
        return Anatomy(
            sites=tuple(r.sites),
            raised=self.raised,
            prefix_cost=r.prefix_cost,
            suffix_cost=r.suffix_cost,
            pair_bytes=r.largest,
            row_axes=(),
            structure=self.structure,
            last_layer=last_layer and r.sites[-1].kind == "dropout" and r.sites[-1].is_random,
        )


def _look(net: nn.Module, inputs: Inputs, row: list[Any], raised: frozenset[type]) -> _Seen:
    own = view(net, raised)
    recorder = _Recorder({id(module): name for name, module in own.named_modules()})
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in row]
    with Interception(recorder):
        output = eagerly(inputs.call)(own, leaves)
    tensors, structure = split(output)
    return _Seen(recorder, raised, tensors, structure)


def _look_or_none(net: nn.Module, inputs: Inputs, row: list[Any], raised: frozenset[type]) -> _Seen | None:
    try:
        return _look(net, inputs, row, raised)
    except Exception:  # a training branch may want what a prediction has not: targets, a process group, other ranks
        return None


def _raises_only_dropout(net: nn.Module, inputs: Inputs, row: list[Any], cls: type, plain: _Seen) -> bool:
    """Whether raising the training flag of one class brings nothing on but randomness."""
    seen = _look_or_none(net, inputs, row, frozenset({cls}))
    if seen is None or not seen.fits(plain):
        return False
    # A branch that draws raw random numbers has no mask to leave out, so its output cannot be compared.
    return seen.agrees_with(plain) or seen.recorder.raw_sites > plain.recorder.raw_sites


def _reads_training_flag(cls: type) -> bool:
    """Whether code of the class's own, not torch's, mentions the attribute `training`."""
    own = [c for c in cls.__mro__ if issubclass(c, nn.Module) and not c.__module__.startswith("torch.")]
    functions = [f for c in own for f in vars(c).values() if hasattr(f, "__code__") or hasattr(f, "__wrapped__")]
    return any(_mentions(f, "training") for f in functions)


def _mentions(function: Any, name: str) -> bool:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    codes = [function.__code__] if hasattr(function, "__code__") else []
    while codes:
        code = codes.pop()
        if name in code.co_names:
            return True
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    return False


def _row_axes(net: nn.Module, inputs: Inputs, seen: _Seen) -> tuple[int | None, ...]:
    """The axis of each output tensor that grows with the rows, found by doubling the row."""
    if inputs.row_axis == 0 and len(seen.tensors) == 1 and seen.tensors[0].shape[:1] == (1,):
        return (0,)
    try:
        twice = inputs.rows(torch.zeros(2, dtype=torch.long))
        doubled, _ = split(eagerly(inputs.call)(view(net), twice))
    except Exception:  # made for one row at a time
        doubled = seen.tensors
    axes: list[int | None] = []
    for one, two in zip(seen.tensors, doubled, strict=True):
        grown = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=False)) if a == 1 and b == 2]
        axes.append(grown[0] if grown else 0 if one.shape[:1] == (1,) and doubled is seen.tensors else None)
    return tuple(axes)


_SHAPE_ONLY: frozenset[Callable[..., Any]] = frozenset(
    {
        Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.transpose, Tensor.permute, Tensor.contiguous,
        Tensor.squeeze, Tensor.unsqueeze, Tensor.to, Tensor.clone, torch.flatten, torch.reshape, torch.transpose,
        torch.permute, torch.squeeze, torch.unsqueeze, torch.movedim, Tensor.movedim,
    }
)  # fmt: skip
_MASK_TIMES_INPUT: frozenset[Callable[..., Any]] = frozenset(  # a mask made by itself, one for all positions
    {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.expand, Tensor.gather}
)
_CONVOLUTIONS: frozenset[Callable[..., Any]] = frozenset(
    {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
)
_RECURRENT: frozenset[Callable[..., Any]] = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
)
_BILINEAR: frozenset[Callable[..., Any]] = frozenset({torch.addmm, torch.baddbmm, Tensor.addmm})
_MULTIPLICATIVE = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


@dataclass
class _Recorder(Noise):
    """A noise that keeps everything and writes down what it is asked, and what surrounds it."""

    paths: dict[int, str]
    sites: list[Site] = field(default_factory=list)
    prefix_cost: float = 0.0
    suffix_cost: float = 0.0
    largest: int = 0
    raw_sites: int = 0
    final_linear: Tensor | None = None
    readers_of_last: int = 0
    _fed_by: dict[int, int] = field(default_factory=dict)  # id of a tensor -> the site whose output it is
    _alive: list[Tensor] = field(default_factory=list)  # keeps those ids from being used again
    _direct: Tensor | None = None
    _told: int = 0

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> None:
        path = self._path()
        # Between the layers of a recurrent module, the next weight layer is in the module itself.
        before = path or "(network)" if kind == "recurrent" else None
        self.sites.append(Site(len(self.sites), path, kind, drop_prob, shape, before))

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> None:
        self.raw_sites += 1
        self.sites.append(Site(len(self.sites), self._path(), kind, drop_prob, shape))

    def _path(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            name = self.paths.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def passed(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        if len(self.sites) > self._told:
            self._told = len(self.sites)
            self.final_linear, self.readers_of_last, self._direct = None, 0, None
            if isinstance(result, Tensor) and self.sites[-1].kind in _MULTIPLICATIVE:
                self._mark(result, self.sites[-1].index)
                self._direct = result
            if func not in _RECURRENT:
                return
        if isinstance(result, Tensor):
            self._follow(func, args, result)
        self._count(func, args, result)

    def _mark(self, tensor: Tensor, site: int) -> None:
        self._fed_by[id(tensor)] = site
        self._alive.append(tensor)

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> None:
        read = [a for a in args if isinstance(a, Tensor) and id(a) in self._fed_by]
        for tensor in read:
            site = self._fed_by[id(tensor)]
            if func in _SHAPE_ONLY or func in _MASK_TIMES_INPUT:
                self._mark(result, site)
            elif self.sites[site].before is None and _has_weights(func, args):
                self.sites[site] = replace(self.sites[site], before=self._path() or func.__name__)
            if tensor is self._direct:
                self.readers_of_last += 1
                self.final_linear = result if func is F.linear and args[0] is tensor else None

    def _count(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        out = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(out, Tensor) or func in _SHAPE_ONLY:
            return
        cost = _operations(func, args, out)
        if self.sites:
            self.suffix_cost += cost
            self.largest = max(self.largest, out.numel() * out.element_size())
        else:
            self.prefix_cost += cost


def _has_weights(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    if func is F.linear or func in _CONVOLUTIONS or func in _RECURRENT or func is F.embedding:
        return True
    return (func in _PRODUCTS or func in _BILINEAR) and any(isinstance(a, nn.Parameter) for a in args)


def _operations(func: Callable[..., Any], args: tuple[Any, ...], out: Tensor) -> float:
    """Roughly, the floating-point operations of one call: exact enough to choose the size of a tile."""
    if func is F.linear:
        return 2.0 * args[0].numel() * args[1].shape[0]
    if func in _CONVOLUTIONS:
        return 2.0 * out.numel() * args[1].numel() / args[1].shape[0]
    if func in _PRODUCTS:
        return 2.0 * out.numel() * args[0].shape[-1]
    if func in _BILINEAR:
        return 2.0 * out.numel() * args[1].shape[-1]
    if func is F.scaled_dot_product_attention:
        return 4.0 * args[0].numel() * args[1].shape[-2]
    if func in _RECURRENT:
        weights = next(a for a in args if isinstance(a, (list, tuple)) and len(a) > 2)
        return 2.0 * args[0].numel() / args[0].shape[-1] * sum(w.numel() for w in weights)
    return 4.0 * out.numel()
