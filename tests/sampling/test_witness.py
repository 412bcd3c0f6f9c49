"""The network as its own witness, of its randomness: what breaks an assumption is right or refused.

Each group is a cause; its members differ in clothes only.
"""

import copy
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from tests.cases import crossed
from tests.sampling.loop import assert_law, assert_same_alone, unchanged
from tests.sampling.training_loop import Net, assert_right, rows
from tests.sampling.zoo import Module

# The output is changed after the last layer ---------------------------------------------------------------------------

AFTER_LAST = {
    "relu": nn.ReLU(inplace=True),
    "sigmoid": Module(lambda m, y: y.sigmoid_()),
    "scaled": Module(lambda m, y: y.mul_(3.0)),
    "one column": Module(lambda m, y: y.index_fill_(1, torch.tensor([0]), 0.0)),
    "written by index": Module(lambda m, y: y.__setitem__((slice(None), 0), 2 * y[:, 1]) or y),
}


@pytest.mark.parametrize(("name", "direct"), crossed(AFTER_LAST, [True, False]))
def test_an_output_changed_in_place_is_not_integrated_as_the_last_layer(name, direct):
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3), copy.deepcopy(AFTER_LAST[name])]
    assert_right(nn.Sequential(*layers) if direct else nn.Sequential(nn.Sequential(*layers), nn.Flatten()), rows())


def test_an_output_changed_in_place_by_a_hook_is_not_integrated():
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    net[3].register_forward_hook(lambda m, args, out: out.mul_(2.0))
    assert_right(net, rows())


# The training flag is read elsewhere ----------------------------------------------------------------------------------


def helper(module, h):
    return F.dropout(h, 0.5) if module.training else h


class ParentReadsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(lambda m, h: h)

    def forward(self, x):
        h = self.net.a(x)
        return self.net.o(self.net.d(F.dropout(h, 0.4) if self.net.d.training else h))


class Property(Net):
    @property
    def noisy(self):
        return self.training

    def middle(self, h):
        return F.dropout(h, 0.5) if self.noisy else h


FLAGS = {
    "helper": lambda: Net(helper),
    "lambda": lambda: Net(lambda m, h: F.dropout(h, 0.5) if m.training else h),
    "getattr": lambda: Net(lambda m, h: F.dropout(h, 0.5, getattr(m, "train" + "ing"))),
    "parent": ParentReadsChild,
    "property": Property,
    "hook": lambda: _hooked(),
}


def _hooked():
    net = Net(lambda m, h: h)
    net.a.register_forward_hook(lambda m, args, out: F.dropout(out, 0.5) if m.training else out)
    return net


@pytest.mark.parametrize("name", FLAGS)
def test_dropout_behind_a_flag_is_found_wherever_the_flag_is_read(name):
    assert_right(FLAGS[name](), rows())


@pytest.mark.parametrize("hold", [lambda net: {0: net}, lambda net: [net], lambda net: (net,)])
def test_a_flag_that_is_read_by_a_container_in_a_closure_is_that_of_the_draw(hold):
    net = Net().eval()
    held = hold(net)
    net.function = lambda m, h: F.dropout(h, 0.5, held[0].training)
    assert [site.drop_prob for site in db.sites(net, rows())] == [0.5, 0.1]


def test_a_flag_that_is_read_by_a_weak_reference_in_a_closure_is_that_of_the_draw():
    net = Net().eval()
    reference = weakref.ref(net)
    net.function = lambda m, h: F.dropout(h, 0.5, reference().training)
    assert [site.drop_prob for site in db.sites(net, rows())] == [0.5, 0.1]


def test_what_is_written_into_a_container_in_a_closure_is_read_by_the_next_call():
    net = Net().eval()
    held: dict = {"net": net, "scale": 1.0}
    net.function = lambda m, h: held["scale"] * F.dropout(m.a.bias.new_ones(h.shape), 0.5, held["net"].training)
    net.o.bias.data.zero_()
    before = db.predict(net, rows(), n_draws=20).mean
    held["scale"] = 3.0
    torch.testing.assert_close(db.predict(net, rows(), n_draws=20).mean, 3 * before)


