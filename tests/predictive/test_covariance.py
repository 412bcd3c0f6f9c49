"""Tests of the covariance between outputs."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.likelihoods import predictive_covariance
from dropbayes.predictive.covariance import output_covariance


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3))


def test_the_covariance_between_outputs_is_that_of_proposition_four(net):
    draws = torch.randn(7, 4, 3, dtype=torch.float64)
    got = output_covariance(draws, torch.full((4, 3), 0.25, dtype=torch.float64))
    torch.testing.assert_close(got, predictive_covariance(draws, precision=4.0))
    expected = torch.cov(draws[:, 0].T, correction=0) + 0.25 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(got[0], expected)


def test_a_prediction_with_its_draws_has_a_covariance_whose_diagonal_is_the_variance(net):
    x = torch.randn(5, 2)
    prediction = db.predict(net, x, n_draws=50, likelihood=db.Gaussian(4.0), keep_draws=True)
    torch.testing.assert_close(prediction.covariance.diagonal(dim1=1, dim2=2), prediction.variance)
    assert prediction.covariance[:, 0, 1].abs().min() > 0
    torch.testing.assert_close(prediction[1:3].covariance, prediction.covariance[1:3])


def test_a_covariance_needs_draws_that_average_to_the_mean(net):
    x = torch.randn(5, 2)
    with pytest.raises(ValueError, match=r"`covariance` needs the draws.*keep_draws=True"):
        _ = db.predict(net, x, n_draws=50).covariance
    with pytest.raises(ValueError, match="whose mean is the network's output"):
        _ = db.predict(net, x, n_draws=50, likelihood=db.Categorical(), keep_draws=True).covariance
