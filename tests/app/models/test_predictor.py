"""A predictor is a pure function of columns, and gives a row the same bits however the rows are cut."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dropbayes as db
from dropbayes.app.models.model import Model, load
from tests.command_line import run

N_ROWS = 60


@pytest.fixture(scope="module", params=["numbers", "classes"])
def predictor(request, models):
    return db.Predictor.load(models / request.param, n_draws=13)


def same_bits(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def rows_of(columns, rows):
    return {name: values.iloc[rows] for name, values in columns.items()}


@given(cuts=st.lists(st.integers(0, N_ROWS), max_size=6))
@settings(max_examples=8, deadline=None)
def test_a_row_has_the_same_bits_however_the_rows_are_cut(predictor, columns, cuts):
    edges = [0, *sorted(cuts), N_ROWS]
    parts = [predictor(rows_of(columns, slice(a, b))) for a, b in pairwise(edges)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in predictor.outputs}
    assert same_bits(joined, predictor(columns))


def test_rows_in_another_order_have_the_same_bits(predictor, columns):
    order = np.random.default_rng(0).permutation(N_ROWS)
    whole, mixed = predictor(columns), predictor(rows_of(columns, order))
    assert same_bits(mixed, {name: values[order] for name, values in whole.items()})


def test_rows_that_nobody_gave_are_not_warned_of():
    frame = {"year": list(range(1990, 2050)), "y": [3.0 * year for year in range(60)]}
    settings = {"drop_prob": 0.05, "weight_decay": 1e-4, "n_steps": 100, "n_networks": 1, "noise": "constant"}
    predictor = db.Predictor(Model.fit(frame, target="y", random_state=0, **settings))
    with pytest.warns(UserWarning, match="1 row is predicted beyond the targets"):
        predictor({"x": np.zeros((1, 1))})
    assert predictor.column_names[0] == "mean" and len(predictor.fingerprint) == 64
    assert predictor({"x": np.zeros((0, 1))})["mean"].shape == (0,)


def test_many_rows_are_predicted_a_block_at_a_time(predictor, columns, monkeypatch):
    whole = predictor(columns)
    monkeypatch.setattr("dropbayes.app.models.predictor._MAX_VALUES", 1000)
    assert same_bits(predictor(columns), whole)


def test_eight_threads_get_eight_right_answers(predictor, columns):
    parts = [rows_of(columns, slice(start, start + 7)) for start in range(0, 56, 7)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(predictor, parts))
    assert all(same_bits(one, predictor(part)) for one, part in zip(together, parts, strict=True))


def test_a_pickled_predictor_is_small_and_predicts_the_same_bits(predictor, columns):
    text = pickle.dumps(predictor)
    assert len(text) < 100_000
    assert same_bits(pickle.loads(text)(columns), predictor(columns))


def test_the_numbers_are_those_of_the_command_line(models, columns):
    result = run("predict", models / "numbers", models / "new.csv", "-o", models / "out.csv", "--keep", "none")
    assert result.code == 0
    written = pd.read_csv(models / "out.csv")
    predictor = db.Predictor.load(models / "numbers")
    found = predictor.flat_columns(predictor(columns))
    assert all(np.array_equal(written[f"price_{name}"], values) for name, values in found.items())
    answer = predictor(columns)  # what `flat_columns` makes a table of: the written numbers must be these
    assert np.array_equal(written["price_mean"], answer["mean"].ravel())
    np.testing.assert_allclose(written["price_epistemic_std"] ** 2, answer["epistemic"].ravel(), rtol=1e-9)
    total = written["price_epistemic_std"] ** 2 + written["price_aleatoric_std"] ** 2
    np.testing.assert_allclose(written["price_std"] ** 2, total, rtol=1e-9)


def test_a_table_has_a_column_for_each_class(models, columns):
    predictor = db.Predictor.load(models / "classes")
    flat = predictor.flat_columns(predictor(columns))
    classes = ["probability_high", "probability_low", "probability_middle"]
    assert list(flat) == ["predicted", *classes, "entropy", "mutual_information"]
    assert predictor.column_names == [*flat, "outside"]
    assert np.array_equal(flat["probability_low"], predictor(columns)["probabilities"][:, 1])


def test_settings_change_the_draws_and_leave_the_first_predictor_as_it_was(predictor, columns):
    before = predictor(columns)
    other = predictor.with_settings(seed=99, n_draws=7)
    assert not same_bits(other(columns), before)
    assert same_bits(predictor(columns), before)
    assert same_bits(other.with_settings(seed=predictor.seed, n_draws=13)(columns), before)


def test_no_rows_give_no_rows_of_the_same_shapes(predictor, columns):
    none, one = predictor(rows_of(columns, slice(0, 0))), predictor(rows_of(columns, slice(0, 1)))
    assert {n: (len(v), v.shape[1:]) for n, v in none.items()} == {n: (0, v.shape[1:]) for n, v in one.items()}


def test_the_linear_method_needs_no_draws(predictor, columns, models):
    linear = predictor.with_settings(seed=99, n_draws=2).with_settings(method="linear")
    assert same_bits(linear(columns), predictor.with_settings(method="linear")(columns))
    for setting in ({"n_draws": 5}, {"seed": 3}):
        with pytest.raises(ValueError, match="`n_draws` and `seed` must be left out with `method` 'linear'"):
            linear.with_settings(**setting)
        with pytest.raises(ValueError, match="must be left out with `method` 'moments'"):
            db.Predictor.load(models / "numbers", method="moments", **setting)
    name = "std" if "std" in linear.outputs else "entropy"
    many = predictor.with_settings(n_draws=500)(columns)[name]
    assert np.median(np.abs(linear(columns)[name] / many - 1)) < 0.1


@pytest.mark.parametrize(
    "setting", [{"method": "magic"}, {"n_draws": 0}, {"n_draws": True}, {"seed": -1}, {"coverage": 1.0}, {"seed": 0.5}]
)
def test_impossible_settings_are_refused(models, setting):
    with pytest.raises(ValueError, match=f"`{next(iter(setting))}` must"):
        db.Predictor.load(models / "numbers", **setting)


def test_a_column_of_a_network_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match=r"`columns` must name each input of the network once; got \['a', 'a'\]"):
        db.Predictor(nn.Linear(2, 1), likelihood=db.Gaussian(precision=1.0), columns=("a", "a"))


def test_all_columns_may_come_as_one_matrix(tmp_path):
    x = np.random.default_rng(1).normal(size=(30, 2))
    frame = pd.DataFrame(x, columns=["a", "b"])
    settings = {"drop_prob": 0.1, "weight_decay": 1e-4, "n_steps": 5, "n_networks": 1, "noise": "constant"}
    model = db.DropoutRegressor((4,), random_state=0, **settings)
    model.fit(frame, x[:, 0]).save(tmp_path / "model.safetensors")
    predictor = db.Predictor.load(tmp_path / "model.safetensors")
    assert predictor.inputs == {"a": "number", "b": "number"}
    assert same_bits(predictor({"x": x}), predictor({"a": x[:, 0], "b": x[:, 1], "other": x}))


def test_a_column_that_is_called_as_the_matrix_is_not_taken_for_it():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
    predictor = db.Predictor(net, likelihood=db.Gaussian(precision=1.0), columns=("x", "z"))
    x = np.arange(6.0).reshape(3, 2)
    assert same_bits(predictor({"x": x}), predictor({"x": x[:, 0], "z": x[:, 1]}))
    with pytest.raises(ValueError, match=r"^`columns` lacks 'z', which the model reads; it has 'x'\.$"):
        predictor({"x": x[:, 0]})


def test_columns_may_be_of_any_array_kind(models, columns):
    predictor = db.Predictor.load(models / "numbers")
    whole = predictor(columns)
    arrow = {name: pa.array(values) for name, values in columns.items()}
    plain = {name: np.asarray(values)[:, None] for name, values in columns.items()}
    lists = {name: [None if v != v else v for v in values] for name, values in columns.items()}
    assert all(same_bits(predictor(other), whole) for other in (arrow, pa.table(arrow), plain, lists))


REFUSED = {
    "a column is missing": ({"city": ["Oslo"], "new": [True]}, "lacks 'size'"),
    "columns of different lengths": ({"size": [1.0, 2.0], "city": ["Oslo"], "new": [True]}, "equally long"),
    "a new category": ({"size": [1.0], "city": ["Paris"], "new": [True]}, "row 0, column 'city'"),
    "a text for a number": ({"size": ["tall"], "city": ["Oslo"], "new": [True]}, "row 0, column 'size': must be a number"),
    "an infinity": ({"size": [np.inf], "city": ["Oslo"], "new": [True]}, "must be a finite number"),
    "one value for all rows": ({"size": 1.0, "city": ["Oslo"], "new": [True]}, "one value per row"),
    "a matrix in a column": ({"size": np.ones((2, 2)), "city": ["Oslo"], "new": [True]}, "one value per row"),
    "half a character": ({"size": [1.0], "city": ["\ud800"], "new": [True]}, "cannot be read"),
    "far away": ({"size": [1e60], "city": ["Oslo"], "new": [True]}, "row 0: the prediction is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_cannot_read_is_refused(models, case):
    columns, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        db.Predictor.load(models / "numbers")(columns)


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_columns_of_a_table_have_the_names_announced(models, columns, calibrated):
    model = load(models / "classes")
    if calibrated:
        model = model.calibrate(pd.read_csv(models / "train.csv"), method="conformal")
    predictor = db.Predictor(model, coverage=0.5)
    table = predictor.add_columns(pa.table({name: list(values) for name, values in columns.items()}))
    assert table.column_names == [*columns, *(f"kind_{name}" for name in predictor.column_names)]
    assert ("kind_labels" in table.column_names) == calibrated
    none = pa.table({name: list(values)[:0] for name, values in columns.items()})
    assert predictor.add_columns(none).column_names == table.column_names


def test_label_sets_hold_the_classes_that_a_conformal_calibration_does_not_exclude(models):
    frame = pd.read_csv(models / "new.csv")
    model = load(models / "classes").calibrate(pd.read_csv(models / "train.csv"), method="conformal")
    scores = np.sort(model.ensemble.recalibration.values)
    limit = scores[int(np.ceil(0.8 * (len(scores) + 1))) - 1]
    found = model.predict(frame, coverage=0.8)
    for labels, row in zip(found["labels"], found.itertuples(), strict=True):
        inside = [name for name in ("high", "low", "middle") if 1 - getattr(row, f"probability_{name}") <= limit + 1e-9]
        assert labels == "; ".join(inside)


def test_a_model_and_its_predictor_give_the_same_columns(models, columns):
    model, frame = load(models / "numbers"), pd.DataFrame(columns)
    added = db.Predictor(model).add_columns(pa.Table.from_pandas(frame), prefix="")
    predicted = model.predict(frame)
    assert isinstance(model, Model) and list(predicted) == added.column_names[3:]
    assert all(predicted[name].tolist() == added[name].to_pylist() for name in predicted)


def test_automatic_draws_of_a_row_are_those_of_their_number_and_depend_on_no_other_row(models, columns):
    columns = rows_of(columns, slice(6))
    for name, tolerance in (("numbers", 0.003), ("classes", 0.0007)):
        automatic = db.Predictor.load(models / name, n_draws="auto", tolerance=tolerance, max_draws=150)
        found = automatic(columns)
        n_networks = automatic.total_draws // 150
        used = found.pop("draws_used")
        assert len(set(used)) > 1 and set(used) <= {n * n_networks for n in (64, 128, 150)}
        for number in set(used):
            rows = np.flatnonzero(used == number)
            part = rows_of(columns, rows)
            plain = db.Predictor.load(models / name, n_draws=int(number) // n_networks)(part)
            assert same_bits(plain, {output: values[rows] for output, values in found.items()})
            assert same_bits(automatic(part), {**plain, "draws_used": used[rows]})


def test_predictions_that_stop_at_other_errors_share_no_batch(models):
    keys = {db.Predictor.load(models / "numbers", n_draws="auto", tolerance=t).key[1:] for t in (0.01, 0.02)}
    assert len(keys) == 2


@pytest.mark.slow
def test_automatic_draws_meet_their_tolerance(models, columns):
    columns = rows_of(columns, slice(20))
    predictor = db.Predictor.load(models / "numbers", n_draws="auto", tolerance=0.02)
    means = np.stack([predictor.with_settings(seed=seed)(columns)["mean"] for seed in range(4)])
    errors = means.std(0, ddof=1) / predictor(columns)["std"]
    assert np.sqrt(np.mean(errors**2)) < 0.02


def test_a_predictor_says_what_it_reads_and_how(models):
    expected = "Predictor(size, city, new -> mean, std, epistemic, aleatoric, lower, upper; n_draws=7, seed=5, "
    assert repr(db.Predictor.load(models / "numbers", n_draws=7, seed=5)).startswith(expected)


@pytest.mark.parametrize("columns", [torch.ones(2, 3), np.ones((2, 3)), [[1, 2, 3]]])
def test_columns_without_names_are_refused(columns):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    predictor = db.Predictor(net, likelihood=db.Gaussian(1.0), columns=["a", "b", "c"])
    with pytest.raises(TypeError, match=r"`columns` must be a dict or a frame, with the matrix of all columns as 'x'"):
        predictor(columns)


def test_an_estimator_that_is_not_fitted_is_refused():
    with pytest.raises(ValueError, match="`model` must be fitted; call its fit first"):
        db.Predictor(db.DropoutRegressor())


def test_the_names_of_columns_are_checked_before_they_are_read(models, columns):
    predictor, table = db.Predictor.load(models / "numbers"), pa.table(dict(columns))
    repeated = pa.table([*table.columns, table.column(0)], names=[*table.column_names, table.column_names[0]])
    for call in (predictor, predictor.add_columns):
        with pytest.raises(ValueError, match="a name of its own for each column; 2 are called"):
            call(repeated)
    with pytest.raises(TypeError, match=r"Pass columns\.collect\(\)"):
        predictor(pl.from_arrow(table).lazy())
    for frame in (pl.from_arrow(table), table.to_pandas()):  # of more rows than names
        with pytest.raises(ValueError, match=r"lacks 'size', which the model reads; it has 'city', 'new'\.$"):
            predictor(frame[["city", "new"]])
