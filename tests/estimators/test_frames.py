"""Tests of data frames: as tables and back, and with categories and dates against the same rows encoded by hand."""

import datetime

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from dropbayes.estimators.frames import as_frame, as_table, frame_inputs, frame_schema, is_mixed_frame

SMALL = {"drop_prob": 0.05, "n_steps": 60, "n_networks": 2, "random_state": 0}
PLAIN = SMALL | {"noise": "constant"}  # which is quick to fit


def columns(n: int = 60) -> dict:
    source = np.random.default_rng(0)
    return {
        "size": source.normal(size=n),
        "colour": source.choice(["blue", "green", "red"], size=n).tolist(),
        "sold": source.random(n) > 0.5,
    }


def frame(kind: str):
    if kind == "pandas":
        return pd.DataFrame(columns()).astype({"colour": "category"})
    return pl.DataFrame(columns()).with_columns(pl.col("colour").cast(pl.Categorical))


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_a_frame_predicts_as_its_columns_encoded_by_hand(kind):
    table = columns()
    one_hot = [np.array(table["colour"]) == text for text in ("blue", "green", "red")]
    x = np.column_stack([table["size"], *one_hot, table["sold"]]).astype(float)
    y = table["size"] + 3 * one_hot[2]
    by_frame = DropoutRegressor(**PLAIN).fit(frame(kind), y)
    np.testing.assert_array_equal(by_frame.predict(frame(kind)), DropoutRegressor(**PLAIN).fit(x, y).predict(x))
    assert list(by_frame.feature_names_in_) == ["size", "colour", "sold"] and by_frame.n_features_in_ == 3


def test_numbers_that_pandas_calls_categories_are_categories():
    data = pd.DataFrame({"floor": pd.Categorical([1, 2, 3] * 10), "size": np.arange(30.0)})
    assert frame_schema(data).inputs == ("floor = 1", "floor = 2", "floor = 3", "size")


def test_dates_become_their_parts():
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(days=9 * k) for k in range(80)]
    data = pl.DataFrame({"day": days, "size": np.arange(80.0)})
    names = frame_schema(data).inputs
    assert names[-1] == "size" and any(name.startswith("day: ") for name in names[:-1])


def test_a_classifier_reads_frames():
    labels = np.array(columns()["colour"]) == "red"
    assert DropoutClassifier(**SMALL).fit(frame("pandas"), labels).score(frame("pandas"), labels) == 1


def test_frames_of_numbers_are_left_to_scikit_learn():
    assert not is_mixed_frame(pd.DataFrame({"a": [1, 2], "b": [True, False]}))
    assert not is_mixed_frame(pl.DataFrame({"a": [1, 2], "b": [True, False]}))
    assert not is_mixed_frame(np.ones((2, 2)))


def test_missing_cells_are_learned_from_or_refused():
    data = pd.DataFrame({"colour": ["red", None, "blue"] * 10, "size": np.arange(30.0)})
    with pytest.raises(ValueError, match=r"10 of column 'colour'.*missing"):
        DropoutRegressor(missing="error", **PLAIN).fit(data, data["size"])
    complete = DropoutRegressor(**PLAIN).fit(data.fillna("green"), data["size"])
    with pytest.raises(ValueError, match=r"10 of column 'colour'.*missing"):
        complete.predict(data)
    model = DropoutRegressor(**PLAIN).fit(data, data["colour"].isna().astype(float))
    absent, present = (
        model.predict(data.assign(colour=None).astype({"colour": object})),
        model.predict(data.assign(colour="red")),
    )
    assert (absent > present).all()


def test_a_new_category_is_refused_by_its_name():
    model = DropoutRegressor(**PLAIN).fit(frame("pandas"), columns()["size"])
    new = frame("pandas").astype({"colour": str}).assign(colour="violet")
    with pytest.raises(ValueError, match=r"'violet' was not seen in training.*`missing=.learn.`"):
        model.predict(new)


