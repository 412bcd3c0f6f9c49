"""Whether two tensors are the same but for the rounding of their computation."""

import math

import torch
from torch import Tensor

_ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def equal_but_for_rounding(
    a: Tensor, b: Tensor, batch: Tensor | None = None, *, offsets: bool = True, precision: torch.dtype | None = None
) -> bool:
    """Whether two outputs agree up to the order of summation.

    An element is compared with the largest of its column (of its channel, its position), in the batch it is from: a
    probability is not compared with a price. With `offsets`, what all rows have in common does not count for that. The
    `precision` is that of the computation, by default of the outputs.
    """
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    dtype = precision or (torch.float32 if a.is_complex() else a.dtype)
    share = _ROUNDING.get(dtype, 1e-2)
    if a.device.type != "cpu":  # its float32 products, as in cuDNN's recurrent layers, may be rounded to ten bits
        share = max(share, 5e-3)
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b, batch = a.to(wide), b.to(wide), None if batch is None else batch.to(wide)
    scale = _scale(torch.maximum(_magnitude(a), _magnitude(b)), None if batch is None else _magnitude(batch))
    least: Tensor | float = 1e-30
    if dtype is torch.float64 and a.numel():  # the arbiter: what is zero but for rounding stays so
        least += 1e-14 * float(_magnitude(a if batch is None else batch).max())
    elif offsets and dtype is not torch.float64 and not a.is_complex():
        whole = b if batch is None else batch
        rows = [axis for axis, size in enumerate(whole.shape) if size != a.shape[axis]] if batch is not None else [0]
        if rows and tuple(whole.shape[rows[0] : rows[0] + 1]) > (1,):  # several rows, or draws
            finite = whole.nan_to_num(0.0, 0.0, 0.0)
            least = least + 16 * torch.finfo(dtype).eps * scale
            scale = torch.minimum(scale, finite.amax(rows, keepdim=True) - finite.amin(rows, keepdim=True))
    close = (a - b).abs() <= share * scale + least
    return bool((close | (a == b) | (a.isnan() & b.isnan())).all())  # infinities, too


def _magnitude(tensor: Tensor) -> Tensor:
    return torch.where(torch.isfinite(tensor), tensor.abs(), torch.zeros((), dtype=torch.float64, device=tensor.device))


def _scale(magnitude: Tensor, batch: Tensor | None) -> Tensor:
    """For every element the largest magnitude with the same index along an axis; the least over all axes."""
    if magnitude.dim() == 0 or not magnitude.numel():
        return magnitude
    scale = torch.full((), math.inf, dtype=torch.float64, device=magnitude.device)
    for axis in range(magnitude.dim()):
        others = [a for a in range(magnitude.dim()) if a != axis]
        largest = magnitude.amax(others, keepdim=True) if others else magnitude
        if batch is not None and batch.dim() == magnitude.dim() and batch.shape[axis] == magnitude.shape[axis]:
            largest = torch.maximum(largest, batch.amax(others, keepdim=True) if others else batch)
        scale = torch.minimum(scale, largest)
    return scale
