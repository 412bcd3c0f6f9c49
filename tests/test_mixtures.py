"""Tests of the quantiles of mixtures."""

import pytest
import torch

from dropbayes.mixtures import mixture_quantile, row_mean


@pytest.mark.parametrize("level", [0.005, 0.3, 0.5, 0.975])
def test_the_distribution_function_of_a_mixture_at_its_quantile_is_the_level(level):
    source = torch.Generator().manual_seed(0)
    mean = 50 + 7 * torch.randn(40, 30, 2, dtype=torch.float64, generator=source)
    scale = 0.1 + 5 * torch.rand(40, 30, 2, dtype=torch.float64, generator=source)
    quantile = mixture_quantile(mean, scale, level)
    assert quantile.shape == (30, 2)
    reached = torch.distributions.Normal(mean, scale).cdf(quantile).mean(0)
    torch.testing.assert_close(reached, torch.full_like(reached, level), rtol=0, atol=1e-9)


@pytest.mark.parametrize("n_draws", [1, 7, 200, 40_000])
def test_a_row_has_the_same_bits_alone_and_among_others(n_draws):
    source = torch.Generator().manual_seed(1)
    mean = torch.randn(n_draws, 11, dtype=torch.float64, generator=source)
    scale = 0.1 + torch.rand(n_draws, 11, dtype=torch.float64, generator=source)
    together = mixture_quantile(mean, scale, 0.9)
    for rows in (slice(0, 1), slice(3, 10), slice(10, 11)):
        assert torch.equal(mixture_quantile(mean[:, rows], scale[:, rows], 0.9), together[rows])
        assert torch.equal(row_mean(mean.T[rows]), row_mean(mean.T)[rows])


def test_the_mean_of_a_row_is_the_mean():
    values = torch.randn(3, 50_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(row_mean(values), values.mean(-1), rtol=1e-12, atol=1e-15)