@pytest.mark.parametrize(
    "data",
    [
        pd.DataFrame(np.ones((20, 2)), columns=["a", "a"]),
        pd.DataFrame([[1.0, "x"]] * 20, columns=["a", "a"]),
        pd.DataFrame([[1.0, "x"]] * 20, columns=["a", 1]).rename(columns={"a": "1"}),
        pa.table([[1.0], [2.0]], names=["a", "a"]),
    ],
)
def test_columns_of_one_name_are_refused(data):
    with pytest.raises(ValueError, match=r"a name of its own for each column; 2 are called '[a1]'. Rename"):
        DropoutRegressor(**PLAIN).fit(data, np.arange(len(data)))


def test_texts_among_numbers_are_named_as_in_a_file():
    data = pd.DataFrame({"size": [*range(29), "12 m"], "age": np.arange(30.0)})
    for frame in (data, data.to_dict("list")):
        with pytest.raises(ValueError, match="'size' that has '12 m' among numbers at `X`, row 29"):
            frame_schema(frame)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, pd.NaT])
def test_a_missing_cell_among_texts_and_numbers_stays_missing(missing):
    assert as_table(pd.DataFrame({"a": [1, "x", missing]}))["a"].to_pylist() == ["1", "x", None]


def test_durations_and_times_of_day_are_numbers_of_days():
    spans = [datetime.timedelta(hours=12 * k) for k in range(30)]
    times = [datetime.time(k % 24, 30) for k in range(30)]
    for data in (pd.DataFrame({"span": spans, "time": times}), pl.DataFrame({"span": spans, "time": times})):
        x = frame_inputs(frame_schema(data), data, learn_missing=False)
        np.testing.assert_allclose(x, np.column_stack([np.arange(30) / 2, (np.arange(30) % 24 + 0.5) / 24]))


def test_sparse_columns_and_intervals_of_pandas_are_read():
    size = np.repeat([0.0, 1.5, 0.0], 10)
    data = pd.DataFrame({"size": pd.arrays.SparseArray(size), "part": pd.cut(np.arange(30.0), 3, labels=None)})
    data.loc[0, "part"] = np.nan
    schema = frame_schema(data)
    assert [(column.kind, len(column.categories), column.flagged) for column in schema.columns] == [
        ("number", 0, False), ("category", 3, True)
    ]  # fmt: skip
    np.testing.assert_array_equal(frame_inputs(schema, data, learn_missing=True)[:, 0], size)


@pytest.mark.parametrize(("often", "first"), [("M", "2011-01-01"), ("Q", "2011-01-01"), ("W", "2010-12-27")])
def test_periods_of_pandas_are_dates(often, first):
    spans = pd.Series(pd.period_range("2011-01", periods=30, freq=often)).where(np.arange(30) != 7)
    schema = frame_schema(pd.DataFrame({"when": spans}))
    (column,) = schema.columns
    assert column.kind == "date" and column.flagged
    assert str(np.datetime64(int(column.low), "D")) == first
    assert frame_inputs(schema, pd.DataFrame({"when": spans}), learn_missing=True)[7, -1] == 1


def test_numbers_of_half_the_precision_beside_texts_are_read():
    size, kind = np.arange(30.0), ["a", "b", "c"] * 10
    for half in (pd.DataFrame({"size": size.astype(np.float16), "kind": kind}), {"size": pa.array(size, pa.float16())}):
        schema = frame_schema(half)
        assert schema.columns[0].kind == "number"
        np.testing.assert_array_equal(frame_inputs(schema, half, learn_missing=False)[:, 0], size)


def test_tensors_of_half_the_precision_are_read():
    x = torch.linspace(-1, 1, 30)[:, None].bfloat16()
    by_half = DropoutRegressor(**PLAIN).fit(x, x[:, 0])
    np.testing.assert_array_equal(
        by_half.predict(x), DropoutRegressor(**PLAIN).fit(x.float(), x[:, 0].float()).predict(x.float())
    )


