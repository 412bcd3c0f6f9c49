"""What a network keeps beside its weights: shared with its parts, written in a pass, and left as it was.

A network whose pass in evaluation changes its state is after a call as after one such pass, or as before.
"""

import argparse
import collections
import contextlib
import contextvars
import gc
import types
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from tests.cases import crossed
from tests.sampling.loop import assert_law, made, network, unchanged
from tests.sampling.test_unchanged import CALLS, Body
from tests.sampling.training_loop import rows

# Written in a pass ----------------------------------------------------------------------------------------------------


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum, self.count = self.sum + value, self.count + 1


class Slots:
    __slots__ = ("mean", "n")

    def __init__(self):
        self.n, self.mean = 0, torch.zeros(2)

    def update(self):
        self.n += 1
        self.mean += 1

    def __repr__(self):
        return f"{self.n} {self.mean}"


class Keeps(Body):
    """A network that keeps `state` and writes into it by `write`, with its state, itself and its hidden values."""

    def __init__(self, state, write):
        super().__init__()
        self.state, self.write = state, write

    def forward(self, x):
        h = self.d(self.a(x))
        self.write(self.state, h)
        return torch.tanh(self.o(h))


def count(state, h):
    state["n"] += 1


class Table(dict):
    pass


class Names(list):
    pass


STATES = {
    "Counter": (lambda: collections.Counter(n=1), count),
    "defaultdict": (lambda: collections.defaultdict(int, n=1), count),
    "dict": (lambda: {"n": 1}, count),
    "OrderedDict": (lambda: collections.OrderedDict(n=1), count),
    "a dict of one's own": (lambda: Table(n=1), count),
    "nested": (lambda: {"n": 1, "inner": [collections.Counter(n=1)]}, lambda s, h: count(s["inner"][0], h)),
    "list": (lambda: [1], lambda s, h: s.append(len(s))),
    "a list of one's own": (lambda: Names([1]), lambda s, h: s.append(len(s))),
    "set": (lambda: {0}, lambda s, h: s.add(len(s))),
    "deque": (lambda: collections.deque([1]), lambda s, h: s.append(len(s))),
    "bytearray": (lambda: bytearray(1), lambda s, h: s.append(1)),
    "a plain tensor": (lambda: torch.zeros(16), lambda s, h: s.mul_(0.9).add_(1)),
    "a tensor in a list": (lambda: [torch.zeros(16)], lambda s, h: s[0].add_(1)),
    "a tensor deep inside": (lambda: {"a": {"b": torch.zeros(16)}}, lambda s, h: s["a"]["b"].add_(1)),
    "an array": (lambda: np.zeros(2), lambda s, h: s.__setitem__(0, s[0] + 1)),
    "an array of counts": (lambda: np.ones(2, int), lambda s, h: np.add(s, 1, out=s)),
    "a namespace": (lambda: types.SimpleNamespace(n=1), lambda s, h: setattr(s, "n", s.n + 1)),
    "parsed arguments": (lambda: argparse.Namespace(n=1), lambda s, h: setattr(s, "n", s.n + 1)),
    "UserDict": (lambda: collections.UserDict(n=1), count),
    "deep inside": (lambda: [[[[[[{"n": 1}]]]]]], lambda s, h: count(s[0][0][0][0][0][0], h)),
    "a meter": (Meter, lambda s, h: s.update(1.0)),
    "slots": (Slots, lambda s, h: s.update()),
    "an array over a tensor": (lambda: torch.zeros(3), lambda s, h: np.add(s.numpy(), 1, out=s.numpy())),
    "a meter of a meter": (lambda: Table(m=Meter()), lambda s, h: s["m"].update(1.0)),
}


@pytest.mark.parametrize(("name", "ask"), crossed(STATES, ["predict", "draws", "function_draw"]))
def test_a_state_written_in_a_pass_stays_as_it_was(name, ask):
    state, write = STATES[name]
    net, x = made(lambda: (Keeps(state(), write), rows(3)))
    for _ in range(2):
        with unchanged(net, x):
            CALLS[ask](net, x)


@pytest.mark.parametrize("make", [lambda: collections.defaultdict(list), lambda: {"h": []}, lambda: Table(h=[])])
def test_activations_that_a_network_keeps_are_its_own(make):
    net, x = made(lambda: (Keeps(make(), lambda s, h: s["h"].append(h)), rows(3)))
    net(x), db.predict(net, x), db.draws(net, x, n_draws=10)
    assert len(net.state["h"]) == 1
    assert torch.isfinite(net.state["h"][0].sum()).item() and net.state["h"][0].shape == (3, 16)


