"""What the tests collect, what each begins with, and what one leaves for the next.

A module written in Triton can be imported only where Triton is.
"""

import gc
import importlib.util
import os
import random

import numpy as np
import pytest
import torch

collect_ignore = []
if not importlib.util.find_spec("triton"):
    collect_ignore = ["src/dropbayes/sampling/kernels"]
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


def pytest_configure(config):
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():  # `torch.manual_seed` would format the stack for each kind that is not there
            devices._is_in_bad_fork = lambda: True
    # Most tests train for a moment, and some predict rows far off; those of the warnings themselves expect them.
    config.addinivalue_line("filterwarnings", "ignore:The held-out log-likelihood:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:.* predicted beyond the targets:UserWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # What is imported lives to the end: no collection of garbage need look through it, neither meanwhile nor later.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # extensions look for leaks when Python ends


@pytest.fixture(autouse=True)
def seeded():
    """The generators at one state: weights and rows of a test do not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the one that networks draw from
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """Threads and oneDNN, which a test may change for all that follow.

    On some processors torch switches oneDNN off for good at the first product in bfloat16 that it cannot make. With
    more threads than cores a small LSTM takes ten times as long.
    """
    enabled, threads = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
    yield
    torch._C._set_mkldnn_enabled(enabled)
    torch.set_num_threads(threads)
