"""Scores and bands along one variable."""

import numpy as np
import pytest
import torch

from experiments import bands


def test_gaussian_scores_are_those_of_torch_distributions():
    mean, std, y = np.array([0.0, 1.0]), np.array([0.5, 2.0]), np.array([0.3, -4.0])
    total = torch.distributions.Normal(torch.tensor(mean), torch.tensor(np.sqrt(std**2 + 0.25)))
    scores = bands.gaussian_scores(mean, std, y, precision=4.0)
    assert scores["log_likelihood"] == pytest.approx(total.log_prob(torch.tensor(y)).mean().item())
    assert scores["coverage_95"] == 0.5
