"""Tests of numbers and names as text."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.runtime import formatting


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_a_name_is_never_empty_never_steers_and_never_breaks_a_line(text):
    shown = formatting.printable_name(text, max_length=30)
    assert 0 < len(shown) <= 30 and not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", shown)
    shown.encode("utf-8")
    assert formatting.printable_name("plain name") == "plain name"
    assert formatting.printable_name("a\u202eb") == r"a\u202eb" and formatting.printable_name("") == "(empty)"
    assert formatting.printable_name("x" * 100, max_length=5) == "xx…xx"


@given(st.floats(-1e300, 1e300), st.integers(1, 6))
def test_a_number_reads_back_to_its_digits(value, digits):
    text = formatting.number(value, digits=digits).replace("−", "-").replace(",", "")
    assert float(text) == pytest.approx(value, rel=0.51 * 10.0 ** (1 - digits), abs=1e-300)


def test_the_largest_number_is_rounded_up_all_the_same():
    assert formatting.number(1.79e308, digits=1) == "2e308"


def test_a_score_of_an_impossible_outcome_is_minus_infinity():
    assert formatting.number(-math.inf) == "−∞"
    assert formatting.score_text(-math.inf, math.nan) == "−∞"
    assert formatting.score_text(1.23456, 0.0312) == "1.235 ± 0.031"
    assert formatting.score_text(0.0345, percent=True) == "3.45 %"


@given(st.floats(-1e300, 1e300))
def test_a_plain_number_is_the_same_number_in_ascii(value):
    text = formatting.plain_number(value)
    assert text.isascii() and "." not in text[-1:]
    assert float(text.replace(",", "")) == pytest.approx(value, rel=5.1e-4, abs=1e-300)


def test_a_plain_number_without_a_finite_value_is_named():
    assert [formatting.plain_number(value) for value in (math.nan, math.inf, -math.inf)] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formatting.number(1234.56), "1,235"),
        (formatting.number(0.012345), "0.0123"),
        (formatting.number(-0.0), "0"),
        (formatting.number(3.2e-9), "3.2e−9"),
        (formatting.number(-math.inf), "−∞"),
        (formatting.plain_number(30870.2), "30,870"),
        (formatting.plain_number(0.0000209681), "2.097e-05"),
        (formatting.plain_number(-1234567.8), "-1,234,568"),
        (formatting.plain_number(12.0), "12"),
        (formatting.fixed_point(135.57, spread=61.8), "135.6"),
        (formatting.fixed_point(0.1234567, spread=0.02), "0.1235"),
        (formatting.fixed_point(-3, spread=1e-9), "−3"),
        (formatting.count(1, "row"), "1 row"),
        (formatting.count(1200, "row"), "1,200 rows"),
        (formatting.percent(0.5), "50 %"),
        (formatting.percent(0.034), "3.4 %"),
        (formatting.percent(0.9991), "99.9 %"),
        (formatting.percent(1.0), "100 %"),
        (formatting.percent(0.0), "0 %"),
    ],
)
def test_numbers_are_written_as_people_write_them(written, expected):
    assert written == expected


@pytest.mark.parametrize("length", [100, 1000])
def test_long_names_that_differ_at_their_end_alone_are_shown_apart(length):
    one, other = (formatting.printable_name("x" * length + end) for end in ("_mean", "_max"))
    assert one.endswith("…" + "x" * 35 + "_mean") and other.endswith("_max") and len(one) == len(other) == 80


def test_a_table_is_text_with_its_cells_flush():
    table = formatting.Table("2 rows", [("rmse", "0.5"), ("mae", "0.25")], align="<>", notes=["Good."])
    assert table.text() == "2 rows\nrmse   0.5\nmae   0.25\nGood."
