"""What is equal but for rounding."""

import pytest
import torch

from dropbayes.runtime.rounding import equal_but_for_rounding


@pytest.mark.parametrize("change, same", [(1e-9, True), (1e-6, False)])
def test_rounding_is_measured_by_the_row_and_not_by_a_larger_one_of_its_batch(change, same):
    batch = torch.tensor([1.0, 1e-4])
    assert equal_but_for_rounding(batch[1:] + change, batch[1:], batch) == same


def test_other_shapes_and_other_integers_are_not_equal():
    assert not equal_but_for_rounding(torch.ones(2), torch.ones(1, 2))
    assert not equal_but_for_rounding(torch.tensor([1]), torch.tensor([2]))


def test_numbers_are_compared_with_the_largest_of_their_column():
    table = torch.tensor([[1e6, 0.5], [2e6, 0.25]])
    assert not equal_but_for_rounding(table, table + torch.tensor([0.0, 0.01]))
    assert equal_but_for_rounding(table, table + torch.tensor([1.0, 0.0]))


def test_what_all_rows_have_in_common_is_no_size_of_a_column():
    batch = torch.tensor([[2000.1], [2000.2], [2000.3]])
    for whole in (batch, None):
        assert not equal_but_for_rounding(batch[:2], batch[:2] + 0.02, whole)
        assert equal_but_for_rounding(batch[:2], batch[:2] + 0.002, whole)
    assert equal_but_for_rounding(batch, batch + 0.02, offsets=False)


def test_what_was_computed_in_half_precision_is_compared_in_it():
    batch = torch.tensor([[1.0], [2.0]])
    assert not equal_but_for_rounding(batch, batch * 1.01, offsets=False)
    assert equal_but_for_rounding(batch, batch * 1.01, offsets=False, precision=torch.bfloat16)
    assert not equal_but_for_rounding(batch, batch * 1.2, offsets=False, precision=torch.bfloat16)


def test_infinities_and_nans_are_equal_to_themselves_only():
    value = torch.tensor([[torch.inf, torch.nan, 1.0]])
    assert equal_but_for_rounding(value, value.clone())
    assert not equal_but_for_rounding(value, torch.tensor([[torch.inf, 0.0, 1.0]]))
    assert not equal_but_for_rounding(value, torch.tensor([[-torch.inf, torch.nan, 1.0]]))


@pytest.mark.parametrize(("dtype", "same"), [(torch.float64, False), (torch.float32, True), (torch.bfloat16, True)])
def test_rounding_is_that_of_the_dtype(dtype, same):
    a = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]], dtype=dtype)
    assert equal_but_for_rounding(a, a + torch.tensor(1e-4, dtype=dtype)) == same


def test_complex_and_empty_outputs_are_compared():
    a = torch.complex(torch.ones(2, 2), torch.ones(2, 2))
    assert equal_but_for_rounding(a, a.clone()) and not equal_but_for_rounding(a, a.conj().resolve_conj())
    assert equal_but_for_rounding(torch.ones(0, 2), torch.ones(0, 2))
