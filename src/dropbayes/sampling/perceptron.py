"""A direct path for multi-layer perceptrons: the draws of an `nn.Sequential` without the cost of general interception.

The masks are those of any other path, so the same seed gives the same draws. What is gained is that the masks of a draw
shared by all rows can be folded into the weights that read them, once for all rows, and that units dropped from wide
layers can be left out of the products.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dropbayes.sampling.anatomy import Anatomy, RowLayout, Site
from dropbayes.sampling.masks import Keys, keep_mask
from dropbayes.sampling.strategies import fused_kernels
from dropbayes.sampling.trees import split
from dropbayes.sampling.views import has_global_hooks

_ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.ReLU6, nn.Softsign, nn.Identity,
)  # fmt: skip
_IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu_,
    nn.Tanh: torch.tanh_,
    nn.Sigmoid: torch.sigmoid_,
}
_ONE_TENSOR = split(torch.empty(0))[1]
_FOLDED_ELEMENTS = 2**20  # masked copies of a weight matrix, one a draw, are made up to this size
_TOGETHER = (64, 32, 16, 8, 4)  # rows of one product where a row's bits are the same in each of these sizes,
_TOGETHER_ELEMENTS = 2**19  # of those that keep a layer of all draws within the cache
_TESTED_OPERATIONS = 2e8  # larger products are not tried out: they lose little by being made in blocks of one size
_COMPACT_WIDTH = 256  # leaving units out pays for its copying from this width,
_COMPACT_DROP_PROB = 0.25  # and from this share of dropped units

_LARGE_WEIGHTS = 2**14

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Perceptron:
    """The layers of a multi-layer perceptron in order, sequences flattened, dropout of probability 0 left out."""

    layers: tuple[nn.Module, ...]

    @property
    def anatomy(self) -> Anatomy:
        """What inspecting the network would show, read off its layers."""
        return _anatomy(tuple([_size(layer) for layer in self.layers]))

    @functools.cached_property
    def fused(self) -> Any:
        """The layers as the fused kernel takes them; None where there is no kernel for them."""
        kernels = fused_kernels()
        return None if kernels is None else kernels.affine_layers(self.layers)

    @property
    def is_wide(self) -> bool:
        """Whether leaving dropped units out of the products pays."""
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        drops = [layer.p for layer in self.layers if isinstance(layer, nn.Dropout)]
        inner = [layer.in_features for layer in linears[1:]]
        return bool(inner) and min(inner) >= _COMPACT_WIDTH and min(drops, default=0.0) >= _COMPACT_DROP_PROB


def _size(layer: nn.Module) -> tuple[int, int, int] | float | None:
    """A linear layer's inputs, outputs and bytes of a number; a dropout's probability; None for an activation."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, layer.weight.element_size()
    return float(layer.p) if isinstance(layer, nn.Dropout) else None


@functools.lru_cache(maxsize=64)
def _anatomy(layers: tuple[tuple[int, int, int] | float | None, ...]) -> Anatomy:
    sites: list[Site] = []
    prefix = suffix = 0.0
    pass_bytes = 0
    for place, layer in enumerate(layers):
        if isinstance(layer, float):
            is_last = place + 1 == len(layers)
            before = None if is_last or not isinstance(layers[place + 1], tuple) else "linear"
            sites.append(Site(len(sites), "", "dropout", layer, (1,), before, RowLayout(0, 1)))
        elif layer is not None:
            n_inputs, n_outputs, n_bytes = layer
            cost = 2.0 * n_inputs * n_outputs
            prefix, suffix = (prefix, suffix + cost) if sites else (prefix + cost, suffix)
            pass_bytes = max(pass_bytes, 4 * n_outputs * n_bytes)
    last_drop_prob = layers[-2] if len(layers) > 1 and isinstance(layers[-1], tuple) else None
    return Anatomy(
        sites=tuple(sites), left_out=(), off_calls=frozenset(), lowered=frozenset(), prefix_cost=prefix,
        suffix_cost=suffix, pass_bytes=pass_bytes, suffix_bytes=pass_bytes, outputs=(RowLayout(0, 1),),
        structure=_ONE_TENSOR,
        last_layer=isinstance(last_drop_prob, float) and last_drop_prob < 1, rows_together=True, host_random=False,
        seeds_itself=False, stateful=False,
    )  # fmt: skip


