"""Tests of a model precision that is trained with the network."""

import copy

import pytest
import torch
from torch import nn

from dropbayes.layers import Prior
from dropbayes.likelihoods import Categorical, Gaussian
from dropbayes.training import Objective, Optimization, fit
from dropbayes.training.optimization import ModelNoise


@pytest.mark.slow
def test_a_learned_precision_ends_at_the_inverse_of_the_mean_squared_error(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(400, 1)
    setting = {"likelihood": Gaussian(1.0), "prior": Prior(length_scale=0.01), "epochs": 200, "batch_size": 400}
    setting |= {"objective": Objective(learn_precision=True), "optimization": Optimization(learning_rate=0.1)}
    setting["device"] = "cpu"
    net = nn.Linear(2, 1)
    start = copy.deepcopy(net)
    history = fit(net, x, y, **setting)
    error = (net(x) - y).square().mean().item()
    assert history.precision[-1] == pytest.approx(1 / error, rel=0.02)
    assert len(history.precision) == 200 and history.precision[0] < history.precision[-1]
    # A run cut in two gives the same bits.
    fit(start, x, y, checkpoint=tmp_path / "run", **{**setting, "epochs": 80})
    resumed = fit(start, x, y, checkpoint=tmp_path / "run", **setting)
    assert resumed.precision == history.precision and torch.equal(start.weight, net.weight)


def test_the_callers_optimiser_keeps_nothing_of_the_precision():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    setting = {"likelihood": Gaussian(1.0), "objective": Objective(learn_precision=True), "device": "cpu", "epochs": 2}
    fit(net, torch.ones(4, 2), torch.ones(4, 1), optimization=Optimization(optimizer), **setting)
    assert optimizer.state_dict()["state"].keys() == {0, 1} and len(optimizer.state) == 2


@pytest.mark.slow
def test_every_output_learns_a_precision_of_its_own(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = x + torch.tensor([0.5, 0.1]) * torch.randn(400, 2)
    net = nn.Linear(2, 2)
    start = copy.deepcopy(net)
    setting = {
        "likelihood": Gaussian(torch.tensor([1.0, 1.0])), "prior": Prior(length_scale=0.01), "batch_size": 400,
        "objective": Objective(learn_precision=True), "optimization": Optimization(learning_rate=0.1), "device": "cpu",
    }  # fmt: skip
    history = fit(net, x, y, epochs=200, **setting)
    errors = (net(x) - y).square().mean(0)
    assert history.precision[-1] == pytest.approx((1 / errors).tolist(), rel=0.05)
    fit(start, x, y, epochs=80, checkpoint=tmp_path / "run", **setting)
    resumed = fit(start, x, y, epochs=200, checkpoint=tmp_path / "run", **setting)
    assert resumed.precision == history.precision and torch.equal(start.weight, net.weight)


def test_the_logarithm_of_the_precision_never_decays():
    noise = ModelNoise(Gaussian(17.0), True, torch.device("cpu"))
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": net.parameters(), "weight_decay": 0.0}], lr=0.1, weight_decay=1.0)
    with Optimization(optimizer).borrowed(net, noise.log_precision) as (trained, _):
        noise.log_precision.grad = torch.zeros(())
        for _ in range(20):
            trained.step()
    assert noise.values()[0] == pytest.approx(17.0)


def test_a_precision_to_be_learned_needs_a_gaussian():
    with pytest.raises(ValueError, match="`learn_precision` needs a Gaussian"):
        fit(
            nn.Linear(2, 2),
            torch.zeros(3, 2),
            torch.zeros(3, dtype=torch.long),
            likelihood=Categorical(),
            epochs=1,
            device="cpu",
            objective=Objective(learn_precision=True),
        )


def test_an_alpha_divergence_is_less_sure_than_the_bound():
    torch.manual_seed(0)
    x = torch.rand(40, 1) * 2 - 1
    y = torch.sin(3 * x) + 0.1 * torch.randn(40, 1)
    deviations = []
    for alpha in (0.0, 1.0):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(1, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 1))
        fit(
            net,
            x,
            y,
            likelihood=Gaussian(50.0),
            prior=Prior(length_scale=0.1),
            epochs=60,
            batch_size=40,
            device="cpu",
            objective=Objective(alpha=alpha),
            optimization=Optimization(learning_rate=0.01),
        )
        deviations.append(torch.stack([net.train()(x) for _ in range(200)]).std(0).mean().item())
    assert deviations[1] > deviations[0]
