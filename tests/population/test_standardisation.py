"""Tests of the standardisation of tasks."""

import pytest
import torch

from dropbayes.population import Task
from dropbayes.population.heads import HEADS
from dropbayes.population.standardisation import moments, stacked_table

F64 = torch.float64


@pytest.mark.parametrize("unit", [1e-200, 1e-11, 1.0, 1e12, 1e200])
def test_units_do_not_matter(unit):
    values = torch.randn(50, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    mean, scale = moments(unit * values, torch.ones(50, dtype=F64))
    torch.testing.assert_close(mean / unit, values.mean(0))
    torch.testing.assert_close(scale / unit, values.std(0, unbiased=False))


def test_a_constant_column_is_left_unscaled_whatever_its_rounding():
    values = torch.full((30, 1), 0.1, dtype=F64) + 1e-17 * torch.arange(30, dtype=F64)[:, None]
    mean, scale = moments(values, torch.ones(30, dtype=F64))
    assert scale.item() == 1.0 and mean.item() == pytest.approx(0.1)


def test_the_scale_of_a_huge_constant_is_above_its_rounding():
    mean, scale = moments(torch.full((30, 1), 1e17, dtype=F64), torch.ones(30, dtype=F64))
    assert mean.item() == pytest.approx(1e17, rel=1e-14) and 1e3 < scale.item() < 1e6
    assert (mean + 0.01 * scale).item() > mean.item()


def test_weights_are_repetitions():
    values = torch.randn(20, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    weight = torch.arange(20) % 3
    for ours, repeated in zip(
        moments(values, weight.double()),
        moments(values.repeat_interleave(weight, 0), torch.ones(int(weight.sum()), dtype=F64)),
        strict=True,
    ):
        torch.testing.assert_close(ours, repeated)


def test_tasks_lie_end_to_end_in_standard_units():
    source = torch.Generator().manual_seed(2)
    tasks = [Task(3 + torch.randn(n, 2, generator=source), 9 * torch.randn(n, generator=source)) for n in (10, 15)]
    table = stacked_table(tasks, HEADS["gaussian"], F64, start=None, n_classes=None)
    assert table.first == [0, 10] and table.n_rows == [10, 15] and len(table.x) == 26
    torch.testing.assert_close(table.y[10:25].std(unbiased=False), torch.ones((), dtype=F64))
    assert table.weight[-1] == 0


@pytest.mark.parametrize("weight", [[-1.0, 1.0], [0.0, 0.0], [1.0], [[1.0], [1.0]], [float("nan"), 1.0]])
def test_what_is_no_weight_is_refused(weight):
    with pytest.raises(ValueError, match="`weight` must"):
        stacked_table(
            [Task(torch.ones(2, 1), torch.ones(2), weight)], HEADS["gaussian"], F64, start=None, n_classes=None
        )