def perceptron(net: nn.Module, x: Tensor) -> Perceptron | None:
    """The layers of `net` if it is nothing but a plain perceptron that takes `x`; None if it does anything else."""
    if has_global_hooks():
        return None
    layers: list[nn.Module] = []
    pending: list[nn.Module] = [net]
    while pending:
        module = pending.pop()
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own.get("_compiled_call_impl") or "forward" in own:
            return None
        if type(module) is nn.Sequential:
            pending.extend(reversed(module._modules.values()))
        elif type(module) is nn.Dropout:
            layers += [module] if module.p > 0 else []
        elif type(module) is nn.Linear or type(module) in _ACTIVATIONS:
            layers.append(module)
        else:
            return None
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    fits = bool(linears) and linears[0].in_features == x.shape[1] and all(_takes(layer, x) for layer in linears)
    return Perceptron(tuple(layers)) if fits else None


def _takes(layer: nn.Linear, x: Tensor) -> bool:
    """Whether a layer's weights are where the rows are, and of their dtype."""
    return layer.weight.dtype == x.dtype and layer.weight.device == x.device


class PerceptronDraws:
    """Some draws of a perceptron, prepared once and then evaluated on rows.

    A row must have the same bits whatever rows it comes with. Where this machine's products of these shapes are seen
    to give a row the same bits in any of a few sizes, rows are taken in parts of those sizes; elsewhere products are
    made in blocks of one size, to which rows are padded.
    """

    def __init__(
        self, net: Perceptron, keys: Keys, draws: range, *, block: int, per_row: bool, integrate: bool, like: Tensor
    ) -> None:
        """Prepares the draws.

        Args:
            net: The layers.
            keys: Seed, number of draws and sampler.
            draws: Which draws.
            block: The number of rows in a product.
            per_row: Whether each row has masks of its own.
            integrate: Leave the last dropout out and give its variance; it must stand right before the last layer.
            like: The rows: their dtype and device are those of the masks.
        """
        self.keys, self.draws, self.block, self.per_row, self.like = keys, draws, block, per_row, like
        self.variance: Tensor | None = None
        self._first_row = 0
        # Until the first site there is no draw axis. Then it stands after the rows where masks are shared (the product
        # with the folded weights of all draws has it there), and before them where each row has its own.
        self._drawn = False
        self._factors: list[tuple[Tensor, int]] = []  # right factors, and the rows of the left one for each of x
        self.steps = self._steps(net.layers, integrate)
        widest = len(draws) * max(layer.out_features for layer in net.layers if isinstance(layer, nn.Linear))
        self._sizes = tuple(size for size in _TOGETHER[:-1] if size * widest <= _TOGETHER_ELEMENTS) + _TOGETHER[-1:]
        on_cpu = like.device.type == "cpu"
        # With masks of their own, even a lone row takes part in products of all draws.
        for sizes in ((*self._sizes, 1), self._sizes) if per_row else (self._sizes,):
            self._together = on_cpu and all(_agrees(*factor, sizes) for factor in self._factors)
            if self._together:
                self._sizes = sizes
                break

    def __call__(self, x: Tensor, first_row: int) -> tuple[Tensor, Tensor | None]:
        """The outputs `[draw, row, out]`, and the mean over draws of their variances over the integrated site."""
        n_rows, results, variances = x.shape[0], [], []
        for part in self._parts(x):
            self._first_row = first_row
            h = part
            for step in self.steps:
                h = step(h)
            results.append(self._draws_first(h))
            if self.variance is not None:
                variances.append(self.variance)
            first_row += part.shape[0]
        if len(results) == 1:
            variance = variances[0][:n_rows] if variances else None
            return results[0][:, :n_rows], variance
        return torch.cat(results, 1)[:, :n_rows], torch.cat(variances)[:n_rows] if variances else None

    def _parts(self, x: Tensor) -> tuple[Tensor, ...] | list[Tensor]:
        """The rows, padded, in parts that are evaluated one after another and small enough for the cache."""
        n_rows, size = x.shape[0], self._sizes[-1] if self._together else self.block
        missing = -n_rows % size
        if missing:
            x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
        if not self._together:
            return x.split(max(self.block, _TOGETHER[0]))
        sizes, left = [], n_rows + missing
        for size in self._sizes:
            count, left = divmod(left, size)
            sizes += [size] * count
        return x.split(sizes) if len(sizes) > 1 else [x]

    def _draws_first(self, h: Tensor) -> Tensor:
        if h.dim() == 2:
            return h.expand(len(self.draws), *h.shape)
        return h if self.per_row else h.transpose(0, 1)

    def _steps(self, layers: tuple[nn.Module, ...], integrate: bool) -> list[Step]:
        steps: list[Step] = []
        sites = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Dropout)]
        done = -1  # the last layer that a step has taken in
        for place, layer in enumerate(layers):
            if place <= done:
                continue
            done = place
            if isinstance(layer, nn.Dropout):
                site, after = sites.index(place), layers[place + 1] if place + 1 < len(layers) else None
                if integrate and place == sites[-1]:
                    assert isinstance(after, nn.Linear)
                    steps.append(self._integrated(layer.p, after))
                    done = place + 1
                    continue
                if isinstance(after, nn.Linear) and self._folds(after):
                    steps.append(self._folded(site, layer.p, after))
                    done = place + 1
                else:
                    steps.append(self._dropped_rows(site, layer.p) if self.per_row else self._dropped(site, layer.p))
                self._drawn = True
            elif isinstance(layer, nn.Linear):
                steps.append(self._linear(layer))
            else:
                # The first tensors may still be views of the rows given: only later ones are written over.
                steps.append(_IN_PLACE.get(type(layer), layer) if self._drawn else layer)
        return steps

    def _product(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """h @ weight + bias for `[row, (draw,) feature]`, in blocks of rows where that matters for a row's bits."""
        flat = h.reshape(-1, h.shape[-1])
        size = self.block * flat.shape[0] // h.shape[0]
        if self._together or self.per_row or size == flat.shape[0]:
            return _affine(flat, weight, bias)
        return torch.cat([_affine(part, weight, bias) for part in flat.split(size)])

    @staticmethod
    def _transposed(weight: Tensor) -> Tensor:
        """The weights as the right factor, laid out for the faster kernel: rows first only where they are few."""
        return weight.t() if weight.numel() >= _LARGE_WEIGHTS else weight.t().contiguous()

    def _mask(self, site: int, drop_prob: float, width: int, rows: range | None) -> Tensor:
        shape = (1, width)  # one row's shape in any other path: the words of a mask are counted in it
        mask = keep_mask(
            self.keys, site, drop_prob=drop_prob, draws=self.draws, rows=rows, shape=shape, dtype=self.like.dtype,
            device=self.like.device,
        )  # fmt: skip
        return mask.view(len(self.draws), -1, width)

    def _folds(self, layer: nn.Linear) -> bool:
        return not self._drawn and not self.per_row and layer.weight.numel() * len(self.draws) <= _FOLDED_ELEMENTS

    def _folded(self, site: int, drop_prob: float, layer: nn.Linear) -> Step:
        """(x ∘ z_t) Wᵀ + b = x (z_t ∘ W)ᵀ + b: one product with the masked weights of all draws side by side."""
        n_draws, width = len(self.draws), layer.out_features
        mask = self._mask(site, drop_prob, layer.in_features, None)[:, 0].t()
        scaled = (layer.weight * _scale(drop_prob)).t()
        flat = (scaled[:, None, :] * mask[:, :, None]).contiguous().view(layer.in_features, -1)
        bias = None if layer.bias is None else layer.bias.repeat(n_draws)
        self._factors.append((flat, 1))

        def step(h: Tensor) -> Tensor:
            return self._product(h, flat, bias).view(-1, n_draws, width)

        return step

    def _dropped(self, site: int, drop_prob: float) -> Step:
        masks: dict[int, Tensor] = {}

        def step(h: Tensor) -> Tensor:
            width = h.shape[-1]
            if width not in masks:
                masks[width] = self._mask(site, drop_prob, width, None)[:, 0] * _scale(drop_prob)
            return h * masks[width] if h.dim() == 3 else h[:, None] * masks[width]

        return step

    def _dropped_rows(self, site: int, drop_prob: float) -> Step:
        def step(h: Tensor) -> Tensor:
            rows = range(self._first_row, self._first_row + h.shape[-2])
            mask = self._mask(site, drop_prob, h.shape[-1], rows)
            return mask.mul_(h * _scale(drop_prob))  # the mask is as large as the result, and nobody else's

        return step

    def _linear(self, layer: nn.Linear) -> Step:
        transposed = self._transposed(layer.weight)
        self._factors.append((transposed, len(self.draws) if self._drawn else 1))

        def step(h: Tensor) -> Tensor:
            return self._product(h, transposed, layer.bias).view(*h.shape[:-1], -1)

        return step

    def _integrated(self, drop_prob: float, layer: nn.Linear) -> Step:
        # Var[W (h ∘ z / keep_prob)] = (W ∘ W)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob)
        squares = layer.weight.square().t() * (drop_prob / (1 - drop_prob))
        mean, n_draws = self._linear(layer), len(self.draws)
        if self._drawn and not self.per_row:  # only the mean over draws is wanted: one sum over draws and units
            squares = (squares / n_draws).repeat(n_draws, 1)
        squares = squares.contiguous()
        self._factors.append((squares, 1))

        def step(h: Tensor) -> Tensor:
            result = mean(h)
            h = h.square_() if self._drawn else h.square()
            if self._drawn and self.per_row:
                self.variance = self._product(h, squares).view_as(result).mean(0, dtype=torch.float64)
            else:
                self.variance = self._product(h.view(h.shape[0], -1), squares)
            return result

        return step


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight)
    # With a factor laid out by columns, a product with a bias takes a slower kernel than the two operations.
    return torch.addmm(bias, x, weight) if weight.is_contiguous() else torch.mm(x, weight).add_(bias)


