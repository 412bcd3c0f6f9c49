"""`dropbayes predict --engine`: a folder of parts from the command line."""

import json

from pyarrow import parquet

import dropbayes as db
from tests.app.distributed.rows import digest, rows, written
from tests.command_line import run


def test_an_engine_writes_a_folder_with_the_numbers_of_the_command_without_one(models, tmp_path):
    parquet.write_table(rows(200), tmp_path / "rows.parquet")
    options = ["--engine", "processes", "--workers", "1", "--json"]
    result = run("predict", models / "numbers", tmp_path / "rows.parquet", "-o", tmp_path / "out", *options)
    assert result.code == 0 and json.loads(result.text)["n_rows"] == 200
    plain = run("predict", models / "numbers", tmp_path / "rows.parquet", "-o", tmp_path / "plain.parquet")
    assert plain.code == 0
    expected = digest(db.Predictor.load(models / "numbers").add_columns(rows(200)))
    assert digest(written(tmp_path / "out")) == digest(parquet.read_table(tmp_path / "plain.parquet")) == expected


def test_options_of_the_one_way_are_refused_in_the_other(models):
    keeping = run("predict", models / "numbers", "rows.parquet", "-o", "out", "--engine", "processes", "--keep", "none")
    assert keeping.code == 2 and "has no --keep" in keeping.err
    alone = run("predict", models / "numbers", "rows.parquet", "-o", "out.csv", "--workers", "2")
    assert alone.code == 2 and "name one with --engine" in alone.err
