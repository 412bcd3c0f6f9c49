"""Tests of the quantiles of mixtures."""

import pytest
import torch

from dropbayes.mixtures import mixture_quantile


@pytest.mark.parametrize("level", [0.005, 0.3, 0.5, 0.975])
def test_the_distribution_function_of_a_mixture_at_its_quantile_is_the_level(level):
    source = torch.Generator().manual_seed(0)
    mean = 50 + 7 * torch.randn(40, 30, 2, dtype=torch.float64, generator=source)
    scale = 0.1 + 5 * torch.rand(40, 30, 2, dtype=torch.float64, generator=source)
    quantile = mixture_quantile(mean, scale, level)
    assert quantile.shape == (30, 2)
    reached = torch.distributions.Normal(mean, scale).cdf(quantile).mean(0)
    torch.testing.assert_close(reached, torch.full_like(reached, level), rtol=0, atol=1e-9)
