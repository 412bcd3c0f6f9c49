"""The lists of operations: what passes a mask leaves a dropped unit at zero, what rearranges only rearranges."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.tracing import Interception, Recorder, SiteNames
from dropbayes.tracing.operations import (
    CELLS,
    CONVOLUTIONS,
    LESS,
    LOOKUPS,
    MORE,
    PASSES_MASK,
    PRODUCTS,
    READS,
    RECURRENT,
    SHAPES,
)

PASSING = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "elu": F.elu,
    "silu": F.silu,
    "leaky relu": F.leaky_relu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "max pooling": lambda h: F.max_pool1d(h, 3, 1, 1),
    "average pooling": lambda h: F.avg_pool1d(h, 3, 1, 1),
    "reshape": lambda h: h.reshape(h.shape),
    "factor": lambda h: h * 2,
}
BLOCKING = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "sum": lambda h: h + 1,
    "normalisation": lambda h: F.layer_norm(h, h.shape[-1:]),
}


def keep_probability(function):
    """The keep probability with which the weight after `function` was recorded, and the layer before the site."""
    weight, h = nn.Parameter(torch.randn(2, 4)), torch.randn(3, 2, 4)
    recorder = Recorder(SiteNames({}), weights={id(weight): "weight"})
    with Interception(recorder):
        F.linear(function(F.dropout(h, 0.25)), weight)
    ((_, keep_prob),) = recorder.uses
    return keep_prob, recorder.sites[0].before


@pytest.mark.parametrize("name", PASSING)
def test_a_mask_passes_what_leaves_zero_at_zero(name):
    assert keep_probability(PASSING[name]) == (0.75, "linear")


@pytest.mark.parametrize("name", BLOCKING)
def test_a_mask_ends_where_zero_is_moved(name):
    assert keep_probability(BLOCKING[name]) == (1.0, None)


def test_activations_in_the_list_leave_zero_at_zero():
    zero = torch.zeros(1, 2, 4, 4)
    for function in (F.relu, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.softsign):
        assert function in PASSES_MASK and not function(zero).any()
    assert not {torch.sigmoid, F.softplus, torch.exp, torch.cos, torch.add} & PASSES_MASK


def test_the_lists_hold_what_they_are_named_after():
    assert SHAPES < PASSES_MASK and CONVOLUTIONS < PRODUCTS and F.linear in PRODUCTS
    assert not LESS & MORE and {Tensor.__lt__, torch.le} <= LESS and {Tensor.__gt__, torch.ge} <= MORE
    assert torch.lstm in RECURRENT and torch.lstm_cell in CELLS and F.embedding in LOOKUPS and Tensor.tolist in READS
