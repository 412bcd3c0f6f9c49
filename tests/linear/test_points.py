"""Points of a Gaussian, against its moments and its expectations."""

import pytest
import torch

from dropbayes.linear.points import N_POINTS, gaussian_points, standard_points


@pytest.mark.parametrize("n_axes", [1, 3, 40])
def test_the_points_have_mean_0_and_covariance_1(n_axes):
    points = standard_points(n_axes)
    torch.testing.assert_close(points.mean(0), torch.zeros(n_axes, dtype=torch.float64))
    torch.testing.assert_close(points.T @ points / N_POINTS, torch.eye(n_axes, dtype=torch.float64))


def test_many_axes_have_variance_1_each():
    points = standard_points(300)
    torch.testing.assert_close(points.square().mean(0), torch.ones(300, dtype=torch.float64))


def test_a_probability_is_that_of_many_draws():
    torch.manual_seed(0)
    mean, root = torch.randn(1, 5, dtype=torch.float64), torch.randn(1, 5, 5, dtype=torch.float64)
    covariance = root @ root.mT
    found = gaussian_points(mean, covariance).softmax(-1).mean(0)
    drawn = torch.distributions.MultivariateNormal(mean, covariance).sample((400_000,)).softmax(-1).mean(0)
    torch.testing.assert_close(found, drawn, atol=6e-3, rtol=0)


def test_a_covariance_without_full_rank_will_do():
    one = torch.ones(1, 3, 3, dtype=torch.float64)
    points = gaussian_points(torch.zeros(1, 3, dtype=torch.float64), one)
    torch.testing.assert_close(points[..., 0], points[..., 2], atol=1e-6, rtol=0)
    torch.testing.assert_close(points.square().mean(0), torch.ones(1, 3, dtype=torch.float64))
