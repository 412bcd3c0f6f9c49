"""Tests of the weight decay that a prior implies for every parameter of a network."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import dropbayes
from dropbayes.layers import (
    BernoulliNoise,
    GaussianNoise,
    Linear,
    MixtureNoise,
    Prior,
    keep_probs,
    kl_coefficients,
    kl_constant,
    parameter_groups,
)
from dropbayes.training.objective import kl_divergence


def decays(net, groups):
    by_id = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in net.named_parameters()}


def mlp():
    return nn.Sequential(
        nn.Dropout(0.1), nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.4), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)
    )


def test_every_parameter_gets_the_decay_of_its_own_dropout_and_length_scale():
    net = mlp()
    prior = Prior(length_scale=2.0, bias_length_scale=0.5, hidden_length_scale="fan_in")
    got = decays(net, parameter_groups(net, precision=10.0, prior=prior, n_data=100))
    # 2λ/p² = l²/(pNτ); K/(pNτ) for the second layer with K = 5; l'²/(Nτ) for the bias; none for normalisation.
    expected = {"1.weight": 4 / 0.9 / 1000, "1.bias": 0.25 / 1000, "5.weight": 5 / 0.6 / 1000}
    assert got == pytest.approx(expected | {"4.weight": 0.0, "4.bias": 0.0})


def test_a_prior_of_stored_weights_is_that_of_active_ones_with_l_times_p():
    # Torch keeps θ = pM: λ‖M‖² = λ‖θ‖²/p², and the authors put λ on θ.
    net = mlp()
    active, stored = (kl_coefficients(net, prior=Prior(2.0, applies_to=to)) for to in ("active", "stored"))
    assert active["1.weight"] == pytest.approx(4 / 0.9) and stored["1.weight"] == pytest.approx(4 * 0.9)
    assert active["5.weight"] == pytest.approx(4 / 0.6) and stored["5.weight"] == pytest.approx(4 * 0.6)
    assert active["1.bias"] == stored["1.bias"] == 4
    rescaled = Prior(2.0, per_layer={"1.weight": 1.8, "5.weight": 1.2})
    assert kl_constant(net, prior=rescaled) == pytest.approx(kl_constant(net, prior=Prior(2.0, applies_to="stored")))


def test_length_scales_and_keep_probs_can_be_named_per_layer():
    net = mlp()
    prior = Prior(length_scale=2.0, per_layer={"5": 3.0, "1.bias": 0.0})
    got = kl_coefficients(net, prior=prior, keep_probs={"1": 0.5})
    assert got == pytest.approx({"1.weight": 4 / 0.5, "1.bias": 0.0, "5.weight": 9 / 0.6})
    with pytest.raises(ValueError, match="`keep_probs` must name weight layers"):
        kl_coefficients(net, prior=prior, keep_probs={"0": 0.5})


def test_recurrent_weights_take_the_dropout_torch_applies_to_them():
    net = nn.Sequential(nn.Dropout(0.2), nn.LSTM(3, 4, num_layers=2, dropout=0.3))
    got = kl_coefficients(net, prior=Prior(bias_length_scale=0.1))
    assert got["1.weight_ih_l0"] == pytest.approx(1 / 0.8)
    assert got["1.weight_ih_l1"] == pytest.approx(1 / 0.7)
    assert got["1.weight_hh_l0"] == got["1.weight_hh_l1"] == 1.0
    assert got["1.bias_hh_l1"] == pytest.approx(0.01)


def test_a_tied_weight_is_decayed_once_and_every_parameter_is_in_one_group():
    net = nn.ModuleDict({"table": nn.Embedding(7, 4), "out": nn.Linear(4, 7)})
    net["out"].weight = net["table"].weight
    groups = parameter_groups(net, precision=1.0, prior=Prior(), n_data=10)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in net.parameters())
    assert kl_coefficients(net, prior=Prior()).keys() == {"table.weight", "out.bias"}


class Tied(nn.Module):
    """An embedding whose table is also the output matrix, with dropout before the latter only."""

    def __init__(self):
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(7, 4), nn.Dropout(0.3), nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.drop(self.table(x)))


def test_a_tied_weight_has_the_smallest_keep_probability_of_its_uses():
    net, x = nn.Sequential(Tied()), torch.zeros(1, 2, dtype=torch.long)
    assert keep_probs(net, x) == {"0.table.weight": 0.7}
    assert kl_coefficients(net, prior=Prior(), keep_probs=keep_probs(net, x)) == pytest.approx(
        {"0.table.weight": 1 / 0.7}
    )
    chain = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Dropout(0.4), nn.Linear(3, 3, bias=False))
    chain[3].weight = chain[0].weight
    assert kl_coefficients(chain, prior=Prior()) == pytest.approx({"0.weight": 1 / 0.6})


class OutFirst(nn.Module):
    """Two branches that read the input, registered after the layer that reads them."""

    def __init__(self):
        super().__init__()
        self.out, self.left, self.right = nn.Linear(6, 1), nn.Linear(3, 6), nn.Linear(3, 6)

    def forward(self, x):
        return self.out(torch.relu(self.left(x)) + self.right(x).tanh())


def test_every_layer_that_reads_the_input_has_l_whatever_the_order_of_registration():
    net, prior = OutFirst(), Prior(length_scale=0.1, hidden_length_scale="fan_in")
    got = kl_coefficients(net, prior=prior, keep_probs=keep_probs(net, torch.zeros(1, 3)))
    weights = {name: c for name, c in got.items() if name.endswith("weight")}
    assert weights == pytest.approx({"out.weight": 6, "left.weight": 0.01, "right.weight": 0.01})
    with pytest.warns(UserWarning, match="guessed from the order of registration"):
        assert kl_coefficients(net, prior=prior)["out.weight"] == pytest.approx(0.01)


@pytest.mark.parametrize("noise", [BernoulliNoise(0.2), BernoulliNoise(0.2, std=0.1), GaussianNoise(), MixtureNoise()])
def test_a_family_with_its_own_kl_is_a_first_layer_where_it_reads_the_input(noise):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.first = Linear(4, 1, noise=noise), Linear(3, 4, noise=noise)

        def forward(self, x):
            return self.out(torch.relu(self.first(x)))

    net, prior = Net(), Prior(length_scale=0.1, hidden_length_scale=2.0)
    traced = keep_probs(net, torch.zeros(2, 3))
    torch.manual_seed(0)
    got = kl_divergence(net, prior=prior, keep_probs=traced)
    assert traced.input_layers == {"first"}
    torch.testing.assert_close(got, net.first.kl(prior, first=True) + net.out.kl(prior, first=False))


def test_fan_in_counts_what_a_convolution_adds_up():
    prior = Prior(hidden_length_scale="fan_in")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 3, groups=2))
    got = kl_coefficients(net, prior=prior)
    assert got["0.weight"] == 1.0
    assert got["1.weight"] == pytest.approx(2 * 9)
    assert got["2.weight"] == pytest.approx(3 * 9)


def test_what_multiplies_element_by_element_is_no_weight_layer():
    net = nn.Sequential(nn.LayerNorm([3, 4]), nn.RMSNorm([3, 4]), nn.PReLU(), nn.BatchNorm1d(3))
    assert kl_coefficients(net, prior=Prior()) == {}
    assert [g["weight_decay"] for g in parameter_groups(net, precision=1.0, prior=Prior(), n_data=1)] == [0.0]


def test_an_embedding_adds_up_one_row():
    net = nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 4))
    assert kl_coefficients(net, prior=Prior(hidden_length_scale="fan_in"))["1.weight"] == 1.0


class InputsTimesOutputs(nn.Module):
    """A linear layer whose matrix is inputs x outputs, as GPT-2's Conv1D, which says so by `nf`."""

    def __init__(self):
        super().__init__()
        self.nf, self.weight = 2, nn.Parameter(torch.randn(7, 2))


