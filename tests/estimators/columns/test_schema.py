"""Tests of schemas."""

from dropbayes.estimators.columns import Column, Schema
from dropbayes.estimators.columns.notation import Notation
from dropbayes.estimators.columns.schema import as_json, from_json


def test_a_schema_comes_back_from_json():
    schema = Schema(
        (Column("a", "number", 1.5, (), True), Column("ü", "category", 0.0, ("x", "="), False), Column("b", "boolean"),
         Column("n", "number", 2.0, notation=Notation(",", " "), low=-1.0, high=3.0),
         Column("d", "date", 18000.0, date_format="%d.%m.%Y", parts=("year", "season"), low=1.0, high=2.0)),
        "y", "classification", {"id": "as asked"}, ("", "-"), Notation(",", ".", "%"),
    )  # fmt: skip
    assert from_json(as_json(schema)) == schema