def _agrees(weight: Tensor, multiple: int, sizes: tuple[int, ...]) -> bool:
    """Whether a row of a product with such a factor has the same bits in all these numbers of rows.

    The order in which a product sums depends on its shape and not on its values, so that random ones show it.
    """
    return _tried(tuple(weight.shape), weight.stride(), weight.dtype, multiple, sizes, torch.get_num_threads())


@functools.lru_cache(maxsize=256)
def _tried(
    shape: tuple[int, int], stride: tuple[int, ...], dtype: torch.dtype, multiple: int, sizes: tuple[int, ...], _: int
) -> bool:
    most = sizes[0] * multiple
    if 2.0 * most * shape[0] * shape[1] > _TESTED_OPERATIONS or dtype not in (torch.float32, torch.float64):
        return False
    source = torch.Generator().manual_seed(0)
    weight = torch.empty_strided(shape, stride, dtype=dtype).normal_(generator=source)
    rows = torch.randn(most, shape[0], dtype=dtype, generator=source)
    for bias in (None, torch.randn(shape[1], dtype=dtype, generator=source)):
        whole = _affine(rows, weight, bias)
        for size in sizes:
            for part in (slice(size * multiple), slice(most - size * multiple, most)):
                if not torch.equal(_affine(rows[part], weight, bias), whole[part]):
                    return False
    return True