def test_fan_in_of_a_transposed_matrix_is_its_first_axis():
    net = nn.Sequential(nn.Linear(2, 2), InputsTimesOutputs())
    assert kl_coefficients(net, prior=Prior(hidden_length_scale="fan_in"))["1.weight"] == pytest.approx(7)


def test_biases_take_the_weights_length_scale_unless_they_have_their_own():
    assert kl_coefficients(nn.Linear(2, 2), prior=Prior(length_scale=3.0))["bias"] == 9.0


def test_what_a_layer_computes_itself_is_not_reached_by_the_dropout_before_it():
    attention = nn.Sequential(nn.Dropout(0.2), nn.MultiheadAttention(4, 2))
    got = kl_coefficients(attention, prior=Prior())
    assert got["1.in_proj_weight"] == pytest.approx(1 / 0.8) and got["1.out_proj.weight"] == 1.0
    cell = kl_coefficients(nn.Sequential(nn.Dropout(0.2), nn.GRUCell(3, 4)), prior=Prior())
    assert cell["1.weight_ih"] == pytest.approx(1 / 0.8) and cell["1.weight_hh"] == 1.0


def test_only_what_reads_the_networks_input_is_a_first_layer():
    got = kl_coefficients(nn.LSTM(3, 50, num_layers=2), prior=Prior(length_scale=0.1, hidden_length_scale="fan_in"))
    assert got["weight_ih_l0"] == pytest.approx(0.01)
    assert got["weight_hh_l0"] == got["weight_ih_l1"] == got["weight_hh_l1"] == pytest.approx(50)


