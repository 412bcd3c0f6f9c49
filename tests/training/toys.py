"""A toy problem and a small network."""

import torch
from torch import nn


def toy(n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))


def network(drop_prob: float = 0.1, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(16, 1))
