"""A small network, and the check of its draws against a loop in training mode."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db


class Net(nn.Module):
    """Linear 6-16, Dropout 0.1, Linear 16-3, with `middle` between."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.d, self.o = nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 3)
        self.function = middle

    def middle(self, h):
        return self.function(self, h)

    def forward(self, x):
        return self.o(self.d(self.middle(self.a(x))))


def rows(n=5):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(1))


def assert_right(net, x, n_draws=800, **options):
    """The moments are those of a loop in training mode with fewer passes, within the errors of both."""
    trained = copy.deepcopy(net).train()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    with torch.no_grad():
        loop = torch.stack([trained(x) for _ in range(n_draws * 5 // 8)])
    torch.set_rng_state(state[0]), random.setstate(state[1])
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    ours = db.predict(net, x, n_draws=n_draws, **options)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    error = 5 * (loop.var(0) / len(loop) + ours.epistemic / n_draws).sqrt() + 1e-5
    assert ((ours.mean - loop.mean(0)).abs() <= error).all()
    assert float(ours.epistemic.sum()) == pytest.approx(float(loop.var(0).sum()), rel=4.6 * n_draws**-0.5)
