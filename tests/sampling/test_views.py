"""Views of a network: the same tensors and hooks, other flags."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling.views import view


@pytest.mark.parametrize("net", [lambda x: x, "net", None])
def test_what_is_no_module_is_refused(net):
    with pytest.raises(TypeError, match=r"`net` must be a torch\.nn\.Module"):
        db.predict(net, torch.zeros(1, 2))


def test_a_view_shares_tensors_and_hooks_but_no_flags():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    copy = view(net)
    copy(torch.ones(2, 2))
    assert seen == [1]
    assert copy[0].weight is net[0].weight and net.training and not copy[1].training
    assert int(net[1].num_batches_tracked) == 0


def test_a_shared_module_is_shared_in_the_view():
    shared = nn.Linear(2, 2)
    copy = view(nn.Sequential(shared, nn.ReLU(), shared))
    assert copy[0] is copy[2] and copy[0] is not shared


def test_raised_classes_get_buffers_of_their_own():
    net = nn.Sequential(nn.BatchNorm1d(2))
    copy = view(net, frozenset({nn.BatchNorm1d}))
    copy(torch.randn(8, 2))
    assert int(copy[0].num_batches_tracked) == 1 and int(net[0].num_batches_tracked) == 0
