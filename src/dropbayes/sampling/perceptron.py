"""Multi-layer perceptrons: plain `nn.Sequential` networks, recognised and drawn from without general interception.

The profile is read off the layers. The masks are those of any other path, so the same seed gives the same draws. A mask
shared by all rows is folded into the weights that read it, once for all rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from dropbayes.sampling.masks import Keys, keep_mask, keep_scale
from dropbayes.sampling.profile import Profile
from dropbayes.sampling.source import MaskSpec
from dropbayes.sampling.streaming import mean_over_draws
from dropbayes.tracing import RowLayout, Site
from dropbayes.tracing.layers import VECTOR, in_whole_vectors
from dropbayes.tracing.outputs import split

_ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.ReLU6, nn.Softsign,
)  # fmt: skip
_ONE_TENSOR = split(torch.empty(0))[1]
_IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_}
_FOLDED_ELEMENTS = 2**20  # the largest size of the masked copies of a weight matrix, one per draw
_TOGETHER = (64, 32, 16, 8, 4)  # rows per product, if a row has the same bits in each of these sizes
_TOGETHER_ELEMENTS = 2**19  # a layer of all draws up to this size stays in the cache
_TESTED_OPERATIONS = 2e8  # larger products are not tested: blocks of one size cost them little
_LARGE_WEIGHTS = 2**14


@dataclass(frozen=True)
class Perceptron:
    """The layers of a multi-layer perceptron in order, sequences flattened; those that do nothing are left out."""

    layers: tuple[nn.Module, ...]

    @property
    def profile(self) -> Profile:
        """The profile of the network, read off its layers."""
        sites, prefix, suffix, pass_bytes = list[Site](), 0.0, 0.0, 0
        for layer, following in zip(self.layers, (*self.layers[1:], None), strict=True):
            if isinstance(layer, nn.Dropout):
                before, number = "linear" if isinstance(following, nn.Linear) else None, len(sites)
                sites.append(Site(number, "", "dropout", float(layer.p), (1,), before, RowLayout(0, 1), number=number))
            elif isinstance(layer, nn.Linear):
                cost = 2.0 * layer.in_features * layer.out_features
                prefix, suffix = (prefix, suffix + cost) if sites else (prefix + cost, suffix)
                pass_bytes = max(pass_bytes, 4 * layer.out_features * layer.weight.dtype.itemsize)
        *_, last, final = (None, *self.layers)
        return Profile(
            sites=tuple(sites), left_out=(), prefix_cost=prefix, suffix_cost=suffix, pass_bytes=pass_bytes,
            suffix_bytes=pass_bytes, outputs=(RowLayout(0, 1),), structure=_ONE_TENSOR,
            last_layer=isinstance(final, nn.Linear) and isinstance(last, nn.Dropout) and last.p < 1,
        )  # fmt: skip


def as_perceptron(net: nn.Module, x: Tensor) -> Perceptron | None:
    """The layers of `net` if it is nothing but a plain perceptron that takes `x`; None if it does anything else."""
    # What calls the layers, and what they call, may have been replaced.
    homes = {nn.Module.__call__: torch_modules.__name__, F.dropout: F.__name__, F.linear: "torch._C._nn"}
    is_patched = any(function.__module__ != home for function, home in homes.items())
    if is_patched or torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return None
    layers, pending = list[nn.Module](), [net]
    width, taken = x.shape[1], (x.dtype, x.device)
    while pending:
        module = pending.pop()
        kind: Any = type(module)
        state = module.__dict__
        replaced = ("_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl", "forward", "train", "eval")
        of_class = getattr(vars(kind).get("forward"), "__module__", "") != kind.__module__
        if of_class or any(map(state.get, replaced)):
            return None
        if kind is nn.Sequential:
            pending.extend(reversed(state["_modules"].values()))
        elif kind is nn.Linear:
            weight = state["_parameters"].get("weight")
            sizes = state["in_features"], state["out_features"]
            found = None if weight is None else (weight.shape, weight.dtype, weight.device)
            if found != (sizes[::-1], *taken) or sizes[0] != width or 0 in sizes or "bias" in state["_buffers"]:
                return None
            layers.append(module)
            width = sizes[1]
        elif kind in _ACTIVATIONS or (kind is nn.Dropout and float(state["p"]) > 0):
            layers.append(module)
        elif kind not in (nn.Dropout, nn.Identity):
            return None
    return Perceptron(tuple(layers)) if nn.Linear in map(type, layers) else None


# Up to the first site a tensor is `[row, feature]`. Afterwards the draws follow the rows if masks are shared (the
# order that the product with the folded weights of all draws gives), and precede them if each row has its own.
Step = Callable[[Tensor, range, int | None], Tensor]
"""One or several layers, for all draws: of a tensor, the rows that key masks, and those in one product (None: all)."""


@dataclass(frozen=True)
class Affine:
    """h W + b."""

    weight: Tensor  # [feature, out]
    bias: Tensor | None
    drawn: tuple[int, int] | None = None  # draws and units, if the weights of all draws are side by side
    is_single: bool = False  # one output, as one of two: the bits of one column depend on the rows' number and places

    def __call__(self, h: Tensor, rows: range, block: int | None) -> Tensor:
        product = _product(h, self.weight, self.bias, block, self.is_single)
        return product.view(-1, *self.drawn) if self.drawn else product.view(*h.shape[:-1], -1)


@dataclass(frozen=True)
class SharedMask:
    """h ∘ z_t, with masks that all rows share."""

    factors: Tensor  # [draw, unit], 0 or 1 / keep_prob

    def __call__(self, h: Tensor, rows: range, block: int | None) -> Tensor:
        return h * self.factors if h.dim() == 3 else h[:, None] * self.factors


@dataclass(frozen=True)
class RowMasks:
    """h ∘ z_t, with separate masks for every row."""

    keys: Keys
    draws: range
    site: int
    drop_prob: float

    def __call__(self, h: Tensor, rows: range, block: int | None) -> Tensor:
        rows = range(rows.start, rows.start + h.shape[-2])  # including the padding of a block
        mask = _mask(self.keys, self.site, self.drop_prob, self.draws, rows, h.shape[-1], h)
        return mask * (h * keep_scale(self.drop_prob))


@dataclass(frozen=True)
class IntegratedLayer:
    """The last layer with its mask integrated out.

    Var[W (h ∘ z / keep_prob)] = (W ∘ W)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob).
    """

    mean: Affine
    squares: Tensor  # [feature, out], or [draw * feature, out] if the product also sums over draws
    is_drawn: bool
    per_row: bool

    def __call__(self, h: Tensor, rows: range, block: int | None) -> tuple[Tensor, Tensor]:
        """The expected outputs, and the mean over draws of their variances."""
        result = self.mean(h, rows, block)
        h = h.square_() if self.is_drawn else h.square()
        if self.is_drawn and self.per_row:
            return result, mean_over_draws(_product(h, self.squares, None, block, self.mean.is_single).view_as(result))
        return result, _product(h.view(h.shape[0], -1), self.squares, None, block, self.mean.is_single)


def _product(h: Tensor, weight: Tensor, bias: Tensor | None, block: int | None, is_single: bool) -> Tensor:
    """h @ weight + bias for `[row, (draw,) feature]`, in blocks of rows if a row's bits depend on them."""
    flat = h.reshape(-1, h.shape[-1])
    size = flat.shape[0] if block is None else block * flat.shape[0] // h.shape[0]
    parts = [_affine(rows, weight, bias) for rows in flat.split(size)]
    product = torch.cat(parts) if len(parts) > 1 else parts[0]
    return product[:, :1] if is_single else product


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight)
    # With a factor of two columns or laid out by columns, a product with a bias takes longer than the two operations.
    is_slow = weight.shape[1] == 2 or not weight.is_contiguous()
    return torch.mm(x, weight).add_(bias) if is_slow else torch.addmm(bias, x, weight)


