"""Tests of schemas, and of rows as inputs of a network."""

import re
from dataclasses import replace

import pyarrow as pa
import pytest

from dropbayes.estimators.columns import Cells, Column, Schema, column_of, encode
from dropbayes.estimators.columns.notation import Notation
from dropbayes.estimators.columns.schema import as_json, from_json, list_names
from tests.estimators.columns.places import at, texts


def test_a_schema_comes_back_from_json():
    schema = Schema(
        (Column("a", "number", 1.5, (), True), Column("ü", "category", 0.0, ("x", "="), False), Column("b", "boolean"),
         Column("n", "number", 2.0, notation=Notation(",", " "), low=-1.0, high=3.0),
         Column("d", "date", 18000.0, date_format="%d.%m.%Y", parts=("year", "season"), low=1.0, high=2.0)),
        "y", "classification", {"id": "as asked"}, ("", "-"), Notation(",", ".", "%"),
    )  # fmt: skip
    assert from_json(as_json(schema)) == schema


def test_a_number_is_filled_by_its_median_and_flagged():
    column = column_of(Cells(texts("1", "", "2", "10"), "a", at))
    assert column == Column("a", "number", fill=2.0, flagged=True, low=1.0, high=10.0)
    found = encode(Schema((column,), "y", "regression"), pa.table({"a": ["5", "NA"]}), at=at)
    assert found.x.tolist() == [[5.0, 0.0], [2.0, 1.0]] and found.missing == {"a": 1}


def test_a_category_has_one_input_for_each_text_and_one_for_missing():
    column = column_of(Cells(texts("b", "a", "?", "b"), "c", at))
    assert column.inputs == ("c = a", "c = b", "c is missing")
    schema = Schema((column,), "y", "regression")
    found = encode(schema, pa.table({"c": ["a", "b", "", "z"]}), at=at, allow_new=True)
    assert found.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]] and found.new == {"c": 1}
    with pytest.raises(ValueError, match="row 3, column 'c': 'z' was not seen in training"):
        encode(schema, pa.table({"c": ["a", "b", "", "z"]}), at=at)


@pytest.mark.parametrize(
    ("learned", "given"), [("12", ["1.0", "2"]), (["1.0", "2.0"], "12"), (["True", "x"], ["TRUE", "x"])]
)
def test_a_category_is_known_however_a_program_writes_it(learned, given):
    schema = Schema((column_of(Cells(texts(*learned), "c", at), categorical=True),), "y", "regression")
    assert encode(schema, pa.table({"c": list(given)}), at=at).x.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match="'01' was not seen in training"):
        encode(schema, pa.table({"c": ["01"]}), at=at)


def test_booleans_are_one_and_zero_however_written():
    schema = Schema((column_of(Cells(texts("True", "false", "", "TRUE"), "b", at)),), "y", "regression")
    for values in (["true", "False", "NA"], [True, False, None]):
        assert encode(schema, pa.table({"b": values}), at=at).x.tolist() == [[1, 0], [0, 0], [1, 1]]


def test_values_beyond_the_training_rows_are_marked():
    schema = Schema(
        (Column("a", "number", low=0.0, high=1.0), Column("c", "category", categories=("x",))), "y", "regression"
    )
    encoded = encode(schema, pa.table({"a": ["0", "2", "", "-1"], "c": ["x", "x", "x", "z"]}), at=at, allow_new=True)
    assert encoded.outside_names() == ["", "a", "", "a; c"]


def test_dates_of_another_format_are_refused_with_their_row():
    column = column_of(Cells(texts("2020-01-05", "2021-03-04", "2022-05-06"), "d", at))
    schema = Schema((column,), "y", "regression")
    inputs = encode(schema, pa.table({"d": ["2021-03-04", "NA"]}), at=at).x
    assert inputs[0].tolist() == inputs[1].tolist()  # the median stands in for what is missing
    with pytest.raises(ValueError, match="row 1, column 'd': must be a date written as 2020-12-31"):
        encode(schema, pa.table({"d": ["2021-03-04", "4.3.2021"]}), at=at)


@pytest.mark.parametrize(
    ("learned", "given", "how"),
    [
        (["5.1.2020", "31.3.2021"], ["2021-03-04"], "a date written as 31.12.2020"),
        (["2020-01-05T10:00Z", "2021-03-04T10:00+01:00"], ["2021-03-04"], "a date written as 2020-12-31T23:59:59Z"),
    ],
)
def test_the_form_of_training_is_shown_by_a_date(learned, given, how):
    schema = Schema((column_of(Cells(texts(*learned), "d", at)),), "y", "regression")
    with pytest.raises(ValueError, match=re.escape(f"must be {how}, as in training; got '{given[0]}'.")):
        encode(schema, pa.table({"d": given}), at=at)


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_instants_and_local_times_are_not_taken_for_each_other(zone):
    hours = pa.array([0, 3_600, 90_000])
    same, other = (hours.cast(pa.timestamp("s", z)) for z in (zone, None if zone else "UTC"))
    schema = Schema((column_of(Cells(same, "d", at)),), "y", "regression")
    assert encode(schema, pa.table({"d": same}), at=at).x[0, 0] == 1970
    with pytest.raises(ValueError, match=f"must hold dates with{'' if zone else 'out'} a time zone, as in training"):
        encode(schema, pa.table({"d": other}), at=at)
    earlier = replace(schema, columns=(replace(schema.columns[0], date_format=""),))
    assert encode(earlier, pa.table({"d": other}), at=at).x[0, 0] == 1970


@pytest.mark.parametrize("wrong", [[7, 0], [0.5, 1.0], ["7", "no"]])
def test_a_number_other_than_0_and_1_in_a_column_of_booleans_is_refused(wrong):
    schema = Schema((Column("flag", "boolean", fill=1.0),), "", "regression", {})
    with pytest.raises(ValueError, match=r"column 'flag': must be true or false, as in training; got"):
        encode(schema, pa.table({"flag": wrong}), at=str)
    for known in (
        [True, False, None],
        [1, 0, None],
        [1.0, 0.0, float("nan")],
        ["Yes", "no", ""],
        ["1", "0", ""],
        ["1.0", "0.0", ""],
    ):
        assert encode(schema, pa.table({"flag": known}), at=str).x.ravel().tolist() == [1, 0, 1]


def test_many_names_are_abbreviated():
    assert list_names(["a", "b", "c"], most=2) == "'a', 'b', …"
