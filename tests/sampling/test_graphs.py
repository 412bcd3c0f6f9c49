"""Evaluations replayed from CUDA graphs: never visible in the results."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling import graphs
from dropbayes.sampling.inspection import inspect_cached
from dropbayes.sampling.trees import as_inputs

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FACTOR = 1.0


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 8), nn.Linear(8, 2), nn.Dropout(0.3)
        self.power = 1

    def forward(self, x):
        h = self.first(x)
        return FACTOR * self.last(h + self.drop(torch.tanh(h))) ** self.power


def on_a_gpu():
    torch.manual_seed(0)
    return Residual().cuda(), torch.randn(7, 4, device="cuda")


def captured(net, x):
    record = inspect_cached(net, as_inputs(x))
    return [graph for graph in record.graphs.captured.values() if graph is not None]


def predictions(net, x, n=6, **options):
    return [moments(db.predict(net, x, n_draws=20, **options)) for _ in range(n)]


def moments(prediction):
    return torch.stack([prediction.mean.float(), prediction.std.float()])


@needs_cuda
@pytest.mark.parametrize("masks", ["shared", "row"])
def test_a_replay_gives_the_numbers_of_the_first_call(masks):
    net, x = on_a_gpu()
    first, *others = predictions(net, x, masks=masks)
    assert captured(net, x) and all(torch.equal(first, other) for other in others)


@needs_cuda
def test_a_replay_takes_the_rows_it_is_given():
    net, x = on_a_gpu()
    predictions(net, x)
    other = torch.randn_like(x)
    expected = moments(db.predict(copy.deepcopy(net), other, n_draws=20))
    torch.testing.assert_close(moments(db.predict(net, other, n_draws=20)), expected)


def double_in_place(net, monkeypatch):
    with torch.no_grad():
        net.last.weight.mul_(2)


def double_elsewhere(net, monkeypatch):
    net.last.weight.data = net.last.weight.data * 2


def replace_the_layer(net, monkeypatch):
    net.last = nn.Linear(8, 2).cuda()


def change_an_attribute(net, monkeypatch):
    net.power = 2


def change_a_global(net, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 3.0)


def change_the_class(net, monkeypatch):
    monkeypatch.setattr(Residual, "forward", lambda self, x: self.last(self.drop(self.first(x))))


def patch_the_forward(net, monkeypatch):
    net.first.forward = lambda x: nn.functional.linear(x, net.first.weight)


def change_the_drop_probability(net, monkeypatch):
    net.drop.p = 0.6


CHANGES = [
    double_in_place, double_elsewhere, replace_the_layer, change_an_attribute, change_a_global, change_the_class,
    patch_the_forward, change_the_drop_probability,
]  # fmt: skip


@needs_cuda
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_network_is_seen(change, monkeypatch):
    net, x = on_a_gpu()
    before = predictions(net, x)[-1]
    change(net, monkeypatch)
    after = predictions(net, x)
    expected = moments(db.predict(net.cpu(), x.cpu(), n_draws=20))
    for one in after:
        torch.testing.assert_close(one.cpu(), expected, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(one, before)


@needs_cuda
def test_weights_rounded_by_autocast_are_those_of_each_call():
    net, x = on_a_gpu()
    for _ in range(6):
        with torch.autocast("cuda", torch.bfloat16):
            ours = moments(db.predict(net, x, n_draws=20))
        torch.cuda.empty_cache()
        expected = moments(db.predict(copy.deepcopy(net), x, n_draws=20))
        torch.testing.assert_close(ours.float(), expected, rtol=5e-2, atol=5e-2)
        double_in_place(net, None)


@needs_cuda
def test_what_reads_a_tensor_on_the_host_is_not_captured():
    class Branches(Residual):
        def forward(self, x):
            return super().forward(x) if bool((x > 1e9).any()) else -super().forward(x)

    net, x = Branches().cuda(), torch.randn(7, 4, device="cuda")
    first, *others = predictions(net, x)
    assert not captured(net, x) and all(torch.equal(first, other) for other in others)


@needs_cuda
def test_the_graphs_of_all_networks_share_the_memory(monkeypatch):
    monkeypatch.setattr(graphs, "_MOST_BYTES", 2000 * 20)
    nets = [on_a_gpu() for _ in range(12)]
    expected = [predictions(net, x)[-1] for net, x in nets]
    assert sum(graph.graph is not None for net, x in nets for graph in captured(net, x)) < 12
    assert all(
        torch.equal(moments(db.predict(net, x, n_draws=20)), one) for (net, x), one in zip(nets, expected, strict=True)
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.recurrent(x)[0][:, -1]


OF_TORCH = {
    "recurrent": (Recurrent, (5, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True), (5, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.2)), (1, 8, 8)),
}


@needs_cuda
@pytest.mark.parametrize("name", OF_TORCH)
def test_layers_of_torch_are_replayed(name):
    make, shape = OF_TORCH[name]
    net, x = make().cuda(), torch.randn(6, *shape, device="cuda")
    first, *others = predictions(net, x)
    assert captured(net, x)
    for other in others:
        torch.testing.assert_close(other, first)


def test_a_network_with_a_tensor_on_the_host_is_not_captured():
    net = Residual()
    net.register_buffer("temperature", torch.tensor(2.0))
    assert graphs.graphs_of_network(net).read is None


@needs_cuda
def test_arguments_of_other_names_are_other_evaluations():
    class Named(Residual):
        def forward(self, x, scale=None, shift=None):
            return super().forward(x if scale is None else x * scale) + (0.0 if shift is None else shift)

    net, (_, x) = Named().cuda(), on_a_gpu()
    one = torch.full((7, 1), 2.0, device="cuda")
    scaled, shifted = (
        [moments(db.predict(net, {"x": x, k: one}, n_draws=20)) for _ in range(6)] for k in ("scale", "shift")
    )
    for given in (scaled, shifted):
        torch.testing.assert_close(given[-1], given[0])
    assert not torch.allclose(scaled[-1], shifted[-1])


def test_a_cpu_captures_nothing():
    torch.manual_seed(0)
    net, x = Residual(), torch.randn(7, 4)
    predictions(net, x)
    assert not captured(net, x)


def test_a_call_is_frequent_once_it_was_made_several_times():
    known = graphs.Graphs((), ())
    assert [graphs._is_frequent(known, "call") for _ in range(5)] == [False] * 3 + [True] * 2
    assert not graphs._is_frequent(known, "another call")


@needs_cuda
@pytest.mark.parametrize("n_hidden", [2, 4])
def test_a_wide_perceptron_without_its_dropped_units_is_replayed(n_hidden):
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.5)) for _ in range(n_hidden)]
    net = nn.Sequential(nn.Linear(3, 512), nn.ReLU(), nn.Dropout(0.5), *hidden, nn.Linear(512, 2)).cuda()
    x = torch.randn(50, 3, device="cuda")
    assert db.predict(net, x, n_draws=20).method.endswith("compacted")
    first, *others = predictions(net, x)
    for other in others:
        torch.testing.assert_close(other, first)
    with torch.no_grad():
        net[0].weight.mul_(2)
    expected = moments(db.predict(copy.deepcopy(net).cpu(), x.cpu(), n_draws=20))
    torch.testing.assert_close(predictions(net, x)[-1].cpu(), expected, rtol=1e-3, atol=1e-4)


def test_graphs_do_not_keep_a_network_alive():
    layers = [nn.Linear(2, 2), nn.Dropout(0.5)]
    graphs.graphs_of_perceptron(layers)
    first = weakref.ref(layers[0])
    del layers
    gc.collect()
    assert first() is None
