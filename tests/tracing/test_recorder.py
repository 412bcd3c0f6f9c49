"""A forward pass watched: sites, costs, and randomness nobody accounts for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.layers import Linear
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.probes import Prober
from dropbayes.tracing import Interception, Recorder, SiteNames, is_ours
from tests.sampling.zoo import Module


def seen(net, x, up=True):
    inputs = as_inputs(x)
    with torch.no_grad():
        return Prober(net, inputs, (), frozenset())(inputs.leaves, lambda name, module: up)


def test_costs_count_the_products_before_and_after_the_first_site():
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Dropout(0.5), nn.Linear(20, 3, bias=False))
    recorder = seen(net, torch.ones(1, 10)).recorder
    assert recorder.prefix_cost == 2 * 10 * 20 and recorder.suffix_cost == 2 * 20 * 3


@pytest.mark.parametrize("equation", ["bf,wf->bw", "b f, w f", "...f,wf->...w"])
def test_an_einsum_costs_what_the_product_does(equation):
    net = Module(lambda m, x: torch.einsum(equation, x, m.w), w=nn.Parameter(torch.ones(20, 10)))
    assert seen(net, torch.ones(5, 10)).recorder.prefix_cost == 2 * 5 * 10 * 20


@pytest.mark.parametrize("function", [torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.inv, torch.inverse])
def test_a_decomposition_costs_far_more_than_its_result_has_elements(function):
    recorder = seen(Module(lambda m, x: function(x)), torch.eye(8).expand(1, 8, 8)).recorder
    assert recorder.prefix_cost > 20 * 8**3


def test_operations_called_with_keywords_are_counted_alike():
    net = Module(lambda m, x: F.linear(input=F.dropout(x, p=0.5), weight=m.w), w=nn.Parameter(torch.ones(3, 4)))
    recorder = seen(net, torch.ones(1, 4)).recorder
    assert recorder.suffix_cost == 2 * 4 * 3 and recorder.sites[0].before == "linear"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_first_layer_of_a_stacked_recurrence_comes_before_its_site(kind, bias):
    stacked = seen(kind(9, 9, 2, bias=bias, dropout=0.5, batch_first=True), torch.ones(1, 5, 9)).recorder
    alone = seen(kind(9, 9, 1, bias=bias, batch_first=True), torch.ones(1, 5, 9)).recorder
    assert stacked.prefix_cost == pytest.approx(stacked.suffix_cost, rel=0.1)
    assert stacked.prefix_cost == pytest.approx(alone.prefix_cost, rel=0.1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: torch.ops.aten.bernoulli(h, 0.5),
        lambda h: h + torch.empty_like(h).random_(3),
    ],
)
def test_random_operations_that_were_not_replaced_are_noted(draw):
    assert seen(Module(lambda m, x: draw(x)), torch.ones(2, 3)).watch.draws_by_generator


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
    watch = seen(network, arguments).watch
    assert not watch.unaccounted and not watch.draws_by_generator


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


def test_sites_are_named_by_module_operation_and_call():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    (site,) = seen(net, torch.ones(2, 3)).recorder.sites
    assert (site.name, site.path, site.before, site.shape) == ("1 dropout 0", "1", "2.1", (2, 4))


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: m.a(m.d(x)), True),
        (lambda m, x: m.a(m.d(x)) + 1, False),
        (lambda m, x: torch.tanh(m.a(m.d(x))), False),
        (lambda m, x: m.a(m.d(x)).add_(1), False),
        (lambda m, x: m.d(m.a(x)), False),
        (lambda m, x: (m.a(m.d(x)), x), False),
        (lambda m, x: m.a(m.d(x)) if x.sum() > 99 else m.a(x), False),
    ],
)
def test_a_last_layer_that_alone_reads_the_last_site_can_be_integrated_over(forward, expected):
    probe = seen(Module(forward, a=nn.Linear(3, 3), d=nn.Dropout(0.5)), torch.ones(2, 3))
    assert probe.recorder.is_integrable(probe.tensors) == expected


def test_dropout_that_is_off_counts_only_where_every_dropout_is_asked_for():
    weight = nn.Parameter(torch.ones(2, 3))
    for every, expected in ((False, 1.0), (True, 0.75)):
        recorder = Recorder(SiteNames({}), weights={id(weight): "w"}, every_dropout=every)
        with Interception(recorder):
            F.linear(F.dropout(torch.ones(1, 3), 0.25, training=False), weight)
        assert recorder.uses == [("w", expected)]


def test_sites_that_are_left_out_are_listed_apart():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2), nn.Dropout(0.25))
    inputs = as_inputs(torch.ones(2, 3))
    with torch.no_grad():
        recorder = Prober(net, inputs, ("2",), frozenset())(inputs.leaves, lambda name, module: True).recorder
    assert [site.path for site in recorder.sites] == ["0"]
    assert [(site.path, site.left_out) for site in recorder.sites_left_out] == [("2", True)]


def test_a_draw_after_a_seed_within_the_pass_is_noted():
    def forward(m, x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x + torch.randn(3)

    recorder = seen(Module(forward), torch.ones(2, 3)).recorder
    assert recorder.seeds_torch and recorder.sites == []


def test_this_librarys_layers_are_told_from_others():
    assert is_ours(Linear(2, 2, 0.5)) and not is_ours(nn.Dropout(0.5)) and not is_ours(None)
