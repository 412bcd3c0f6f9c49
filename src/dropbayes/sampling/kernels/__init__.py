"""Triton kernels for keyed masks: the masks of docs/masks.md, generated in registers.

Every kernel has a counterpart in torch operations with the same bits of masks; the kernels have no backward pass.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

__all__ = ["kernels_on"]


def kernels_on(device: torch.device) -> Any:
    """The kernels for tensors on a device; None without them or with an older Triton: torch then does the same."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):  # asked at every site: torch's own < is slow
        return None
    return importlib.import_module("dropbayes.sampling.kernels.all")
