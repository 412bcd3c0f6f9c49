"""Sources of randomness: none at all, masks that are given, and what both share."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.tracing import NEUTRAL, Given, Interception, Ones, neutral_uniform, scaled_product
from tests.tracing.fixed_source import FixedSource

NETWORKS = {
    "dropout": nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2)),
    "in place": nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3, inplace=True), nn.Linear(6, 2)),
    "alpha": nn.Sequential(nn.Linear(4, 6), nn.AlphaDropout(0.3), nn.Linear(6, 2)),
    "attention": nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True),
    "recurrent": nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_with_ones_the_network_in_training_is_that_in_evaluation(name):
    net, x = NETWORKS[name], torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = net.eval()(x)
    state = torch.get_rng_state()
    with Interception(Ones()):
        ours = net.train()(x)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)


def test_ones_keep_gates_open_and_noise_at_its_median():
    probability = torch.full((4,), 0.3)
    with Interception(Ones()):
        assert torch.equal(torch.bernoulli(probability), probability)
        assert torch.randn(3).abs().max() == 0
        assert not (torch.rand(3) < 0.999).any()


def test_given_factors_multiply_the_sites_in_order():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.2))
    x, factors = torch.tensor([[1.0, 2.0]]), [torch.tensor([3.0, 0.5]), torch.tensor([[0.0, 2.0]])]
    with Interception(Given(factors)):
        ours = net(x)
    torch.testing.assert_close(ours, net[1](x * factors[0]) * factors[1])


def test_given_factors_have_gradients():
    factor = torch.ones(3, requires_grad=True)
    with Interception(Given([factor])):
        F.dropout(torch.arange(3.0), 0.5).sum().backward()
    assert factor.grad.tolist() == [0, 1, 2]


def test_given_factors_take_part_in_alpha_dropout():
    factor = torch.tensor([1.0, 0.0, 1.0, 0.0])
    with Interception(Given([factor / 0.6])):
        ours = F.alpha_dropout(torch.arange(4.0), 0.4, True)
    source = FixedSource()
    source.keep = lambda kind, drop_prob, shape, like: factor
    with Interception(source):
        torch.testing.assert_close(ours, F.alpha_dropout(torch.arange(4.0), 0.4, True))


def test_too_few_given_factors_are_an_error():
    with pytest.raises(ValueError, match="there is none for a dropout"), Interception(Given([torch.ones(2)])):
        F.dropout(F.dropout(torch.ones(2), 0.5), 0.5)


def test_numbers_that_are_no_mask_cannot_be_given():
    with pytest.raises(NotImplementedError, match="no multiplicative mask"), Interception(Given([torch.ones(2)])):
        torch.rand(2)


@pytest.mark.parametrize("source", [Ones(), Given([])])
def test_dropout_is_off_unless_the_network_switched_it_on(source):
    x = torch.arange(3.0)
    with Interception(source):
        assert torch.equal(F.dropout(x, 0.5, training=False), x)


def test_a_generator_of_the_networks_own_is_not_replaced():
    with Interception(FixedSource()):
        ours = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_ones_of_a_bernoulli_have_its_probability():
    uniform = torch.linspace(0.05, 0.95, 4, dtype=torch.float64)
    probability = torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=torch.float64)
    assert FixedSource().bernoulli(probability, None).tolist() == (uniform < probability).double().tolist()


def test_the_scale_is_that_of_the_kept_units():
    x, keep = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
    assert scaled_product(x, keep, 0.75).tolist() == [4, 0]
    assert scaled_product(x, 0 * keep, 1.0).tolist() == [0, 0]
    assert scaled_product(x, keep, 0.5, inplace=True) is x


def test_a_parameter_is_never_scaled_in_place():
    weight = nn.Parameter(torch.ones(2))
    scaled_product(weight, torch.zeros(2), 0.5, inplace=True)
    assert weight.tolist() == [1, 1]


def test_the_first_neutral_numbers_open_a_gate_and_the_last_are_in_the_middle():
    device = torch.device("cpu")
    assert float(neutral_uniform("rand", (), device, NEUTRAL[0])) == 1 - 2.0**-24
    assert float(neutral_uniform("rand", (), device)) == NEUTRAL[-1].uniform == 0.5
    assert neutral_uniform("randn", (2,), device, NEUTRAL[0]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("neutral, expected", list(zip(NEUTRAL, [0.25, 0.25, 1, 0, 0.25], strict=True)))
def test_a_neutral_mask_is_its_probability_or_a_constant(neutral, expected):
    source = Ones()
    source.neutral = neutral
    assert float(source.bernoulli(torch.tensor(0.25), 0.75)) == expected
