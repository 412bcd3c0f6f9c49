"""Tests of tracing: which weight multiplies what, whatever the order of registration."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from dropbayes.layers import BernoulliNoise, Conv2d, Embedding, Linear, Prior, keep_probs, trace
from dropbayes.layers.conversion import add_dropout
from dropbayes.layers.recurrent import LSTM
from dropbayes.processes import theory_report
from dropbayes.sampling import sites


class Shared(nn.Module):
    """The commonest style: one dropout, registered last (or first), used before every layer but one."""

    def __init__(self, first=False):
        super().__init__()
        if first:
            self.drop = nn.Dropout(0.5)
        self.fc1, self.fc2, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        if not first:
            self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(torch.relu(self.fc1(x)))
        return self.out(self.drop(torch.relu(self.fc2(h))))


@pytest.mark.parametrize("first", [True, False])
def test_a_shared_dropout_counts_where_it_is_used(first):
    assert keep_probs(Shared(first), torch.zeros(1, 3)) == {"fc1.weight": 1.0, "fc2.weight": 0.5, "out.weight": 0.5}


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformers_residual_dropouts_are_before_no_weight(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    traced = keep_probs(net, torch.zeros(2, 3, 8))
    # Only the dropout inside the feed-forward block stands before a weight; those on residual branches before none.
    expected = {name: 0.9 if name.endswith("linear2.weight") else 1.0 for name in traced}
    assert traced == pytest.approx(expected) and len(traced) == 8


def test_dropout_called_as_a_function_is_seen_through_shapes_and_rectifiers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2 * 4 * 4, 1)

        def forward(self, x):
            h = F.relu(F.dropout2d(self.conv(F.dropout(x, 0.1)), 0.2))
            return self.fc(h.flatten(1))

    assert keep_probs(Net(), torch.zeros(1, 1, 6, 6)) == pytest.approx({"conv.weight": 0.9, "fc.weight": 0.8})


ZERO_AT_ZERO = [
    nn.Tanh(),
    nn.GELU(),
    nn.ELU(),
    nn.SiLU(),
    nn.LeakyReLU(),
    nn.PReLU(),
    nn.Hardtanh(),
    nn.ReLU6(),
    nn.SELU(),
]


@pytest.mark.parametrize("function", ZERO_AT_ZERO, ids=lambda module: type(module).__name__)
def test_a_mask_passes_a_nonlinearity_that_is_zero_at_zero(function):
    # [GG16, section "Insights"]: a dropped unit is zero after it too.
    assert function(torch.zeros(1)).item() == 0
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), function, nn.Linear(3, 1))
    assert keep_probs(net, torch.randn(2, 2)) == {"0.weight": 1.0, "3.weight": 0.8}
    report = theory_report(net, torch.randn(2, 2), Prior(), 10)
    assert report.is_variational and [w.reading for w in report.weights] == ["MAP", "Bayesian"]


@pytest.mark.parametrize(
    "between",
    [nn.ReflectionPad2d(1), nn.ZeroPad2d(1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(1)],
    ids=lambda module: type(module).__name__,
)
def test_a_mask_of_channels_passes_padding_and_interpolation(between):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), between, nn.Conv2d(4, 2, 2))
    x = torch.randn(2, 1, 6, 6)
    assert keep_probs(net, x) == {"0.weight": 1.0, "3.weight": 0.8}
    assert [site.before for site in sites(net, x)] == ["3"]


def test_a_convolution_that_pads_by_reflection_has_the_dropout_before_it():
    net = add_dropout(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")), 0.25)
    assert keep_probs(net, torch.randn(2, 2, 6, 6)) == {"0.weight": 0.75}


def test_a_mask_of_channels_passes_maximum_pooling_and_none_passes_a_sigmoid():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2))
    x = torch.randn(2, 1, 6, 6)
    assert keep_probs(net, x) == {"0.weight": 1.0, "4.weight": 0.8}
    assert theory_report(net, x, Prior(), 10).is_variational
    sigmoid = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), nn.Sigmoid(), nn.Linear(3, 1))
    assert keep_probs(sigmoid, torch.randn(2, 2))["3.weight"] == 1.0
    assert not theory_report(sigmoid, torch.randn(2, 2), Prior(), 10).is_variational


def test_own_layers_and_dropout_before_them_multiply():
    net = nn.Sequential(nn.Dropout(0.5), Linear(3, 2, noise=BernoulliNoise(0.1)))
    assert keep_probs(net, torch.zeros(1, 3)) == pytest.approx({"1.weight": 0.45})
    layer = Conv2d(2, 2, 3, noise=BernoulliNoise(0.2))
    assert keep_probs(layer, torch.zeros(1, 2, 4, 4)) == pytest.approx({"weight": 0.8})
    words = nn.Sequential(
        Embedding(5, 3, noise=BernoulliNoise(0.3)), LSTM(3, 2, drop_prob=0.2, recurrent_drop_prob=0.4)
    )
    traced = keep_probs(words, torch.zeros(1, 4, dtype=torch.long))
    assert traced == pytest.approx({"0.weight": 0.7, "1.weight_ih_l0": 0.8, "1.weight_hh_l0": 0.6})


def test_recurrent_and_attention_weights_take_what_reaches_them():
    lstm = nn.Sequential(nn.Dropout(0.2), nn.LSTM(3, 4, num_layers=2, dropout=0.3))
    assert keep_probs(lstm, torch.zeros(5, 1, 3)) == pytest.approx(
        {"1.weight_ih_l0": 0.8, "1.weight_hh_l0": 1.0, "1.weight_ih_l1": 0.7, "1.weight_hh_l1": 1.0}
    )
    attention = add_dropout(nn.MultiheadAttention(4, 2, batch_first=True), 0.1)
    x = torch.zeros(1, 3, 4)
    assert keep_probs(attention, (x, x, x)) == pytest.approx({"in_proj_weight": 0.9, "out_proj.weight": 0.9})


def test_a_converted_network_keeps_every_weight_as_it_says():
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), parametrizations.weight_norm(nn.Linear(32, 2)))
    traced = keep_probs(add_dropout(net, 0.25), torch.zeros(1, 3, 6, 6))
    assert traced == pytest.approx({"0.weight": 0.75, "3.weight": 0.75})


def test_a_weight_used_twice_is_listed_twice():
    layer = nn.Linear(3, 3)
    net = nn.Sequential(layer, nn.ReLU(), nn.Dropout(0.5), layer)
    assert trace(net, torch.zeros(1, 3)) == [("0.weight", 1.0), ("0.weight", 0.5)]


def test_nothing_of_the_network_is_changed_by_a_trace():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(4, 3)
    state = torch.get_rng_state()
    keep_probs(net, x)
    assert torch.equal(state, torch.get_rng_state()) and net.training
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
