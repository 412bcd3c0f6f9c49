"""Tests of the evidence lower bound: against the dropout loss, its own expectation, and the exact evidence."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from dropbayes.layers import GaussianNoise, Linear, Prior, kl_constant, weight_decay
from dropbayes.likelihoods import Categorical, Gaussian, Quantiles
from dropbayes.training.objective import divergence_of, kl_divergence, negative_elbo
from tests.training.small_networks import DTYPE, PRIOR, net_and_data


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def decays(precision, n_data):
    shared = {"precision": precision, "n_data": n_data}
    return (
        weight_decay(keep_prob=0.9, length_scale=0.7, **shared),
        weight_decay(keep_prob=0.7, length_scale=math.sqrt(8), **shared),
        weight_decay(keep_prob=1.0, length_scale=0.2, **shared),
    )


def penalty(net, precision, n_data):
    first, second, bias = decays(precision, n_data)
    active = (net[1].weight / 0.9).square().sum(), (net[4].weight / 0.7).square().sum()  # M = θ/p
    return first * active[0] + second * active[1] + bias * net[1].bias.square().sum()


def gradients(loss, net):
    return torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)


def test_regression_bound_is_precision_times_the_dropout_loss_in_value_and_gradient():
    net, x, y = net_and_data(outputs=2)
    tau, n_data = 5.0, 40
    output = net(x)
    elbo_loss = negative_elbo(net, output, y, likelihood=Gaussian(tau), prior=PRIOR, n_data=n_data)
    euclidean = (y - output).square().sum() / (2 * len(y))  # [GG16, eq:NN:reg]
    dropout_loss = euclidean + penalty(net, tau, n_data)  # [GG16, eq:L:dropout]
    constant = 2 / 2 * math.log(2 * math.pi / tau) + kl_constant(net, prior=PRIOR) / n_data  # D/2 log(2π/τ) + C/N
    torch.testing.assert_close(elbo_loss, tau * dropout_loss + constant)
    for got, expected in zip(gradients(elbo_loss, net), gradients(tau * dropout_loss, net), strict=True):
        torch.testing.assert_close(got, expected)


def test_classification_bound_is_the_softmax_dropout_loss_in_value_and_gradient():
    net, x, _ = net_and_data(outputs=4)
    labels = torch.randint(4, (12,))
    output = net(x)
    elbo_loss = negative_elbo(net, output, labels, likelihood=Categorical(), prior=PRIOR, n_data=40)
    dropout_loss = nn.functional.cross_entropy(output, labels) + penalty(net, 1.0, 40)  # [GG16, eq:NN:class]
    torch.testing.assert_close(elbo_loss, dropout_loss + kl_constant(net, prior=PRIOR) / 40)
    for got, expected in zip(gradients(elbo_loss, net), gradients(dropout_loss, net), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_weight_decayed_optimiser_takes_the_same_step_as_the_bound():
    from dropbayes.layers import parameter_groups

    net, x, y = net_and_data(outputs=2)
    tau, n_data = 5.0, 12
    output = net(x)
    loss = negative_elbo(net, output, y, likelihood=Gaussian(tau), prior=PRIOR, n_data=n_data)
    expected = [p - 0.1 * g / tau for p, g in zip(net.parameters(), gradients(loss, net), strict=True)]
    optimizer = torch.optim.SGD(parameter_groups(net, precision=tau, prior=PRIOR, n_data=n_data), lr=0.1)
    ((y - output).square().sum() / (2 * len(y))).backward()
    optimizer.step()
    for parameter, value in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value.detach())


def test_mini_batches_average_to_the_full_bound():
    net, x, y = net_and_data(outputs=1, rows=6)
    net.eval()  # one fixed output per row: what is left random is the choice of the mini-batch
    setting = {"likelihood": Gaussian(2.0), "prior": PRIOR, "n_data": 6}
    full = negative_elbo(net, net(x), y, **setting)
    batches = [list(batch) for batch in itertools.combinations(range(6), 2)]
    average = torch.stack([negative_elbo(net, net(x[b]), y[b], **setting) for b in batches]).mean()
    torch.testing.assert_close(average, full)


def test_the_bound_scales_its_data_term_by_n_over_m():
    net, x, y = net_and_data(outputs=1, rows=6)
    output = net(x)
    bound = -60 * negative_elbo(net, output, y, likelihood=Gaussian(2.0), prior=PRIOR, n_data=60)
    expected = 60 / 6 * Gaussian(2.0).log_density(output, y).sum() - kl_divergence(net, prior=PRIOR)
    torch.testing.assert_close(bound, expected)


def test_single_draws_average_to_the_expected_log_density_over_masks():
    # One input unit, one output: the masks can be summed over exactly.
    net = nn.Sequential(nn.Dropout(0.25), nn.Linear(1, 1, bias=False)).to(DTYPE)
    x, y = torch.full((200_000, 1), 1.0, dtype=DTYPE), torch.full((200_000, 1), 0.3, dtype=DTYPE)
    weight = net[1].weight.item()
    density = Gaussian(3.0).log_density(torch.tensor([[weight / 0.75], [0.0]], dtype=DTYPE), y[:2])
    exact = -(0.75 * density[0] + 0.25 * density[1]).item()
    kl = kl_divergence(net, prior=PRIOR).item() / 200_000
    got = negative_elbo(net, net(x), y, likelihood=Gaussian(3.0), prior=PRIOR, n_data=200_000).item() - kl
    standard_error = abs(density[0] - density[1]).item() * math.sqrt(0.75 * 0.25 / 200_000)
    assert abs(got - exact) < 4 * standard_error


def test_leading_draws_are_averaged():
    net, x, y = net_and_data(outputs=2)
    outputs = torch.stack([net(x) for _ in range(3)])
    setting = {"likelihood": Gaussian(2.0), "prior": PRIOR, "n_data": 12}
    each = torch.stack([negative_elbo(net, output, y, **setting) for output in outputs])
    torch.testing.assert_close(negative_elbo(net, outputs, y, **setting), each.mean())


def test_kl_matches_torch_distributions_up_to_its_constant():
    # Without dropout q is N(m, σ²): differences of its KL between two means are free of the constant.
    net = nn.Linear(3, 2).to(DTYPE)
    prior = Prior(length_scale=1.7, bias_length_scale=0.4)

    def exact():
        terms = ((net.weight, 1.7), (net.bias, 0.4))
        return sum(
            torch.distributions.kl_divergence(
                torch.distributions.Normal(m, 1e-3), torch.distributions.Normal(torch.zeros_like(m), 1 / scale)
            ).sum()
            for m, scale in terms
        )

    before, exact_before = kl_divergence(net, prior=prior), exact()
    nn.init.normal_(net.weight)
    nn.init.normal_(net.bias)
    torch.testing.assert_close(kl_divergence(net, prior=prior) - before, exact() - exact_before)


def test_n_data_counts_the_training_set():
    net, x, y = net_and_data(outputs=1)
    with pytest.raises(ValueError, match="`n_data` must count the whole training set"):
        negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=PRIOR, n_data=11)
    negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=PRIOR, n_data=12)  # all twelve rows are a mini-batch
    with pytest.raises(ValueError, match="`n_data` must be at least 1"):
        negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), prior=PRIOR, n_data=0)


@pytest.mark.parametrize("likelihood", [None, "gaussian", Gaussian], ids=["none", "text", "class"])
def test_what_is_no_likelihood_and_no_alpha_is_refused_by_name(likelihood):
    net, x, y = net_and_data(outputs=1)
    options = {"prior": PRIOR, "n_data": 100}
    with pytest.raises(TypeError, match="`likelihood` must say what the output means"):
        negative_elbo(net, net(x), y, likelihood=likelihood, **options)
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\]; got 'one'"):
        negative_elbo(net, net(x), y, likelihood=Gaussian(1.0), alpha="one", **options)


def test_what_is_no_network_output_or_mapping_is_refused_by_name():
    net, x, y = net_and_data(outputs=1)
    options = {"likelihood": Gaussian(1.0), "prior": PRIOR, "n_data": 100}
    with pytest.raises(TypeError, match="`net` must be the network that gave `output`; got 'net'"):
        negative_elbo("net", net(x), y, **options)
    with pytest.raises(TypeError, match="`output` must be the network's output, a tensor"):
        negative_elbo(net, (net(x),), y, **options)
    with pytest.raises(TypeError, match=r"`keep_probs` must be a mapping .* got \[0.5\]"):
        negative_elbo(net, net(x), y, keep_probs=[0.5], **options)


def test_every_row_has_a_mask_of_its_own():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 1, bias=False)).to(DTYPE)
    assert net(torch.ones(50, 20, dtype=DTYPE)).unique().numel() > 40


def test_the_divergence_makes_no_tensor_of_numbers_of_the_host(monkeypatch):
    """A copy to the device could not be part of a CUDA graph: every `fit` on CUDA would lose its graph."""
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1))
    divergence = divergence_of(net, prior=Prior(length_scale=2.0), keep_probs=None)
    expected = divergence()
    for owner, name in ((torch.Tensor, "new_tensor"), (torch, "tensor"), (torch, "as_tensor")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("made of a number of the host"))
    assert divergence() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks_have_the_divergence_and_the_bound_of_their_weights_in_float32(dtype):
    half = nn.Sequential(nn.Dropout(0.1), nn.Linear(300, 300), Linear(300, 1, noise=GaussianNoise(0.3))).to(dtype)
    full, prior = copy.deepcopy(half).float(), Prior(length_scale=0.01)
    divergence = kl_divergence(half, prior=prior)
    assert divergence.dtype == torch.float32
    torch.testing.assert_close(divergence, kl_divergence(full, prior=prior), rtol=2e-3, atol=0.0)
    output, y = torch.full((4, 1), 300.0, dtype=dtype), torch.zeros(4, 1, dtype=dtype)  # whose square overflows float16
    bounds = [
        negative_elbo(net, out, y, likelihood=Gaussian(1.0), prior=prior, n_data=4)
        for net, out in ((half, output), (full, output.float()))
    ]
    torch.testing.assert_close(*bounds, rtol=2e-3, atol=0.0)


def test_a_target_that_is_one_number_is_refused():
    net = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"`y` must hold the targets of the mini-batch, .*; got the number 3"):
        negative_elbo(net, net(torch.ones(4, 2)), 3.0, likelihood=Gaussian(1.0), prior=PRIOR, n_data=4)


def test_the_data_term_of_quantiles_is_their_pinball_loss_which_is_bounded_below():
    net, quantiles = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3)), Quantiles((0.1, 0.5, 0.9))
    output, y = torch.tensor([[[1.0, 2.0, 4.0]], [[3.0, 1.0, 2.0]]]), torch.tensor([2.0])
    bound = negative_elbo(net, output, y, likelihood=quantiles, prior=PRIOR, n_data=7)
    expected = quantiles.pinball_loss(output, y).mean() + kl_divergence(net, prior=PRIOR) / 7
    torch.testing.assert_close(bound, expected)
