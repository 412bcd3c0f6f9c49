"""The state of a network: a change is told by value for plain values, by identity for the rest."""

import dataclasses
import functools
import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dropbayes.tracing.states import NetworkState, is_object


class Context:
    """An object of the user's own class."""

    def __init__(self):
        self.scale = 1.0


def network():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.25), nn.Sequential(nn.Tanh()))
    net.settings, net.seen, net.table = {"rate": 0.1, "more": [1]}, [], {"w": net[0].weight}
    net.context, net.names = Context(), {"a", "b"}
    return net


def replace_attributes(module, **attributes):
    module.__dict__.update(attributes)


CHANGES = {
    "a child gone, the only one": lambda net: net[3]._modules.clear(),
    "a child added": lambda net: net.append(nn.ReLU()),
    "a child replaced": lambda net: net.__setitem__(0, nn.Linear(2, 3)),
    "a drop probability": lambda net: setattr(net[2], "p", 0.5),
    "a parameter replaced": lambda net: setattr(net[0], "bias", nn.Parameter(torch.zeros(3))),
    "a parameter gone": lambda net: net[0]._parameters.__setitem__("bias", None),
    "a parametrised weight": lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    "a buffer replaced": lambda net: setattr(net[1], "running_mean", torch.ones(3)),
    "a buffer added": lambda net: net.register_buffer("b", torch.ones(1)),
    "a value in a dictionary": lambda net: net.settings.__setitem__("rate", 0.3),
    "a value in a list of a dictionary": lambda net: net.settings["more"].append(2),
    "an element of a list": lambda net: net.seen.append(1),
    "an element of a set": lambda net: net.names.add("c"),
    "an empty list made a number": lambda net: replace_attributes(net, seen=1),
    "a tensor in a dictionary": lambda net: net.table.__setitem__("w", torch.zeros(1)),
    "an attribute of an object": lambda net: setattr(net.context, "scale", 2.0),
    "a patched forward": lambda net: replace_attributes(net[0], forward=lambda x: x),
    "a hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "a hook before": lambda net: net[0].register_forward_pre_hook(lambda *_: None),
    "an attribute added": lambda net: replace_attributes(net, flag=True),
    "another class": lambda net: setattr(net[3], "__class__", nn.ModuleList),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name):
    net = network()
    state = NetworkState(net)
    assert state.holds(net)
    CHANGES[name](net)
    assert not state.holds(net)


class Steering(Context):
    """A hook with a setting."""

    def __call__(self, module, args, output):
        return self.scale * output


HOOKS = {
    "an object": lambda steering: steering,
    "a method": lambda steering: steering.__call__,
    "a partial": lambda steering: functools.partial(steering.__call__),
    "a function that closes over a method": lambda steering: (lambda call: lambda *args: call(*args))(
        steering.__call__
    ),
}


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_change_of_what_a_hook_holds_is_seen(name, register):
    net, steering = network(), Steering()
    getattr(net[0], register)(HOOKS[name](steering))
    state = NetworkState(net)
    assert state.holds(net)
    steering.scale = 2.0
    assert not state.holds(net)


def test_a_hook_of_the_whole_process_is_a_change():
    net = network()
    state = NetworkState(net)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not state.holds(net)
    finally:
        handle.remove()
    assert state.holds(net)


def test_new_values_and_training_flags_are_no_change():
    net = network()
    state = NetworkState(net)
    net.train()
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[1].running_mean.add_(1)
    assert state.holds(net) and state.changes(net) == []


def test_an_equal_plain_value_is_no_change():
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.25))
    state = NetworkState(net)
    net[0].kernel_size, net[1].p = (*net[0].kernel_size,), float("0.25")
    assert state.holds(net)


