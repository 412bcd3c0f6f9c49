"""Tests of the identity between precision, weight decay and length-scale, and of reading it off a network."""

import pytest
import torch
from torch import nn

from dropbayes.precision import (
    Prior,
    keep_probs_by_order,
    kl_coefficients,
    model_precision,
    optimizer_weight_decay,
    parameter_groups,
    weight_decay,
)


def decays(net, groups):
    by_id = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in net.named_parameters()}


def test_precision_and_weight_decay_are_inverse_to_each_other():
    for tau in (1e-12, 0.3, 1e12):
        lam = weight_decay(precision=tau, keep_prob=0.8, length_scale=3.0, n_data=50)
        assert model_precision(weight_decay=lam, keep_prob=0.8, length_scale=3.0, n_data=50) == pytest.approx(tau)


def test_weight_decay_has_every_factor_of_the_paper():
    # l = 2, p = 0.9, N = 10, τ = 4: 4·0.9/(2·10·4). A lost ½, a keep/drop swap or l for l² each give another number.
    assert weight_decay(precision=4.0, keep_prob=0.9, length_scale=2.0, n_data=10) == pytest.approx(0.045)


def test_boston_weight_decay_is_the_authors_own():
    # drop .05, τ .159707652696, l 1e-2, N = 455 = round(0.9·506): the authors' code gives reg = 6.5e-7.
    lam = weight_decay(precision=0.159707652696, keep_prob=0.95, length_scale=1e-2, n_data=455)
    assert lam == pytest.approx(6.5e-7, rel=0.01)


def test_regression_demo_precision_is_the_authors_own():
    # reg_demo: τ⁻¹ = 2·N·1e-5/(.95·l²) with l² = .005 and N = 20.
    tau = model_precision(weight_decay=1e-5, keep_prob=0.95, length_scale=0.005**0.5, n_data=20)
    assert 1 / tau == pytest.approx(2 * 20 * 1e-5 / (0.95 * 0.005))


@pytest.mark.parametrize(("lam", "squared_length_scale"), [(1e-6, 60.0), (5e-7, 30.0)])
def test_co2_precision_needs_the_length_scale_the_paper_leaves_out(lam, squared_length_scale):
    # The appendix: weight decay 1e-6 "corresponding to" τ = 1e5, with N = 272 and p = .9.
    tau = model_precision(weight_decay=lam, keep_prob=0.9, length_scale=squared_length_scale**0.5, n_data=272)
    assert tau == pytest.approx(1e5, rel=0.01)


def test_optimizer_step_descends_the_papers_penalty():
    setting = {"precision": 2.0, "keep_prob": 0.7, "length_scale": 1.5, "n_data": 30}
    theta = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
    (weight_decay(**setting) * theta.square().sum()).backward()
    explicit = theta.detach() - 0.1 * theta.grad
    theta.grad = torch.zeros_like(theta)
    torch.optim.SGD([theta], lr=0.1, weight_decay=optimizer_weight_decay(**setting)).step()
    torch.testing.assert_close(theta.detach(), explicit)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"precision": -1.0}, "`precision` must be a positive"),
        ({"precision": 0.0}, "`precision` must be a positive"),
        ({"length_scale": -0.1}, "`length_scale` must be a positive"),
        ({"keep_prob": 0.0}, r"`keep_prob` must lie in \(0, 1\]"),
        ({"keep_prob": 1.1}, r"`keep_prob` must lie in \(0, 1\]"),
        ({"keep_prob": float("nan")}, r"`keep_prob` must lie in \(0, 1\]"),
        ({"n_data": 0}, "`n_data` must be at least 1"),
    ],
)
def test_invalid_settings_are_refused_with_the_rule(change, rule):
    setting = {"precision": 1.0, "keep_prob": 0.9, "length_scale": 1.0, "n_data": 10} | change
    with pytest.raises(ValueError, match=rule):
        weight_decay(**setting)


def test_prior_refuses_negative_length_scales_and_is_frozen():
    with pytest.raises(ValueError, match="`length_scale`"):
        Prior(length_scale=-1.0)
    with pytest.raises(ValueError, match="`bias_length_scale`"):
        Prior(bias_length_scale=-1.0)
    with pytest.raises(AttributeError):
        Prior().length_scale = 2.0


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
