"""The families beside the posterior."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from experiments import posteriors
from tests.experiments.smallest import tiny


def test_the_sampled_network_is_the_one_whose_prior_the_families_have():
    width = 7
    unit = torch.randn(2, 3 * width + 1, dtype=torch.float64)
    w1, b1, w2, b2 = unit[1].split([width, width, width, 1])
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    scales = [
        posteriors.PRIOR.of_weight("0", parameter="weight", first=True, fan_in=1, keep_prob=1.0),
        posteriors.PRIOR.of_weight("2", parameter="weight", first=False, fan_in=width, keep_prob=1.0),
    ]
    assert scales == [0.5, math.sqrt(width)]
    with torch.no_grad():
        net[0].weight.copy_(w1[:, None] / scales[0])
        net[2].weight.copy_(w2 / scales[1])
        net[0].bias.copy_(b1)
        net[2].bias.copy_(b2)
    torch.testing.assert_close(posteriors.network_outputs(unit, posteriors.GRID)[1], net(posteriors.GRID)[:, 0])


def test_the_divergence_is_that_of_two_gaussians():
    p, q = torch.distributions.Normal(0.3, 0.5), torch.distributions.Normal(-0.1, 2.0)
    expected = torch.distributions.kl_divergence(p, q).item()
    assert posteriors._divergence(0.3, 0.5, -0.1, 2.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_dropout_is_unsure_at_the_data_and_an_ensemble_is_not(tmp_path):
    pytest.importorskip("pyro")
    table = tiny("posteriors", posteriors, tmp_path)["table"]
    assert table["dropout before the last layer"]["at the data"] > table["ensemble of 2"]["at the data"]
    assert all(np.isfinite(list(row.values())).all() for row in table.values())