def test_a_number_at_the_address_of_a_former_one_is_a_change():
    net = nn.Sequential(nn.Dropout(0.25))
    state = NetworkState(net)
    net[0].p = float("0.25")  # an equal one, which is then the one that counts
    assert state.holds(net)
    for numerator in range(1, 2000):
        net[0].p = numerator / 2001
        assert not state.holds(net)
    net[0].p = 0.25
    assert state.holds(net)


def test_with_versions_a_write_into_a_buffer_tensor_or_array_is_a_change():
    net = network()
    net.plain, net.array = torch.zeros(2), np.zeros(2)
    state = NetworkState(net, versions=True)
    assert state.changes(net) == []
    net[1].running_mean.add_(1)
    net.plain[0] = 1
    net.array[1] = 1
    assert state.changes(net) == [("", "array"), ("", "plain"), ("1", "_buffers/running_mean")]
    assert not state.holds(net)


def test_changes_are_named_by_module_and_attribute():
    net = network()
    state = NetworkState(net)
    net[2].p, net.seen, net[0].extra = 0.5, [1], 1
    assert state.changes(net) == [("", "seen"), ("0", "extra"), ("2", "p")]


class Slotted:
    __slots__ = ("n",)


def test_objects_with_slots_are_compared_by_what_these_hold():
    net = nn.Identity()
    net.held = Slotted()
    net.held.n = 1
    state = NetworkState(net)
    net.held.n = 2
    assert state.changes(net) == [("", "held")]
    net.held.n = 1
    assert state.holds(net)


OBJECTS = {
    "a tensor": lambda: torch.zeros(2),
    "a number of NumPy": lambda: np.float64(torch.rand(()).item()),
    "a tuple": lambda: (torch.rand(()).item(),),
    "a slice, which cannot be referred to weakly": lambda: slice(torch.rand(()).item()),
    "deep inside": lambda: [[[[[[[[[[Context()]]]]]]]]]],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_gone_does_not_lend_its_identity_to_another(name):
    net = nn.Identity()
    net.__dict__["held"] = OBJECTS[name]()
    state = NetworkState(net)
    assert state.holds(net)
    net.__dict__["held"] = None
    gc.collect(1)  # what this test made is young
    for _ in range(100):  # until one is at the same address
        net.__dict__["held"] = OBJECTS[name]()
        assert not state.holds(net)


def test_an_equal_number_that_is_gone_does_not_lend_its_identity_to_another():
    net = nn.Dropout(0.25)
    state = NetworkState(net)
    net.p = float("0.25")
    assert state.holds(net)
    net.p = 0.0
    for _ in range(100):
        net.p = float("0.5")
        assert not state.holds(net)


def test_a_forward_that_is_gone_does_not_lend_its_identity_to_another():
    kind: Any = type("Patched", (nn.Module,), {"forward": lambda self, x: x})
    net = kind()
    state = NetworkState(net)
    for _ in range(100):
        kind.forward = lambda self, x: -x
        assert not state.holds(net)


@pytest.mark.parametrize("hold", [lambda net: net, lambda net: [net], lambda net: {"net": (net,)}])
def test_a_network_that_refers_to_itself_is_described(hold):
    net = network()
    net[0].__dict__["owner"] = hold(net)
    state = NetworkState(net)
    assert state.holds(net)
    net[2].p = 0.5
    assert not state.holds(net)


def test_a_container_that_holds_itself_is_described():
    net = network()
    net.settings["self"] = net.settings
    assert NetworkState(net).holds(net)


def test_objects_are_those_of_somebodys_own_class():
    assert is_object(Context())
    assert not any(map(is_object, (nn.ReLU(), torch.zeros(1), Context, np, 3, [1], np.zeros(1), network)))


def test_an_object_of_a_class_made_at_run_time_is_told_by_what_it_holds():
    net = network()
    net.options = dataclasses.make_dataclass("Options", [("scale", float)])(1.0)
    state = NetworkState(net)
    assert is_object(net.options) and state.holds(net)
    net.options.scale = 2.0
    assert not state.holds(net)
