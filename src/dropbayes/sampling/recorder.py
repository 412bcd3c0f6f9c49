"""The recorder of a forward pass: its stochastic sites, its costs, and its unaccounted randomness."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dropbayes.sampling.anatomy import Site
from dropbayes.sampling.names import SiteNames
from dropbayes.sampling.operations import RandomSource

SENTINEL_SEED = 0x64726F70626179  # the seed of torch's generator during a look, which reveals seeding

_SHAPE_ONLY: frozenset[Callable[..., Any]] = frozenset(
    {
        Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.transpose, Tensor.permute, Tensor.contiguous,
        Tensor.squeeze, Tensor.unsqueeze, Tensor.to, Tensor.clone, torch.flatten, torch.reshape, torch.transpose,
        torch.permute, torch.squeeze, torch.unsqueeze, torch.movedim, Tensor.movedim,
    }
)  # fmt: skip
_MASK_TIMES_INPUT: frozenset[Callable[..., Any]] = frozenset(  # a mask generated separately, one for all positions
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
_LESS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.__lt__, Tensor.__le__, Tensor.lt, Tensor.le, torch.lt, torch.le}
)


@dataclass
class Recorder(RandomSource):
    """A source that drops nothing and records the requests and the operations around them.

    Args:
        paths: The names of the modules, by id.
        left_out: Whether the sites of a module are left out, by its name and object.
        honours_flags: Whether dropout called with `training=False` is off, as when every training flag is set.
    """

    paths: dict[int, str]
    left_out: Callable[[str, nn.Module], bool] = lambda name, module: False
    honours_flags: bool = False
    sites: list[Site] = field(default_factory=list)
    sites_left_out: list[Site] = field(default_factory=list)
    off_calls: set[int] = field(default_factory=set)
    prefix_cost: float = 0.0
    suffix_cost: float = 0.0
    raw_sites: int = 0
    seeds_itself: bool = False
    generator_states: list[bytes] = field(default_factory=list)
    _calls: int = 0
    _final_linear: Tensor | None = None
    _final_version: int = 0
    _readers_of_last: int = 0
    _fed_by: dict[int, int] = field(default_factory=dict)  # id of a tensor -> the site whose output it is
    _uniforms: dict[int, int] = field(default_factory=dict)  # id of a scalar uniform -> its site
    _scalars: list[Tensor] = field(default_factory=list)  # prevents the reuse of those ids
    _last_output: Tensor | None = None
    _told: int = 0

    def __post_init__(self) -> None:
        self._names = SiteNames(self.paths)

    def is_off(self, training: bool) -> bool:
        path, module = self._caller()
        out = module is not None and self.left_out(path, module)
        if out:
            self.sites_left_out.append(Site(-1, path, "dropout", None, (), left_out=True))
        off = out or (self.honours_flags and not training and not _is_ours(module))
        if off:
            self.off_calls.add(self._calls)
        self._calls += 1
        return off

    def keep(self, kind: str, drop_prob: float, shape: tuple[int, ...], like: Tensor) -> None:
        path, _ = self._caller()
        # Between the layers of a recurrent module, the next weight layer is in the module itself.
        before = path or "(network)" if kind == "recurrent" else None
        self.sites.append(Site(len(self.sites), path, kind, drop_prob, shape, before, name=self._names.next(kind)))

    def uniform(self, kind: str, drop_prob: float | None, shape: tuple[int, ...], device: torch.device) -> None:
        path, module = self._caller()
        call, self._calls = self._calls, self._calls + 1
        if module is not None and self.left_out(path, module):
            self.off_calls.add(call)
            self.sites_left_out.append(Site(-1, path, kind, drop_prob, shape, left_out=True))
            return
        self.raw_sites += 1
        self.sites.append(Site(len(self.sites), path, kind, drop_prob, shape, name=self._names.next(kind)))

    def is_fixed(self, generator: torch.Generator | None) -> bool:
        if generator is not None:
            self.generator_states.append(generator.get_state().numpy().tobytes())
            return True
        fixed = torch.default_generator.initial_seed() != SENTINEL_SEED
        self.seeds_itself |= fixed
        return fixed

    def comparison(self, func: Callable[..., Any], left: Any, right: Any) -> None:
        """A scalar uniform compared with a number is LayerDrop: the number is the site's drop probability."""
        drawn, number, less = (
            (left, right, func in _LESS) if isinstance(left, Tensor) else (right, left, func not in _LESS)
        )
        site = self._uniforms.get(id(drawn))
        if site is not None and isinstance(number, (int, float)):
            chance = min(max(float(number), 0.0), 1.0)
            self.sites[site] = replace(self.sites[site], drop_prob=chance if less else 1 - chance)

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if len(self.sites) > self._told:
            is_first, self._told = self._told == 0, len(self.sites)
            self._final_linear, self._readers_of_last, self._last_output = None, 0, None
            if isinstance(result, Tensor):
                self._note_site(result)
            if func not in _RECURRENT:
                return
            if is_first:  # its first layer comes before the site
                self._count_first_layer(args)
        if isinstance(result, Tensor):
            self._follow(func, args, kwargs, result)
        self._count(func, args, kwargs, result)

    def is_integrable(self, outputs: list[Tensor]) -> bool:
        """Whether the last site is dropout that only the final linear layer reads, whose output is the output."""
        if not self.sites or len(outputs) != 1 or outputs[0] is not self._final_linear or self._readers_of_last != 1:
            return False
        untouched = outputs[0]._version == self._final_version
        return untouched and self.sites[-1].kind == "dropout" and self.sites[-1].is_random

    def _caller(self) -> tuple[str, nn.Module | None]:
        """The innermost module of the view whose code is running."""
        return next(self._names.callers(), ("", None))

    def _note_site(self, result: Tensor) -> None:
        site = self.sites[-1]
        if site.kind in _MULTIPLICATIVE:
            self._mark(result, site.index)
            self._last_output = result
        elif site.kind == "rand" and result.dim() == 0:
            self._uniforms[id(result)] = site.index
            self._scalars.append(result)

    def _mark(self, tensor: Tensor, site: int) -> None:
        # Forgotten with the tensor: a reference would count as memory that the network needs.
        self._fed_by[id(tensor)] = site
        weakref.finalize(tensor, self._fed_by.pop, id(tensor), None)

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        read = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) in self._fed_by]
        for tensor in read:
            site = self._fed_by[id(tensor)]
            if func in _SHAPE_ONLY or func in _MASK_TIMES_INPUT:
                self._mark(result, site)
            elif self.sites[site].before is None and _has_weights(func, leaves):
                self.sites[site] = replace(self.sites[site], before=self._caller()[0] or func.__name__)
            if tensor is self._last_output:
                self._readers_of_last += 1
                is_linear = func is F.linear and _argument(args, kwargs, 0, "input") is tensor
                self._final_linear = result if is_linear else None
                self._final_version = 0 if result.is_inference() else result._version

    def _count_first_layer(self, args: tuple[Any, ...]) -> None:
        weights = next(a for a in args if isinstance(a, (list, tuple)) and len(a) > 2)
        n_sites = len(self.sites)
        share = sum(w.numel() for w in weights[: len(weights) // (n_sites + 1)]) / sum(w.numel() for w in weights)
        cost = share * _recurrent_operations(args)
        self.prefix_cost += cost
        self.suffix_cost -= cost

    def _count(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        out = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(out, Tensor) or func in _SHAPE_ONLY:
            return
        cost = _operations(func, args, kwargs, out)
        if self.sites:
            self.suffix_cost += cost
        else:
            self.prefix_cost += cost


def _is_ours(module: nn.Module | None) -> bool:
    """Whether a module is one of this library's layers, which are random regardless of their flag."""
    return module is not None and type(module).__module__.startswith("dropbayes.")


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _has_weights(func: Callable[..., Any], leaves: list[Any]) -> bool:
    if func is F.linear or func in _CONVOLUTIONS or func in _RECURRENT or func is F.embedding:
        return True
    return (func in _PRODUCTS or func in _BILINEAR) and any(isinstance(leaf, nn.Parameter) for leaf in leaves)


def _operations(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> float:
    """Roughly, the floating-point operations of one call: accurate enough to choose the size of a block."""
    first, second = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    if (func is F.linear or func in _CONVOLUTIONS) and isinstance(second, Tensor):
        return 2.0 * out.numel() * second.numel() / second.shape[0]
    if func in _PRODUCTS and isinstance(first, Tensor) and first.dim():
        return 2.0 * out.numel() * first.shape[-1]
    if func in _BILINEAR and isinstance(args[1] if len(args) > 1 else None, Tensor):
        return 2.0 * out.numel() * args[1].shape[-1]
    if func is F.scaled_dot_product_attention:
        query, key = _argument(args, kwargs, 0, "query"), _argument(args, kwargs, 1, "key")
        return 4.0 * query.numel() * key.shape[-2]
    if func in _RECURRENT:
        return _recurrent_operations(args)
    return 4.0 * out.numel()


def _recurrent_operations(args: tuple[Any, ...]) -> float:
    weights = next(a for a in args if isinstance(a, (list, tuple)) and len(a) > 2)
    return 2.0 * args[0].numel() / args[0].shape[-1] * sum(w.numel() for w in weights)


class Watch(TorchDispatchMode):
    """Observes every operation at the dispatcher, whichever Python function called it.

    Random operations that arrive here were not replaced: `unaccounted` names them and the module that ran. The memory
    of all tensors alive at once is `peak_bytes`, that of those made from the first site on `peak_suffix_bytes`.
    """

    def __init__(self, recorder: Recorder, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.recorder = recorder
        self.unaccounted: list[str] = []
        self.peak_bytes = self.peak_suffix_bytes = 0
        # Views of parameters, buffers and inputs take no memory.
        self._live: dict[int, tuple[int, bool]] = {
            tensor.untyped_storage().data_ptr(): (0, False) for tensor in held if _has_storage(tensor)
        }
        self._total = self._suffix_total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs) and not self._is_fixed(kwargs):
            path, _ = self.recorder._caller()
            self.unaccounted.append(f"{func.overloadpacket.__name__} in {path or 'the network'}")
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._hold(leaf)
        return result

    def _is_fixed(self, kwargs: dict[str, Any]) -> bool:
        seeded = torch.default_generator.initial_seed() != SENTINEL_SEED
        return kwargs.get("generator") is not None or seeded

    def _hold(self, tensor: Tensor) -> None:
        if not _has_storage(tensor):
            return
        key, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if key in self._live:
            return
        self._live[key] = size, bool(self.recorder.sites)
        self._total += size
        self._suffix_total += size if self.recorder.sites else 0
        self.peak_bytes = max(self.peak_bytes, self._total)
        self.peak_suffix_bytes = max(self.peak_suffix_bytes, self._suffix_total)
        weakref.finalize(tensor, self._free, key)

    def _free(self, key: int) -> None:
        size, in_suffix = self._live.pop(key, (0, False))
        self._total -= size
        self._suffix_total -= size if in_suffix else 0


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has its own memory: not sparse, nested, quantised by a subclass, or on the meta device."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that may be random is random with these arguments."""
    arguments = func._schema.arguments
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    named |= {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    if any(named.get(name) is False for name in ("train", "training")):
        return False
    return not any(
        name in named and named[name] == 0 for name in ("dropout_p", "dropout", "p") if _is_number(named, name)
    )


def _is_number(named: dict[str, Any], name: str) -> bool:
    return isinstance(named.get(name), (int, float))
