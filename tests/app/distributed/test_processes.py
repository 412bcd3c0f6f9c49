"""Processes of this machine: the same rows and bits, also when workers are killed."""

import subprocess
import sys
import time

import psutil
import pytest
from pyarrow import parquet

from dropbayes.app.distributed import engines, predict_parquet
from tests.app.distributed.kills import killed_at_random, spawned
from tests.app.distributed.rows import digest, rows, written


@pytest.mark.slow
def test_two_processes_write_the_bits_of_one(predictor, models, tmp_path):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", n_workers=2, part_rows=250)
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(1000)))


def test_an_address_is_refused(predictor, models, tmp_path):
    with pytest.raises(ValueError, match="`address` must be None"):
        predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", address="host:1")


DRIVER = """
import sys
import dropbayes as db
from dropbayes.app.distributed import predict_parquet

if __name__ == "__main__":
    predict_parquet(db.Predictor.load(sys.argv[1]), sys.argv[2], sys.argv[3], n_workers=2, part_rows=10)
"""


@pytest.mark.slow
def test_workers_end_with_a_driver_that_was_killed(models, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    arguments = [tmp_path / "driver.py", models / "numbers", models / "rows.parquet", tmp_path / "out"]
    with subprocess.Popen([sys.executable, *map(str, arguments)]) as driver:
        while not any((tmp_path / "out").glob("part-*")):
            assert driver.poll() is None
            time.sleep(0.05)
        workers = [child for child in psutil.Process(driver.pid).children() if spawned(child)]
        driver.kill()
    assert workers and psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.slow
def test_every_row_is_there_once_after_twenty_workers_were_killed(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_MAX_FRUITLESS_POOLS", 100)
    parquet.write_table(rows(200_000), tmp_path / "rows.parquet")
    with killed_at_random(20, spawned) as killer:
        predict_parquet(predictor, tmp_path / "rows.parquet", tmp_path / "out", n_workers=2, part_rows=2000)
    assert killer.killed == 20
    assert digest(written(tmp_path / "out")) == digest(predictor.add_columns(rows(200_000)))
