"""Seeded samples for the tests of decisions."""

import torch


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=generator(seed), dtype=torch.float64)
