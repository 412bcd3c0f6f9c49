"""What the tests collect: a module written in Triton can be imported only where Triton is."""

import importlib.util
import os

import torch

collect_ignore = []
if not importlib.util.find_spec("triton"):
    collect_ignore = ["src/dropbayes/population/fused.py", "src/dropbayes/sampling/kernels"]
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