_prepared: OrderedDict[tuple[Any, ...], PerceptronDraws] = OrderedDict()
_PREPARED_ENTRIES, _PREPARED_WEIGHTS = 8, 2**14


def prepared_draws(
    net: Perceptron, keys: Keys, draws: range, *, block: int, per_row: bool, integrate: bool, like: Tensor
) -> PerceptronDraws:
    """The prepared draws, remembered for small networks: one row after another with one seed prepares only once.

    What is remembered is looked up by the values of the weights, so no way of changing them can go unnoticed.
    """
    parameters = [p for layer in net.layers for p in layer._parameters.values() if p is not None]

    def make(net: Perceptron) -> PerceptronDraws:
        return PerceptronDraws(net, keys, draws, block=block, per_row=per_row, integrate=integrate, like=like[:0])

    small = sum([p.numel() for p in parameters]) <= _PREPARED_WEIGHTS
    if not small or like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return make(net)
    kinds = tuple(map(_settings, net.layers))
    values = tuple([p.detach().numpy().tobytes() for p in parameters])
    key = (kinds, values, keys, draws, block, per_row, integrate, like.dtype, threading.get_ident())
    found = _prepared.get(key)
    if found is None:
        found = _prepared[key] = make(copy.deepcopy(net))  # of its own weights: those of `net` may change in place
        while len(_prepared) > _PREPARED_ENTRIES:
            _prepared.popitem(last=False)
    return found


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """What a layer does besides its weights."""
    kind = type(layer)
    if kind is nn.Linear:
        return (kind, layer.weight.shape)
    return (kind, layer.p if kind is nn.Dropout else None if kind in _IN_PLACE else layer.extra_repr())


