"""Weighted averages over rows."""

import pytest
import torch

from dropbayes.scores.averages import standard_error, weighted_mean
from tests.scores.samples import normal


def test_a_weighted_mean_is_the_mean_of_repeated_rows_whatever_the_weights_unit():
    values, weight = normal(10, 3), torch.arange(10)
    repeated = values.repeat_interleave(weight, 0).mean().item()
    assert weighted_mean(values, weight).item() == pytest.approx(repeated)
    assert weighted_mean(values, weight * 1e-9).item() == pytest.approx(repeated)
    assert weighted_mean(values, None) == values.mean()


def test_the_standard_error_is_the_deviation_of_means_of_such_rows():
    means = normal(4000, 25, seed=3).mean(1)
    errors = torch.stack([standard_error(row) for row in normal(400, 25, seed=4)])
    assert errors.square().mean().sqrt().item() == pytest.approx(means.std().item(), rel=0.05)
