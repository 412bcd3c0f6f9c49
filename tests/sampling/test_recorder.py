"""A forward pass watched: sites, costs, and randomness nobody accounts for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.sampling.looks import look
from dropbayes.sampling.trees import as_inputs
from tests.sampling.zoo import Module


def seen(net, x, up=True):
    inputs = as_inputs(x)
    with torch.no_grad():
        return look(net, inputs, list(inputs.leaves), lambda name, module: up, ())


def test_costs_count_the_products_before_and_after_the_first_site():
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Dropout(0.5), nn.Linear(20, 3, bias=False))
    recorder = seen(net, torch.ones(1, 10)).recorder
    assert recorder.prefix_cost == 2 * 10 * 20 and recorder.suffix_cost == 2 * 20 * 3


def test_operations_called_with_keywords_are_counted_alike():
    net = Module(lambda m, x: F.linear(input=F.dropout(x, p=0.5), weight=m.w), w=nn.Parameter(torch.ones(3, 4)))
    recorder = seen(net, torch.ones(1, 4)).recorder
    assert (recorder.suffix_cost == 2 * 4 * 3 and recorder.sites[0].before == "") or "linear"


def test_the_first_layer_of_a_stacked_recurrence_comes_before_its_site():
    recorder = seen(nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), torch.ones(1, 5, 4)).recorder
    assert recorder.prefix_cost == pytest.approx(recorder.suffix_cost, rel=0.1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: torch.ops.aten.dropout(h, 0.5, True),
        lambda h: h * torch.binomial(torch.ones_like(h), torch.full_like(h, 0.5)),
        lambda h: h * torch.distributions.Gamma(1.0, 1.0).sample(h.shape),
        lambda h: h * torch.distributions.Beta(1.0, 1.0).sample(h.shape),
    ],
)
def test_random_operations_that_were_not_replaced_are_named(draw):
    watch = seen(Module(lambda m, x: draw(x)), torch.ones(2, 3)).watch
    assert watch.unaccounted and " in the network" in watch.unaccounted[0]


@pytest.mark.parametrize(
    "network",
    [
        nn.LSTM(3, 3, batch_first=True),
        nn.MultiheadAttention(4, 2, batch_first=True),
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)),
    ],
    ids=lambda net: type(net).__name__,
)
def test_operations_that_could_be_random_but_are_not_are_not_named(network):
    x = torch.ones(2, 5, 3) if isinstance(network, nn.LSTM) else torch.ones(2, 5, 4)
    arguments = (x, x, x) if isinstance(network, nn.MultiheadAttention) else x
    assert not seen(network, arguments).watch.unaccounted


def test_a_scalar_uniform_compared_with_a_number_is_layer_drop():
    net = Module(lambda m, x: x if torch.rand([]) < 0.25 else 2 * x)
    (site,) = seen(net, torch.ones(2, 3)).recorder.sites
    assert site.drop_prob == 0.25


def test_memory_counts_what_is_alive_at_once():
    def forward(m, x):
        h = F.dropout(x, 0.5)
        for _ in range(10):
            h = h + 1  # the tensor before is gone
        return h

    watch = seen(Module(forward), torch.ones(1, 1000)).watch
    assert 2 * 4000 <= watch.peak_bytes <= 4 * 4000


def test_views_of_weights_take_no_memory():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(100, 100), nn.Linear(100, 100))
    assert seen(net, torch.ones(1, 100)).watch.peak_bytes <= 6 * 400
