"""Names of sites: by the modules that call, counted, and no further than the network."""

import gc
import weakref

import torch
from torch import nn

from dropbayes.tracing.sites import SiteNames


class Asking(nn.Module):
    """A module that asks for the name of its site, twice."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, told):
        return [*told, self.names[0].next("dropout"), self.names[0].next("dropout")]


def names_of(net, names):
    names.append(SiteNames({id(module): path for path, module in net.named_modules()}))
    return net([])


def test_calls_of_one_module_are_counted():
    names = []
    assert names_of(nn.Sequential(Asking(names)), names) == ["0 dropout 0", "0 dropout 1"]


def test_a_shared_module_is_named_with_its_caller():
    names = []
    shared = Asking(names)
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.Identity(), shared))
    told = names_of(net, names)
    assert told == ["0.0 dropout 0", "0.0 dropout 1", "0.0 in 1 dropout 0", "0.0 in 1 dropout 1"]


def test_variables_of_the_caller_are_not_kept_alive():
    names, held = [], torch.nn.Linear(1, 1)
    names_of(nn.Sequential(Asking(names)), names)
    reference = weakref.ref(held)
    del held
    gc.collect()
    assert reference() is None
