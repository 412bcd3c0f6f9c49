"""One step descends the paper's objective, weights of rows included."""

import pytest
import torch

import dropbayes as db
from dropbayes.layers import Prior, parameter_groups
from dropbayes.training import InverseDecay, Optimization, fit
from dropbayes.training.objective import negative_elbo
from tests.training.toys import network, toy


def test_full_batch_sgd_is_gradient_descent_on_the_negative_elbo_over_tau():
    x, y = toy()
    likelihood, prior = db.Gaussian(precision=7.0), Prior(length_scale=3.0, bias_length_scale=0.5)
    ours, theirs = network(0.0).double(), network(0.0).double()
    x, y = x.double(), y.double()
    policy = InverseDecay(gamma=0.1, power=0.5)
    fit(
        ours,
        x,
        y,
        likelihood=likelihood,
        prior=prior,
        epochs=5,
        batch_size=64,
        device="cpu",
        optimization=Optimization("sgd", learning_rate=0.05, momentum=0.8, schedule=policy),
    )
    velocity = [torch.zeros_like(p) for p in theirs.parameters()]
    for iteration in range(5):
        loss = negative_elbo(theirs, theirs(x), y, likelihood=likelihood, prior=prior, n_data=64) / 7.0
        gradients = torch.autograd.grad(loss, list(theirs.parameters()))
        with torch.no_grad():
            for p, v, g in zip(theirs.parameters(), velocity, gradients, strict=True):
                v.mul_(0.8).add_(g)
                p -= 0.05 * policy(iteration) * v
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_p, theirs_p, rtol=1e-6, atol=1e-9)


def test_the_paper_loss_with_decay_in_the_optimiser_gives_the_same_network():
    # E + λ‖M‖² by parameter_groups [GG16, eq:L:dropout] against `fit`: two readings of one identity.
    x, y = (part.double() for part in toy())
    prior, tau = Prior(length_scale=2.0), 5.0
    ours, theirs = network(0.0).double(), network(0.0).double()
    fit(
        ours,
        x,
        y,
        likelihood=db.Gaussian(tau),
        prior=prior,
        epochs=4,
        batch_size=64,
        device="cpu",
        optimization=Optimization("sgd", learning_rate=0.1, momentum=0.0),
    )
    optimizer = torch.optim.SGD(parameter_groups(theirs, precision=tau, prior=prior, n_data=64), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (0.5 * (theirs(x) - y).square().sum(1).mean()).backward()
        optimizer.step()
    torch.testing.assert_close(ours[0].weight, theirs[0].weight, rtol=1e-7, atol=1e-10)


def test_history_holds_the_negative_elbo():
    x, y = toy()
    net = network(0.0)
    likelihood, prior = db.Gaussian(4.0), Prior()
    with torch.no_grad():
        expected = float(negative_elbo(net, net(x), y, likelihood=likelihood, prior=prior, n_data=64))
    history = fit(net, x, y, likelihood=likelihood, prior=prior, epochs=1, batch_size=64, device="cpu")
    assert history.loss[0] == pytest.approx(expected, rel=1e-5)
    assert history.stopped == "epochs"


def test_row_weights_equal_repeated_rows():
    x, y = (part.double() for part in toy(20))
    weight = torch.tensor([1.0, 3.0]).repeat(10)
    rows = torch.cat([torch.arange(20), torch.arange(1, 20, 2), torch.arange(1, 20, 2)])
    weighted, repeated = network(0.0).double(), network(0.0).double()
    options = {"likelihood": db.Gaussian(4.0), "prior": Prior(length_scale=1e-9), "epochs": 10, "device": "cpu"}
    fit(weighted, x, y, sample_weight=weight, **options)
    fit(repeated, x[rows], y[rows], **options)
    torch.testing.assert_close(weighted[0].weight, repeated[0].weight, rtol=1e-6, atol=1e-9)


def test_a_row_of_weight_twenty_counts_as_twenty_beside_the_prior_too():
    # Full batches and no dropout: the two runs descend the same function.
    x, y = (part.double() for part in toy(20))
    options = {"likelihood": db.Gaussian(1.0), "prior": Prior(length_scale=5.0), "epochs": 30, "device": "cpu"}
    nets = [network(0.0).double() for _ in range(3)]
    fit(nets[0], x, y, sample_weight=torch.full((20,), 20.0), batch_size=20, **options)
    fit(nets[1], x.repeat(20, 1), y.repeat(20, 1), batch_size=400, **options)
    fit(nets[2], x, y, batch_size=20, **options)
    torch.testing.assert_close(nets[0][0].weight, nets[1][0].weight, rtol=1e-6, atol=1e-8)
    assert (nets[0][0].weight - nets[2][0].weight).abs().max() > 1e-4


@pytest.mark.parametrize("weight", [torch.ones(64, 1), torch.ones(63), -torch.ones(64), torch.zeros(64)])
def test_impossible_weights_are_refused(weight):
    x, y = toy()
    with pytest.raises(ValueError, match="`sample_weight` must"):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), sample_weight=weight, device="cpu")
