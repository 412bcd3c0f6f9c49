"""Recurrent layers one at a time against torch's own."""

import pytest
import torch
from torch import nn

from dropbayes.tracing import Interception, Ones

CASES = [
    (kind, extra)
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for extra in ({}, {"bidirectional": True}, {"bias": False}, {"batch_first": True})
] + [(nn.LSTM, {"proj_size": 2}), (nn.LSTM, {"proj_size": 2, "bidirectional": True})]


@pytest.mark.parametrize("kind, extra", CASES)
def test_layers_one_by_one_equal_the_fused_module(kind, extra):
    torch.manual_seed(0)
    rnn = kind(3, 5, 3, dropout=0.4, **extra).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    expected = rnn.eval()(x)
    rnn.train()
    with Interception(Ones()):
        ours = rnn(x)
    for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_equal_the_fused_module(kind):
    torch.manual_seed(0)
    rnn = kind(3, 5, 2, dropout=0.4).double()
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 3, dtype=torch.float64) for n in (4, 3, 1)])
    expected = rnn.eval()(packed)[0].data
    rnn.train()
    with Interception(Ones()):
        torch.testing.assert_close(rnn(packed)[0].data, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_mapping_over_rows_equals_a_batch(kind):
    torch.manual_seed(0)
    rnn = kind(3, 5, 2, batch_first=True).eval().double()
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    with torch.no_grad(), Interception(Ones()):
        mapped = torch.func.vmap(lambda row: rnn(row[None])[0][0])(x)
    torch.testing.assert_close(mapped, rnn(x)[0])


def test_gradients_are_those_of_the_fused_module():
    torch.manual_seed(0)
    rnn = nn.LSTM(3, 5, 2, batch_first=True).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(rnn(x)[0].square().sum(), x)
    with Interception(Ones()):
        (ours,) = torch.autograd.grad(rnn(x)[0].square().sum(), x)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_is_mapped_over_has_second_derivatives_and_transforms(kind):
    torch.manual_seed(0)
    rnn = kind(3, 5, 2, batch_first=True).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(rnn(x)[0].square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(slope.square().sum(), x)
    with Interception(Ones()):

        def total(rows):
            return torch.func.vmap(lambda row: rnn(row[None])[0].square().sum())(rows).sum()

        torch.testing.assert_close(torch.func.grad(total)(x.detach()), slope.detach())
        (ours,) = torch.autograd.grad(total(x), x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), x)[0], expected)
