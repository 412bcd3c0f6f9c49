"""Parts: cut by the input alone, whole or not there, and made once."""

import json
import types

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import dropbayes as db
from dropbayes.app.distributed import ENGINES, predict_parquet
from tests.app.distributed.rows import digest, rows, written


@pytest.fixture
def here(monkeypatch):
    """An engine that makes the parts one after the other in this process, and can be told to die."""
    engine = types.SimpleNamespace(survives=10**9, made=[])

    def run(prediction, some, n_workers, address):
        for part in some:
            if len(engine.made) == engine.survives:
                raise KeyboardInterrupt
            engine.made.append(part.output)
            yield prediction(part)

    monkeypatch.setitem(ENGINES, "processes", run)
    return engine


def test_the_parts_are_the_rows_in_order_with_the_columns_of_the_command_line(here, predictor, models, tmp_path):
    assert predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=170) == 1000
    found = written(tmp_path / "out")
    assert found.equals(predictor.add_columns(rows(1000)))
    assert found.column_names[-7:] == [f"price_{name}" for name in ("mean", "std", "epistemic_std", "aleatoric_std", "lower", "upper", "outside")]  # fmt: skip


def test_the_prediction_does_not_depend_on_how_the_rows_are_cut(here, predictor, models, tmp_path):
    digests = set()
    for part_rows in (1, 299, 300, 301, 5000)[1:]:
        predict_parquet(predictor, models / "rows.parquet", tmp_path / str(part_rows), part_rows=part_rows)
        digests.add(digest(written(tmp_path / str(part_rows))))
    assert digests == {digest(predictor.add_columns(rows(1000)))}


def test_a_folder_of_files_is_read_in_the_order_of_their_names(here, predictor, tmp_path):
    (tmp_path / "in").mkdir()
    table = rows(100)
    for name, first in (("b", 60), ("a", 0)):
        parquet.write_table(table.slice(first, 60 if name == "a" else 40), tmp_path / "in" / f"{name}.parquet")
    predict_parquet(predictor, tmp_path / "in", tmp_path / "out", part_rows=33)
    assert written(tmp_path / "out").equals(predictor.add_columns(table))


def test_a_second_run_makes_what_the_first_left(here, predictor, models, tmp_path):
    here.survives = 3
    with pytest.raises(KeyboardInterrupt):
        predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=100)
    first, here.survives = list(here.made), 10**9
    assert predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=100) == 700
    assert len(set(here.made)) == len(here.made) == 10 and here.made[:3] == first
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))
    assert predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=100) == 0


def test_a_part_that_fails_leaves_nothing_behind(here, predictor, models, tmp_path):
    table = rows(100)
    broken = table.set_column(2, "city", pa.array(["Oslo"] * 99 + ["Paris"]))
    parquet.write_table(broken, tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="was not seen in training"):
        predict_parquet(predictor, tmp_path / "rows.parquet", tmp_path / "out", part_rows=50)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_prediction.json", "part-000000.parquet"]


def test_what_killed_workers_left_is_removed(here, predictor, models, tmp_path):
    (tmp_path / "out").mkdir()
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=500)
    (tmp_path / "out" / ".part-000001.parquet.1234.part").write_bytes(b"half")
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=500)
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.parametrize("size", [0, 1000, -1], ids=["empty", "cut", "a byte short"])
def test_a_part_that_was_cut_is_made_again(here, predictor, models, tmp_path, size):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=500)
    part = tmp_path / "out" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:size])
    assert predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=500) == 500
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))


def test_a_source_replaced_by_one_of_the_same_size_is_other_rows(here, predictor, tmp_path):
    source, plain = tmp_path / "rows.parquet", {"compression": "none", "use_dictionary": False}
    parquet.write_table(rows(100).drop_columns(["size"]).append_column("size", pa.array([0.5] * 100)), source, **plain)
    before = source.stat().st_size
    predict_parquet(predictor, source, tmp_path / "out")
    parquet.write_table(rows(100).drop_columns(["size"]).append_column("size", pa.array([0.7] * 100)), source, **plain)
    assert source.stat().st_size == before
    with pytest.raises(FileExistsError, match="other rows"):
        predict_parquet(predictor, source, tmp_path / "out")