def compact_draw(net: Perceptron, x: Tensor, *, keys: Keys, draw: int) -> Tensor:
    """One draw of a wide perceptron for all rows, `[row, out]`, with its dropped units left out of the products."""
    h, kept = x, None  # kept: which units of the layer before h holds, scaled
    site = 0
    for place, layer in enumerate(net.layers):
        if isinstance(layer, nn.Dropout):
            if kept is None:
                kept, h = _kept(keys, site, draw, layer.p, h)
            else:
                h = h * _scale(layer.p)
            site += 1
        elif isinstance(layer, nn.Linear):
            weight: Tensor = layer.weight
            bias: Tensor | None = layer.bias
            read = kept
            kept = _wanted(keys, net, place, site, draw, layer)
            if kept is not None:  # the next dropout keeps only these units: no others are computed
                weight, bias = weight.index_select(0, kept), None if bias is None else bias.index_select(0, kept)
            if read is not None:  # last, on the rows that are left: picking columns is the slower of the two
                weight = weight.index_select(1, read)
            h = linear(h, weight, bias)
        else:
            h = layer(h)
    return h


def _kept(keys: Keys, site: int, draw: int, drop_prob: float, h: Tensor) -> tuple[Tensor, Tensor]:
    units = _units(keys, site, draw, drop_prob, h.shape[-1], h)
    return units, h.index_select(-1, units) * _scale(drop_prob)


def _wanted(keys: Keys, net: Perceptron, place: int, site: int, draw: int, layer: nn.Linear) -> Tensor | None:
    """The units of this layer that the next dropout keeps, if only activations stand between."""
    for later in net.layers[place + 1 :]:
        if isinstance(later, nn.Dropout):
            return _units(keys, site, draw, later.p, layer.out_features, layer.weight)
        if isinstance(later, nn.Linear):
            break
    return None


def _units(keys: Keys, site: int, draw: int, drop_prob: float, width: int, like: Tensor) -> Tensor:
    mask = keep_mask(
        keys, site, drop_prob=drop_prob, draws=range(draw, draw + 1), rows=None, shape=(1, width), dtype=like.dtype,
        device=like.device,
    )  # fmt: skip
    return mask.flatten().nonzero().flatten()


def _scale(drop_prob: float) -> float:
    return 1 / (1 - drop_prob) if drop_prob < 1 else 1.0
