"""Kernels are used where they can run, and nowhere else."""

import importlib.util

import torch

from dropbayes.sampling.kernels import kernels_on


def test_there_are_kernels_for_a_gpu_where_triton_is_installed():
    assert (kernels_on(torch.device("cuda", 1)) is not None) == (importlib.util.find_spec("triton") is not None)


def test_there_are_none_with_a_torch_whose_triton_is_older_than_they_are(monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
    assert kernels_on.__wrapped__(torch.device("cuda")) is None


def test_no_other_device_has_kernels():
    assert kernels_on(torch.device("cpu")) is None and kernels_on(torch.device("meta")) is None
