"""Tests of what columns mean."""

import pyarrow as pa
import pytest

from dropbayes.estimators.columns import Cells, Column, LeftOut, column_of
from dropbayes.estimators.columns.inference import kind_of
from dropbayes.estimators.columns.schema import column_values
from tests.estimators.columns.places import at, texts


@pytest.mark.parametrize(("values", "kind"), [
    (texts("1", "2.5", "NA"), "number"), (texts("a", "b"), "category"), (texts("true", "FALSE", ""), "boolean"),
    (texts("1", "a", "b"), "category"), (texts("01007", "20110"), "category"), (texts("yes", "No"), "boolean"),
    (texts("2020-01-31", ""), "date"), (texts("2021-03", "2021-12", ""), "date"), (texts("2021-W07", "2021-W08"), "date"), (texts("2010-11", "2011-12"), "category"), (pa.array([1, 2], pa.date32()), "date"), (texts("$1,200.50", "$3"), "number"), (pa.array([1, 2]), "number"), (pa.array([True, None]), "boolean"),
    (pa.array(["a", "b"]).dictionary_encode(), "category"), (texts("0", "1"), "number"), (pa.nulls(2), "number"),
    (pa.array([None, 1], pa.decimal128(5, 2)), "number"),
])  # fmt: skip
def test_the_kind_of_a_column(values, kind):
    assert kind_of(Cells(values, "a", at)) == kind


@pytest.mark.parametrize("values", [
    texts("20210401", "20210430", ""), pa.array([20210401, None, 20210430]), pa.array([20210401.0, float("nan"), 20210430.0]),
])  # fmt: skip
def test_days_without_separators_are_dates_where_the_name_says_so(values):
    column = column_of(Cells(values, "sale_date", at))
    assert (column.kind, column.date_format, column.low, column.high) == ("date", "%Y%m%d", 18718.0, 18747.0)
    assert column.flagged and column_values(column, Cells(pa.array([20210402]), "sale_date", at)).tolist() == [18719.0]
    assert {kind_of(Cells(values, name, at)) for name in ("order_id", "sale")} == {"number"}


def test_a_period_that_does_not_exist_is_refused_with_how_others_are_written():
    column = column_of(Cells(texts("2021Q3", "2021Q4"), "quarter", at))
    with pytest.raises(
        ValueError, match="row 0, column 'quarter': must be a date written as 2020Q4, as in training; got '2021Q5'"
    ):
        column_values(column, Cells(texts("2021Q5"), "quarter", at))


@pytest.mark.parametrize(("values", "reason"), [
    (texts("", "NA"), "no value in any row"), (texts("3", "3.0"), "3 in every row"),
    (texts("1000000000000000001", "1000000000000000002"), "numbers too large to be told apart"), (texts("a", "a"), "'a' in every row"),
])  # fmt: skip
def test_columns_that_teach_nothing_are_left_out_with_the_reason(values, reason):
    assert column_of(Cells(values, "a", at)) == LeftOut(reason)


@pytest.mark.parametrize(
    ("values", "reason"), [(("1", "2"), "an index without a name"), (("", ""), "no value in any row")]
)
def test_a_column_without_a_name_is_an_index_unless_it_is_empty(values, reason):
    assert column_of(Cells(texts(*values), "unnamed_2", at)) == LeftOut(reason)


def test_only_a_generated_name_is_that_of_an_index():
    for name, read in (("unnamed_road", True), ("unnamed_2", False), ("Unnamed: 0", False)):
        assert isinstance(column_of(Cells(texts("1", "2"), name, at)), Column) == read


def test_a_text_among_numbers_of_any_notation_is_a_problem():
    comma = [f"{row},5" for row in range(30)]
    for column, odd in (
        ([*comma, "-"], "'-' among numbers at row 30"),
        (["1%", "2", *"45"], "'1%' among numbers at row 0"),
    ):
        assert odd in column_of(Cells(texts(*column), "a", at)).message


@pytest.mark.parametrize("codes", ["FN", "TY", "YNF", "TF1"])
def test_letters_of_two_pairs_are_codes_and_no_booleans(codes):
    assert column_of(Cells(texts(*codes), "a", at)) == Column("a", "category", categories=tuple(sorted(codes)))


@pytest.mark.parametrize("words", [("Y", "n"), ("T", "F"), ("yes", "N", "True"), ("t", "no"), ("true", "0", "1")])
def test_words_and_letters_of_one_pair_are_booleans(words):
    assert column_of(Cells(texts(*words), "a", at)).kind == "boolean"


@pytest.mark.parametrize(
    "values", [pa.array([1, 2, 3, 4]), pa.array([18461, 18462], pa.date32()), texts("0.5", "1", "", "7")]
)
def test_a_missing_value_is_taken_as_one_that_occurs(values):
    column = column_of(Cells(values, "a", at))
    assert column.fill in column_values(column, Cells(values, "a", at))


def test_a_constant_that_is_sometimes_missing_teaches_something():
    assert column_of(Cells(texts("3", "", "3"), "a", at)) == Column(
        "a", "number", fill=3.0, flagged=True, low=3.0, high=3.0
    )
    assert column_of(Cells(texts("x", "", "x"), "a", at)) == Column("a", "category", categories=("x",), flagged=True)


@pytest.mark.parametrize("form", ["({})", "{}-5", "{}/30"])
def test_texts_of_digits_that_are_left_out_are_said_to_be_perhaps_numbers(form):
    found = column_of(Cells(texts(*(form.format(10 + i) for i in range(40))), "a", at))
    what = f"an identifier, or numbers in a notation that is not read (such as {form.format(10)!r})"
    assert found == LeftOut(f"{what}: 40 different texts in 40 rows")
