"""Random numbers that have no row: one gate or one mask of weights for all rows of a pass.

Such a network is a distribution over functions like any other: a row is the same alone, in a batch and in a shard.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from tests.cases import slow_except
from tests.sampling.loop import assert_law, assert_same_alone, made, network
from tests.sampling.training_loop import rows


class Skipped(nn.Module):
    """Residual layers, each skipped if `gate` says so."""

    def __init__(self, gate):
        super().__init__()
        self.layers, self.d = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Dropout(0.1)
        self.o, self.gate = nn.Linear(6, 2), gate

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.gate():
                continue
            x = x + self.d(torch.tanh(layer(x)))
        return self.o(x)


GATES = {
    "torch.rand(1) < p": lambda: torch.rand(1) < 0.3,
    "torch.rand([]) < p": lambda: torch.rand([]) < 0.3,
    "p > torch.rand(())": lambda: 0.3 > torch.rand(()),  # noqa: SIM300
    "torch.rand(1).item() < p": lambda: torch.rand(1).item() < 0.3,
    "float(torch.rand(1, 1))": lambda: float(torch.rand(1, 1)) < 0.3,
    "bernoulli of a tensor": lambda: torch.bernoulli(torch.tensor(0.3)),
    "bernoulli_ in place": lambda: torch.empty(1).bernoulli_(0.3).bool(),
    "a number of NumPy": lambda: np.random.rand() < 0.3,
    "a number of Python": lambda: random.random() < 0.3,
    "a normal number": lambda: torch.randn(()) < -0.5,
    "uniform_ in place": lambda: torch.empty(()).uniform_(0, 2) < 0.6,
    "uniform_ below zero": lambda: torch.empty(()).uniform_(-1, 1) < -0.4,
    "exponential_ above one": lambda: torch.empty(()).exponential_() > 1.2,
}


@pytest.mark.parametrize(
    "name", slow_except(GATES, "torch.rand(1) < p", "uniform_ in place", "a number of NumPy", "a number of Python")
)
def test_layers_skipped_by_a_gate_have_the_law_of_the_loop_and_the_same_rows_alone(name):
    net, x = made(lambda: (Skipped(GATES[name]), rows(3)))
    assert_law(net, x, n_draws=170, predicted=False)
    assert_same_alone(net, x)


class ShakeDrop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, training, p, as_bool):
        if not training:
            return (1 - p) * x
        gate = bool(torch.rand(()) < 1 - p) if as_bool else torch.tensor([0.0]).bernoulli_(1 - p).item() == 1
        return x if gate else x.new_empty(len(x), 1).uniform_(-1, 1).expand_as(x) * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None


def shake_drop(as_bool):
    def forward(self, x):
        h = self.a(x)
        return self.o(h + ShakeDrop.apply(torch.tanh(self.b(h)), self.training, 0.4, as_bool))

    return network(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), o=nn.Linear(8, 2)), rows(3)


def noise_with_a_probability():
    def forward(self, x):
        h = self.a(x)
        if self.training and torch.rand(1) < 0.5:
            h = h + 0.3 * torch.randn_like(h)
        return self.o(self.d(h))

    return network(forward, a=nn.Linear(6, 8), d=nn.Dropout(0.2), o=nn.Linear(8, 2)), rows(3)


def flipout():
    def forward(self, x):
        h = F.linear(x, self.w)
        if self.training:
            signs_in = torch.empty_like(x).uniform_(-1, 1).sign()
            signs_out = torch.empty_like(h).uniform_(-1, 1).sign()
            h = h + F.linear(x * signs_in, 0.2 * torch.randn_like(self.w)) * signs_out
        return self.o(torch.tanh(h))

    return network(forward, w=nn.Parameter(torch.randn(8, 6)), o=nn.Linear(8, 2)), rows(3)


class Noisy(nn.Linear):
    """A linear layer whose noise buffers are drawn anew in every pass of training."""

    def __init__(self, n_inputs, n_outputs):
        super().__init__(n_inputs, n_outputs)
        self.register_buffer("noise", torch.zeros(n_outputs, n_inputs))

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        self.noise.copy_(torch.randn(self.out_features).outer(torch.randn(self.in_features)))
        return F.linear(x, self.weight + 0.2 * self.noise, self.bias)


def noisy_layers():
    return nn.Sequential(Noisy(6, 8), nn.Tanh(), Noisy(8, 2)), rows(3)


class ChannelDropout(nn.Module):
    """A mask per channel that is drawn in every mode and used, unscaled, in training alone."""

    def forward(self, x):
        mask = x.new_empty(1, x.shape[1], 1).bernoulli_(0.7)
        return x * mask if self.training else x


def channels_dropped_for_the_batch():
    net = nn.Sequential(nn.Conv1d(2, 6, 3), ChannelDropout(), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2))
    return net, torch.randn(3, 2, 6)


class WeightDrop(nn.Module):
    """An LSTM or GRU whose recurrent weights are dropped."""

    def __init__(self, kind, always):
        super().__init__()
        self.rnn, self.always = kind(5, 6, batch_first=True), always
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.detach().clone())
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.weight_hh_l0 = self.raw.detach().clone()
        self.o = nn.Linear(6, 2)

    def forward(self, x):
        mask = F.dropout(torch.ones(len(self.raw), 1), 0.4, self.training or self.always)
        self.rnn.weight_hh_l0 = mask * self.raw
        return self.o(self.rnn(x)[0][:, -1])


def lstm_of_dropped_weights():
    return WeightDrop(nn.LSTM, True), torch.randn(3, 4, 5)


def gru_of_dropped_weights():
    return WeightDrop(nn.GRU, False), torch.randn(3, 4, 5)


def one_mask_for_all_rows():
    def forward(self, x):
        return self.o(torch.relu(self.a(x)) * F.dropout(torch.ones(16), 0.4, self.training))

    return network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 2)), rows(3)


def stochastic_depth():
    def forward(self, x):
        h = self.a(x)
        if self.training:
            h = h * torch.empty([1] * h.dim()).bernoulli_(0.6).div_(0.6)
        return torch.tanh(self.o(self.d(h) + x))

    return network(forward, a=nn.Linear(6, 6), d=nn.Dropout(0.1), o=nn.Linear(6, 2)), rows(3)


def shake_drop_read_with_item():
    return shake_drop(False)


def shake_drop_read_as_a_condition():
    return shake_drop(True)


SHARED = [
    shake_drop_read_with_item, shake_drop_read_as_a_condition, noise_with_a_probability, flipout, noisy_layers,
    channels_dropped_for_the_batch, lstm_of_dropped_weights, gru_of_dropped_weights, one_mask_for_all_rows,
    stochastic_depth,
]  # fmt: skip


@pytest.mark.parametrize("make", slow_except(SHARED, shake_drop_read_with_item, flipout, noisy_layers,
                                             channels_dropped_for_the_batch, lstm_of_dropped_weights, stochastic_depth))  # fmt: skip
def test_a_mask_without_rows_has_the_law_of_the_loop_and_the_same_rows_alone(make):
    net, x = made(make)
    # A pass of training that writes noise into buffers must not be the next pass's state.
    assert_law(net, x, n_draws=170, predicted=False)
    assert_same_alone(net, x)


@pytest.mark.parametrize(
    "make", slow_except([noise_with_a_probability, noisy_layers, one_mask_for_all_rows], one_mask_for_all_rows)
)
def test_a_mask_without_rows_takes_masks_per_row(make):
    net, x = made(make)
    assert_law(net, x, n_draws=170, predicted=False, masks="row")
    assert db.evaluate(net, x[:1], torch.zeros(1, 2), likelihood=db.Gaussian(1.0)).n_rows == 1


def test_a_branch_that_has_or_has_no_site_is_a_function_of_its_input():
    def forward(self, x):
        h = self.a(x)
        return self.o(2 * self.d(h) if self.training and torch.rand(1) < 0.5 else h)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 2)), rows(3)))
    assert_same_alone(net, x, n_draws=8)
    assert_law(net, x, n_draws=170, predicted=False)
