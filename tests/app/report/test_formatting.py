"""Tests of numbers and names as text."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.app.report import formatting, measurements


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_a_name_is_never_empty_never_steers_and_never_breaks_a_line(text):
    shown = formatting.name(text, most=30)
    assert 0 < len(shown) <= 30 and not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", shown)
    shown.encode("utf-8")
    assert formatting.name("plain name") == "plain name"


@given(st.floats(-1e300, 1e300), st.integers(1, 6))
def test_a_number_reads_back_to_its_digits(value, digits):
    text = formatting.number(value, digits=digits).replace("−", "-").replace(",", "")
    assert float(text) == pytest.approx(value, rel=0.51 * 10.0 ** (1 - digits), abs=1e-300)


def test_an_impossible_truth_has_minus_infinity_not_a_crash():
    assert formatting.number(-math.inf) == "−∞"
    value, error = measurements.mean_and_error(np.array([-math.inf, 0.0]))
    assert formatting.score_text(value, error) == "−∞"
