"""Tests of cells as numbers, booleans or texts."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.estimators.columns import labels, numbers
from tests.estimators.columns.places import at, texts


@pytest.mark.parametrize("token", ["", "  ", "NA", "N/A", "NaN", "nan", "NAN", "null", "NULL", "?", " NA "])
def test_missing_tokens_are_no_numbers_and_no_categories(token):
    assert np.isnan(numbers(texts(token), "a", at=at)).all()
    assert labels(texts(token)) == [None]


@given(st.floats(-1e100, 1e100))
@settings(max_examples=200, deadline=None)
def test_numbers_are_read_to_the_last_bit(value):
    assert numbers(texts(repr(value), f" {value!r} "), "a", at=at).tolist() == [value, value]


@pytest.mark.parametrize("text", ["1,5", "0x10", "1_000", "1 000", "--1", "1e", "one", "1d5", "+-1", "٣", "½"])
def test_what_is_no_number_is_named_with_its_row(text):
    with pytest.raises(ValueError, match="row 2, column 'a': must be a number; got "):
        numbers(texts("1", "NA", text, "2", "x"), "a", at=at)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e101])
def test_numbers_must_be_finite(value):
    for values in (pa.array([0.0, value]), texts("0", repr(value))):
        with pytest.raises(ValueError, match="row 1, column 'a': must be a finite number"):
            numbers(values, "a", at=at)


def test_classes_have_one_spelling():
    assert labels(texts("1", "1.0", "01", "True", "x ")) == ["1", "1", "1", "true", "x"]
    assert labels(pa.array([1.0, 2.5])) == ["1", "2.5"]
    assert labels(pa.array([True, None])) == ["true", None]
