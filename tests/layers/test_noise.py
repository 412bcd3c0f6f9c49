"""Tests of the families as modules: what they learn, and what they draw in training and in prediction."""

import copy
import math

import pytest
import torch
from torch import nn

import dropbayes
from dropbayes.layers import (
    BernoulliNoise,
    ConcreteNoise,
    GaussianNoise,
    Linear,
    Mixture,
    MixtureNoise,
    Prior,
)
from dropbayes.likelihoods import Gaussian
from dropbayes.sampling import Sampling
from dropbayes.training.objective import negative_elbo

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_concrete_kl_is_the_authors_formula():
    # Their regulariser, for twice the loss: l²/N ΣW²/(1-p) + 2/N K(p log p + (1-p) log(1-p)), p the drop probability.
    layer = Linear(4, 3, bias=False, noise=ConcreteNoise(0.2)).to(DTYPE)
    length_scale, n_data, drop = 1e-2, 100, 0.2
    theirs = length_scale**2 / n_data * layer.weight.square().sum() / (1 - drop)
    theirs = theirs + 2 / n_data * 4 * (drop * math.log(drop) + (1 - drop) * math.log(1 - drop))
    theirs = theirs - 2 / n_data * 12 * math.log(
        length_scale
    )  # free of weights and drop probability; they leave it out
    torch.testing.assert_close(2 * layer.kl(Prior(length_scale=length_scale)) / n_data, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_concrete_drop_probability_falls_as_data_grow():
    """The more the data say, the less is dropped (Gal, Hron and Kendall 2017, figure 2)."""
    learnt = []
    for n in (10, 300):
        torch.manual_seed(0)
        x = torch.randn(n, 1)
        y = 2 * x + 0.1 * torch.randn(n, 1)
        net = nn.Sequential(Linear(1, 16, noise=ConcreteNoise(0.3)), nn.ReLU(), Linear(16, 1, noise=ConcreteNoise(0.3)))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.04)
        for _ in range(150):
            optimizer.zero_grad()
            prior = Prior(length_scale=0.1)
            negative_elbo(net, net(x), y, likelihood=Gaussian(4.0), prior=prior, n_data=n).backward()
            optimizer.step()
        learnt.append(net[2].noise.drop_prob)
    assert learnt[1] < learnt[0]


