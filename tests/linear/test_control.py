"""The linear part as a control variate: exact where the network is linear in its masks, better where it is nearly so."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.linear import control
from tests.cases import crossed
from tests.sampling.zoo import ZOO, build

INDEPENDENT = db.Sampling(sampler="independent", integrate_last_layer=False)


def deep(drop_prob):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(50, 50), nn.ReLU(),
                        nn.Dropout(drop_prob), nn.Linear(50, 2))  # fmt: skip
    return net, torch.randn(12, 3)


@pytest.mark.parametrize("masks", ["shared", "row"])
def test_a_network_that_is_linear_in_its_masks_has_exact_moments(masks):
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    exact = db.predict(net, x)
    found = db.predict(net, x, method="controlled", n_draws=5, masks=masks, sampling=INDEPENDENT)
    torch.testing.assert_close(found.mean, exact.mean)
    torch.testing.assert_close(found.epistemic, exact.epistemic)
    assert found.method == "controlled, direct"


NAMES = ["dropout_mlp", "dropout2d", "lstm_sequence_first", "multi_head_attention", "bert_sdpa"]


@pytest.mark.parametrize(("name", "masks"), crossed(NAMES, ["shared", "row"]))
def test_the_masks_are_those_of_the_draws(name, masks):
    """The draws of a network that is nearly linear in its masks are nearly their linear parts."""
    net, x = build(name)
    sampling = db.Sampling(row_axis=ZOO[name].row_axis, sampler="independent", integrate_last_layer=False)
    assert correlation(net, x, sampling, masks) > 0.8


def correlation(net, x, sampling, masks):
    """The correlation of draws with their linear parts, over all draws and outputs."""
    seen = []
    original = control._corrected

    def corrected(drawn, linear, variance):
        seen.append(torch.stack([(drawn - drawn.mean(0)).flatten(), (linear - linear.mean(0)).flatten()]))
        return original(drawn, linear, variance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_corrected", corrected)
        db.predict(net, x, method="controlled", n_draws=60, masks=masks, sampling=sampling)
    return torch.cat(seen, 1).corrcoef()[0, 1]


def test_the_error_of_mean_and_variance_falls_for_independent_masks():
    net, x = deep(0.1)
    truth = db.predict(net, x, n_draws=10_000)
    errors = torch.zeros(4)
    for seed in range(20):
        plain = db.predict(net, x, n_draws=30, seed=seed, sampling=INDEPENDENT)
        better = db.predict(net, x, method="controlled", n_draws=30, seed=seed, sampling=INDEPENDENT)
        found = (plain.mean, better.mean, plain.epistemic, better.epistemic)
        expected = (truth.mean, truth.mean, truth.epistemic, truth.epistemic)
        errors += torch.stack([(a - b).square().mean() for a, b in zip(found, expected, strict=True)])
    assert errors[1] < errors[0] / 4 and errors[3] < errors[2] / 3


def test_a_network_with_other_random_numbers_is_refused():
    net, x = build("gaussian_noise")
    with pytest.raises(ValueError, match=r"multiplies by its masks.*randn.*sampling"):
        db.predict(net, x, method="controlled")


@pytest.mark.parametrize("arguments", [{"n_draws": "auto"}, {"likelihood": db.Categorical()}, {"keep_draws": True}])
def test_only_moments_of_a_number_of_draws_are_corrected(arguments):
    with pytest.raises(ValueError, match="controlled"):
        db.predict(*deep(0.1), method="controlled", **arguments)
