"""One forward pass with every mask left out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.runtime.devices import autocast_dtype
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.probes import (
    ProbeFailed,
    Prober,
    is_ignored,
    training_flags,
)
from dropbayes.tracing import SharedWrite
from tests.sampling.zoo import Module


def seen(net, flags):
    inputs = as_inputs(torch.ones(2, 4))
    with torch.no_grad():
        return Prober(net, inputs, (), frozenset())(inputs.leaves, flags)


def test_masks_are_left_out_whatever_the_flags():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    up, down = seen(net, training_flags(())), seen(net, None)
    assert up.agrees_with(down) and (len(up.recorder.sites), len(down.recorder.sites)) == (1, 0)
    torch.testing.assert_close(up.tensors[0], net[0](torch.ones(2, 4)))


def test_normalisation_and_lowered_classes_stay_in_evaluation():
    flags = training_flags(("2",), frozenset({nn.ReLU}))
    net = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Tanh(), nn.Dropout(0.1))
    assert [flags(name, module) for name, module in net.named_children()] == [False, False, False, True]


def test_a_pass_that_fails_keeps_what_was_recorded():
    def forward(m, x):
        F.dropout(x, 0.5)
        raise KeyError("targets")

    with pytest.raises(ProbeFailed, match="targets") as failure:
        seen(Module(forward), training_flags(()))
    assert len(failure.value.recorder.sites) == 1


def test_the_network_and_its_input_are_left_as_they_were():
    net, x = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)).train(), -torch.ones(2, 4)
    inputs = as_inputs(x)
    with torch.no_grad():
        probe = Prober(net, inputs, (), frozenset())(inputs.leaves, lambda name, module: True)
    assert probe.changes and int(net[0].num_batches_tracked) == 0 and (x == -1).all() and net.training


def test_a_view_that_a_pass_changed_is_not_used_again():
    def forward(m, x):
        m.calls += 1
        return x * m.calls

    net = Module(forward)
    net.calls, inputs = 0, as_inputs(torch.ones(2, 4))
    prober = Prober(net, inputs, (), frozenset())
    with torch.no_grad():
        first, again = prober(inputs.leaves, None), prober(inputs.leaves, None)
    assert first.agrees_with(again) and first.changes == [("", "calls")]


def test_a_write_into_a_weight_is_an_error_of_its_own_before_it_happens():
    def forward(m, x):
        m.a.weight.data.mul_(0.5)
        return m.a(x)

    net = Module(forward, a=nn.Linear(4, 4))
    before, inputs = net.a.weight.clone(), as_inputs(torch.ones(2, 4))
    with torch.no_grad():
        with pytest.raises(SharedWrite, match=r"a\.weight"):
            Prober(net, inputs, (), frozenset())(inputs.leaves, None)
        Prober(net, inputs, (), frozenset(), owns_parameters=True)(inputs.leaves, None)
    assert torch.equal(net.a.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_double_precision_is_an_arbiter_where_the_network_has_it(dtype):
    inputs = as_inputs(torch.ones(2, 4, dtype=dtype))
    prober = Prober(nn.Linear(4, 4).to(dtype), inputs, (), frozenset())
    with torch.no_grad():
        assert prober.in_double(inputs, lambda exact, rows: exact(rows.leaves, None).tensors[0].dtype == torch.float64)
        assert not prober.in_double(inputs, lambda exact, rows: exact([None], None).fits(prober(rows.leaves, None)))
    assert inputs.leaves[0].dtype == dtype


def test_double_precision_judges_the_rows_in_question():
    inputs = as_inputs(torch.randn(9, 4))
    prober = Prober(nn.Linear(4, 4), inputs, (), frozenset())
    assert prober.in_double(inputs, lambda exact, rows: torch.equal(rows.leaves[0], inputs.leaves[0].double()))


@pytest.mark.parametrize(
    ("ignored", "expected"), [(("a.b",), True), (("a",), True), (("Tanh",), True), (("a.bc",), False), ((), False)]
)
def test_a_module_is_ignored_by_its_name_its_class_or_what_it_is_in(ignored, expected):
    assert is_ignored(ignored, "a.b", nn.Tanh()) == expected


def test_autocast_is_seen():
    device = torch.device("cpu")
    assert autocast_dtype(device) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(device) == torch.bfloat16
