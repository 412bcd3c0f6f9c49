"""Weighted averages over rows."""

import pytest
import torch

from dropbayes.scores.averages import weighted_mean
from tests.scores.samples import normal


def test_a_weighted_mean_is_the_mean_of_repeated_rows_whatever_the_weights_unit():
    values, weight = normal(10, 3), torch.arange(10)
    repeated = values.repeat_interleave(weight, 0).mean().item()
    assert weighted_mean(values, weight).item() == pytest.approx(repeated)
    assert weighted_mean(values, weight * 1e-9).item() == pytest.approx(repeated)
    assert weighted_mean(values, None) == values.mean()
