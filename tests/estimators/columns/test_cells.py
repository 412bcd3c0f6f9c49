"""Tests of cells as numbers, booleans or texts."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.estimators.columns import Cells
from tests.estimators.columns.places import at, texts


@pytest.mark.parametrize(
    "token", ["", "  ", "NA", "N/A", "NaN", "nan", "NAN", "null", "NULL", "?", "#N/A", "<NA>", " NA "]
)
def test_missing_tokens_are_no_numbers_and_no_categories(token):
    assert np.isnan(Cells(texts(token), "a", at).numbers()).all()
    assert Cells(texts(token), "a", at).labels() == [None]


def test_a_number_that_means_no_value_does_so_however_it_is_stored():
    for values in (texts("-999", "1", "-999.0"), pa.array([-999, 1, -999]), pa.array([-999.0, 1.0, -999.0])):
        numbers = Cells(values, "a", at, ("", "-999")).numbers()
        np.testing.assert_array_equal(numbers, [np.nan, 1.0, np.nan])


@given(st.floats(-1e100, 1e100))
@settings(max_examples=200, deadline=None)
def test_numbers_are_read_to_the_last_bit(value):
    assert Cells(texts(repr(value), f" {value!r} "), "a", at).numbers().tolist() == [value, value]


@pytest.mark.parametrize("text", ["1,5", "0x10", "1_000", "1 000", "--1", "1e", "one", "1d5", "+-1", "٣", "½"])
def test_what_is_no_number_is_named_with_its_row(text):
    with pytest.raises(ValueError, match=r"row 2, column 'a': must be a number written as 1234.5; got "):
        Cells(texts("1", "NA", text, "2", "x"), "a", at).numbers()


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e101])
def test_numbers_must_be_finite(value):
    for values in (pa.array([0.0, value]), texts("0", repr(value))):
        with pytest.raises(ValueError, match="row 1, column 'a': must be a finite number"):
            Cells(values, "a", at).numbers()


def test_classes_have_one_spelling():
    assert Cells(texts("1", "1.0", "01", "True", "x "), "a", at).labels() == ["1", "1", "01", "true", "x"]
    assert Cells(pa.array([1.0, 2.5]), "a", at).labels() == ["1", "2.5"]
    assert Cells(pa.array([True, None]), "a", at).labels() == ["true", None]
