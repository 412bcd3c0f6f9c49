"""Views of a network: the same tensors and hooks, other flags."""

import functools

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling.views import View
from tests.sampling.zoo import Module


@pytest.mark.parametrize("net", [lambda x: x, "net", None])
def test_what_is_no_module_is_refused(net):
    with pytest.raises(TypeError, match=r"`net` must be a torch\.nn\.Module"):
        db.predict(net, torch.zeros(1, 2))


def test_a_view_shares_tensors_and_hooks_but_no_flags():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    copy = View(net).net
    copy(torch.ones(2, 2))
    assert seen == [1]
    assert copy[0].weight is net[0].weight and net.training and not copy[1].training
    assert int(net[1].num_batches_tracked) == 0


def test_a_shared_module_is_shared_in_the_view():
    shared = nn.Linear(2, 2)
    copy = View(nn.Sequential(shared, nn.ReLU(), shared)).net
    assert copy[0] is copy[2] and copy[0] is not shared


def test_a_view_has_buffers_of_its_own():
    net = nn.Sequential(nn.BatchNorm1d(2))
    copy = View(net, lambda name, module: True).net
    copy(torch.randn(8, 2))
    assert int(copy[0].num_batches_tracked) == 1 and int(net[0].num_batches_tracked) == 0


def test_methods_partials_and_closures_are_bound_to_the_view():
    net = Module(lambda m, x: m.a(x), a=nn.Linear(2, 2))
    net.method, net.partial = net.a.forward, functools.partial(nn.Linear.forward, net.a)
    linear = net.a
    net.closure = lambda x: linear(x)
    view = View(net).net
    assert view.method.__self__ is view.a and view.partial.args[0] is view.a
    assert view.closure.__closure__[0].cell_contents is view.a
    assert net.method.__self__ is net.a and net.closure.__closure__[0].cell_contents is net.a


def test_a_network_that_trains_parts_of_itself_has_its_way():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].eval()
            return self

    view = View(Frozen(nn.Dropout(0.5), nn.Dropout(0.5)), lambda name, module: True).net
    assert [module.training for module in view.children()] == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.register_buffer("b", torch.ones(1)),
        lambda net: setattr(net[1], "p", 0.25),
        lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda net: net[0].register_forward_hook(lambda *_: None),
        lambda net: net[0].register_forward_pre_hook(lambda *_: None),
        lambda net: net.__setitem__(0, nn.Linear(2, 2)),
        lambda net: setattr(net[0], "forward", lambda x: x),
        lambda net: net.sizes.append(3),
        lambda net: torch.nn.utils.parametrizations.weight_norm(net[0]),
    ],
)
def test_a_view_of_a_network_that_was_changed_is_not_valid(change):
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    net.sizes = [1, 2]
    view = View(net)
    assert view.is_valid(net)
    change(net)
    assert not view.is_valid(net)


def test_a_step_of_an_optimiser_leaves_a_view_valid():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    view = View(net)
    with torch.no_grad():
        net[0].weight.add_(1.0)
    assert view.is_valid(net) and view.net[0].weight is net[0].weight


def test_averages_that_training_moved_are_taken_over():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    view = View(net, own_buffers=False)
    net.train()(torch.randn(8, 2) + 3)
    assert view.is_valid(net) and torch.equal(view.net[0].running_mean, net[0].running_mean)


def test_a_prediction_follows_averages_that_training_moved():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    x = torch.randn(8, 2)
    db.predict(net, x)
    net.train()(x + 3)
    torch.testing.assert_close(db.predict(net, x).mean, net.eval()(x))


def test_changes_are_named_and_can_be_given_to_the_network():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1))
            self.calls, self.history = 0, []

        def forward(self, x):
            self.calls += 1
            self.total += x.sum()
            self.history.append(self.calls)
            return x

    net = Counting()
    view = View(net)
    view.net(torch.ones(2, 2))
    assert view.changes() == ["_buffers/total", "calls", "history"]
    assert (net.calls, float(net.total), net.history) == (0, 0.0, [])
    view.commit(net)
    assert (net.calls, float(net.total), net.history) == (1, 4.0, [1])


def changed(name):
    """A network after one change that no view may overlook."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Sequential(nn.Tanh()))
    net.settings, net.seen, net.table = {"rate": 0.1, "more": [1]}, [], {"w": net[0].weight}
    view = View(net)
    assert view.is_valid(net)
    CHANGES[name](net)
    return net, view


def replaced(net, **attributes):
    net.__dict__.update(attributes)


CHANGES = {
    "a child gone, the only one": lambda net: net[2]._modules.clear(),
    "a child added": lambda net: net.append(nn.ReLU()),
    "a child replaced": lambda net: net.__setitem__(0, nn.Linear(2, 3)),
    "a drop probability": lambda net: setattr(net[1], "p", 0.2),
    "a parameter replaced": lambda net: setattr(net[0], "bias", nn.Parameter(torch.zeros(3))),
    "a parameter gone": lambda net: net[0]._parameters.__setitem__("bias", None),
    "a value in a dictionary": lambda net: net.settings.__setitem__("rate", 0.3),
    "an element of a list": lambda net: net.seen.append(1),
    "an empty list made a number": lambda net: replaced(net, seen=0),
    "a dictionary of tensors": lambda net: net.table.__setitem__("w", torch.zeros(1)),
    "a patched forward": lambda net: replaced(net[0], forward=lambda x: x),
    "a hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "an attribute added": lambda net: replaced(net, flag=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_view_of_a_changed_network_is_not_valid(name):
    net, view = changed(name)
    assert not view.is_valid(net)


def test_a_view_stays_valid_through_training_flags_and_new_values():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))
    view = View(net)
    net.train()
    with torch.no_grad():
        net[0].weight.zero_()
    net[1].running_mean.fill_(2.0)
    assert view.is_valid(net)


def test_an_equal_value_that_replaces_another_leaves_a_view_valid():
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.25))
    view = View(net)
    net[0].kernel_size, net[1].p = (*net[0].kernel_size,), float("0.25")
    assert view.is_valid(net)
