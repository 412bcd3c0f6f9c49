"""Columns of any kind are read, and what a model cannot read is refused."""

import numpy as np
import pyarrow as pa
import pytest

import dropbayes as db


def same_bits(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_columns_may_be_of_any_array_kind(models, columns):
    predictor = db.Predictor.load(models / "numbers")
    whole = predictor(columns)
    arrow = {name: pa.array(values) for name, values in columns.items()}
    plain = {name: np.asarray(values)[:, None] for name, values in columns.items()}
    lists = {name: [None if v != v else v for v in values] for name, values in columns.items()}
    assert all(same_bits(predictor(other), whole) for other in (arrow, plain, lists))


REFUSED = {
    "a column is missing": ({"city": ["Oslo"], "new": [True]}, "lacks 'size'"),
    "columns of different lengths": ({"size": [1.0, 2.0], "city": ["Oslo"], "new": [True]}, "equally long"),
    "a new category": ({"size": [1.0], "city": ["Paris"], "new": [True]}, "row 0, column 'city'"),
    "a text for a number": ({"size": ["tall"], "city": ["Oslo"], "new": [True]}, "row 0, column 'size': must be a number"),
    "an infinity": ({"size": [np.inf], "city": ["Oslo"], "new": [True]}, "must be a finite number"),
    "a matrix in a column": ({"size": np.ones((2, 2)), "city": ["Oslo"], "new": [True]}, "one value per row"),
    "half a character": ({"size": [1.0], "city": ["\ud800"], "new": [True]}, "cannot be read"),
    "far away": ({"size": [1e60], "city": ["Oslo"], "new": [True]}, "row 0: the prediction is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_cannot_read_is_refused(models, case):
    columns, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        db.Predictor.load(models / "numbers")(columns)
