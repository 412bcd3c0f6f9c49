"""The linear part as a control variate: exact where the network is linear in its masks, better where it is nearly so."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.linear.control import controlled_moments
from tests.sampling.zoo import ZOO, build


def deep(drop_prob):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(50, 50), nn.ReLU(),
                        nn.Dropout(drop_prob), nn.Linear(50, 2))  # fmt: skip
    return net, torch.randn(12, 3)


def test_a_network_that_is_linear_in_its_masks_has_exact_moments():
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    exact = db.predict(net, x)
    mean, variance = controlled_moments(net, x, n_draws=5, sampling=db.Sampling(sampler="independent"))
    torch.testing.assert_close(mean, exact.mean)
    torch.testing.assert_close(variance, exact.epistemic)


@pytest.mark.parametrize("name", ["dropout_mlp", "dropout2d", "lstm_sequence_first", "multi_head_attention"])
def test_the_draws_are_those_of_predict(name, monkeypatch):
    """Without a correction, the moments are those of the same draws."""
    net, x = build(name)
    axis = ZOO[name].row_axis
    monkeypatch.setattr(
        "dropbayes.linear.control._linear_part", lambda linear, slopes, _: torch.zeros_like(linear.flat(0)).double()
    )
    mean, variance = controlled_moments(net, x, n_draws=8, seed=3, sampling=db.Sampling(row_axis=axis))
    drawn = (
        db.draws(net, x, n_draws=8, seed=3, sampling=db.Sampling(row_axis=axis))
        .movedim(1 + axis, 1)
        .flatten(2)
        .double()
    )
    torch.testing.assert_close(mean, drawn.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(variance, drawn.var(0, correction=0), rtol=1e-3, atol=1e-8)


def test_the_error_of_mean_and_variance_falls_for_independent_masks():
    net, x = deep(0.1)
    truth = db.predict(net, x, n_draws=10_000)
    errors = torch.zeros(4)
    for seed in range(20):
        drawn = db.draws(net, x, n_draws=30, seed=seed, sampling=db.Sampling(sampler="independent")).double()
        mean, variance = controlled_moments(net, x, n_draws=30, seed=seed, sampling=db.Sampling(sampler="independent"))
        found = (drawn.mean(0), mean, drawn.var(0), variance)
        expected = (truth.mean, truth.mean, truth.epistemic, truth.epistemic)
        errors += torch.stack([(a - b).square().mean() for a, b in zip(found, expected, strict=True)])
    assert errors[1] < errors[0] / 4 and errors[3] < errors[2] / 3


def test_a_network_with_other_random_numbers_is_refused():
    net, x = build("gaussian_noise")
    with pytest.raises(ValueError, match=r"multiply by its masks.*randn.*predict"):
        controlled_moments(net, x)