def test_the_prior_of_a_computed_weight_is_on_the_weight_itself():
    for norm in (parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm):
        layer = norm(nn.Linear(3, 2)).eval()
        layer(torch.zeros(1, 3))
        expected = 0.5 * 4 * (layer.weight.square().sum() + layer.bias.square().sum()) - 8 * math.log(2)
        torch.testing.assert_close(kl_divergence(layer, prior=Prior(length_scale=2.0)), expected)
        with pytest.raises(ValueError, match="computed from others"):
            parameter_groups(layer, precision=1.0, prior=Prior(), n_data=10)


def test_the_constant_counts_weights_and_units():
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 5, bias=False), nn.Dropout(0.1), nn.Conv1d(4, 2, 3, bias=False))
    entropy = {p: -(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (0.7, 0.9)}
    expected = -15 * math.log(2.0) - 3 * entropy[0.7] - 24 * math.log(2.0) - 4 * entropy[0.9]
    assert kl_constant(net, prior=Prior(length_scale=2.0)) == pytest.approx(expected)
    stored = Prior(length_scale=0.5, bias_length_scale=0.0, applies_to="stored")
    assert kl_constant(net, prior=stored) == pytest.approx(
        expected + 39 * math.log(4) - 15 * math.log(0.7) - 24 * math.log(0.9)
    )


def test_impossible_keep_probabilities_and_empty_weights_are_refused():
    dropped = nn.Sequential(nn.Dropout(1.0), nn.Linear(3, 2))
    for keep in (
        None,
        keep_probs(nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 2)), torch.zeros(1, 3)) | {"1.weight": 0},
    ):
        with pytest.raises(ValueError, match=r"`keep_prob` must lie in \(0, 1\]; got 0"):
            kl_coefficients(dropped, prior=Prior(), keep_probs=keep)
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Sequential(nn.Linear(3, 0), nn.Dropout(0.1), nn.Linear(0, 1))
    x, y, rule = (
        torch.zeros(2, 3),
        torch.zeros(2, 1),
        r"`net` must have no layer of width 0; got 0.weight of shape \(0, 3\)",
    )
    calls = [
        lambda: kl_constant(empty, prior=Prior()),
        lambda: keep_probs(empty, x),
        lambda: dropbayes.predict(empty, x),
        lambda: dropbayes.fit(empty, x, y, likelihood=dropbayes.Gaussian(1.0), epochs=1, device="cpu"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rule), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()


def test_unknown_names_and_dropout_stated_twice_are_refused():
    net = nn.Sequential(Linear(3, 2, noise=BernoulliNoise(0.1)), nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"`prior.per_layer` must name .* \['1.wieght'\]"):
        kl_coefficients(net, prior=Prior(per_layer={"1.wieght": 100.0}))
    with pytest.raises(ValueError, match="state their own dropout"):
        kl_coefficients(net, prior=Prior(), keep_probs={"0": 0.5})


def test_traced_keep_probabilities_are_taken_parameter_by_parameter():
    net = nn.Sequential(nn.Dropout(0.5), Linear(3, 2, noise=BernoulliNoise(0.1)), nn.Linear(2, 1))
    got = kl_coefficients(net, prior=Prior(), keep_probs=keep_probs(net, torch.zeros(1, 3)))
    assert got == pytest.approx({"1.weight": 1 / 0.45, "1.bias": 1.0, "2.weight": 1.0, "2.bias": 1.0})


@pytest.mark.parametrize("following", [None, "fan_in", 0.7])
def test_length_scales_are_differentiated_where_they_are_tensors(following):
    net = mlp().double()

    def divergence(length_scale, bias_length_scale, own):
        prior = Prior(length_scale, bias_length_scale, following, {"5": own})
        return kl_divergence(net, prior=prior)

    scales = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.3, 0.4, 0.8)]
    assert torch.autograd.gradcheck(divergence, scales)
    with pytest.raises(TypeError, match="must be a number, not a tensor"):
        parameter_groups(net, precision=1.0, prior=Prior(length_scale=scales[0]), n_data=10)
    with pytest.raises(TypeError, match="`precision` must be a number"):
        parameter_groups(net, precision=scales[0], prior=Prior(), n_data=10)
