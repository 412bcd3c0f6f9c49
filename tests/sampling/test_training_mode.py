"""The training flags of a draw: set where they switch randomness on, and nowhere else."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import forget
from dropbayes.sampling.probes import Prober
from dropbayes.sampling.training_mode import UncertaintyWarning, check_accounted, check_repeatable, training_probe
from tests.sampling.loop import assert_law, made, network


def own(forward, name="Own"):
    """A module of a class of its own, with `forward` as its method."""
    return type(name, (nn.Module,), {"forward": forward})()


def probed(net, *, ignored=(), x=None):
    """The probe of a draw, and the names of the modules whose training flag it sets."""
    inputs = as_inputs(torch.linspace(-1, 1, 12).reshape(3, 4) if x is None else x)
    prober = Prober(net, inputs, ignored, frozenset())
    with torch.no_grad():
        rows = inputs.different_rows()
        probe, flags = training_probe(prober, rows, prober(rows.leaves, None))
    return probe, [name for name, module in net.named_children() if flags(name, module)]


def test_every_flag_is_set_where_training_only_drops():
    probe, trained = probed(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    assert trained == ["0", "2"] and len(probe.recorder.sites) == 1


def test_a_class_that_does_something_else_in_training_stays_in_evaluation():
    ended = own(lambda self, x: x if self.training else x.softmax(-1), "Ended")
    probe, trained = probed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), ended))
    assert trained == ["1"] and len(probe.recorder.sites) == 1
    torch.testing.assert_close(probe.tensors[0].sum(-1), torch.ones(len(probe.tensors[0])))


def test_a_power_iteration_rests_even_where_it_changes_next_to_nothing():
    def forward(self, x):
        if self.training:
            self.scale.mul_(1 + 1e-5)
        return x / self.scale

    normalised = own(forward, "Normalised")
    normalised.register_buffer("scale", torch.tensor(2.0))
    probe, trained = probed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), normalised))
    assert trained == ["1"] and not probe.changes and len(probe.recorder.sites) == 1


def test_what_is_ignored_stays_in_evaluation():
    probe, trained = probed(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)), ignored=("2",))
    assert trained == ["0", "1"] and len(probe.recorder.sites) == 1


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: x * torch.empty_like(x).bernoulli_(0.8) / 0.8,
        lambda x: x * torch.empty_like(x).bernoulli_(0.8),
        lambda x: x.masked_fill(torch.bernoulli(torch.full_like(x, 0.2)).bool(), 0.0),
        lambda x: x * (torch.rand_like(x) + 0.8).floor(),
        lambda x: x.masked_fill(torch.rand_like(x) < 0.2, 0.0),
        lambda x: x * (1 + 0.2 * (torch.rand_like(x) - 0.5)),
        lambda x: x + 0.3 * torch.randn_like(x),
    ],
)
def test_noise_of_a_networks_own_is_switched_on_whatever_number_is_neutral(noise):
    noisy = own(lambda self, x: noise(x) if self.training else x, "Noisy")
    _, trained = probed(nn.Sequential(nn.Linear(4, 4), noisy))
    assert "1" in trained


def test_a_branch_that_draws_and_changes_more_is_refused_by_name():
    doubled = own(lambda self, x: 2 * F.dropout(x, 0.5) if self.training else x, "Doubled")
    with pytest.raises(ValueError, match=r"holds a Doubled whose training branch draws .* and changes its output"):
        probed(nn.Sequential(nn.Linear(4, 4), doubled))


def test_randomness_that_cannot_be_switched_on_alone_is_refused():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = own(lambda self, x: x if self.training else 2 * x, "Inner")

        def forward(self, x):  # drops only if another class is in training, which does more
            x = self.inner(x)
            return F.dropout(x, 0.5) if self.inner.training and self.training else x

    with pytest.raises(ValueError, match="what cannot be switched on alone: dropout in the network"):
        probed(Gated())


def test_a_class_whose_training_branch_fails_is_warned_of():
    class NeedsTargets(nn.Module):
        def forward(self, x):
            if self.training:
                raise ValueError("targets should not be none")
            return x

    with pytest.warns(UncertaintyWarning, match="NeedsTargets of the network stays in evaluation mode"):
        _, trained = probed(nn.Sequential(nn.Dropout(0.5), NeedsTargets()))
    assert trained == ["0"]


def test_a_class_that_draws_and_then_fails_is_refused_with_its_error():
    def forward(self, x):
        x = F.dropout(x, 0.5, self.training)
        if self.training:
            raise KeyError("targets")
        return x

    with pytest.raises(KeyError, match="targets"):
        probed(nn.Sequential(nn.Linear(4, 4), own(forward)))


def test_an_output_of_another_form_in_training_is_refused():
    with pytest.raises(ValueError, match=r"another form in training|another way as well"):
        probed(own(lambda self, x: (F.dropout(x, 0.5), x) if self.training else x))


def test_random_numbers_that_no_seed_controls_are_refused():
    def forward(self, x):
        outs = {"out0": torch.empty_like(x), "out1": torch.empty_like(x, dtype=torch.bool)}
        return torch.ops.aten.native_dropout.out(x, 0.5, self.training, **outs)[0]

    hidden, inputs = own(forward), as_inputs(torch.ones(2, 3))
    with pytest.raises(NotImplementedError, match="cannot be keyed"):
        probed(hidden)
    prober = Prober(hidden, inputs, (), frozenset())
    with torch.no_grad(), pytest.raises(NotImplementedError, match="cannot be keyed to a seed"):
        check_accounted(prober(inputs.leaves, lambda name, module: True), prober(inputs.leaves, None))


def test_outputs_that_differ_from_pass_to_pass_are_refused():
    numbers = iter(range(100))
    net, inputs = own(lambda self, x: x + next(numbers)), as_inputs(torch.ones(2, 3))
    prober = Prober(net, inputs, (), frozenset())
    with torch.no_grad(), pytest.raises(NotImplementedError, match="different outputs in training"):
        check_repeatable(prober, inputs, lambda name, module: True, prober(inputs.leaves, None))


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: x[torch.arange(len(x))[:, None], torch.randn(len(x), 4).topk(2).indices].repeat(1, 2),
        lambda x: x.gather(1, torch.randn_like(x).argsort()),
        lambda x: x * torch.randn(1, 4).sign(),
    ],
    ids=["topk", "argsort", "sign"],
)
def test_normal_numbers_that_choose_are_noise(noise):
    noisy = own(lambda self, x: noise(x) if self.training else x, "Noisy")
    net, x = made(lambda: (nn.Sequential(nn.Linear(4, 4), noisy, nn.Linear(4, 2)), torch.randn(3, 4)))
    assert_law(net, x)


ALWAYS_DRAWN = {
    "uniforms": lambda x: x * (torch.rand_like(x) < 0.7) / 0.7,
    "ones and zeros": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)) / 0.7,
    "normal numbers": lambda x: x + 0.3 * torch.randn_like(x),
    "a number of NumPy": lambda x: x * 2 * np.random.rand(),
}


@pytest.mark.parametrize("name", ALWAYS_DRAWN)
def test_noise_that_is_drawn_in_evaluation_too_is_switched_on_beside_another_end(name):
    draw = ALWAYS_DRAWN[name]  # a function of the closure, in which the name of a generator is seen

    def noisy(self, x):
        noise = draw(x)
        return noise if self.training else x

    ended = own(lambda self, x: x if self.training else x.softmax(-1), "Ended")
    net = nn.Sequential(nn.Linear(4, 4), own(noisy, "Noisy"), ended).eval()
    reference = nn.Sequential(net[0], net[1], nn.Softmax(-1))
    assert_law(net, torch.linspace(-1, 1, 12).reshape(3, 4), reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [lambda: random.uniform(0, 1), lambda: np.random.uniform(0, 1)], ids=["Python", "NumPy"]
)
def test_layers_are_skipped_by_a_number_that_is_drawn_in_evaluation_too(number):
    def forward(self, x):
        for layer in self.layers:
            drawn = number()
            if not (self.training and drawn < 0.4):
                x = x + torch.tanh(self.drop(layer(x)))
        return x

    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    net, x = made(lambda: (network(forward, layers=layers, drop=nn.Dropout(0.2)), torch.randn(3, 4)))
    for start in range(4):  # whatever the numbers are at first
        random.seed(start), np.random.seed(start)
        forget(net)
        assert_law(net, x, n_draws=135, predicted=False)
