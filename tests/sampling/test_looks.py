"""One forward pass with every mask left out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.sampling.looks import LookFailed, equal_but_for_rounding, flags_down, flags_up, look
from dropbayes.sampling.trees import as_inputs
from tests.sampling.zoo import Module


def seen(net, flags):
    inputs = as_inputs(torch.ones(2, 4))
    with torch.no_grad():
        return look(net, inputs, list(inputs.leaves), flags, ())


def test_masks_are_left_out_whatever_the_flags():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    up, down = seen(net, flags_up(())), seen(net, flags_down)
    assert up.agrees_with(down) and len(up.recorder.sites) == len(down.recorder.sites) == 1
    torch.testing.assert_close(up.tensors[0], net[0](torch.ones(2, 4)))


def test_normalisation_and_lowered_classes_stay_in_evaluation():
    flags = flags_up(("2",), frozenset({nn.ReLU}))
    net = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Tanh(), nn.Dropout(0.1))
    assert [flags(name, module) for name, module in net.named_children()] == [False, False, False, True]


def test_a_pass_that_fails_keeps_what_was_recorded():
    def forward(m, x):
        F.dropout(x, 0.5)
        raise KeyError("targets")

    with pytest.raises(LookFailed, match="targets") as failure:
        seen(Module(forward), flags_up(()))
    assert len(failure.value.recorder.sites) == 1


@pytest.mark.parametrize("change, same", [(1e-6, True), (1e-2, False)])
def test_rounding_is_measured_by_the_batch(change, same):
    batch = torch.tensor([1.0, 1e-4])
    assert equal_but_for_rounding(batch[1:] + change, batch[1:], batch) == same


def test_other_shapes_and_other_integers_are_not_equal():
    assert not equal_but_for_rounding(torch.ones(2), torch.ones(1, 2))
    assert not equal_but_for_rounding(torch.tensor([1]), torch.tensor([2]))