THE_NETWORK: nn.Module = nn.Identity()


def test_a_flag_that_is_read_by_a_global_variable_or_an_object_is_refused(monkeypatch):
    net = Net(lambda m, h: F.dropout(h, 0.5, THE_NETWORK.training))
    monkeypatch.setitem(globals(), "THE_NETWORK", net)
    with pytest.raises(ValueError, match=r"by a global variable.*Read self\.training"):
        db.predict(net, rows())
    trainer = types.SimpleNamespace(net=net)
    net.function = lambda m, h: F.dropout(h, 0.5, trainer.net.training)
    with pytest.raises(ValueError, match=r"or an object, in <lambda>.*Read self\.training"):
        db.predict(net, rows())
    net.function = lambda m, h: F.dropout(h, trainer.rate, m.training)  # which reads its own
    trainer.rate = 0.5
    assert [site.drop_prob for site in db.sites(net, rows())] == [0.5, 0.1]


def test_an_attribute_is_not_taken_for_a_global_variable_of_its_name(monkeypatch):
    net = Net(lambda m, h: F.dropout(m.THE_NETWORK(h), 0.5, m.training))
    net.THE_NETWORK = nn.Tanh()
    monkeypatch.setitem(globals(), "THE_NETWORK", net)
    assert [site.drop_prob for site in db.sites(net.eval(), rows())] == [0.5, 0.1]


class Coins(nn.Module):
    def forward(self, h):
        return 2 * h * torch.bernoulli(torch.full_like(h, 0.5)) if self.training else h


def test_a_module_with_a_flag_that_is_run_by_a_global_variable_or_an_object_is_refused(monkeypatch):
    net = Net()
    net.coins = Coins()
    for read, function in ((net.coins, lambda m, h: THE_NETWORK(h)), (net, lambda m, h: THE_NETWORK.coins(h))):
        net.function = function
        monkeypatch.setitem(globals(), "THE_NETWORK", read)
        with pytest.raises(ValueError, match=r"or a module, by a global variable.*modules of self"):
            db.predict(net, rows())
    parts = types.SimpleNamespace(coins=net.coins)
    net.function = lambda m, h: parts.coins(h)
    with pytest.raises(ValueError, match=r"or an object, in <lambda>.*modules of self"):
        db.predict(net, rows())


def test_a_module_that_is_registered_from_a_global_variable_is_not_read_by_it(monkeypatch):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = THE_NETWORK  # as in a notebook

        def forward(self, x):
            return self.body(x)

    monkeypatch.setitem(globals(), "THE_NETWORK", Net(lambda m, h: F.dropout(h, 0.5, m.training)))
    assert_right(Around(), rows())


def test_a_part_that_stays_in_evaluation_stays_so():
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            self.d.eval()
            return self

        def middle(self, h):
            return F.dropout(h, 0.5, self.training)

    assert_right(Frozen(), rows())


# A training branch that does more than drop ---------------------------------------------------------------------------


class MoreInTraining(nn.Module):
    def forward(self, h):
        return F.dropout(3 * h, 0.5) if self.training else h


def test_a_branch_that_drops_and_changes_more_is_refused_by_name_and_can_be_left_out():
    net = Net(lambda m, h: m.block(h))
    net.block = MoreInTraining()
    with pytest.raises((ValueError, NotImplementedError), match=r"ignore_modules|torch\.rand"):
        db.predict(net, rows())
    for name in ("block", "MoreInTraining"):
        assert len([s for s in db.sites(net, rows(), sampling=db.Sampling(ignore_modules=name)) if not s.left_out]) == 1
        assert db.predict(net, rows(), sampling=db.Sampling(ignore_modules=name)).epistemic.sum() > 0


def test_dropout_left_out_by_name_takes_no_part_and_is_listed_as_such():
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 2))
    found = db.sites(net, rows(), sampling=db.Sampling(ignore_modules="1"))
    assert [(s.path, s.left_out) for s in found] == [("3", False), ("1", True)]
    alone = nn.Sequential(net[0], net[2], net[3], net[4])
    torch.testing.assert_close(
        db.predict(net, rows(), sampling=db.Sampling(ignore_modules="1")).std, db.predict(alone, rows()).std
    )
    with pytest.raises(ValueError, match="`ignore_modules` must name modules"):
        db.predict(net, rows(), sampling=db.Sampling(ignore_modules="nothing"))


