"""Processes of this machine: the same rows and bits, also when workers are killed."""

import os
import random
import signal
import threading
import time

import psutil
import pytest
from pyarrow import parquet

from dropbayes.distributed import predict_parquet, processes
from tests.distributed.rows import digest, rows, written


def test_two_processes_write_the_bits_of_one(predictor, models, tmp_path):
    predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", n_workers=2, part_rows=250)
    assert digest(written(tmp_path / "out")) == digest(predictor.extend(rows(1000)))


def test_an_address_is_refused(predictor, models, tmp_path):
    with pytest.raises(ValueError, match="`address` must be None"):
        predict_parquet(predictor, models / "rows.parquet", tmp_path / "out", address="host:1")


class Killer(threading.Thread):
    """Kills worker processes of this one at random times, each as if the machine had."""

    def __init__(self, n_kills, seed, finished, is_worker):
        super().__init__(daemon=True)
        self.n_kills, self.chance, self.finished, self.is_worker = n_kills, random.Random(seed), finished, is_worker
        self.killed = 0

    def run(self):
        while self.killed < self.n_kills and not self.finished.wait(self.chance.uniform(0.2, 1.5)):
            workers = [p for p in psutil.Process().children(recursive=True) if self.is_worker(p)]
            if workers:
                os.kill(self.chance.choice(workers).pid, signal.SIGKILL)
                self.killed += 1


def is_pool_worker(process):
    try:
        return "spawn_main" in " ".join(process.cmdline()) and time.time() - process.create_time() > 2
    except psutil.Error:
        return False


@pytest.mark.slow
def test_every_row_is_there_once_after_twenty_workers_were_killed(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_FRUITLESS_POOLS", 100)
    parquet.write_table(rows(200_000), tmp_path / "rows.parquet")
    finished = threading.Event()
    killer = Killer(20, 0, finished, is_pool_worker)
    killer.start()
    predict_parquet(predictor, tmp_path / "rows.parquet", tmp_path / "out", n_workers=2, part_rows=2000)
    finished.set()
    killer.join()
    assert killer.killed == 20
    assert digest(written(tmp_path / "out")) == digest(predictor.extend(rows(200_000)))
