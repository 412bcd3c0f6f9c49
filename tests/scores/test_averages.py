"""Averages over rows and draws."""

import pytest
import torch

from dropbayes.scores.averages import cumulative_weights, draw_mean, standard_error, weighted_mean, weighted_quantile
from tests.scores.samples import normal


def test_a_weighted_mean_is_the_mean_of_repeated_rows_whatever_the_weights_unit():
    values, weight = normal(10, 3), torch.arange(10)
    repeated = values.repeat_interleave(weight, 0).mean().item()
    assert weighted_mean(values, weight).item() == pytest.approx(repeated)
    assert weighted_mean(values, weight * 1e-9).item() == pytest.approx(repeated)
    assert weighted_mean(values, None) == values.mean()


def test_a_weighted_quantile_is_that_of_repeated_rows_in_any_unit_of_weight():
    values, weight = normal(20), torch.arange(20).remainder(4).double()
    ordered = values.repeat_interleave(weight.long()).sort().values
    for scale in (1e-15, 1.0, 1e15):
        mass = scale * torch.arange(1, len(ordered) + 1).double()
        assert torch.equal(weighted_quantile(values, scale * weight, mass), ordered)
    assert weighted_quantile(values, weight, weight.sum() + 1) == torch.inf


def test_weights_below_a_value_and_up_to_it_differ_by_the_ties():
    values, weight = torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    below, up_to, total = cumulative_weights(values, weight, torch.tensor([2.0, 0.0, 9.0]))
    assert below.tolist() == [2, 0, 10] and up_to.tolist() == [9, 0, 10] and total == 10


def test_the_standard_error_is_the_deviation_of_means_of_such_rows():
    means = normal(4000, 25, seed=3).mean(1)
    errors = torch.stack([standard_error(row) for row in normal(400, 25, seed=4)])
    assert errors.square().mean().sqrt().item() == pytest.approx(means.std().item(), rel=0.05)


def test_the_standard_error_of_rows_of_several_numbers_is_that_of_the_means_of_rows():
    # Outputs in different units, of which the second depends on the first: neither adds to the number of rows.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 50, 1, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 100.0])
    rows[..., 1] += 30 * rows[..., 0]
    claimed = torch.stack([standard_error(one) for one in rows]).mean()
    assert float(rows.mean((1, 2)).std() / claimed) == pytest.approx(1, abs=0.05)


def test_the_mean_over_draws_is_the_mean_and_a_row_has_the_same_bits_alone():
    values = torch.randn(50_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(draw_mean(values), values.mean(0), rtol=1e-12, atol=1e-15)
    assert torch.equal(draw_mean(values[:, 1:2]), draw_mean(values)[1:2])