def test_the_error_of_a_row_names_its_file_and_block(here, predictor, tmp_path):
    size = [0.5] * 5000 + [float("inf")]
    table = pa.table({"size": size, "city": ["Oslo"] * 5001, "new": [True] * 5001})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows.parquet', counted from its row 4096: row 904"):
        predict_parquet(predictor, tmp_path / "rows.parquet", tmp_path / "out")


@pytest.mark.parametrize("change", ["model", "settings", "rows"])
def test_the_prediction_of_something_else_is_not_added_to(here, predictor, models, tmp_path, change):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out")
    source, other = models / "rows.parquet", predictor
    if change == "rows":
        source = tmp_path / "rows.parquet"
        parquet.write_table(rows(900), source)
    elif change == "settings":
        other = predictor.with_settings(seed=8)
    else:
        plan = json.loads((tmp_path / "out" / "_prediction.json").read_text())
        (tmp_path / "out" / "_prediction.json").write_text(json.dumps({**plan, "model": "another"}))
    with pytest.raises(FileExistsError, match="another model, other settings or other rows"):
        predict_parquet(other, source, tmp_path / "out")


def test_a_model_read_again_has_the_same_fingerprint_and_another_seed_another(predictor, models):
    again = type(predictor).load(models / "numbers")
    assert again.fingerprint == predictor.fingerprint != predictor.with_settings(seed=8).fingerprint


REFUSED = {
    "no such file": (lambda f: f / "none.parquet", FileNotFoundError, "no file or folder"),
    "not Parquet": (lambda f: (f / "a.parquet").write_text("x") and f / "a.parquet", ValueError, "not a whole Parquet"),
    "an empty folder": (lambda f: f, ValueError, "holds no Parquet file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_table_is_refused(here, predictor, tmp_path, case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        predict_parquet(predictor, make(tmp_path), tmp_path / "out")


def test_a_folder_with_other_files_and_an_unknown_engine_are_refused(here, predictor, models, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no prediction"):
        predict_parquet(predictor, models / "rows.parquet", tmp_path)
    with pytest.raises(ValueError, match="`engine` must be one of 'processes'"):
        predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", engine="hadoop")


def test_another_calibration_of_label_sets_has_another_fingerprint(models):
    classes, held_out = db.load(models / "classes"), pd.read_csv(models / "train.csv")
    first, second = (db.Predictor(classes.calibrate(held_out[k::2], method="conformal")) for k in range(2))
    one = held_out[:1]
    assert (first(one)["probabilities"] == second(one)["probabilities"]).all(), "only their sets differ"
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("place", ["_temporary/0", ".ipynb_checkpoints", "day=1/_temporary"])
def test_files_in_hidden_folders_are_no_rows(here, predictor, tmp_path, place):
    (tmp_path / "in" / place).mkdir(parents=True)
    (tmp_path / "in" / "b.parquet").mkdir()
    for name in ("a.parquet", f"{place}/a.parquet", "b.parquet/part-0.parquet"):
        parquet.write_table(rows(5), tmp_path / "in" / name)
    assert predict_parquet(predictor, tmp_path / "in", tmp_path / "out") == 10


def test_parts_inside_the_input_are_refused_before_they_are_taken_for_rows(here, predictor, tmp_path):
    parquet.write_table(rows(5), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="`folder` must lie outside"):
        predict_parquet(predictor, tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_a_folder_that_another_run_fills_is_refused(here, predictor, models, tmp_path, monkeypatch):
    def second_run(prediction, some, n_workers, address):
        monkeypatch.undo()
        with pytest.raises(FileExistsError, match="another run fills"):
            predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=500)
        yield from map(prediction, some)

    monkeypatch.setitem(ENGINES, "processes", second_run)
    assert predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", part_rows=500) == 1000
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))
