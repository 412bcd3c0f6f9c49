"""The divergence of weight layers, and the bound of networks made of them."""

import copy
import math

import pytest
import torch
from torch import nn

from dropbayes.layers import (
    Bernoulli,
    BernoulliNoise,
    DiagonalGaussian,
    Linear,
    Prior,
    kl_coefficients,
    parameter_groups,
)
from dropbayes.likelihoods import Gaussian
from dropbayes.training.objective import kl_divergence, negative_elbo
from tests.layers.families import kl_monte_carlo
from tests.layers.noises import DTYPE, NOISES, layers


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_bernoulli_layers_give_the_bound_of_dropout_networks():
    x, y = torch.randn(6, 3, dtype=DTYPE), torch.randn(6, 2, dtype=DTYPE)
    ours = nn.Sequential(Linear(3, 5, noise=BernoulliNoise(0.1)), nn.ReLU(), Linear(5, 2, noise=BernoulliNoise(0.4)))
    theirs = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, 2))
    ours, theirs = ours.to(DTYPE), theirs.to(DTYPE)
    theirs[1].load_state_dict(ours[0].state_dict())
    theirs[4].load_state_dict(ours[2].state_dict())
    for applies_to in ("stored", "active"):
        prior = Prior(length_scale=0.7, bias_length_scale=0.3, hidden_length_scale="fan_in", applies_to=applies_to)
        losses = []
        for net in (ours, theirs):
            torch.manual_seed(2)
            losses.append(negative_elbo(net, net(x), y, likelihood=Gaussian(3.0), prior=prior, n_data=50))
        torch.testing.assert_close(*losses)
        decays = [sorted(g["weight_decay"] for g in parameter_groups(n, precision=3.0, prior=prior, n_data=50))
                  for n in (ours, theirs)]  # fmt: skip
        assert decays[0] == pytest.approx(decays[1])


@pytest.mark.parametrize("applies_to", ["active", "stored"])
@pytest.mark.parametrize("name", ["bernoulli", "dropped bias"])
def test_a_dropout_layers_own_kl_is_its_weight_decay_and_its_constant(name, applies_to):
    layer = Linear(4, 3, noise=NOISES[name]).to(DTYPE)
    prior = Prior(length_scale=1.3, bias_length_scale=0.6, applies_to=applies_to)
    torch.testing.assert_close(layer.kl(prior), kl_divergence(layer, prior=prior))
    coefficient = {"bernoulli": 0.36, "dropped bias": 0.36 * 0.7 if applies_to == "stored" else 0.36 / 0.7}[name]
    assert kl_coefficients(layer, prior=prior)["bias"] == pytest.approx(coefficient)


@pytest.mark.parametrize("drop_bias", [True, False])
def test_a_layer_of_positive_std_states_its_exact_kl(drop_bias):
    layer = Linear(2, 1, noise=BernoulliNoise(0.3, std=0.4, drop_bias=drop_bias)).to(DTYPE)
    bias = layer.bias[:, None].detach()
    q_bias = Bernoulli(bias / 0.7, 0.7, 0.4) if drop_bias else DiagonalGaussian(bias, torch.tensor(0.4, dtype=DTYPE))
    estimates = [kl_monte_carlo(layer.posterior(), length_scale=1.3, n_draws=100_000),
                 kl_monte_carlo(q_bias, length_scale=0.6, n_draws=100_000)]  # fmt: skip
    prior = Prior(length_scale=1.3, bias_length_scale=0.6)
    error = sum(error**2 for _, error in estimates) ** 0.5
    assert (kl_divergence(layer, prior=prior) - sum(value for value, _ in estimates)).abs() < 4 * error
    with pytest.raises(ValueError, match="whose KL is a weight decay"):
        parameter_groups(layer, precision=1.0, prior=prior, n_data=10)


@pytest.mark.parametrize("name", ["gaussian", "mixture", "low-rank mixture", "concrete"])
def test_other_families_put_their_own_kl_in_the_bound_and_refuse_to_be_a_decay(name):
    net = nn.Sequential(nn.Linear(2, 4), Linear(4, 3, noise=NOISES[name])).to(DTYPE)
    prior = Prior(length_scale=1.3, bias_length_scale=0.6, hidden_length_scale=0.9)
    first = 0.5 * 1.3**2 * net[0].weight.square().sum() + 0.5 * 0.36 * net[0].bias.square().sum()
    bias = net[1].bias.detach()
    stds = {"gaussian": 0.5 * bias.abs(), "mixture": 0.3 + 0 * bias, "low-rank mixture": 0.3 + 0 * bias}
    if name == "concrete":  # points, but for their infinite constant
        of_bias = 0.5 * 0.36 * bias.square().sum() - 3 * math.log(0.6)
    else:
        normal = torch.distributions.Normal
        of_bias = torch.distributions.kl_divergence(normal(bias, stds[name]), normal(0.0, 1 / 0.6)).sum()
    second = net[1].posterior().kl(0.9) + of_bias
    constant = -8 * math.log(1.3) - 4 * math.log(0.6)
    torch.testing.assert_close(kl_divergence(net, prior=prior), first + second + constant)
    with pytest.raises(ValueError, match="whose KL is a weight decay"):
        parameter_groups(net, precision=1.0, prior=prior, n_data=10)


def test_the_output_bias_can_be_the_mean_function_of_the_process():
    # A GP mean function μ(x) = b has no prior: shifting the data shifts b at no cost. Without it, biases are penalised.
    net = nn.Sequential(Linear(2, 3), nn.ReLU(), Linear(3, 1)).to(DTYPE)
    free, pinned = Prior(per_layer={"2.bias": 0.0}), Prior()
    before = kl_divergence(net, prior=free), kl_divergence(net, prior=pinned)
    with torch.no_grad():
        net[2].bias += 5.0
    torch.testing.assert_close(kl_divergence(net, prior=free), before[0])
    assert kl_divergence(net, prior=pinned) > before[1] + 5
    assert Linear(2, 1, bias=False).bias is None


@pytest.mark.parametrize("name", NOISES)
def test_layers_differentiate_in_all_their_parameters(name):
    noise = copy.deepcopy(NOISES[name])
    noise.temperature = 0.5
    for layer, x in layers(noise):
        layer, x = layer.to(DTYPE), x.to(DTYPE) if x.is_floating_point() else x
        names, values = zip(*layer.named_parameters(), strict=True)

        def output(*parameters, layer=layer, names=names, x=x):
            torch.manual_seed(1)
            return torch.func.functional_call(
                layer, dict(zip(names, parameters, strict=True)), (x.expand(2, *x.shape),)
            )

        values = tuple(value.detach().clone().requires_grad_() for value in values)
        assert torch.autograd.gradcheck(output, values, fast_mode=True)
