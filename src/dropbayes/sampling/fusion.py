"""The fused kernels, if they can run."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


def kernels_on(device: torch.device) -> Any:
    """The kernels for tensors on a device; None if there are none: torch operations then do the same."""
    return fused_kernels() if device.type == "cuda" else None


@functools.cache
def fused_kernels() -> Any:
    """The Triton kernels; None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from dropbayes.sampling import kernels

    return kernels