def test_a_module_with_slots_is_drawn_and_followed():
    class Slotted(Body):
        __slots__ = ("scale",)

        def forward(self, x):
            return self.o(self.d(self.a(x))) * self.scale

    net, x = made(lambda: (Slotted(), rows(3)))
    net.scale = 2.0
    one = db.draws(net, x, n_draws=5)
    net.scale = 3.0
    torch.testing.assert_close(db.draws(net, x, n_draws=5), one * 1.5)


def test_what_a_first_call_caches_is_cached():
    def forward(self, x):
        self.table.setdefault(x.shape[1], torch.arange(float(x.shape[1])))
        return self.o(self.d(x + self.table[x.shape[1]]))

    net, x = made(lambda: (network(forward, d=nn.Dropout(0.5), o=nn.Linear(6, 2)), rows(3)))
    net.table = {}
    db.predict(net, x)
    torch.testing.assert_close(net.table, {6: torch.arange(6.0)})


def test_a_flag_of_a_first_call_is_not_kept_without_the_hooks_that_it_stands_for():
    def forward(self, x):
        if not self.is_hooked:  # as a network of transformers that is asked for its hidden states
            self.is_hooked, kept = True, self.kept
            self.d.register_forward_hook(lambda module, given, result: kept.append(result))
        self.kept.clear()
        return self.o(self.d(x)), self.kept[0]

    net, x = made(lambda: (network(forward, d=nn.Dropout(0.5), o=nn.Linear(6, 2)), rows(3)))
    net.is_hooked, net.kept = False, []
    hidden = [db.draws(net, some, n_draws=5)[1] for some in (x, x, x[1:2])]
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0][:, 1:2], hidden[2])
    assert torch.equal(net(x)[1], x)


def keep_result(module, given, result):
    """A hook that refers to nothing but a variable of its context, as those of transformers."""
    RESULTS.get().append(result)


RESULTS = contextvars.ContextVar("results")


class Hooked(Body):
    """Asked for its hidden states, as a network of transformers: hooks collect them, registered at the first call."""

    def __init__(self, flag=True):
        super().__init__()
        self.flag, self.is_hooked = flag, False

    def forward(self, x):
        if not self.is_hooked:
            self.is_hooked = self.flag
            self.a.register_forward_hook(keep_result)
        token = RESULTS.set([])
        out = super().forward(x)
        hidden = RESULTS.get()
        RESULTS.reset(token)
        return out, hidden[0]


def test_hooks_that_refer_to_nothing_and_are_registered_once_are_no_state():
    net, x = made(lambda: (Hooked(), rows(3)))
    first, again = db.draws(net, x, n_draws=5), db.draws(net, x, n_draws=5)
    assert not inspect(net, as_inputs(x)).profile.is_stateful
    assert not net.is_hooked and not net.a._forward_hooks
    assert all(map(torch.equal, first, again)) and torch.equal(net(x)[1], first[1][0])


def test_hooks_that_are_registered_at_every_call_are_a_state():
    net, x = made(lambda: (Hooked(flag=False), rows(3)))
    db.draws(net, x, n_draws=5)
    assert inspect(net, as_inputs(x)).profile.is_stateful and not net.a._forward_hooks


# Weights written in a pass --------------------------------------------------------------------------------------------


class Renormalised(Body):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(5, 16, max_norm=1.0)

    def forward(self, x):
        return torch.tanh(self.o(self.d(self.a(x) + self.e(torch.zeros(len(x), dtype=torch.long)))))


class Prototypes(Body):
    def forward(self, x):
        with torch.no_grad():
            self.o.weight.copy_(F.normalize(self.o.weight, dim=1))
        return super().forward(x)


class DroppedInPlace(Body):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(self.a.weight.detach().clone())

    def forward(self, x):
        self.a.weight.data.copy_(F.dropout(self.raw, 0.5, self.training))
        return super().forward(x)


class PutBack(Body):
    """Writes noisy weights, and the old ones back after the pass."""

    def forward(self, x):
        old = self.a.weight.data.clone()
        if self.training:
            self.a.weight.data.add_(0.1 * torch.randn_like(old))
        y = super().forward(x)
        self.a.weight.data.copy_(old)
        return y