@pytest.mark.parametrize("drop_prob", [1e-6, 1 - 1e-6])
def test_extreme_drop_probabilities_train(drop_prob):
    for noise in (BernoulliNoise(drop_prob), BernoulliNoise(drop_prob, std=1e-30), ConcreteNoise(drop_prob)):
        layer = Linear(4, 3, noise=noise)
        (layer(torch.randn(5, 4)).square().sum() + layer.kl(Prior())).backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_noise_is_copied_so_that_layers_share_no_parameters():
    noise = ConcreteNoise(0.2)
    first, second = Linear(2, 2, noise=noise), Linear(2, 2, noise=noise)
    assert first.noise.drop_logit is not second.noise.drop_logit
    twin = copy.deepcopy(first)
    assert twin.noise.drop_prob == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: BernoulliNoise(1.0), r"`drop_prob` must lie in \[0, 1\)"),
        (lambda: BernoulliNoise(-0.1), r"`drop_prob` must lie in \[0, 1\)"),
        (lambda: BernoulliNoise(0.1, std=-1.0), "`std`"),
        (lambda: ConcreteNoise(0.0), "must be positive to be learned"),
        (lambda: GaussianNoise(0.0), "`noise_std`"),
        (lambda: MixtureNoise(1), "`n_components`"),
    ],
)
def test_impossible_noises_are_refused(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()


@pytest.mark.parametrize("noise", [0.1, BernoulliNoise])
def test_what_is_no_noise_is_refused(noise):
    with pytest.raises(TypeError, match=r"`noise` must be a noise, such as BernoulliNoise\(0.1\); got"):
        Linear(2, 2, noise=noise)


@pytest.mark.parametrize("drop_prob", [0.1, 0.5])
def test_concrete_masks_are_bernoulli_in_prediction(drop_prob):
    layer = Linear(1, 1, bias=False, noise=ConcreteNoise(drop_prob)).to(DTYPE).eval()  # the default temperature
    nn.init.ones_(layer.weight)
    draws = dropbayes.draws(
        layer, torch.ones(1, 1, dtype=DTYPE), n_draws=4000, seed=0, sampling=Sampling(sampler="independent")
    )
    torch.testing.assert_close(draws.unique(), torch.tensor([0.0, 1 / (1 - drop_prob)], dtype=DTYPE), rtol=1e-6, atol=0)
    assert draws.var().item() == pytest.approx(layer.posterior().variance.item(), rel=0.12)


def test_a_mixture_in_bfloat16_has_a_kl_and_draws():
    layer = Linear(4, 3, noise=MixtureNoise(3))
    with torch.no_grad():
        layer.noise.logits.copy_(torch.tensor([0.1, 0.7, -0.4]))
    expected = layer.kl(dropbayes.Prior(length_scale=1.0))
    layer = layer.to(torch.bfloat16).train()
    torch.testing.assert_close(layer.kl(dropbayes.Prior(length_scale=1.0)), expected, rtol=1e-2, atol=0.0)
    assert layer(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_rare_drops_survive_bfloat16():
    x = torch.ones(200_000, 1, dtype=torch.bfloat16)
    for noise in (ConcreteNoise(0.002), BernoulliNoise(0.002), BernoulliNoise(0.002, std=1e-4)):
        layer = Linear(1, 1, bias=False, noise=noise).to(torch.bfloat16)
        nn.init.ones_(layer.weight)
        dropped = (layer(x).float() < 0.5).double().mean().item()
        assert abs(dropped - 0.002) < 5 * math.sqrt(0.002 / 200_000), type(noise)


@pytest.mark.parametrize("noise", [BernoulliNoise(0.3, std=0.4, learn_std=True), GaussianNoise(0.5, learn_std=True)])
def test_a_learned_std_has_the_gradient_of_the_layers_kl(noise):
    layer = Linear(3, 2, noise=noise).to(DTYPE)
    prior = Prior(length_scale=1.3)

    def kl(log_std):
        return torch.func.functional_call(_Divergence(layer, prior), {"layer.noise.log_std": log_std}, ())

    assert torch.autograd.gradcheck(kl, layer.noise.log_std.detach().clone().requires_grad_())


class _Divergence(nn.Module):
    def __init__(self, layer, prior):
        super().__init__()
        self.layer, self.prior = layer, prior

    def forward(self):
        return self.layer.kl(self.prior)


@pytest.mark.parametrize("probability", [0.5, 0.8])
def test_mixture_probabilities_get_the_gradient_of_the_expected_misfit(probability):
    # One weight, components at 1 and 0, data say 1, τ = 10. Under q itself E[-log p] = c + 5 P(second), so that the
    # gradient in the logits is -+5 p(1-p); relaxed draws come close to it.
    layer = Linear(1, 1, bias=False, noise=MixtureNoise(2, std=1e-3)).to(DTYPE)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.noise.other_locs.zero_()
        layer.noise.logits.copy_(torch.tensor([probability, 1 - probability], dtype=DTYPE).log())
    ones = torch.ones(40_000, 1, dtype=DTYPE)
    (-Gaussian(10.0).log_density(layer(ones), ones).mean()).backward()
    exact = 5 * probability * (1 - probability)
    torch.testing.assert_close(layer.noise.logits.grad, torch.tensor([-exact, exact], dtype=DTYPE), rtol=0.12, atol=0.0)


def test_a_relaxed_mixture_has_the_gradient_of_its_own_expectation():
    # By common random numbers, the finite difference of the expectation of the relaxed draws themselves.
    def expectation(logits):
        q = Mixture(logits.softmax(0), torch.tensor([[[1.0]], [[-0.5]]], dtype=DTYPE), torch.full((1, 1, 1), 0.2, dtype=DTYPE), temperature=0.5)  # fmt: skip
        return torch.cos(3 * q.sample(20_000, generator=torch.Generator().manual_seed(1), relaxed=True)).mean()

    assert torch.autograd.gradcheck(expectation, torch.tensor([0.3, -0.2], dtype=DTYPE, requires_grad=True))


def test_a_mixture_learns_which_component_the_data_speak_for():
    torch.manual_seed(0)
    layer = Linear(1, 1, bias=False, noise=MixtureNoise(2, std=0.05))
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.noise.other_locs.fill_(-1.0)
    x = torch.ones(64, 1)
    optimizer = torch.optim.Adam([layer.noise.logits], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        negative_elbo(layer, layer(x), x, likelihood=Gaussian(10.0), prior=Prior(), n_data=64).backward()
        optimizer.step()
    assert layer.noise.logits.softmax(0)[0] > 0.9


@pytest.mark.parametrize("noise", [ConcreteNoise, MixtureNoise])
@pytest.mark.parametrize("temperature", [-1.0, 0.0, math.nan])
def test_a_temperature_that_relaxes_nothing_is_refused_when_it_is_given(noise, temperature):
    with pytest.raises(ValueError, match="`temperature` must be a positive finite number"):
        noise(temperature=temperature)
