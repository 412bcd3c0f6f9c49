r"""Draws of a wide perceptron without the units they drop.

With masks shared by all rows, a dropped unit is zero in every row: its column of the weights that read it, and its row
of the weights that write it, need not enter the products. At drop probability 1/2 a quarter of the multiplications
remains. All draws are one batch: each keeps its own units, padded with a few dropped ones (times zero) to the largest
number that any draw keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dropbayes.sampling.fusion import kernels_on
from dropbayes.sampling.masks import Keys, keep_mask

_ALIGNMENT = 16  # units: widths for which matrix products are fast
_REMEMBERED_BYTES = 2**25  # of the masks and units of one network


@dataclass(frozen=True)
class _Site:
    mask: Tensor  # [draw, unit], 0 or 1 / keep_prob
    units: Tensor | None  # [draw, kept unit]: every kept one and some dropped ones; None if all units are kept


def compact_draws(
    layers: Sequence[nn.Module], x: Tensor, keys: Keys, *, draws: range, integrate_last: bool
) -> tuple[Tensor, Tensor | None]:
    """The outputs `[draw, row, out]`, and the variance over an integrated last mask, averaged over the draws.

    The variance `[row, out]` is None unless `integrate_last`.

    Args:
        layers: Linear layers, elementwise activations and dropout in order, without dropout of probability 0.
        x: The rows, `[row, feature]`.
        keys: Seed, number of draws and sampler.
        draws: The draws.
        integrate_last: Whether to integrate over the last mask; one linear layer must follow it.
    """
    sites = _sites(layers, x, keys, draws, integrate_last)
    h, units, variance = x, None, None  # units: which of a layer's units h holds, `[draw, unit]`; None for all
    for index, layer in enumerate(layers):
        if index in sites:
            site = sites[index]
            if units is None and site.units is not None:
                units = site.units
                h = _columns(h, units)
            mask = site.mask if units is None else site.mask.gather(1, units)
            h = h * mask[:, None, :]
        elif isinstance(layer, nn.Linear):
            if integrate_last and index == len(layers) - 1:
                variance = _integrated_variance(h, layer, layers[index - 1])
            wanted = _units_after(layers, index, sites) if h.dim() == 3 else None
            h, units = _product(h, layer, units, wanted), wanted
        elif not isinstance(layer, nn.Dropout):
            h = layer(h)
    return h if h.dim() == 3 else h.expand(len(draws), *h.shape), variance


def _sites(layers: Sequence[nn.Module], x: Tensor, keys: Keys, draws: range, integrate_last: bool) -> dict[int, _Site]:
    """The masks of every site that is drawn, by its index among the layers, and the units that may be left out."""
    form = tuple(
        layer.out_features if isinstance(layer, nn.Linear) else layer.p if isinstance(layer, nn.Dropout) else None
        for layer in layers
    )
    n_bytes = 12 * len(draws) * max(size for size in form if isinstance(size, int)) * len(form)
    remembered = x.device.type == "cuda" and n_bytes <= _REMEMBERED_BYTES
    make = _remembered_sites if remembered else _new_sites
    return make(form, x.shape[1], keys, draws, integrate_last, x.dtype, x.device)


def tensors_of_sites(
    layers: Sequence[nn.Module], x: Tensor, keys: Keys, draws: range, integrate_last: bool
) -> tuple[Tensor, ...]:
    """The masks and units that `compact_draws` reads; on a GPU the same ones as long as they are remembered."""
    sites = _sites(layers, x, keys, draws, integrate_last).values()
    return tuple(tensor for site in sites for tensor in (site.mask, site.units) if tensor is not None)


def _new_sites(
    form: tuple[int | float | None, ...],
    width: int,
    keys: Keys,
    draws: range,
    integrate_last: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, _Site]:
    """The sites of layers of this form: the size of a linear layer, the probability of a dropout, None for others."""
    dropouts = [index for index, layer in enumerate(form) if isinstance(layer, float)]
    masks: list[Tensor] = []
    for index, layer in enumerate(form):
        if isinstance(layer, int):
            width = layer
        elif isinstance(layer, float) and not (integrate_last and index == dropouts[-1]):
            masks.append(_scaled_mask(keys, len(masks), layer, draws, width, dtype, device))
    if not masks:
        return {}
    most = torch.stack([mask.count_nonzero(1).max() for mask in masks]).tolist()  # one synchronisation
    sites = {}
    for index, mask, count in zip(dropouts, masks, most, strict=False):
        units = None
        if isinstance(form[index + 1] if index + 1 < len(form) else None, int):
            count = -(-max(count, 1) // _ALIGNMENT) * _ALIGNMENT
            units = mask.argsort(dim=1, descending=True, stable=True)[:, :count].contiguous()
        sites[index] = _Site(mask, units)
    return sites


# On a GPU the sizes of the products must be known on the host: repeated calls do not wait for them again.
_remembered_sites = functools.lru_cache(maxsize=4)(_new_sites)


def _scaled_mask(
    keys: Keys, site: int, drop_prob: float, draws: range, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The masks of a site, `[draw, unit]`, scaled by 1 / keep_prob."""
    kernels = kernels_on(device)
    if kernels is not None:  # one launch instead of about twenty
        ones = torch.ones(width, dtype=dtype, device=device)
        spread: Tensor = kernels.dropout(
            ones, keys, site, drop_prob=drop_prob, draws=draws, rows=None, outer=1, inner=width, drawn=False
        )
        return spread.view(-1, width)
    mask = keep_mask(
        keys, site, drop_prob=drop_prob, draws=draws, rows=None, shape=(width,), dtype=dtype, device=device
    )
    return mask * (1 / (1 - drop_prob) if drop_prob < 1 else 1.0)