class Clipped(Body):
    def forward(self, x):
        self.o.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClippedAlias(Body):
    """Writes by a tensor over the memory of a weight."""

    def __init__(self):
        super().__init__()
        self.alias = self.o.weight.data

    def forward(self, x):
        self.alias.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClippedIfPossible(Body):
    """Catches the error of a write that is refused."""

    def forward(self, x):
        with contextlib.suppress(Exception):
            self.o.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Loaded(Body):
    """Loads its weights in a pass: an error of a single one is told at the end."""

    def __init__(self):
        super().__init__()
        self.other = {name: 0.5 * value for name, value in self.o.state_dict().items()}

    def forward(self, x):
        self.o.load_state_dict(self.other)
        return super().forward(x)


class ClippedAndHidden(Clipped):
    """Shows an optimiser no weight that the pass writes."""

    def named_parameters(self, *args, **options):
        return ((name, value) for name, value in super().named_parameters(*args, **options) if name != "o.weight")


WRITES = [
    Renormalised,
    Prototypes,
    DroppedInPlace,
    PutBack,
    Clipped,
    ClippedAlias,
    ClippedIfPossible,
    Loaded,
    ClippedAndHidden,
]


@pytest.mark.parametrize(("kind", "ask"), crossed(WRITES, ["predict", "draws", "function_draw", "sites"]))
def test_weights_that_a_pass_writes_are_left_as_they_were(kind, ask):
    net, x = made(lambda: (kind(), rows(3)))
    with unchanged(net, x):
        CALLS[ask](net, x)


@pytest.mark.parametrize("kind", WRITES)
def test_weights_that_a_pass_writes_have_the_law_of_the_loop(kind):
    (net, x), (reference, _) = (made(lambda: (kind(), rows(3))) for _ in range(2))  # a deep copy parts an alias
    assert_law(net, x, reference=reference)


class Averaged(Body):
    """Replaces a tensor that began as the memory of a weight."""

    last: torch.Tensor

    def __init__(self):
        super().__init__()
        self.average = self.o.weight.data
        self.register_buffer("last", self.a.weight.data)

    def forward(self, x):
        self.average, self.last = 0.9 * self.average, 0.5 * self.last
        return super().forward(x)


def spectrally_normalised():
    net = Body()
    net.a = nn.utils.spectral_norm(net.a)  # its weight begins as the memory of the one that it normalises
    return net


@pytest.mark.parametrize("make", [Averaged, spectrally_normalised])
@pytest.mark.parametrize("ask", ["draws", "predict"])
def test_what_a_pass_replaces_is_not_written_into(make, ask):
    net, x = made(lambda: (make(), rows(3)))
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    before = [parameter.data_ptr() for parameter in net.parameters()]
    CALLS[ask](net, x)
    assert all(map(torch.equal, weights, net.parameters()))
    assert before == [parameter.data_ptr() for parameter in net.parameters()]
    if make is Averaged:
        assert net.average.data_ptr() == net.o.weight.data_ptr() and net.last.data_ptr() == net.a.weight.data_ptr()


# What parts of a network share ----------------------------------------------------------------------------------------


class Factor(nn.Module):
    def __init__(self, g, plain=False):
        super().__init__()
        if plain:
            self.g = g
        else:
            self.register_buffer("g", g)

    def forward(self, x):
        return x * self.g


class Writes(Body):
    """A number shared with a child, which the parent writes before the child reads it."""

    def __init__(self, plain, part):
        super().__init__()
        g = torch.ones(1)
        if plain:
            self.g = g
        else:
            self.register_buffer("g", g)
        self.middle = Factor(part(g), plain)

    def forward(self, x):
        self.g.fill_(3.0)
        return super().forward(x)


PARTS = {"the same": lambda g: g, "a slice": lambda g: g[:1], "an element": lambda g: g[0]}


@pytest.mark.parametrize("plain", [False, True], ids=["buffer", "plain tensor"])
@pytest.mark.parametrize("name", PARTS)
def test_a_tensor_of_parent_and_child_is_shared_in_a_draw(plain, name):
    make = lambda: (Writes(plain, PARTS[name]), rows(3))  # noqa: E731
    net, x = made(make)
    assert_law(net, x, reference=made(make)[0])
    with unchanged(net, x, once=True):
        db.predict(net, x)


