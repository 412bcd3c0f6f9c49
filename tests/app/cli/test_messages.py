"""Tests of what the command line says."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropbayes.app.cli.messages import bold, complain, one_line, print_result
from dropbayes.runtime.formatting import count, plain_number


@given(st.floats(1e-4, 9.9e8))
def test_a_number_is_read_back_to_four_digits(value):
    assert float(plain_number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-4)


def test_numbers_have_no_exponent_where_they_can_do_without():
    assert [plain_number(v) for v in (30870.2, 1.682e-09, 0.0, -3.5, 100.0)] == [
        "30,870",
        "1.682e-09",
        "0",
        "-3.5",
        "100",
    ]


def test_a_count_has_its_noun():
    assert [count(n, "column") for n in (0, 1, 2)] == ["0 columns", "1 column", "2 columns"]


def test_details_stand_below_the_error(capsys):
    complain("two\nlines", ["one", "more\x1b[31m"])
    assert capsys.readouterr().err == "dropbayes: error: two lines\n  one\n  more\N{REPLACEMENT CHARACTER}[31m\n"


def test_json_has_no_number_that_json_does_not_know(capsys):
    values = {"a": math.nan, "b": [1.5, math.inf], "c": np.array([1.0, -np.inf]), "d": {"e": np.int64(3)}}
    print_result(values, [], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "c": [1.0, None], "d": {"e": 3}}


def test_a_result_is_text_or_json_and_the_text_is_not_made_for_json(capsys):
    def text():
        yield f"{bold('a[b]')} was written"

    print_result({"a": 1}, text(), as_json=False)
    assert capsys.readouterr().out == "a[b] was written\n"
    made = text()
    print_result({"a": 1}, made, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": 1} and next(made)


@given(st.text())
def test_one_line_is_one_printable_line(text):
    assert one_line(text).isprintable()
