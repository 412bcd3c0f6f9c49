"""Moments propagated through perceptrons, against closed forms, plain Monte Carlo and draws."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.linear.perceptrons import propagate


def deep(activation, drop_prob=0.2, n_outputs=3):
    torch.manual_seed(0)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(64, 64), activation(), nn.Dropout(drop_prob))]
    net = nn.Sequential(nn.Linear(4, 64), activation(), nn.Dropout(drop_prob), *hidden, nn.Linear(64, n_outputs))
    return net, torch.randn(20, 4)


def test_one_hidden_layer_is_exact():
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 2))
    x = torch.randn(5, 3)
    moments, exact = db.predict(net, x, method="moments"), db.predict(net, x)
    assert moments.method == "moments" and moments.n_draws == 0
    torch.testing.assert_close(moments.mean, exact.mean)
    torch.testing.assert_close(moments.epistemic, exact.epistemic)


ACTIVATIONS = [nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.GELU, nn.ELU, nn.SiLU, nn.Identity]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_deviations_and_means_are_those_of_4000_draws(activation):
    net, x = deep(activation)
    moments, drawn = db.predict(net, x, method="moments"), db.predict(net, x, n_draws=4000)
    ratio = moments.std / drawn.std
    assert 0.97 < float(ratio.median()) < 1.03 and float(ratio.min()) > 0.92 and float(ratio.max()) < 1.08
    assert float(((moments.mean - drawn.mean).abs() / drawn.std).median()) < 0.05


def test_they_are_closer_to_the_mean_than_the_linear_method_at_a_large_rate():
    net, x = deep(nn.ReLU, 0.5)
    drawn = db.predict(net, x, n_draws=10_000)
    errors = [
        float((db.predict(net, x, method=method).mean - drawn.mean).abs().mean()) for method in ("moments", "linear")
    ]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh()])
def test_a_non_linearity_of_a_gaussian_pair_has_the_moments_of_many_draws(activation):
    """Dropout of 1/2 of many units is a Gaussian pair by the central limit theorem; here, drawn as such."""
    torch.manual_seed(0)
    first = nn.Linear(400, 2).double()
    x = torch.ones(1, 400, dtype=torch.float64)
    mean, covariance = propagate((nn.Dropout(0.5), first), x)
    draws = activation(torch.distributions.MultivariateNormal(mean[0], covariance[0]).sample((400_000,)))
    found, spread = propagate((nn.Dropout(0.5), first, activation), x)
    torch.testing.assert_close(found[0], draws.mean(0), atol=6e-3, rtol=0)
    torch.testing.assert_close(spread[0], draws.T.cov(), atol=1e-2, rtol=0)


def test_linear_layers_keep_the_covariance_exactly():
    first, second = nn.Linear(3, 5).double(), nn.Linear(5, 2, bias=False).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    _, covariance = propagate((nn.Dropout(0.2), first, nn.Identity(), second), x)
    weight = second.weight @ first.weight
    expected = torch.einsum("ki,ri,li->rkl", weight, 0.25 * x.square(), weight)
    torch.testing.assert_close(covariance, expected.detach())


def test_classes_read_the_gaussian_of_the_logits():
    net, x = deep(nn.ReLU)
    moments, drawn = (
        db.predict(net, x, method=method, likelihood=db.Categorical(), n_draws=5000)
        for method in ("moments", "sampling")
    )
    torch.testing.assert_close(moments.mean, drawn.mean, atol=5e-3, rtol=0)
    torch.testing.assert_close(moments.mutual_information, drawn.mutual_information, atol=2e-3, rtol=0)


def test_little_memory_gives_the_same_moments():
    net, x = deep(nn.ReLU)
    whole, parts = (db.predict(net, x, method="moments", sampling=db.Sampling(max_bytes=size)) for size in (None, 1))
    torch.testing.assert_close(parts.epistemic, whole.epistemic)


def test_any_other_network_is_refused_with_a_remedy():
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r'needs a perceptron.*method="linear"'):
        db.predict(net, torch.randn(3, 1, 4), method="moments")
    with pytest.raises(ValueError, match="add_dropout"):
        db.predict(nn.Sequential(nn.Linear(2, 1)), torch.randn(3, 2), method="moments")


def test_nothing_passes_a_dropout_of_everything():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(1.0), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 1))
    x = torch.randn(3, 3)
    moments, drawn = db.predict(net, x, method="moments"), db.predict(net, x, n_draws=2000)
    torch.testing.assert_close(moments.std, drawn.std, rtol=0.05, atol=1e-6)
    torch.testing.assert_close(moments.mean, drawn.mean, rtol=0, atol=4 * float(drawn.std.max()) / 2000**0.5)
