"""Tests of whole models: what Python fits and saves, the command line reads, and the other way round."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import dropbayes as db
from dropbayes.app.models.storage import CARD
from dropbayes.app.tables import open_table
from tests.command_line import TINY, rows_of, run, table

SMALL = {
    "hidden": (4,),
    "n_steps": 5,
    "n_networks": 2,
    "n_draws": 3,
    "drop_prob": 0.1,
    "weight_decay": 1e-4,
    "random_state": 0,
}
PLAIN = SMALL | {"noise": "constant"}  # a shape of the noise takes longer to fit than these networks


def frame(n_rows=60, seed=0):
    return pd.DataFrame(rows_of(table(n_rows, seed)))


@pytest.fixture(scope="module")
def model():
    return db.app.Model.fit(frame().drop(columns="kind"), target="price", **PLAIN)


def test_python_predicts_what_the_command_line_predicts(tmp_path):
    (tmp_path / "train.csv").write_text(table(60))
    (tmp_path / "new.csv").write_text(table(10, seed=1))
    run("fit", tmp_path / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *TINY)
    written = rows_of(run("predict", tmp_path / "m", tmp_path / "new.csv", "-o", "-").text)
    predicted = db.load(tmp_path / "m").predict(frame(10, seed=1))
    for name in ("mean", "std", "epistemic_std", "lower", "upper"):
        np.testing.assert_allclose([float(row[f"price_{name}"]) for row in written], predicted[name], rtol=1e-10)
    assert [row["price_outside"] for row in written] == predicted["outside"].tolist()


def test_a_change_of_the_ensemble_of_a_loaded_model_is_what_predicts_and_is_saved(model, tmp_path):
    loaded = db.load(model.save(tmp_path / "m").path)
    before = loaded.predict(frame(5))["mean"]
    loaded.ensemble.seed_ += 1
    assert not np.array_equal(loaded.predict(frame(5))["mean"], before)
    assert db.load(loaded.save(tmp_path / "n").path).ensemble.seed_ == model.ensemble.seed_ + 1


def test_a_model_fitted_in_python_is_the_folder_of_the_command_line(model, tmp_path):
    saved = model.save(tmp_path / "m")
    result = run("predict", saved.path, "-", "-o", "-", stdin=table(10, seed=1).encode())
    means = [float(row["price_mean"]) for row in rows_of(result.text)]
    assert means == model.predict(frame(10, seed=1))["mean"].tolist()
    assert sorted(path.name for path in saved.path.iterdir()) == ["card.md", "columns.json", "model.safetensors"]


def test_an_estimator_fitted_to_a_data_frame_is_saved_as_the_same_folder(tmp_path):
    x = pd.DataFrame({"a": np.linspace(0, 1, 30), "b": np.linspace(1, 0, 30) ** 2})
    y = x["a"] + x["b"]
    estimator = db.DropoutRegressor(**SMALL).fit(x, y)
    db.app.Model.of(estimator, x, y, target="y").save(tmp_path / "m")
    loaded = db.load(tmp_path / "m")
    np.testing.assert_allclose(loaded.predict(x)["mean"], estimator.predict(x))
    assert [column.high for column in loaded.schema.columns] == [1.0, 1.0]


@pytest.mark.parametrize("kind", [db.DropoutRegressor, db.DropoutClassifier])
def test_an_estimator_fitted_to_categories_and_dates_becomes_the_folder_of_the_command_line(tmp_path, kind):
    days = pd.date_range("2020-01-01", periods=60, freq="W")
    x = pd.DataFrame({"size": np.linspace(0, 1, 60), "city": ["Oslo", "Rome", "Lyon"] * 20, "day": days})
    y = np.arange(60) % 4 * 1.0 if kind is db.DropoutRegressor else np.array(["low", "high"])[np.arange(60) % 2]
    estimator = kind(**SMALL).fit(x, y)
    db.app.Model.of(estimator, x, y, target="price").save(tmp_path / "m")
    x.to_csv(tmp_path / "rows.csv", index=False)
    rows = rows_of(run("predict", tmp_path / "m", tmp_path / "rows.csv", "-o", "-").text)
    if kind is db.DropoutRegressor:
        np.testing.assert_allclose([float(row["price_mean"]) for row in rows], estimator.predict(x), rtol=1e-9)
    else:
        assert [row["price_predicted"] for row in rows] == estimator.predict(x).tolist()
    assert {row["price_outside"] for row in rows} == {""}


@pytest.mark.parametrize("labels", [[True, False], [1.0, 2.0], ["True", "False"], ["a", "b"], [3, 4]])
def test_the_classes_of_an_estimator_are_found_in_the_table_it_was_fitted_to(tmp_path, labels):
    x, y = np.linspace(-1, 1, 30), np.array(labels * 15)
    estimator = db.DropoutClassifier(**SMALL).fit(x[:, None], y)
    model = db.app.Model.of(estimator, {"x": x}, y, target="t")
    found, known = model.outcomes(pa.table({"t": pa.array(y.tolist())}))
    assert known.all() and found.tolist() == y.tolist()
    pd.DataFrame({"x": x, "t": y}).to_csv(tmp_path / "t.csv", index=False)
    with open_table(tmp_path / "t.csv") as source:
        assert model.outcomes(next(iter(source.blocks())))[0].tolist() == y.tolist()


def test_an_estimator_that_read_other_inputs_is_refused():
    x = pd.DataFrame({"a": np.linspace(0, 1, 30)})
    estimator = db.DropoutRegressor(**PLAIN)
    with pytest.raises(ValueError, match="`estimator` must be fitted"):
        db.app.Model.of(estimator, x, x["a"], target="y")
    estimator.fit(x, x["a"])
    with pytest.raises(ValueError, match=r"must hold numbers alone.*Model\.fit"):
        db.app.Model.of(estimator, pd.DataFrame({"a": list("ab") * 15}), x["a"], target="y")
    with pytest.raises(ValueError, match="must hold the 1 inputs of the estimator; got 2"):
        db.app.Model.of(estimator, x.assign(b=x["a"] ** 2), x["a"], target="y")
    with pytest.raises(ValueError, match="`y` must hold a target for each of the 30 rows; got 29"):
        db.app.Model.of(estimator, x, x["a"][1:], target="y")


def test_rows_far_from_the_training_rows_are_marked(model):
    new = frame(3, seed=1)
    new.loc[1, "size"] = "1000"
    assert model.predict(new)["outside"].tolist() == ["", "size", ""]


@pytest.mark.parametrize("city", ["Oslo", 5, None])
def test_one_value_for_a_column_is_refused(model, city):
    with pytest.raises(ValueError, match="column 'city' must have one value per row, as a list or an array"):
        model.predict({"size": [1.0], "city": city, "new": ["true"]})


def test_missing_values_and_new_categories_are_read(model):
    row = {"size": [""], "city": ["Bergen"], "new": ["true"]}
    with pytest.raises(ValueError, match="'Bergen' was not seen in training"):
        model.predict(row)
    assert model.predict(row, allow_new=True)["outside"] == ["city"]


@pytest.mark.parametrize("method", ["scale", "isotonic", "conformal"])
def test_a_calibration_is_recorded_and_comes_back(model, tmp_path, method):
    held_out = frame(50, seed=2)
    calibrated = model.calibrate(held_out, method=method)
    calibrated.save(tmp_path / "m")
    loaded = db.load(tmp_path / "m")
    for name in ("lower", "upper"):
        assert loaded.predict(held_out)[name].tolist() == calibrated.predict(held_out)[name].tolist()
    assert calibrated.predict(held_out)["upper"].tolist() != model.predict(held_out)["upper"].tolist()
    assert f"calibration: {method}" in (tmp_path / "m" / CARD).read_text()


def test_weights_reach_the_estimator():
    rows = {"x": [float(i) for i in range(30)], "y": [2.0 * i for i in range(30)], "w": [1.0] * 30}
    first = db.app.Model.fit(rows, target="y", reading=reading(weights="w"), **PLAIN)
    rows["w"] = [3.0 if i < 10 else 1.0 for i in range(30)]
    second = db.app.Model.fit(rows, target="y", reading=reading(weights="w"), **PLAIN)
    assert first.predict({"x": [5.0]})["mean"] != second.predict({"x": [5.0]})["mean"]


def reading(**options):
    from dropbayes.app.tables.training import Reading

    return Reading(**options)


def test_a_model_without_a_folder_has_nowhere_to_keep_a_calibration(model):
    with pytest.raises(ValueError, match="has no folder yet"):
        model.save_calibration()


def test_the_percentiles_of_training_rows_are_kept_however_a_model_came_about(model, tmp_path):
    rows = frame().drop(columns="kind")
    deviations = db.Predictor(model)({name: rows[name].tolist() for name in rows if name != "price"})["std"]
    expected = {str(level): np.percentile(deviations, level) for level in (50, 90, 95, 99)}
    saved = db.load(model.save(tmp_path / "m").path)
    assert model.uncertainty_percentiles == saved.uncertainty_percentiles == pytest.approx(expected)
    x, y = np.random.default_rng(0).normal(size=(50, 2)), np.arange(50.0)
    estimator = db.DropoutRegressor(**PLAIN).fit(x, y)
    of = db.app.Model.of(estimator, pd.DataFrame(x, columns=["a", "b"]), y, target="y")
    assert of.uncertainty_percentiles["50"] == pytest.approx(np.median(estimator.predict(x, return_std=True)[1]))


def test_a_calibration_that_widens_brings_percentiles_of_its_own_and_takes_them_back(model):
    rows = frame(seed=3).drop(columns="kind")
    wider = model.calibrate(rows)
    factor = wider.ensemble.recalibration.values[0]
    plain = model.ensemble.predict(model.encode(rows).x, return_std=True)[1]
    assert wider.uncertainty_percentiles["95"] == pytest.approx(factor * np.percentile(plain, 95))
    assert wider.uncalibrated().uncertainty_percentiles == model.uncertainty_percentiles


def test_a_target_is_named_as_its_frame_names_it():
    frame, settings = (
        {0: np.arange(20.0), 1: np.arange(20.0) % 3},
        {"drop_prob": 0.1, "weight_decay": 1e-4, "noise": "constant"},
    )
    model = db.app.Model.fit(frame, target=0, hidden=(2,), n_steps=1, n_networks=1, **settings)
    assert model.schema.target == "0"
    with pytest.raises(ValueError, match=r"has no column '2' \(`target`\)"):
        db.app.Model.fit(frame, target=2)


@pytest.mark.parametrize("classes", [["yes", "no"], ["Yes", "No"]])
def test_outcomes_in_another_case_are_the_classes_of_training(classes):
    x, y = np.linspace(-1, 1, 30), np.array(classes * 15)
    model = db.app.Model.of(db.DropoutClassifier(**SMALL).fit(x[:, None], y), {"x": x}, y, target="t")
    found, _ = model.outcomes(pa.table({"t": ["YES", "no", "No"]}))
    assert found.tolist() == [classes[0], classes[1], classes[1]]
