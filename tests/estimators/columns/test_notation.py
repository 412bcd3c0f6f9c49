"""Tests of numbers as people write them: each notation is found, and reads back what it wrote."""

import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.estimators.columns import Cells
from dropbayes.estimators.columns.notation import PLAIN, Notation, mixed_currencies, notation_of
from tests.cases import slow_except
from tests.estimators.columns.places import at, texts

NOTATIONS = [Notation(decimal, thousands, sign) for decimal, thousands in ((".", ""), (".", ","), (",", ""), (",", "."),
             (".", " "), (",", " "), (".", "'")) for sign in ("", "%", "€", "CHF")]  # fmt: skip
# Every separator without a sign, and every sign beside two of them.
PLAIN_OR_SIGNED = {*NOTATIONS[::4], *NOTATIONS[4:8], *NOTATIONS[20:24]}


def written(value: float, notation: Notation) -> str:
    text = f"{value:,.2f}" if notation.thousands else f"{value:.2f}"
    text = text.replace(",", "T").replace(".", notation.decimal).replace("T", notation.thousands)
    return {"%": f"{text}%", "€": f"€{text}", "CHF": f"{text} CHF"}.get(notation.sign, text)


@pytest.mark.parametrize("notation", slow_except(NOTATIONS, *PLAIN_OR_SIGNED), ids=lambda n: n.example)
@given(st.lists(st.integers(100_001, 10**11).map(lambda n: (10 * n + 5) / 1000), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_a_notation_is_found_and_reads_what_it_wrote(notation, values):
    values = [*values, 1234567.25]  # long enough to show its separators
    cells = texts(*(written(value, notation) for value in values))
    assert notation_of(cells) == notation
    assert Cells(cells, "a", at).numbers(notation).tolist() == [round(value, 2) for value in values]


@pytest.mark.parametrize(("cells", "notation"), [
    (["1", "2.5e3", "-.5"], PLAIN), (["1,000", "49,000"], Notation(".", ",")), (["1,50", "2,5"], Notation(",", "")),
    (["7%", "12 %"], Notation(".", "", "%")), (["$475,639.00"], Notation(".", ",", "$")), (["475639,0"], Notation(",", "")),
    (["1.234,5", "2"], Notation(",", ".")), (["1\u202f234,5"], Notation(",", " ")), (["EUR 5", "7 EUR"], Notation(".", "", "EUR")),
])  # fmt: skip
def test_the_notation_of_what_people_write(cells, notation):
    assert notation_of(texts(*cells)) == notation


@pytest.mark.parametrize(
    "cells",
    [["one"], ["1", "7%"], ["1,5", "1.5.2"], ["12-3"], ["1,23,456"], ["5 kg"], ["%"], ["$"], ["USD 5", "7 EUR"]],
)
def test_what_is_no_number_has_no_notation(cells):
    assert notation_of(texts(*cells)) is None


@pytest.mark.parametrize("notation", [PLAIN, Notation(",", "."), Notation(sign="%"), Notation(sign="€")])
def test_the_minus_sign_of_typesetters_is_a_minus(notation):
    values = [-1234.25, 7.5, -0.125]
    plain = [written(value, notation) for value in values]
    cells = texts(*(cell.replace("-", "\u2212") for cell in plain))
    assert notation_of(cells) == notation_of(texts(*plain))
    numbers = [Cells(column, "a", at).numbers(notation).tolist() for column in (cells, texts(*plain))]
    assert numbers[0] == numbers[1] and numbers[0][0] < 0 < numbers[0][1]


def test_a_notation_shows_an_example_and_writes_numbers_as_programs_do():
    assert (Notation(",", ".", "%").example, Notation(",", ".", "€").example) == ("1.234,5%", "1.234,5 €")
    assert Notation(",", ".").plain(pa.array(["1.234,5", "x.y"])).to_pylist() == ["1234.5", "x.y"]


def test_a_known_decimal_mark_settles_what_is_ambiguous():
    cells = texts("1,000", "2,500")
    assert notation_of(cells).plain(cells).to_pylist() == ["1000", "2500"]
    assert notation_of(cells, decimal=",").plain(cells).to_pylist() == ["1.000", "2.500"]


def test_cells_that_do_not_match_are_left_to_be_refused():
    assert Notation(".", ",").plain(pa.array(["1,2,3", None])).to_pylist() == ["1,2,3", None]


@pytest.mark.parametrize(
    ("notation", "cell"),
    [
        (Notation(","), "1.234"),
        (Notation(",", " "), "-12.345"),
        (Notation(",", ".", "€"), "1.234"),
        (Notation(sign="%"), "0.07"),
        (Notation(sign="%"), "7"),
    ],
)
def test_what_a_program_would_read_as_another_number_is_refused(notation, cell):
    how = re.escape(f"must be a number written as {notation.example}, as in training; got '{cell}'.")
    with pytest.raises(ValueError, match=how):
        Cells(texts(cell), "a", at).numbers(notation)


def test_what_programs_write_is_read_where_it_means_one_number():
    numbers = Cells(texts("1.5", "12", "1234.567", "0.125"), "a", at).numbers(Notation(","))
    assert numbers.tolist() == [1.5, 12, 1234.567, 0.125]
    assert Cells(texts("1.234", "€5"), "a", at).numbers(Notation(sign="€")).tolist() == [1.234, 5]


def test_amounts_in_several_currencies_are_no_numbers_to_compare():
    assert mixed_currencies(texts("$5", "€7", "-3 $")) == ["$", "€"]
    assert mixed_currencies(texts("$5", "$7")) == mixed_currencies(texts("$5", "soon €7")) == []


def test_an_amount_in_another_currency_than_that_of_training_is_refused():
    with pytest.raises(ValueError, match=r"written as 1234\.5 €, as in training; got '\$7'"):
        Cells(texts("€5", "$7"), "price", at).numbers(Notation(sign="€"))


def test_models_without_a_recorded_currency_read_any():
    assert Cells(texts("€5", "$7"), "price", at).numbers(Notation(sign="currency")).tolist() == [5, 7]


def test_a_number_below_one_has_a_decimal_comma_and_no_thousands():
    assert notation_of(pa.array(["12,345", "0,671", "-1,798"])) == Notation(",", "")
    assert notation_of(pa.array(["12,345", "671", "-1,798"])) == Notation(".", ",")


@pytest.mark.parametrize("unit", [" kg", "m²", " °C", " km/h", "\u00a0kWh"])
def test_quantities_of_one_unit_are_numbers(unit):
    cells = texts(*(f"{n / 2}{unit}" for n in range(40)))
    notation = notation_of(cells)
    assert notation == Notation(".", "", unit.strip())
    numbers = Cells(pa.concat_arrays([cells, texts("7.25")]), "a", at).numbers(notation)
    assert numbers.tolist() == [*(n / 2 for n in range(40)), 7.25]
    with pytest.raises(ValueError, match=r"must be a number written as 1234.5 .*; got '3 lb'"):
        Cells(texts("3 lb"), "a", at).numbers(notation)


def test_units_that_differ_and_few_different_quantities_are_none():
    assert notation_of(texts(*(f"{n} {'kg' if n else 'lb'}" for n in range(40)))) is None
    assert notation_of(texts(*(["2WD", "4WD"] * 20))) is None
    assert notation_of(texts(*(f"{n}A{n}" for n in range(40)))) is None


def test_times_and_durations_are_numbers_of_days():
    times = [f"{hour:02}:{minute:02}" for hour in range(24) for minute in (0, 30)]
    notation = notation_of(texts(*times))
    assert notation == Notation(sign=":") and notation.example == "12:30"
    assert notation_of(texts(*times[:20])) is None  # few different texts are categories
    assert notation_of(texts(*times, "24:60")) is None and notation_of(texts(*times, "soon")) is None
    cells = Cells(texts("12:00", "6:00:00", None, "36:00", "0:00:21.6", "0.5"), "a", at)
    assert cells.numbers(notation).tolist()[:2] + cells.numbers(notation).tolist()[3:] == [0.5, 0.25, 1.5, 0.00025, 0.5]
    with pytest.raises(ValueError, match="must be a number written as 12:30, as in training; got '12:61'"):
        Cells(texts("12:61"), "a", at).numbers(notation)
