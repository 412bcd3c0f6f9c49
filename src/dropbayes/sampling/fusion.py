"""The fused kernels, where they can run."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


def kernels_on(device: torch.device) -> Any:
    """The kernels for tensors on a device; None where there are none: elsewhere torch operations do the same."""
    return fused_kernels() if device.type == "cuda" else None


@functools.cache
def fused_kernels() -> Any:
    """The Triton kernels; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from dropbayes.sampling import kernels

    return kernels
