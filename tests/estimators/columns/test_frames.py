"""Tests of data frames as tables and back."""

import pandas as pd
import pyarrow as pa
import pytest

from dropbayes.estimators.columns.frames import as_frame, as_table

COLUMNS = {"a": [1, 2], "b": ["x", "y"]}


def frames():
    pl = pytest.importorskip("polars")
    return [COLUMNS, pd.DataFrame(COLUMNS), pl.DataFrame(COLUMNS), pa.table(COLUMNS)]


def test_every_kind_of_frame_is_the_same_table():
    for frame in frames():
        assert as_table(frame).to_pydict() == COLUMNS


def test_columns_come_back_as_the_kind_of_frame_they_were():
    for frame in frames():
        assert type(as_frame({"c": [0.5, 1.5]}, frame)) is type(frame)


def test_the_index_of_a_pandas_frame_is_kept():
    frame = pd.DataFrame(COLUMNS, index=["first", "second"])
    assert as_table(frame).column_names == ["a", "b"]
    assert as_frame({"c": [1, 2]}, frame).index.tolist() == ["first", "second"]


def test_what_is_no_frame_is_refused():
    with pytest.raises(TypeError, match="`frame` must be a data frame"):
        as_table([1, 2])
