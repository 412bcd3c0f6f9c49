"""Key-value caches with rows of several draws: their rows, their size, and reordering for a beam search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dropbayes.sampling import copied_cache, is_cache

CACHE_NAMES = ("past_key_values", "cache_params")


def cache_name(arguments: dict[str, Any]) -> str | None:
    """The name of the cache argument; None without one."""
    return next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)


def layers_of(cache: Any) -> Iterator[Any]:
    """The layers of a cache, including those of its sub-caches (one for self-attention, one for cross-attention)."""
    sub_caches = [value for value in vars(cache).values() if is_cache(value)]
    for sub_cache in sub_caches:
        yield from layers_of(sub_cache)
    yield from getattr(cache, "layers", ())


def tensors_of(layer: Any) -> list[Tensor]:
    """The non-empty tensors of a layer."""
    values = list(vars(layer).values())
    values += [entry for value in values if isinstance(value, dict) for entry in value.values()]
    return [value for value in values if isinstance(value, Tensor) and value.dim() > 1 and value.numel()]


def cache_bytes(cache: Any) -> int:
    """The memory that a cache holds."""
    return sum(tensor.numel() * tensor.element_size() for layer in layers_of(cache) for tensor in tensors_of(layer))


def reorder(cache: Any, rows: Tensor, n_draws: int) -> None:
    """Takes the given rows in every draw; a layer that all draws share has them once."""
    n_rows = len(rows)
    folded = torch.cat([rows + draw * n_rows for draw in range(n_draws)])
    for layer in layers_of(cache):
        held = tensors_of(layer)
        if held:
            layer.reorder_cache(rows if held[0].shape[0] == n_rows else folded)


def spread(cache: Any, n_rows: int, n_draws: int) -> None:
    """Gives each draw its own rows in the layers that all draws have shared so far."""
    for layer in layers_of(cache):
        held = tensors_of(layer)
        if n_draws > 1 and held and held[0].shape[0] == n_rows:
            layer.reorder_cache(torch.arange(n_rows, device=held[0].device).repeat(n_draws))


def first_rows(cache: Any, n_rows: int) -> Any:
    """A copy of the cache with the rows of the first draw alone."""
    copied = copied_cache(cache)
    for layer in layers_of(copied):
        held = tensors_of(layer)
        if held and held[0].shape[0] > n_rows:
            layer.reorder_cache(torch.arange(n_rows, device=held[0].device))
    copied.__dict__.pop("reorder_cache", None)  # bound to the original cache
    return copied