# Randomness outside of torch's functions ------------------------------------------------------------------------------

HOST = {
    "python": lambda m, h: 0 * h if m.training and random.random() < 0.3 else h,
    "numpy": lambda m, h: 0 * h if m.training and np.random.rand() < 0.3 else h,
    "choice": lambda m, h: random.choice([h, 2 * h]) if m.training else h,
    "layer drop": lambda m, h: h if m.training and torch.rand([]) < 0.6 else 3 * h,
}


@pytest.mark.parametrize("name", HOST)
def test_random_numbers_of_the_host_are_keyed_to_the_seed(name):
    net = Net(HOST[name])
    assert_right(net, rows(1), n_draws=400)
    one, two = (db.draws(net, rows(), n_draws=20, seed=3) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, db.draws(net, rows(), n_draws=20, seed=4))


UNSEEN = {
    "aten": lambda h: torch.ops.aten.dropout(h, 0.5, True),
    "gamma": lambda h: h * torch.distributions.Gamma(1.0, 1.0).sample(h.shape),
    "dirichlet": lambda h: h * torch.distributions.Dirichlet(torch.ones(h.shape[1])).sample(),
    "poisson": lambda h: h + torch.poisson(h.abs()),
    "log-normal": lambda h: h * torch.empty_like(h).log_normal_(0.0, 0.5),
}


def test_normal_numbers_have_the_dtype_that_is_asked_for():
    def noise(m, h):
        return F.linear(torch.normal(0.0, 1.0, (len(h), 16), dtype=torch.float64), m.w) + h

    net = Net(lambda m, h: noise(m, h) if m.training else h).double().eval()
    net.w = nn.Parameter(torch.eye(16, dtype=torch.float64))
    assert_law(net, rows().double())


@pytest.mark.parametrize("name", UNSEEN)
def test_random_operations_of_every_kind_are_keyed(name):
    net = Net(lambda m, h: UNSEEN[name](h) if m.training else h).eval()
    with unchanged(net):
        assert_law(net, rows())
        assert_same_alone(net, rows())


