"""The state of modules: a change is told by identity where that suffices, and by value where it does not."""

import pytest
import torch
from torch import nn

from dropbayes.sampling.module_states import ModuleState, differences, identities_of, snapshot


def network():
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.25))
    net[0].names, net[0].table = ["a", "b"], {"scale": 2.0}
    return net


CHANGES = {
    "number": lambda net: setattr(net[2], "p", 0.5),
    "parameter": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(2, 1, 1, 1))),
    "buffer": lambda net: setattr(net[1], "running_mean", torch.ones(2)),
    "element": lambda net: net[0].names.append("c"),
    "entry": lambda net: net[0].table.update(scale=3.0),
    "new attribute": lambda net: setattr(net[0], "extra", 1),
    "hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "child": lambda net: net.append(nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_by_identity_and_by_value(change):
    net = network()
    identities, states = identities_of(net), [ModuleState(module) for module in net.modules()]
    assert identities.hold() and all(state.holds() for state in states)
    CHANGES[change](net)
    assert not identities.hold() and not all(state.holds() for state in states)


def test_values_that_change_in_place_leave_the_state_unchanged():
    net = network()
    identities = identities_of(net)
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[1].running_mean.add_(1)
    assert identities.hold()


def test_an_equal_value_is_another_object_but_the_same_state():
    net = network()
    identities, state = identities_of(net), ModuleState(net[2])
    net[2].p = float("0.25")
    assert not identities.hold() and state.holds()


@pytest.mark.parametrize(
    "hold", [lambda net: net, lambda net: [net], lambda net: {"net": (net,)}, lambda net: net.forward]
)
def test_a_network_that_refers_to_itself_is_not_held_by_its_identities(hold):
    net = network()
    net[0].__dict__["owner"] = hold(net)
    assert identities_of(net) is None


def test_the_differences_of_two_snapshots_are_named():
    net = network()
    before = snapshot(net[1])
    net[1].eps = 1.0
    net[1].running_mean.add_(1)
    assert differences(before, snapshot(net[1])) == ["_buffers/running_mean", "eps"]
    assert differences(before, before) == []
