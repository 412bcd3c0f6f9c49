"""The engines of a prediction over many processes: those of this machine, Ray, Dask and Spark.

Ray, Dask and Spark add the columns of a prediction to their own frames, lazily, as those frames are; the `prefix` of
their names is by default the target and `_`. Every engine makes parts: it takes what a worker does, the parts, the
number of workers and the address of a cluster (None: this machine), and yields the number of rows of each part as it is
finished. A part is made again after a worker's death, however often, never after an error.
"""

import contextlib
import copy
import logging
import multiprocessing
import operator
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa

from dropbayes.app.models.predictor import Predictor
from dropbayes.runtime.devices import cpu_threads, end_with_parent
from dropbayes.runtime.validation import needed_for

Part = TypeVar("Part")
Make = Callable[[Part], int]

_MAX_FRUITLESS_POOLS = 10  # in a row, after which the fault must be ours
_MAX_DEATHS = 100  # of the workers that make one part


def _with_pools(pool: Callable[[list[Part]], Iterator[tuple[Part, int]]], parts: Sequence[Part]) -> Generator[int]:
    """Makes the parts with pools of workers: one that ends without some of them is replaced."""
    waiting, fruitless = list(parts), 0
    while waiting:
        before = len(waiting)
        for part, n_rows in pool(list(waiting)):
            waiting.remove(part)
            yield n_rows
        fruitless = 0 if len(waiting) < before else fruitless + 1
        if fruitless == _MAX_FRUITLESS_POOLS:
            raise ChildProcessError(f"workers died {fruitless} times: out of memory, or run without a __main__ guard?")


def on_processes(make: Make[Part], parts: Sequence[Part], n_workers: int, address: str | None) -> Generator[int]:
    """Makes the parts in processes of this machine; a pool whose worker was killed is replaced."""
    if address is not None:
        raise ValueError("`address` must be None for processes of this machine; name an engine that has a cluster.")
    spawn = multiprocessing.get_context("spawn")

    def pool(waiting: list[Part]) -> Iterator[tuple[Part, int]]:
        executor = ProcessPoolExecutor(n_workers, mp_context=spawn, initializer=end_with_parent)
        try:
            futures = {executor.submit(make, part): part for part in waiting}
            for future in as_completed(futures):
                with contextlib.suppress(BrokenProcessPool):
                    yield futures[future], future.result()
        except BrokenProcessPool:  # while parts were submitted
            pass
        finally:
            executor.shutdown(cancel_futures=True)

    return _with_pools(pool, parts)


def on_ray(make: Make[Part], parts: Sequence[Part], n_workers: int, address: str | None) -> Generator[int]:
    """Makes the parts on a Ray cluster, so many at a time."""
    with needed_for("the engine Ray", extra="ray"):
        import ray

    if started := not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local = {} if address else {"num_cpus": n_workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address=address or "local", log_to_driver=False, logging_level="error", **local)
    try:
        # Retried after a worker's death, not after an error.
        task = ray.remote(num_cpus=1, max_retries=-1, name="part")(lambda make, part: make(part))
        model, waiting = ray.put(make), iter(parts)
        running = [task.remote(model, part) for part in islice(waiting, n_workers)]
        while running:
            (finished,), running = ray.wait(running)
            yield ray.get(finished)
            running += [task.remote(model, part) for part in islice(waiting, 1)]
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        if started:
            ray.shutdown()


