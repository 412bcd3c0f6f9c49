"""A call leaves its input, the network's weights and state, the generators and the memory as they were."""

import collections
import gc
import itertools
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.tracing.generators import state_of
from tests.cases import crossed
from tests.sampling.loop import assert_law, made, may_be_refused, network, unchanged
from tests.sampling.training_loop import rows

CALLS = {
    "draws": lambda net, x: db.draws(net, x, n_draws=10),
    "predict": lambda net, x: db.predict(net, x, n_draws=10),
    "sites": lambda net, x: db.sites(net, x),
    "function_draw": lambda net, x: db.function_draw(net, 1, n_draws=10)(x),
    "evaluate": lambda net, x: db.evaluate(net, x, torch.zeros(len(x), 2), likelihood=db.Gaussian(1.0), n_draws=10),
    "check": lambda net, x: db.check(net, x, torch.zeros(len(x), 2), likelihood=db.Gaussian(1.0), n_draws=10),
}


def ends():
    return {"a": nn.Linear(6, 16), "d": nn.Dropout(0.3), "o": nn.Linear(16, 2)}


# The input ------------------------------------------------------------------------------------------------------------


def standardised(x):
    x -= 0.5
    x /= 0.5
    return x


def filled(x):
    x[torch.isnan(x)] = 0
    return x


def first_column_zero(x):
    x[:, 0] = 0
    return x


IN_PLACE = {
    "standardised": standardised,
    "filled": filled,
    "a column": first_column_zero,
    "relu": lambda x: F.relu(x, inplace=True),
    "through a view": lambda x: (x.view(-1).mul_(0.7), x)[1],
    "through its data": lambda x: (x.data.add_(1.0), x)[1],
    "through NumPy": lambda x: (np.multiply(x.numpy(), 0.7, out=x.numpy()), x)[1],
    "through an array of its data": lambda x: (np.asarray(x.data).__imul__(0.7), x)[1],
}


def in_place(name):
    def forward(self, x):
        return torch.tanh(self.o(self.d(torch.relu(self.a(IN_PLACE[name](x))))))

    return network(forward, **ends()), rows(4)


@pytest.mark.parametrize(("name", "ask"), crossed(IN_PLACE, CALLS))
def test_an_input_that_the_network_writes_into_is_left_as_it_was(name, ask):
    net, x = made(lambda: in_place(name))
    with unchanged(net, x):
        CALLS[ask](net, x)


@pytest.mark.parametrize("name", IN_PLACE)
def test_chunks_of_draws_see_the_input_that_was_given(name):
    net, x = made(lambda: in_place(name))
    # Both hold it under one name: rows that are read give its sites the numbers of their names.
    writing, copying = network(lambda self, x: self.n(x), n=net), network(lambda self, x: self.n(x.clone()), n=net)
    for options in ({}, {"sampling": db.Sampling(max_bytes=4000)}, {"masks": "row"}):
        ours, theirs = (db.draws(one.eval(), x.clone(), n_draws=30, **options) for one in (writing, copying))
        torch.testing.assert_close(ours, theirs)
    f = db.function_draw(net, 1, n_draws=10)
    assert torch.equal(f(x), f(x))


def test_an_image_normalised_in_place_is_right_in_several_chunks():
    def make(change):
        def forward(self, x):
            h = F.relu(self.b(self.d(F.relu(self.a(change(x))))))
            return torch.tanh(self.o(h.mean((2, 3))))

        convolutions = {"a": nn.Conv2d(3, 32, 3, padding=1), "b": nn.Conv2d(32, 16, 3, padding=1)}
        return network(forward, d=nn.Dropout2d(0.3), o=nn.Linear(16, 2), **convolutions), torch.randn(1, 3, 96, 96)

    (one, x), (two, _) = made(lambda: make(standardised)), made(lambda: make(lambda x: (x - 0.5) / 0.5))
    with unchanged(one, x):
        ours = db.draws(one, x, n_draws=30)
    torch.testing.assert_close(ours, db.draws(two, x, n_draws=30))


