"""Toy data for the processes."""

import torch

PRECISION = 25.0


def toy_data(n_rows=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n_rows, 1, dtype=torch.float64, generator=generator) * 4 - 2
    noise = torch.randn(n_rows, dtype=torch.float64, generator=generator) * PRECISION**-0.5
    return x, torch.sin(2 * x[:, 0]) + noise


GRID = torch.linspace(-3, 3, 9, dtype=torch.float64)[:, None]


X, Y = toy_data(6)
