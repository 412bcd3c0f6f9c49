"""Triton kernels for keyed masks: the masks of docs/masks.md, generated in registers.

Every kernel has a counterpart in torch operations with the same bits of masks; the kernels have no backward pass.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch


@functools.cache  # asked at every site
def kernels_on(device: torch.device) -> Any:
    """The kernels for tensors on a device; None without them or with an older Triton: torch then does the same."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or torch.__version__ < "2.10":
        return None
    return importlib.import_module("dropbayes.sampling.kernels.all")