@pytest.mark.parametrize("first", [nn.Dropout(0.4, inplace=True), nn.ReLU(inplace=True)], ids=["dropout", "relu"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_first_layer_in_place_leaves_the_input(first, direct):
    body = first, nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    net, x = made(lambda: (nn.Sequential(*body) if direct else nn.Sequential(*body, nn.Tanh()), rows(3)))
    with unchanged(net, x):
        assert_law(net, x, n_draws=400)
    array = x.numpy().copy()
    db.predict(net, array)
    np.testing.assert_array_equal(array, x.numpy())


# Overridden train() ---------------------------------------------------------------------------------------------------


class Context:
    training = False


class AsksContext(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        return x + 0.5 * torch.randn_like(x) if self.context.training else x


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.middle, self.d, self.o = nn.Linear(6, 16), nn.Identity(), nn.Dropout(0.2), nn.Linear(16, 2)

    def forward(self, x):
        return self.o(self.d(self.middle(self.a(x))))


class SetsContext(Body):
    def __init__(self):
        super().__init__()
        self.context = Context()
        self.middle = AsksContext(self.context)

    def train(self, mode=True):
        self.context.training = mode
        return super().train(mode)


class Merged(nn.Linear):
    """Low-rank weights that eval() adds to the weight and train() takes out."""

    def __init__(self):
        super().__init__(16, 16)
        self.A, self.B, self.merged = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(16, 2)), False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.B @ self.A
            self.merged = not mode
        return self

    def forward(self, x):
        y = F.linear(x, self.weight)
        return y if self.merged else y + x @ self.A.t() @ self.B.t()


class MergedLayer(Body):
    def __init__(self):
        super().__init__()
        self.middle = Merged()


class Averaged(Body):
    """Averaged weights that eval() swaps in and train() out."""

    def __init__(self):
        super().__init__()
        self.other, self.averaged = {name: p.detach() * 0.5 for name, p in self.named_parameters()}, False

    def train(self, mode=True):
        if mode == self.averaged:
            for name, p in self.named_parameters():
                old = p.data.clone()
                p.data.copy_(self.other[name])
                self.other[name] = old
            self.averaged = not mode
        return super().train(mode)


class FreezesGradients(Body):
    def train(self, mode=True):
        self.a.requires_grad_(mode)
        return super().train(mode)


class CountsSwitches(Body):
    def __init__(self):
        super().__init__()
        self.switches, self.log = 0, []

    def train(self, mode=True):
        self.switches += 1
        self.log.append(mode)
        return super().train(mode)


class Fuses(Body):
    """Replaces a module in evaluation, as reparametrised convolutions do."""

    def train(self, mode=True):
        self.middle = nn.Identity() if mode else nn.Sequential(nn.Identity())
        return super().train(mode)


@pytest.mark.parametrize(
    ("kind", "ask"), crossed([SetsContext, MergedLayer, Averaged, FreezesGradients, CountsSwitches, Fuses], CALLS)
)
def test_a_train_method_of_the_networks_own_leaves_no_trace(kind, ask):
    net, x = made(lambda: (kind(), rows(3)))
    before = net(x)
    with unchanged(net, x), may_be_refused():
        CALLS[ask](net, x)
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("ask", CALLS)
def test_a_module_past_the_module_tree_keeps_its_mode_and_statistics(ask):
    class Holds(Body):
        def train(self, mode=True):
            self.parts[0].train(mode)
            return super().train(mode)

        def forward(self, x):
            return self.o(self.d(self.parts[0](self.a(x))))

    net = Holds()
    net.parts = [nn.BatchNorm1d(16)]
    net.eval()
    with pytest.raises(ValueError, match="a BatchNorm1d that it holds past its module tree"):
        CALLS[ask](net, rows(3))
    assert not net.parts[0].training and not net.parts[0].num_batches_tracked


@pytest.mark.parametrize("kind", [SetsContext, MergedLayer, FreezesGradients, CountsSwitches])
def test_a_train_method_of_the_networks_own_has_the_law_of_the_loop(kind):
    net, x = made(lambda: (kind(), rows(3)))
    with may_be_refused():
        assert_law(net, x)


def test_tuning_dropout_leaves_a_network_whose_weights_move_with_its_mode():
    net, x = made(lambda: (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Merged(), nn.Linear(16, 2)), rows(20)))
    with unchanged(net, x), may_be_refused():
        db.tune_dropout(net, x, torch.zeros(20, 2), per="network", drop_probs=(0.1, 0.2), n_draws=5)


# Generators -----------------------------------------------------------------------------------------------------------

SOURCES = {
    "torch": lambda: torch.rand(1, dtype=torch.float64).item(),
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_another_thread_may_draw_meanwhile(name):
    nets = [made(lambda: (network(lambda s, x: torch.tanh(s.n(x)), n=Body()), None))[0] for _ in range(6)]
    seen, stop = [], threading.Event()

    def other():
        while not stop.is_set():
            seen.append(SOURCES[name]())
            time.sleep(0.0003)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        drawn = [(len(db.sites(net, rows(3))), db.draws(net, rows(3), n_draws=5)) for net in nets]
    finally:
        stop.set()
        thread.join()
    assert len(seen) == len(set(seen))
    assert all(n == 1 and torch.equal(one, drawn[0][1]) for n, one in drawn)


class Remembers(Body):
    """A state, and dropout that is always on."""

    def __init__(self, drop):
        super().__init__()
        self.last, self.drop = None, drop

    def forward(self, x):
        self.last = x.mean().item()
        return self.drop(super().forward(x))


ALWAYS = {
    "dropout": lambda y: F.dropout(y, 0.3, True),
    "normal": lambda y: y + torch.randn_like(y),
    "Python's": lambda y: y * (random.random() < 0.8),
    "NumPy's": lambda y: y * float(np.random.rand() < 0.8),
    "a generator of its own": lambda y: y + torch.randn(2, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize(("name", "ask"), crossed(ALWAYS, ["predict", "check", "draws", "function_draw"]))
def test_a_network_with_a_state_and_dropout_always_on_leaves_the_generators(name, ask):
    net, x = made(lambda: (Remembers(ALWAYS[name]), rows(3)))
    with unchanged(net, x, once=True):
        CALLS[ask](net, x)


# Memory ---------------------------------------------------------------------------------------------------------------


class Trainer:
    pass


def with_trainer(net):
    net.trainer = Trainer()
    net.trainer.model = net


def with_hook(net):
    net.a.register_forward_hook(lambda m, args, out, net=net: out if net.d.p else None)


def with_bound_method(net):
    net.other = net.forward


def with_list(net):
    object.__setattr__(net.a, "parents", [net])


def with_itself_as_a_result(net):
    net.seen = collections.deque([lambda: net], maxlen=3)


REFERENCES = [with_trainer, with_hook, with_bound_method, with_list, with_itself_as_a_result]


def test_networks_that_refer_to_themselves_are_freed():
    called = {}
    for refer, ask in itertools.product(REFERENCES, ("draws", "function_draw", "predict", "sites")):
        net = made(lambda: (Body(), None))[0]
        refer(net)
        CALLS[ask](net, rows(3))
        called[refer.__name__, ask] = weakref.ref(net)
    del net
    gc.collect()  # which takes longer than all the rest
    assert not [case for case, reference in called.items() if reference() is not None]


def test_the_input_is_freed():
    net, x = made(lambda: (Body(), rows(3)))
    db.predict(net, x), db.function_draw(net, 1)(x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


OF_TORCH, OF_PYTHON, OF_NUMPY = torch.Generator(), random.Random(3), np.random.default_rng(3)
GLOBALS = {"torch": OF_TORCH, "random": OF_PYTHON, "numpy": OF_NUMPY}


@pytest.mark.parametrize("kind", GLOBALS)
@pytest.mark.parametrize("always", [True, False])
def test_a_generator_that_is_a_global_variable_is_refused_and_left_as_it_was(kind, always):
    number = NUMBER[kind]

    def forward(self, x):
        draws = always or self.training
        return self.a(F.dropout(x, 0.3, self.training)) * (number() if draws else 1.0)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 2)), rows(3)))
    before = state_of(GLOBALS[kind])
    with pytest.raises(NotImplementedError, match=r"of its own|its own torch\.Generator"):
        db.predict(net, x)
    assert state_of(GLOBALS[kind]) == before


def _from_torch():
    return torch.rand(1, generator=OF_TORCH)


def _from_python():
    return OF_PYTHON.random()


def _from_numpy():
    return OF_NUMPY.random()


NUMBER = {"torch": _from_torch, "random": _from_python, "numpy": _from_numpy}


class Graph:
    """An object of the user's own class."""

    def __init__(self, x):
        self.x, self.seen, self.calls, self.held = x, [], 0, None


def _replaces(self, graph):
    graph.x = self.d(torch.relu(self.a(graph.x)))
    return self.o(graph.x)


def _writes(self, graph):
    graph.calls += 1
    graph.seen.append(graph.calls)
    return self.o(self.d(torch.relu(self.a(graph.x.mul_(graph.calls)))))


@pytest.mark.parametrize("forward", [_replaces, _writes])
def test_an_object_that_the_network_writes_into_is_left_as_it_was(forward):
    def plain(self, x):
        return self.o(self.d(torch.relu(self.a(x))))

    layers = {"a": nn.Linear(6, 8), "d": nn.Dropout(0.3), "o": nn.Linear(8, 2)}
    net, x = made(lambda: (network(forward, **layers), rows(5)))
    graph, whole = Graph(x.clone().requires_grad_()), db.Sampling(row_axis=None)
    expected = db.draws(network(plain, **layers).eval(), x, n_draws=5, sampling=whole)
    torch.testing.assert_close(db.draws(net, graph, n_draws=5, sampling=whole), expected)
    one = db.function_draw(net, 2, n_draws=5, sampling=whole)(graph)
    torch.testing.assert_close(one, expected[2])
    assert torch.equal(graph.x, x) and not graph.seen and not graph.calls
    assert torch.autograd.grad(one.sum(), graph.x)[0].abs().sum() > 0


def test_an_object_that_cannot_be_copied_is_refused_if_it_is_written_into():
    net, x = made(lambda: (network(_replaces, a=nn.Linear(6, 8), d=nn.Dropout(0.3), o=nn.Linear(8, 2)), rows(5)))
    graph = Graph(x)
    graph.held = threading.Lock()
    with pytest.raises(TypeError, match="`x` holds a Graph that the network writes into"):
        db.predict(net, graph, sampling=db.Sampling(row_axis=None))


def _in_place(self, x, table):
    return self.o(self.d(torch.relu(self.a(x)))) + table.add_(1).sum()


def _past_the_version(self, x, table):
    return self.o(self.d(torch.relu(self.a(x)))) + table.data.add_(1).sum()


def _row_by_row(self, x, table):
    return self.o(self.d(torch.relu(self.a(x)))) + table.add_(1).sum() + float(x.sum()) * 0


@pytest.mark.parametrize("forward", [_in_place, _past_the_version, _row_by_row])
@pytest.mark.parametrize("n", [1, 3])
def test_an_argument_without_rows_that_the_network_writes_into_is_left_as_it_was(forward, n):
    def plain(self, x, table):
        read = float(x.sum()) * 0 if forward is _row_by_row else 0.0  # which numbers the sites by their names
        return self.o(self.d(torch.relu(self.a(x)))) + (table + 1).sum() + read

    layers = {"a": nn.Linear(6, 8), "d": nn.Dropout(0.3), "o": nn.Linear(8, 2)}
    net, x = made(lambda: (network(forward, **layers), rows(n)))
    table = torch.zeros(4)
    expected = db.draws(network(plain, **layers).eval(), (x, table), n_draws=5)
    torch.testing.assert_close(db.draws(net, (x, table), n_draws=5), expected)
    torch.testing.assert_close(db.function_draw(net, 2, n_draws=5)(x, table), expected[2])
    assert not table.any()
