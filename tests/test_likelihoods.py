"""Tests of the observation models against torch.distributions."""

import pytest
import torch

import dropbayes as db


def test_gaussian_log_density_is_that_of_torch_distributions():
    output, y = torch.randn(7, 5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = torch.distributions.Normal(output, 4.0**-0.5).log_prob(y).sum(-1)
    torch.testing.assert_close(db.Gaussian(precision=4.0).log_density(output, y), expected)


def test_column_output_against_flat_targets_is_refused():
    with pytest.raises(ValueError, match=r"`y` must have the shape"):
        db.Gaussian(precision=1.0).log_density(torch.zeros(4, 1), torch.zeros(4))