def _elementwise(function: Callable[[Tensor], Tensor], h: Tensor, rows: range, block: int | None) -> Tensor:
    """σ(h), with the same bits for a unit wherever it stands."""
    return in_whole_vectors(function, h) if h.numel() % VECTOR and function not in _IN_PLACE.values() else function(h)


def _mask(
    keys: Keys, site: int, drop_prob: float, draws: range, rows: range | None, width: int, like: Tensor
) -> Tensor:
    shape = (1, width)  # one row's shape on any other path, which numbers the words of a mask
    mask = keep_mask(
        keys, site, drop_prob=drop_prob, draws=draws, rows=rows, shape=shape, dtype=like.dtype, device=like.device
    )
    return mask.view(len(draws), -1, width)


@dataclass(frozen=True)
class PerceptronDraws:
    """Some draws of a perceptron, prepared once and then evaluated on rows.

    A row must have the same bits in any batch. If a test shows that products of these shapes give a row the same bits
    in each of a few `sizes`, rows are taken in chunks of those sizes; otherwise products are computed in blocks of one
    size, to which rows are padded.
    """

    steps: tuple[Step, ...]
    last: IntegratedLayer | None
    n_draws: int
    per_row: bool
    block: int  # the number of rows in a product
    sizes: tuple[int, ...] | None  # None if products must have one size
    apart: bool = False  # layers before the first site have products of the block's size, whatever the sizes

    def __call__(self, x: Tensor, first_row: int) -> tuple[Tensor, Tensor | None]:
        """The outputs `[draw, row, out]`, and the mean over draws of their variances over the integrated site."""
        n_rows, results, variances = x.shape[0], [], []
        block = None if self.sizes or self.per_row else self.block
        for h in self._parts(x):
            rows = range(first_row, first_row + len(h))
            for step in self.steps:
                h = step(h, rows, self.block if self.apart and h.dim() == 2 else block)
            if self.last is not None:
                h, variance = self.last(h, rows, self.block if self.apart and h.dim() == 2 else block)
                variances.append(variance)
            results.append(
                h.expand(self.n_draws, *h.shape) if h.dim() == 2 else h if self.per_row else h.transpose(0, 1)
            )
            first_row = rows.stop
        if len(results) == 1:
            return results[0][:, :n_rows], variances[0][:n_rows] if variances else None
        return torch.cat(results, 1)[:, :n_rows], torch.cat(variances)[:n_rows] if variances else None

    def _parts(self, x: Tensor) -> tuple[Tensor, ...] | list[Tensor]:
        """The rows, padded, in chunks that are small enough for the cache."""
        n_rows = x.shape[0]
        missing = -n_rows % (self.sizes[-1] if self.sizes else self.block)
        x = torch.constant_pad_nd(x, (0, 0, 0, missing)) if missing else x
        if not self.sizes:
            return x.split(self.block if self.per_row else max(self.block, _TOGETHER[0]))
        sizes, left = [], n_rows + missing
        for size in self.sizes:
            count, left = divmod(left, size)
            sizes += [size] * count
        return x.split(sizes) if len(sizes) > 1 else [x]


