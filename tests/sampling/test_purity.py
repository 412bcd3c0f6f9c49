"""Code that reads nothing but its arguments and its modules is told from code that reads more."""

import functools
import random
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.sampling.purity import all_unchanged, references

SCALE = 2.0
TABLE, SCALES = {"scale": 2.0}, [2.0]


def doubled(x):
    return SCALE * x


class Net(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.__dict__.update(attributes)

    def forward(self, x):
        return F.dropout(torch.relu(self.layer(x)), 0.5, self.training)


class CallsAMethod(Net):
    def shifted(self, x):
        return doubled(x)

    def forward(self, x):
        return sum([self.shifted(self.layer(x)) for _ in range(2)])


class Collects(Net):
    def forward(self, x):
        return OrderedDict(output=self.layer(x))


class ReadsATable(Net):
    def forward(self, x):
        return TABLE["scale"] * self.layer(x)


class ReadsATableInAMethod(CallsAMethod):
    def shifted(self, x):
        return TABLE["scale"] * x


class ReadsATableInAProperty(Net):
    @property
    def scale(self):
        return TABLE["scale"]

    def forward(self, x):
        return self.scale * self.layer(x)


class ReadsAList(Net):
    def forward(self, x):
        return SCALES[0] * self.layer(x)


class HasATable(Net):
    table = TABLE

    def forward(self, x):
        return self.table["scale"] * self.layer(x)


def rescaled(x):
    return rescaled.__dict__["scale"] * x


rescaled.__dict__["scale"] = 2.0


class CallsAFunctionWithAState(Net):
    def forward(self, x):
        return rescaled(self.layer(x))


class Random(Net):
    def forward(self, x):
        return random.random() * self.layer(x)


class Imports(Net):
    def forward(self, x):
        import time

        return time.time() * self.layer(x)


class Counts(Net):
    def forward(self, x):
        self.count = 1
        return self.layer(x)


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


class Decorated(Net):
    @decorated
    def forward(self, x):
        return self.layer(x)


class Called(Net):
    def __call__(self, x):
        return super().__call__(x) * TABLE["scale"]


PURE = [
    Net(),
    Net(table={"scale": 2.0}),
    Collects(),
    CallsAMethod(),
    Net(width=3, names=["a", "b"], activation=torch.relu),
    nn.Sequential(Net(), nn.ReLU()),
]
IMPURE = [
    ReadsATable(), CallsAFunctionWithAState(), ReadsAList(), HasATable(), ReadsATableInAMethod(), ReadsATableInAProperty(), Random(), Imports(), Counts(), Decorated(),
    Called(), Net(config=object()), Net(weights=torch.ones(3)), nn.Sequential(nn.ReLU(), Random()),
]  # fmt: skip


@pytest.mark.parametrize("net", PURE, ids=lambda net: type(net).__name__)
def test_code_that_reads_its_modules_alone_is_pure(net):
    assert all_unchanged(references(net))


@pytest.mark.parametrize("net", IMPURE, ids=lambda net: type(net).__name__)
def test_code_that_reads_more_is_not_pure(net):
    assert references(net) is None


OF_TORCH = [
    nn.LSTM(3, 5, 2, dropout=0.4), nn.TransformerEncoderLayer(8, 2, 16), nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    nn.MultiheadAttention(8, 2), nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("net", OF_TORCH, ids=lambda net: type(net).__name__)
def test_the_layers_of_torch_are_pure(net):
    assert references(net) is not None


def test_a_hook_or_a_patched_forward_is_not_pure():
    hooked, patched = Net(), Net()
    hooked.layer.register_forward_hook(lambda module, args, output: output + 1)
    patched.layer.forward = lambda x: x
    assert references(hooked) is None and references(patched) is None


def test_a_changed_global_is_seen(monkeypatch):
    read = references(CallsAMethod())
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert not all_unchanged(read)


def test_a_changed_function_is_seen(monkeypatch):
    read = references(CallsAMethod())
    monkeypatch.setitem(globals(), "doubled", lambda x: x)
    assert not all_unchanged(read)


def test_a_method_replaced_on_the_class_is_seen(monkeypatch):
    read = references(CallsAMethod())
    monkeypatch.setattr(CallsAMethod, "shifted", lambda self, x: x)
    assert not all_unchanged(read)


def test_a_name_that_hides_a_builtin_is_seen(monkeypatch):
    read = references(CallsAMethod())
    monkeypatch.setitem(globals(), "sum", max)
    assert not all_unchanged(read)
