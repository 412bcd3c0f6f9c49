"""Tests of what a network's structure tells of its weight layers."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dropbayes.layers import (
    BernoulliNoise,
    DroppedLayer,
    GaussianNoise,
    Linear,
    keep_probs_by_order,
    kl_is_weight_decay,
    weight_layers,
)
from dropbayes.layers.recurrent import LSTM


class Gate(nn.Module):
    """A module with a weight of its own around a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) @ self.weight


class Product(nn.Module):
    """A matrix that is not called `weight`, beside a vector and a position that are no matrices."""

    def __init__(self):
        super().__init__()
        self.mixing, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(4))
        self.position = nn.Parameter(torch.zeros(1, 5, 4))

    def forward(self, x):
        return x @ self.mixing * self.scale


def names(net):
    return [name for name, _ in weight_layers(net)]


def test_parametrised_layers_are_weight_layers():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.spectral_norm(nn.Conv1d(1, 1, 3)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )
    assert names(net) == ["0", "1", "2", "3"]


def test_layers_inside_a_module_with_a_weight_of_its_own_and_other_matrices_are_found():
    assert names(nn.Sequential(Gate(), Product())) == ["0", "0.inner", "1"]
    assert names(nn.Sequential(nn.LayerNorm([3, 4]), nn.BatchNorm1d(3), nn.PReLU())) == []
    assert names(nn.MultiheadAttention(4, 2)) == [""]


def test_order_of_registration_tells_the_dropout_before_each_layer_of_a_sequence():
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.4), nn.Dropout(0.5), nn.Linear(5, 2))
    assert keep_probs_by_order(net) == pytest.approx({"1": 0.9, "5": 0.6 * 0.5})  # two dropouts multiply


def test_a_layers_own_dropout_multiplies_what_is_before_it():
    net = nn.Sequential(nn.Dropout(0.5), Linear(3, 2, noise=BernoulliNoise(0.1)))
    assert keep_probs_by_order(net) == pytest.approx({"1": 0.45})


def test_a_guess_from_the_order_of_registration_says_so():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.drop, self.fc2 = nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)

    with pytest.warns(UserWarning, match=r"drop .* is guessed|guessed from the order"):
        assert keep_probs_by_order(Net()) == {"fc1": 1.0, "fc2": 0.5}


def test_the_protocols_tell_which_layer_states_what():
    gaussian, dropped, plain = Linear(2, 2, noise=GaussianNoise()), LSTM(2, 3), nn.Linear(2, 2)
    assert isinstance(gaussian, DroppedLayer) and isinstance(dropped, DroppedLayer)
    assert not isinstance(plain, DroppedLayer)
    assert [kl_is_weight_decay(layer) for layer in (gaussian, dropped, plain)] == [False, True, True]