def prepare(net: Perceptron, spec: MaskSpec, draws: range, *, block: int, x: Tensor) -> PerceptronDraws:
    """Some draws of a perceptron, prepared for rows of the dtype, the device and the number of `x`.

    `block` is the number of rows in a product. To be integrated, the last dropout must be right before the last layer.
    """
    steps, last = _steps(net.layers, spec.keys, draws, spec.per_row, spec.integrate, x)
    widest = len(draws) * max(layer.out_features for layer in net.layers if isinstance(layer, nn.Linear))
    fitting = tuple(size for size in _TOGETHER[:-1] if size * widest <= _TOGETHER_ELEMENTS) + _TOGETHER[-1:]
    # With separate masks, even a single row takes part in products of all draws. The largest sizes may not be tested.
    candidates = [((*fitting[i:], *one), False) for one in ((1,), ())[not spec.per_row :] for i in range(len(fitting))]
    larger = tuple(size for size in fitting if size > block)  # tested where many rows take longer than the test
    candidates += [((*larger, block), True)] if larger and spec.per_row and len(x) >= 8 * larger[0] else []
    factors, threads = _factors(steps, last, len(draws)), torch.get_num_threads()
    for sizes, large in candidates if x.is_cpu else ():
        if all(_sizes_agree(*one, sizes, threads, large) for one in factors if one[-1] > 1 or not large):
            return PerceptronDraws(steps, last, len(draws), spec.per_row, block, sizes, large)
    return PerceptronDraws(steps, last, len(draws), spec.per_row, block, None)


def _steps(
    layers: tuple[nn.Module, ...], keys: Keys, draws: range, per_row: bool, integrate: bool, like: Tensor
) -> tuple[tuple[Step, ...], IntegratedLayer | None]:
    """The layers as steps; the last one separately if its mask is integrated out."""
    steps, pending, n_sites = list[Step](), list(layers), sum(isinstance(layer, nn.Dropout) for layer in layers)
    site, is_drawn, width = 0, False, next(layer.in_features for layer in layers if isinstance(layer, nn.Linear))
    while pending:
        layer = pending.pop(0)
        if isinstance(layer, nn.Dropout):
            after, drop_prob = pending[0] if pending else None, float(layer.p)
            site += 1
            if integrate and site == n_sites:
                assert isinstance(after, nn.Linear)
                return tuple(steps), _integrated(drop_prob, after, len(draws), is_drawn, per_row)
            if per_row:
                steps.append(RowMasks(keys, draws, site - 1, drop_prob))
            else:
                factors = _mask(keys, site - 1, drop_prob, draws, None, width, like)[:, 0] * keep_scale(drop_prob)
                folded = len(draws) * after.weight.numel() if isinstance(after, nn.Linear) else 0
                if isinstance(after, nn.Linear) and not is_drawn and folded <= _FOLDED_ELEMENTS:
                    steps.append(_fold_masks(factors, after))
                    pending.pop(0)
                    width = after.out_features
                else:
                    steps.append(SharedMask(factors))
            is_drawn = True
        elif isinstance(layer, nn.Linear):
            steps.append(_affine_layer(layer))
            width = layer.out_features
        else:
            # The first tensors may be views of the input: only later ones are overwritten.
            function = _IN_PLACE.get(type(layer), layer) if is_drawn else layer
            steps.append(functools.partial(_elementwise, function))
    return tuple(steps), None