def test_an_arrow_table_with_texts_is_read_as_the_frame_it_is():
    table = pa.table(columns())
    assert is_mixed_frame(table) and not is_mixed_frame(table.select(["size", "sold"]))
    by_table, by_frame = (DropoutRegressor(**PLAIN).fit(x, columns()["size"]) for x in (table, table.to_pandas()))
    np.testing.assert_array_equal(by_table.predict(table), by_frame.predict(table.to_pandas()))


def test_masked_cells_are_missing():
    x = np.ma.masked_array(np.arange(30.0)[:, None], mask=np.arange(30)[:, None] > 25, fill_value=1e20)
    model = DropoutRegressor(**PLAIN).fit(x, np.arange(30.0))
    assert model.missing_values_ is not None
    np.testing.assert_array_equal(model.predict(x), model.predict(x.filled(np.nan)))


def test_a_column_that_teaches_nothing_is_named():
    data = pd.DataFrame({"name": [f"n{k}" for k in range(60)], "size": np.arange(60.0)})
    with pytest.warns(UserWarning, match="'name' of `X` is not learned from: an identifier"):
        assert frame_schema(data).inputs == ("size",)


def test_a_model_of_a_frame_is_the_same_after_saving(tmp_path):
    model = DropoutRegressor(**PLAIN).fit(frame("polars"), columns()["size"])
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(
        DropoutRegressor.load(tmp_path / "model").predict(frame("polars")), model.predict(frame("polars"))
    )


COLUMNS = {"a": [1, 2], "b": ["x", "y"]}


def frames():
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


def test_an_error_about_rows_names_the_argument_of_the_estimator():
    model = DropoutRegressor(**PLAIN).fit(frame("pandas"), columns()["size"])
    with pytest.warns(UserWarning, match="feature names"), pytest.raises(TypeError, match=r"`X` must be .* got list"):
        model.predict([[1.0, "red", True]])
    with pytest.raises(TypeError, match=r"`X` must be a data frame; got a LazyFrame.*X\.collect"):
        model.fit(frame("polars").lazy(), columns()["size"])


def test_a_batch_of_arrow_is_read_as_a_table():
    batch = pa.RecordBatch.from_pydict(columns())
    assert is_mixed_frame(batch) and as_table(batch).to_pydict() == pa.table(columns()).to_pydict()


def test_objects_that_are_no_numbers_are_read_as_dates_or_left_out():
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(days=9 * k) for k in range(80)]
    data = pd.DataFrame({"day": days, "size": np.arange(80.0), "pair": [[1, 2]] * 80})
    assert is_mixed_frame(data)
    with pytest.warns(UserWarning, match="'pair' of `X` is not learned from: values of type list"):
        assert [column.kind for column in frame_schema(data).columns] == ["date", "number"]


def test_an_object_that_stands_for_no_number_is_missing():
    numbers = pd.Series([1.5, pd.NA, 2, None] * 20, dtype=object)
    x = pd.DataFrame({"a": numbers, "b": np.arange(80.0)})
    assert frame_schema(x).columns[0].flagged and is_mixed_frame(x) and not is_mixed_frame(x[["b"]])
    assert np.isfinite(DropoutRegressor(**PLAIN).fit(x, x["b"]).predict(x)).all()


def test_labels_may_be_an_array_of_pandas_texts():
    labels = pd.array(columns()["colour"], dtype="string")
    assert DropoutClassifier(**SMALL).fit(frame("pandas"), labels).classes_.tolist() == ["blue", "green", "red"]


@pytest.mark.parametrize("kind", [">f8", ">i4", ">U5", ">M8[s]"])
def test_bytes_in_the_order_of_other_machines_are_read(kind):
    values = np.array([18000, 18001, 18002]).astype(kind[1:]).astype(kind)
    same = values.astype(kind[1:])
    for given in (values, pd.Series(values)):
        assert as_table({"a": given})["a"].to_pylist() == as_table({"a": same})["a"].to_pylist()
