"""Rows to learn, and a population that has learned them."""

import torch

from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from dropbayes.population import Member, Task, train

LIKELIHOODS = {"gaussian": Gaussian(1.0), "heteroscedastic": HeteroscedasticGaussian(), "categorical": Categorical()}
F64 = {"device": "cpu", "dtype": torch.float64}


def toy(n: int = 120, *, noise: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=source, dtype=torch.float64)
    clean = 5 + 2 * x[:, 0].sin() + x[:, 1]
    return x, clean + noise * torch.randn(n, generator=source, dtype=torch.float64)


def trained_population(**settings):
    x, y = toy(150)
    tasks = [Task(x[:100], y[:100], held_out=(x[100:], y[100:])), Task(x[30:], y[30:], held_out=(x[:30], y[:30]))]
    members = [Member(task=i % 2, drop_prob=0.1, epochs=30, learning_rate=0.01, seed=i) for i in range(6)]
    return train(tasks, members, hidden=(12,), batch_size=32, **F64, **settings), tasks


def log_likelihood(head: str, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """That of standardised targets `[member, row, output]` under the library's own likelihood of the head's name."""
    targets = y.flatten(0, 1)[:, 0] if head == "categorical" else y.flatten(0, 1)
    return LIKELIHOODS[head].log_density(output.flatten(0, 1), targets).view(y.shape[:2])
