"""Tests of the delimiter that the first lines of a table show."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.app.tables.delimiters import delimiter_of

CELL = st.text(st.sampled_from('ab,;|\t"0. \n'), max_size=5)


@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=2, max_size=6), st.sampled_from(",;\t|"))
@settings(max_examples=200, deadline=None)
def test_a_table_as_python_writes_it_is_read_with_its_delimiter_if_no_other_fits(rows, delimiter):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("x", "y", "z"), *rows])
    assert delimiter_of(out.getvalue()) == delimiter


@pytest.mark.parametrize(("text", "delimiter"), [
    ("a;b\n1,5;2,5\n", ";"), ("a,b\n1;2,3\n", ","), ("one\n1\n2\n", ","), ("a|b\n1|2\n", "|"), ("", ","),
    ("a;b;c\n1;2\n3;4;5\n", ";"), ("name;note\nx;yes, please\n", ";"),
])  # fmt: skip
def test_the_delimiter_of_what_people_write(text, delimiter):
    assert delimiter_of(text) == delimiter