class Asks(nn.Module):
    """Noise if what `ask` returns is in training."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, x):
        return 2 * x * torch.bernoulli(torch.full_like(x, 0.5)) if self.ask().training else x


class AsksProxy(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.__dict__["parent"] = weakref.proxy(parent)  # a proxy passes for a module, and is no child

    def forward(self, x):
        return F.dropout(x, 0.5, self.parent.training)


class AsksList(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent = [parent]

    def forward(self, x):
        return F.dropout(x, 0.5, self.parent[0].training)


def through(kind):
    net = Body()
    net.middle = kind(net)
    return net, rows(3)


PARENTS = {
    "a weak reference": lambda net: Asks(weakref.ref(net)),
    "a weak proxy": AsksProxy,
    "a list": AsksList,
    "a closure": lambda net: Asks(lambda: net),
    "a bound method": lambda net: Asks(net.requires_grad_),
}


@pytest.mark.parametrize("name", PARENTS)
def test_a_child_that_asks_its_parent_for_the_mode_is_drawn(name):
    net, x = made(lambda: through(PARENTS[name]))
    reference, _ = made(lambda: through(PARENTS[name]))
    with unchanged(net, x):
        assert_law(net, x, reference=reference)


# Hooks ----------------------------------------------------------------------------------------------------------------


class Features(nn.Module):
    """Reads a hidden value through a hook, which it removes when it is deleted."""

    def __init__(self):
        super().__init__()
        self.body, self.o, self.kept = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3)), nn.Linear(16, 2), {}
        self.hook = self.body[1].register_forward_hook(lambda m, args, out: self.kept.update(f=out))

    def forward(self, x):
        self.body(x)
        return self.o(self.kept["f"])

    def __del__(self):
        self.hook.remove()


def test_a_network_that_removes_its_hooks_when_deleted_keeps_them():
    net, x = made(lambda: (Features(), rows(3)))
    ours = db.predict(net, x, n_draws=2000)
    gc.collect()
    assert len(net.body[1]._forward_hooks) == 1
    linear = nn.Sequential(net.body[0], nn.Dropout(0.3), net.o).eval()
    torch.testing.assert_close(ours.mean, linear(x), atol=0.05, rtol=0.05)
    torch.testing.assert_close(ours.epistemic, db.predict(linear, x).epistemic, atol=0.01, rtol=0.1)


def test_a_deletion_that_the_user_counts_happens_once():
    deleted = []
    kind = type("Deleted", (Body,), {"__del__": lambda self: deleted.append(1)})
    net = made(lambda: (kind(), None))[0]
    db.predict(net, rows(3)), db.draws(network(lambda s, x: s.n(x), n=net).eval(), rows(3), n_draws=5)
    gc.collect()
    assert not deleted


def test_a_weight_that_a_pass_registers_anew_stays_the_networks_own():
    def forward(self, x):
        self.l.weight_hh_l0 = F.dropout(self.raw, 0.4, self.training)  # in evaluation mode, the parameter itself
        return self.o(self.l(x)[0][:, -1])

    def make():
        lstm = nn.LSTM(4, 6, batch_first=True)
        raw = nn.Parameter(lstm._parameters.pop("weight_hh_l0").detach().clone())
        lstm.weight_hh_l0 = raw.detach()
        return network(forward, l=lstm, raw=raw, o=nn.Linear(6, 2)), torch.randn(3, 4, 4)

    net, x = made(make)
    before = net.l.weight_hh_l0
    db.draws(net, x, n_draws=3)
    assert net.l.weight_hh_l0 is before
    assert net.l._flat_weights[0] is net.l.weight_ih_l0
    assert net.l._flat_weight_refs[0]() is net.l.weight_ih_l0


# Written between two calls --------------------------------------------------------------------------------------------

# By name: what a network holds, and the container in it whose element 0 is a number that its pass reads.
HELD = {
    "array": (lambda: np.ones(1), lambda held: held),
    "array in a dictionary": (lambda: {"a": np.ones(1)}, lambda held: held["a"]),
    "array of an object": (lambda: Named(np.ones(1)), lambda held: held.value),
    "tensor": (lambda: torch.ones(1), lambda held: held),
    "tensor in a dictionary": (lambda: {"a": {"b": torch.ones(1)}}, lambda held: held["a"]["b"]),
    "bytes": (lambda: bytearray(b"\x01"), lambda held: held),
    "list of lists": (lambda: [[[[[[1]]]]]], lambda held: held[0][0][0][0][0]),
}


class Named:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("name", HELD)
def test_what_is_written_into_a_network_is_read_by_the_next_call(name):
    make, at = HELD[name]
    net, x = made(lambda: (network(lambda s, x: s.o(s.d(x)) * s.read(s.held)[0], d=nn.Dropout(0.5)), rows(3)))
    net.o, net.held, net.read = nn.Linear(x.shape[1], 2), make(), at
    before = db.predict(net, x, n_draws=20).mean
    at(net.held)[0] = 3
    torch.testing.assert_close(db.predict(net, x, n_draws=20).mean, 3 * before)


class Steering(Named):
    def __call__(self, module, args, output):
        return self.value * output


@pytest.mark.parametrize("hook", [lambda steering: steering, lambda steering: steering.__call__])
def test_what_is_written_into_a_hook_is_read_by_the_next_call(hook):
    net, x = made(lambda: (nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2), nn.Identity()), torch.randn(3, 6)))
    steering = Steering(1.0)
    net[1].register_forward_hook(hook(steering))
    before = db.predict(net, x, n_draws=20).mean
    steering.value = 3.0
    torch.testing.assert_close(db.predict(net, x, n_draws=20).mean, 3 * before)


def averaged(self):
    self.average.data.mul_(0.9).add_(0.1)


def replaced(self):
    self.average.data = 0.9 * self.average.data + 0.1


@pytest.mark.parametrize("write", [averaged, replaced])
def test_a_buffer_that_training_writes_past_its_versions_is_left_as_it_was(write):
    def forward(self, x):
        if self.training:
            write(self)
        return self.last(self.dropout(torch.relu(self.first(x))))

    net = network(forward, first=nn.Linear(4, 8), dropout=nn.Dropout(0.3), last=nn.Linear(8, 2))
    net.register_buffer("average", torch.zeros(8))
    db.predict(net, torch.randn(3, 4), n_draws=4)
    assert torch.equal(net.average, torch.zeros(8))


def with_other_memory(layer):
    layer.weight.data = layer.weight.data.clamp(-0.1, 0.1)


def with_another_parameter(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clamp(-0.1, 0.1))


@pytest.mark.parametrize("constrain", [with_other_memory, with_another_parameter])
def test_weights_that_a_pass_constrains_are_left_as_they_were(constrain):
    def forward(self, x):
        constrain(self.last)
        return self.last(self.dropout(torch.relu(self.first(x))))

    net = network(forward, first=nn.Linear(4, 8), dropout=nn.Dropout(0.3), last=nn.Linear(8, 2)).eval()
    weight, before = net.last.weight, net.last.weight.detach().clone()
    db.predict(net, torch.randn(3, 4), n_draws=4)
    assert net.last.weight is weight
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    "prepare", [with_other_memory, with_another_parameter, lambda layer: layer.weight.data.mul_(2)]
)
def test_a_flag_that_the_weights_are_ready_is_not_kept_without_the_weights(prepare):
    def forward(self, x):
        if not self.is_ready:
            prepare(self.last)
            self.is_ready = True
        return self.last(self.dropout(torch.relu(self.first(x))))

    net = network(forward, first=nn.Linear(4, 8), dropout=nn.Dropout(0.3), last=nn.Linear(8, 2)).eval()
    net.is_ready, x = False, torch.randn(3, 4)
    first = db.draws(net, x, n_draws=4)
    assert not net.is_ready
    assert torch.equal(db.draws(net, x, n_draws=4), first)


@pytest.mark.parametrize("has_gradients", [False, True])
def test_gradients_that_a_pass_takes_are_not_left_in_the_network(has_gradients):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            self.last(self.dropout(torch.tanh(self.first(x)))).sum().backward()
        self.first.requires_grad_(False)
        return x.grad

    net = network(forward, first=nn.Linear(4, 8), dropout=nn.Dropout(0.3), last=nn.Linear(8, 2)).eval()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if has_gradients else None
    assert db.predict(net, torch.randn(3, 4), n_draws=20).epistemic.min() > 0
    for parameter in net.parameters():
        assert parameter.requires_grad
        assert bool((parameter.grad == 1).all()) if has_gradients else parameter.grad is None


@pytest.mark.parametrize("name", ["running_mean", "weight"])
def test_a_module_past_the_module_tree_that_a_pass_writes_into_is_refused_and_left_as_it_was(name):
    def forward(self, x):
        getattr(self.teachers[0], name).data.add_(1)
        return self.last(self.dropout(torch.relu(self.first(x))))

    net = network(forward, first=nn.Linear(4, 8), dropout=nn.Dropout(0.3), last=nn.Linear(8, 2)).eval()
    net.teachers = [nn.BatchNorm1d(4).eval()]
    before = getattr(net.teachers[0], name).clone()
    with pytest.raises(
        ValueError, match=f"`net` writes into a BatchNorm1d {name}, which it holds past its module tree"
    ):
        db.predict(net, torch.randn(3, 4), n_draws=4)
    assert torch.equal(getattr(net.teachers[0], name), before)
