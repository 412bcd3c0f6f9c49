"""Parts, and Spark data frames, predicted by Spark (extra `spark`, which needs Java 17)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from dropbayes.app.distributed.parts import Part, Prediction
from dropbayes.app.models.predictor import Predictor
from dropbayes.runtime.devices import cpu_threads

__all__ = ["predict", "run"]


def predict(frame: Any, predictor: Predictor, *, prefix: str | None = None) -> Any:
    """A Spark data frame with the columns of a prediction, by `mapInArrow`; lazy.

    Args:
        frame: A `pyspark.sql.DataFrame` with the model's columns. Spark promises no order: carry a column with the
            number of each row where it matters.
        predictor: The model.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    empty = to_arrow_schema(frame.schema).empty_table()
    schema = from_arrow_schema(predictor.add_columns(empty, prefix=prefix).schema)
    return frame.mapInArrow(functools.partial(_add_predictions, predictor=predictor, prefix=prefix), schema)


def _add_predictions(batches: Iterator[pa.RecordBatch], *, predictor: Predictor, prefix: str | None) -> Iterator[Any]:
    with cpu_threads(1):
        for batch in batches:
            yield from predictor.add_columns(pa.Table.from_batches([batch]), prefix=prefix).to_batches()


def run(prediction: Prediction, parts: Sequence[Part], n_workers: int, address: str | None) -> Iterator[int]:
    """Computes the parts on a Spark cluster; yields the number of rows of each once all are finished.

    Args:
        prediction: The task of a worker.
        parts: The parts to compute.
        n_workers: The number of workers that Spark has on this machine.
        address: The master's address; None runs Spark in processes of this machine.
    """
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    started = session is None
    if session is None:
        builder = SparkSession.builder.master(address or f"local[{n_workers}, 1000]").appName("dropbayes predict")
        settings = {"spark.ui.enabled": "false", "spark.task.maxFailures": "1000"}
        if address is None:
            settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF" if address is None else "ERROR")
    try:
        context = session.sparkContext
        shared = context.broadcast(prediction)  # one copy for each worker
        rows = context.parallelize(list(parts), len(parts)).map(functools.partial(_make, shared=shared))
        for result in rows.collect():
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        if started:
            session.stop()


def _make(part: Part, *, shared: Any) -> int | Exception:
    """The number of rows of a part, or the error it ended with: Spark would try that again like a worker's death."""
    try:
        return shared.value(part)
    except Exception as error:
        return error