def _fold_masks(factors: Tensor, layer: nn.Linear) -> Affine:
    """(x ∘ z_t) Wᵀ + b = x (z_t ∘ W)ᵀ + b: one product with the masked weights of all draws side by side."""
    n_draws, width = factors.shape[0], layer.out_features
    flat = (layer.weight.t()[:, None, :] * factors.t()[:, :, None]).contiguous().view(layer.in_features, -1)
    bias, is_single = None if layer.bias is None else layer.bias.repeat(n_draws), flat.shape[1] == 1
    return Affine(flat.repeat(1, 2) if is_single else flat, bias, (n_draws, width), is_single)


def _integrated(drop_prob: float, layer: nn.Linear, n_draws: int, is_drawn: bool, per_row: bool) -> IntegratedLayer:
    mean = _affine_layer(layer)
    squares = layer.weight.square().t() * (drop_prob / (1 - drop_prob))
    if is_drawn and not per_row:  # only the mean over draws is needed: one sum over draws and units
        squares = (squares / n_draws).repeat(n_draws, 1)
    return IntegratedLayer(mean, squares.repeat(1, 1 + mean.is_single), is_drawn, per_row)


def _affine_layer(layer: nn.Linear) -> Affine:
    """The layer with its weights as the right factor, for the faster kernel with rows first only where they are few."""
    is_single, few = layer.out_features == 1, layer.weight.numel() < _LARGE_WEIGHTS
    weight = layer.weight.t().contiguous() if few else layer.weight.t()
    return Affine(weight.repeat(1, 2) if is_single else weight, layer.bias, is_single=is_single)


def _factors(steps: tuple[Step, ...], last: IntegratedLayer | None, n_draws: int) -> list[tuple[Any, ...]]:
    """The forms of all products' right factors, and the number of rows of the left factor per row of the batch."""
    factors, multiple = [], 1
    for step in (*steps, *([last.mean] if last else [])):
        if isinstance(step, Affine):
            factors.append((step.weight, multiple))
        if isinstance(step, (SharedMask, RowMasks)) or (isinstance(step, Affine) and step.drawn):
            multiple = n_draws
    factors += [(last.squares, multiple if last.per_row else 1)] if last else []
    return [(tuple(weight.shape), weight.stride(), weight.dtype, multiple) for weight, multiple in factors]


@functools.lru_cache(maxsize=256)
def _sizes_agree(
    shape: tuple[int, int], stride: tuple[int, ...], dtype: torch.dtype, multiple: int, sizes: tuple[int, ...], _: int,
    large: bool = False,
) -> bool:  # fmt: skip
    """Whether a row of a product with such a factor has the same bits in all these numbers of rows, by some threads.

    The order in which a product sums depends on its shape and not on its values, so random values suffice.
    """
    most = sizes[0] * multiple
    costs = 0.0 if large else 2.0 * most * shape[0] * shape[1]
    if costs > _TESTED_OPERATIONS or dtype not in (torch.float32, torch.float64):
        return False
    source = torch.Generator("cpu").manual_seed(0)
    weight = torch.empty_strided(shape, stride, dtype=dtype, device="cpu").normal_(generator=source)
    rows = torch.randn(most, shape[0], dtype=dtype, generator=source, device="cpu")
    for bias in (None, torch.randn(shape[1], dtype=dtype, generator=source, device="cpu")):
        whole = _affine(rows, weight, bias)
        spans = [span for size in sizes for span in (slice(size * multiple), slice(most - size * multiple, most))]
        if not all(torch.equal(_affine(rows[span], weight, bias), whole[span]) for span in spans):
            return False
    return True
