"""Tests of reading the identity off a network: its weight layers, their dropout and their weight decay."""

import pytest
from torch import nn

from dropbayes.precision import Prior
from dropbayes.weight_layers import keep_probs_by_order, kl_coefficients, parameter_groups


def decays(net, groups):
    by_id = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in net.named_parameters()}


def mlp():
    return nn.Sequential(
        nn.Dropout(0.1), nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.4), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)
    )


def test_every_parameter_gets_the_decay_of_its_own_dropout_and_length_scale():
    net = mlp()
    prior = Prior(length_scale=2.0, bias_length_scale=0.5, following_length_scale="fan_in")
    got = decays(net, parameter_groups(net, precision=10.0, prior=prior, n_data=100))
    # 2λ = l²p/(Nτ); K p/(Nτ) for the second layer with K = 5; l'²/(Nτ) for the bias; none for normalisation.
    expected = {"1.weight": 4 * 0.9 / 1000, "1.bias": 0.25 / 1000, "5.weight": 5 * 0.6 / 1000}
    assert got == pytest.approx(expected | {"4.weight": 0.0, "4.bias": 0.0})


def test_the_letter_of_the_paper_divides_by_keep_prob_squared():
    # Torch keeps θ = pM: λ‖M‖² = λ‖θ‖²/p².
    net = mlp()
    mean = kl_coefficients(net, prior=Prior(length_scale=2.0))
    kept = kl_coefficients(net, prior=Prior(length_scale=2.0, describes="kept"))
    assert kept["1.weight"] == pytest.approx(mean["1.weight"] / 0.9**2)
    assert kept["5.weight"] == pytest.approx(mean["5.weight"] / 0.6**2)
    assert kept["1.bias"] == mean["1.bias"]


def test_length_scales_and_keep_probs_can_be_named_per_layer():
    net = mlp()
    prior = Prior(length_scale=2.0, per_layer={"5": 3.0, "1.bias": 0.0})
    got = kl_coefficients(net, prior=prior, keep_probs={"1": 0.5})
    assert got == pytest.approx({"1.weight": 4 * 0.5, "1.bias": 0.0, "5.weight": 9 * 0.6})
    with pytest.raises(ValueError, match="`keep_probs` must name weight layers"):
        kl_coefficients(net, prior=prior, keep_probs={"0": 0.5})


def test_order_of_registration_tells_the_dropout_before_each_layer():
    assert keep_probs_by_order(mlp()) == pytest.approx({"1": 0.9, "5": 0.6})


def test_recurrent_weights_take_the_dropout_torch_applies_to_them():
    net = nn.Sequential(nn.Dropout(0.2), nn.LSTM(3, 4, num_layers=2, dropout=0.3))
    got = kl_coefficients(net, prior=Prior(bias_length_scale=0.1))
    assert got["1.weight_ih_l0"] == pytest.approx(0.8)
    assert got["1.weight_ih_l1"] == pytest.approx(0.7)
    assert got["1.weight_hh_l0"] == got["1.weight_hh_l1"] == 1.0
    assert got["1.bias_hh_l1"] == pytest.approx(0.01)


def test_a_tied_weight_is_decayed_once_and_every_parameter_is_in_one_group():
    net = nn.ModuleDict({"table": nn.Embedding(7, 4), "out": nn.Linear(4, 7)})
    net["out"].weight = net["table"].weight
    groups = parameter_groups(net, precision=1.0, prior=Prior(), n_data=10)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in net.parameters())
    assert kl_coefficients(net, prior=Prior()).keys() == {"table.weight", "out.bias"}


def test_fan_in_counts_what_a_convolution_adds_up():
    prior = Prior(following_length_scale="fan_in")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 2, 3))
    got = kl_coefficients(net, prior=prior)
    assert got["0.weight"] == 1.0
    assert got["1.weight"] == pytest.approx(2 * 9)
    assert got["2.weight"] == pytest.approx(6 * 9)


def test_what_multiplies_element_by_element_is_no_weight_layer():
    net = nn.Sequential(nn.LayerNorm([3, 4]), nn.RMSNorm([3, 4]), nn.PReLU(), nn.BatchNorm1d(3))
    assert kl_coefficients(net, prior=Prior()) == {}
    assert [g["weight_decay"] for g in parameter_groups(net, precision=1.0, prior=Prior(), n_data=1)] == [0.0]


def test_an_embedding_adds_up_one_row():
    net = nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 4))
    assert kl_coefficients(net, prior=Prior(following_length_scale="fan_in"))["1.weight"] == 1.0