@pytest.fixture
def no_other_threads(monkeypatch):
    """As in a process of its own: a progress bar of an earlier test may have left a thread that watches it."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.mark.usefixtures("no_other_threads")
def test_random_operations_that_take_no_generator_are_refused_by_name():
    def written(m, h):
        outs = {"out0": torch.empty_like(h), "out1": torch.empty_like(h, dtype=torch.bool)}
        return torch.ops.aten.native_dropout.out(h, 0.5, m.training, **outs)[0]

    net = Net(written)
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match="cannot be keyed to a seed: native_dropout"):
        db.predict(net, rows())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_numbers_drawn_until_they_meet_a_condition_are_refused_with_the_remedy():
    def rejected(m, h):
        scale = torch.rand(1)
        while scale > 0.9:
            scale = torch.rand(1)
        return h * scale

    with pytest.raises(NotImplementedError, match=r"rejection sampling. Transform the numbers of a single draw"):
        db.predict(Net(rejected), rows())


@pytest.mark.parametrize(
    "noise", [lambda h: h * np.random.rand(), lambda h: torch.poisson(h.abs())], ids=["NumPy", "poisson"]
)
def test_rows_that_depend_on_each_other_are_refused_beside_generators(noise):
    net = Net(lambda m, h: noise(h / h.norm()) if m.training else h / h.norm())
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.predict(net, rows())


class Own(Net):
    """A network with generators of the host as its attributes."""

    def __init__(self, middle):
        super().__init__(middle)
        self.python, self.legacy = random.Random(3), np.random.RandomState(3)
        self.sources = {"numpy": np.random.default_rng(3)}


PRIVATE = {
    "Python's, as an attribute": lambda m, h: h * (m.python.random() < 0.99),
    "Python's, unseeded": lambda m, h: h * (random.Random().gauss(1, 0.1)),
    "NumPy's, in a dict": lambda m, h: h * float(m.sources["numpy"].random() < 0.99),
    "NumPy's, legacy": lambda m, h: h * float(m.legacy.rand() < 0.99),
    "NumPy's, unseeded": lambda m, h: h * float(np.random.default_rng().random()),
    "NumPy's, in a closure": lambda m, h, source=np.random.default_rng(5): h * source.random(),  # noqa: B008
    "the system's": lambda m, h: h * random.SystemRandom().random(),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_generators_of_the_networks_own_are_refused_and_left_as_they_were(name):
    net = Own(lambda m, h: PRIVATE[name](m, h) if m.training else h).eval()
    with pytest.raises(NotImplementedError, match="cannot be keyed to a seed"):
        db.predict(net, rows())
    assert net.python.getstate() == random.Random(3).getstate()
    assert net.sources["numpy"].random() == np.random.default_rng(3).random()
    assert net.legacy.rand() == np.random.RandomState(3).rand()


@pytest.mark.usefixtures("no_other_threads")
def test_dropout_in_another_thread_is_refused():
    def in_thread(m, h):
        box = []
        worker = threading.Thread(target=lambda: box.append(F.dropout(h, 0.5, m.training)))
        worker.start(), worker.join()
        return box[0]

    with pytest.raises((NotImplementedError, ValueError), match=r"another thread|switched on alone"):
        db.predict(Net(in_thread), rows())


def test_a_forward_that_was_generated_has_sites_though_it_is_in_no_module():
    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 8)

        def forward(self, x):
            return torch.dropout(self.a(x), 0.5, True)

    net = torch.fx.symbolic_trace(Traced())
    assert [site.kind for site in db.sites(net, rows())] == ["dropout"]
    assert bool((db.predict(net, rows(), n_draws=10).epistemic > 0).any())


def test_initialisers_in_a_forward_pass_are_keyed():
    assert_right(Net(lambda m, h: h * nn.init.uniform_(torch.empty_like(h), 0.0, 2.0) if m.training else h), rows())


def test_rrelu_is_drawn():
    assert_right(Net(lambda m, h: F.rrelu(h, 0.1, 0.9, m.training)), rows())


# Random numbers that are fixed ----------------------------------------------------------------------------------------


def seeded(m, h):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.cos(h @ torch.randn(16, 16))


FIXED = {
    "generator": lambda m, h: torch.cos(h @ torch.randn(16, 16, generator=torch.Generator().manual_seed(7))),
    "fork": seeded,
    "Python's": lambda m, h: h * random.Random(7).gauss(1, 0.1),
    "NumPy's": lambda m, h: h * float(np.random.default_rng(7).random()),
}


@pytest.mark.parametrize("name", FIXED)
def test_numbers_from_a_generator_seeded_in_the_forward_pass_are_no_site(name):
    net = Net(FIXED[name])
    assert len(db.sites(net, rows())) == 1
    assert_right(net, rows())


def replayed(m, h):
    state = torch.get_rng_state()
    first = m.d(h)
    torch.set_rng_state(state)
    return first - m.d(h + 1)


def forked(m, h):
    with torch.random.fork_rng():
        first = m.d(h)
    return first - m.d(h + 1)


def dropped_alike(m, h):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return m.d(h)


def doubled(m, h):
    with torch.random.fork_rng():
        noise = torch.rand_like(h)
    return h * (noise + torch.rand_like(h) if m.training else 1)


@pytest.mark.parametrize("middle", [replayed, forked, dropped_alike, doubled])
def test_masks_from_a_state_that_is_set_again_are_refused(middle):
    with pytest.raises(NotImplementedError, match="sets torch's generator"):
        db.predict(Net(middle), rows())


def test_a_network_that_seeds_torch_anew_in_each_pass_leaves_its_generator():
    def reseeded(m, h):
        torch.manual_seed(torch.seed())
        return m.d(h)

    assert_right(Net(reseeded), rows())


def test_a_generator_that_goes_on_from_call_to_call_is_refused():
    source = torch.Generator().manual_seed(3)
    with pytest.raises(NotImplementedError, match=r"its own torch\.Generator"):
        db.predict(Net(lambda m, h: h + torch.randn(16, generator=source)), rows())
