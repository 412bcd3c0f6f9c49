"""Rows per second with one worker process and with two, on the same rows in one run.

    python -m benchmarks.scaling [rows]

The workers are started, and have loaded the model, before the clock starts: what grows with the rows is measured. Only
the ratio means anything.
"""

import functools
import json
import multiprocessing
import pathlib
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pyarrow as pa
from pyarrow import parquet

import dropbayes as db
from benchmarks import history
from benchmarks.serving import fitted_folder
from dropbayes.app.distributed import parts


def wait_for(everyone):
    """Waits until all workers are up."""
    everyone.wait()


def seconds(prediction, some, n_workers):
    """The time that warm workers need for some parts."""
    context = multiprocessing.get_context("spawn")
    everyone = context.Barrier(n_workers)
    with ProcessPoolExecutor(n_workers, context, wait_for, (everyone,)) as pool:
        list(pool.map(time.sleep, [0.5] * n_workers))  # begins when every worker is up
        begun = time.perf_counter()
        list(pool.map(prediction, some))
        return time.perf_counter() - begun


def measure(n_rows: int = 120_000, repeats: int = 3) -> dict:
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        predictor = db.Predictor.load(fitted_folder(folder / "model"))
        parquet.write_table(pa.table({n: generator.normal(size=n_rows) for n in "abcd"}), folder / "rows.parquet")
        (folder / "out").mkdir()
        some = parts.plan_parts([folder / "rows.parquet"], folder / "out", 5000)
        prediction = functools.partial(parts.write_part, predictor, None)
        times: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(repeats):  # in turns, so that both see the same machine
            for n_workers, measured in times.items():
                measured.append(seconds(prediction, some, n_workers))
    one, two = (min(times[n]) for n in (1, 2))  # the least disturbed run of each
    return {
        "rows": n_rows,
        "seconds": times,
        "rows_per_second_of_one": n_rows / one,
        "ratio": one / two,
    }


if __name__ == "__main__":
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 120_000)
    print(json.dumps(found, indent=1))
    history.write("scaling", found, [history.Goal("throughput of two workers over one", found["ratio"], at_least=1.7)])