def _units_after(layers: Sequence[nn.Module], index: int, sites: dict[int, _Site]) -> Tensor | None:
    """The units of a linear layer that are needed: those the next site keeps, if only activations are between."""
    for later in range(index + 1, len(layers)):
        if later in sites:
            return sites[later].units
        if isinstance(layers[later], (nn.Linear, nn.Dropout)):
            break
    return None


def _columns(h: Tensor, units: Tensor) -> Tensor:
    """The columns `[draw, row, unit]` of `[row, feature]` or `[draw, row, feature]`."""
    if h.dim() == 3:
        return h.gather(2, units[:, None, :].expand(-1, h.shape[1], -1))
    return h.index_select(1, units.flatten()).view(-1, *units.shape).transpose(0, 1)


def _product(h: Tensor, layer: nn.Linear, units: Tensor | None, wanted: Tensor | None) -> Tensor:
    """The layer's outputs at the requested units, from an input that holds only some of its units."""
    if units is None and wanted is None:
        return layer(h)
    # Units ascend, so that reading them along the rows of the weights reads neighbours.
    if units is None:
        weight = layer.weight[wanted]
    elif wanted is None:
        weight = layer.weight[:, units].transpose(0, 1)
    else:
        weight = _submatrices(layer.weight, wanted, units)
    if layer.bias is None:
        return torch.bmm(h, weight.transpose(1, 2))
    bias = layer.bias if wanted is None else layer.bias[wanted][:, None, :]
    return torch.baddbmm(bias, h, weight.transpose(1, 2))


def _submatrices(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Some rows and columns of the weights, different for every draw."""
    kernels = kernels_on(weight.device)
    if kernels is not None and weight.is_contiguous():
        gathered: Tensor = kernels.gathered_weights(weight, rows, columns)
        return gathered
    # The rows first: selecting columns is slower, and fewer elements are then left.
    submatrices = [weight.index_select(0, r).index_select(1, c) for r, c in zip(rows, columns, strict=True)]
    return torch.stack(submatrices) if len(submatrices) > 1 else submatrices[0][None]


def _integrated_variance(h: Tensor, layer: nn.Linear, dropout: nn.Module) -> Tensor:
    # Var[W (h ∘ z / keep_prob)] = (W ∘ W)(h ∘ h) drop_prob / keep_prob for z ~ Bernoulli(keep_prob)
    squares, drop_prob = h.square().mean(0) if h.dim() == 3 else h.square(), _drop_prob(dropout)
    return squares @ layer.weight.square().t() * (drop_prob / (1 - drop_prob))


def _drop_prob(dropout: nn.Module) -> float:
    assert isinstance(dropout, nn.Dropout)
    return dropout.p