def on_dask(make: Make[Part], parts: Sequence[Part], n_workers: int, address: str | None) -> Generator[int]:
    """Makes the parts on a Dask cluster; one on this machine cannot be reached from elsewhere.

    Dask replaces a killed worker, but not one that is killed while it starts: without any, the cluster is replaced.
    """
    with needed_for("the engine Dask", extra="dask"):
        import distributed
        from dask import config

    local = {"n_workers": n_workers, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}

    def pool(waiting: list[Part]) -> Iterator[tuple[Part, int]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(config.set({"distributed.scheduler.allowed-failures": _MAX_DEATHS}))
            cluster: Any = address
            if address is None:
                try:
                    cluster = stack.enter_context(distributed.LocalCluster(silence_logs=logging.CRITICAL, **local))
                except RuntimeError:  # a worker was killed
                    return
            client = stack.enter_context(distributed.Client(cluster))
            # The model is a task like the others, which Dask computes again where a worker that held it is killed.
            model = client.submit(copy.copy, make, pure=False)
            futures = {client.submit(operator.call, model, part, pure=False): part for part in waiting}
            while futures:
                try:
                    done = distributed.wait(list(futures), timeout=30, return_when="FIRST_COMPLETED").done
                except TimeoutError:
                    if address is None and not client.nthreads():
                        return
                    continue
                for future in done:
                    yield futures.pop(future), int(future.result())

    return _with_pools(pool, parts)


def on_spark(make: Make[Part], parts: Sequence[Part], n_workers: int, address: str | None) -> Generator[int]:
    """Makes the parts on a Spark cluster (which needs Java 17); yields once all are finished."""
    with needed_for("the engine Spark", extra="spark"):
        from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if started := session is None:
        master = address or f"local[{n_workers}, {_MAX_DEATHS}]"
        settings = {"spark.ui.enabled": "false", "spark.task.maxFailures": str(_MAX_DEATHS)}
        if address is None:
            settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the first in the path may lack what is needed
        session = SparkSession.builder.master(master).appName("dropbayes predict").config(map=settings).getOrCreate()
        session.sparkContext.setLogLevel("OFF" if address is None else "ERROR")
    try:
        context = session.sparkContext
        shared = context.broadcast(make)  # one copy for each worker

        def attempt(part: Part) -> tuple[int, Exception | None]:
            try:
                return shared.value(part), None
            except Exception as error:  # returned: Spark would try it again like a worker's death
                return 0, error

        for n_rows, error in context.parallelize(list(parts), len(parts)).map(attempt).collect():
            if error is not None:
                raise error
            yield n_rows
    finally:
        if started:
            session.stop()


ENGINES = {"processes": on_processes, "ray": on_ray, "dask": on_dask, "spark": on_spark}
"""Where parts are made, by name."""


def predict_dask(frame: Any, predictor: Predictor, *, prefix: str | None = None) -> Any:
    """A Dask data frame with the columns of a prediction and their `prefix`, its partitions in the same order."""

    def add(partition: Any) -> Any:
        table = predictor.add_columns(pa.Table.from_pandas(partition, preserve_index=False), prefix=prefix)
        added = table.select(table.column_names[len(partition.columns) :]).to_pandas()
        return partition.assign(**{name: added[name].to_numpy() for name in added.columns})

    return frame.map_partitions(add, meta=add(frame._meta))


def predict_ray(dataset: Any, predictor: Predictor, *, n_workers: int, prefix: str | None = None) -> Any:
    """A Ray dataset with the columns of a prediction and their `prefix`, made by so many workers at a time.

    Its blocks keep their order only where the context's `execution_options.preserve_order` is set; otherwise carry a
    column with the number of each row.
    """
    import ray.data

    def add(batch: pa.Table) -> pa.Table:
        with cpu_threads(1):
            return predictor.add_columns(batch, prefix=prefix)

    workers = ray.data.TaskPoolStrategy(size=n_workers)
    return dataset.map_batches(add, batch_format="pyarrow", batch_size=4096, compute=workers, num_cpus=1)


def predict_spark(frame: Any, predictor: Predictor, *, prefix: str | None = None) -> Any:
    """A Spark data frame with the columns of a prediction and their `prefix`, by `mapInArrow`.

    Spark promises no order: carry a column with the number of each row where it matters.
    """
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with cpu_threads(1):
            for batch in batches:
                yield from predictor.add_columns(pa.Table.from_batches([batch]), prefix=prefix).to_batches()

    empty = to_arrow_schema(frame.schema).empty_table()
    return frame.mapInArrow(add, from_arrow_schema(predictor.add_columns(empty, prefix=prefix).schema))
