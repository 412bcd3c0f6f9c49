"""Views of a network: the same tensors and hooks, other flags."""

import functools
import gc
import random

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.tracing.views import View, check_modules, checked_network, unwrap
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


def test_averages_that_training_moved_are_taken_over():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    view = View(net, own_buffers=False)
    net.train()(torch.randn(8, 2) + 3)
    assert view.net[0].running_mean is net[0].running_mean


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
    assert [key for _, key in view.state.changes(view.net)] == ["_buffers/total", "calls", "history"]
    assert (net.calls, float(net.total), net.history) == (0, 0.0, [])
    view.commit(net)
    assert (net.calls, float(net.total), net.history) == (1, 4.0, [1])


def test_a_step_of_an_optimiser_reaches_the_view():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    view = View(net)
    with torch.no_grad():
        net[0].weight.add_(1.0)
    assert view.net[0].weight is net[0].weight


def test_a_view_may_have_parameters_of_its_own():
    net = nn.Sequential(nn.Linear(2, 2))
    view = View(net, own_parameters=True)
    assert torch.equal(view.net[0].weight, net[0].weight) and view.net[0].weight is not net[0].weight
    assert isinstance(view.net[0].weight, nn.Parameter)


def test_tied_parameters_stay_tied_in_a_view_of_its_own():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    view = View(net, own_parameters=True).net
    assert view[0].weight is view[1].weight


def test_a_network_whose_eval_moves_its_weights_is_left_as_it_was():
    class Merging(nn.Linear):
        def train(self, mode=True):
            if self.training and not mode:
                self.weight.data += 1
            return super().train(mode)

    net = nn.Sequential(Merging(2, 2)).train()
    before = net[0].weight.clone()
    view = View(net)
    assert view.moves_weights and torch.equal(net[0].weight, before) and net[0].training
    assert torch.equal(view.net[0].weight, before + 1)


def test_containers_and_objects_of_the_network_are_copied_and_stay_shared():
    class Context:
        def __init__(self):
            self.calls = []

    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net[0].context = net[1].context = Context()
    net.table = {"rate": 0.1, "more": [1]}
    view = View(net).net
    view[0].context.calls.append(1)
    view.table["more"].append(2)
    assert view[0].context is view[1].context and view[0].context is not net[0].context
    assert net[0].context.calls == [] and net.table == {"rate": 0.1, "more": [1]}


def closing_over(log):
    return lambda module, args, output: log.append(1)


def with_default(log):
    return lambda module, args, output, log=log: log.append(1)


def with_keyword(log):
    def hook(module, args, output, *, log=log):
        log.append(1)

    return hook


@pytest.mark.parametrize("held", [[], [0]])
@pytest.mark.parametrize("hook", [closing_over, with_default, with_keyword])
@pytest.mark.parametrize("of", ["", "0", "1"])
def test_a_list_of_the_network_that_a_hook_writes_to_is_the_views(held, hook, of):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh())
    net[1].log = net[2].seen = log = list(held)
    net.get_submodule(of).register_forward_hook(hook(log))
    view = View(net).net
    view(torch.zeros(1, 2))
    assert log == held and view[1].log == [*held, 1] and view[2].seen is view[1].log


def test_generators_of_the_network_are_copied_and_listed():
    net = nn.Identity()
    net.python, net.source = random.Random(3), torch.Generator().manual_seed(3)
    view = View(net)
    view.net.python.random(), torch.rand(2, generator=view.net.source)
    assert len(view.generators) == 2
    assert net.python.random() == random.Random(3).random()
    assert torch.equal(net.source.get_state(), torch.Generator().manual_seed(3).get_state())


def test_arrays_and_plain_tensors_are_copied_and_written_back():
    net = nn.Identity()
    net.total, net.seen = torch.zeros(2), np.zeros(2)
    view = View(net)
    view.net.total += 1
    view.net.seen[0] = 5
    assert net.total.tolist() == [0, 0] and net.seen.tolist() == [0, 0]
    total, seen = net.total, net.seen
    view.commit(net)
    assert net.total is total and total.tolist() == [1, 1]
    assert net.seen is seen and seen.tolist() == [5, 0]


def test_a_clean_up_of_the_users_does_not_run_for_a_view():
    freed = []

    class Owner(nn.Identity):
        def __del__(self):
            freed.append(1)

    net = nn.Sequential(Owner())
    View(net)
    gc.collect()
    assert freed == [] and type(View(net).net[0]).__name__ == "Owner"


def test_the_modules_of_a_view_are_named_as_in_the_network():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    view = View(net)
    assert {view.paths[id(module)]: type(module) for module in view.net.modules()} == {
        name: type(module) for name, module in net.named_modules()
    }
    assert view.originals[id(net[1])] is net[1]


def test_wrappers_are_taken_off():
    inner = nn.Linear(2, 2)
    assert unwrap(nn.DataParallel(inner)) is inner
    assert checked_network(torch.compile(inner)) is inner
    assert isinstance(View(nn.Sequential(nn.DataParallel(inner))).net[0], nn.Linear)


def test_what_holds_a_network_is_told_from_a_network():
    class Estimator:
        def __init__(self):
            self.lr, self.module_ = 0.1, nn.Linear(2, 2)

    with pytest.raises(TypeError, match=r"got Estimator. Pass the network that it holds: .module_$"):
        checked_network(Estimator())
    with pytest.raises(TypeError, match=r"got function.$"):
        checked_network(torch.compile(lambda x: x))


def test_lazy_modules_are_refused():
    with pytest.raises(ValueError, match="'0' is lazy"):
        check_modules(nn.Sequential(nn.LazyLinear(2)))


def test_networks_without_weights_are_refused():
    with pytest.raises(ValueError, match=r"`net` must hold its weights; '0.weight' is on the meta device"):
        check_modules(nn.Sequential(nn.Linear(2, 2)).to("meta"))
