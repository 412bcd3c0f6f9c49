"""Data frames of Ray, Dask and Spark with the columns of a prediction: lazy, as those frames are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dropbayes.app.models.predictor import Predictor
from dropbayes.runtime.devices import cpu_threads

if TYPE_CHECKING:
    import pyarrow as pa


def predict_dask(frame: Any, predictor: Predictor, *, prefix: str | None = None) -> Any:
    """A Dask data frame with the columns of a prediction, its partitions in the same order.

    Args:
        frame: A `dask.dataframe.DataFrame` with the model's columns.
        predictor: The model.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """

    def add(partition: Any) -> Any:
        import pyarrow as pa

        table = predictor.add_columns(pa.Table.from_pandas(partition, preserve_index=False), prefix=prefix)
        added = table.select(table.column_names[len(partition.columns) :]).to_pandas()
        return partition.assign(**{name: added[name].to_numpy() for name in added.columns})

    return frame.map_partitions(add, meta=add(frame._meta))


def predict_ray(dataset: Any, predictor: Predictor, *, n_workers: int, prefix: str | None = None) -> Any:
    """A Ray dataset with the columns of a prediction.

    Args:
        dataset: A `ray.data.Dataset` with the model's columns. Its blocks keep their order only where the context's
            `execution_options.preserve_order` is set; otherwise carry a column with the number of each row.
        predictor: The model.
        n_workers: The batches predicted at a time.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """
    import ray.data

    def add(batch: pa.Table) -> pa.Table:
        with cpu_threads(1):
            return predictor.add_columns(batch, prefix=prefix)

    workers = ray.data.TaskPoolStrategy(size=n_workers)
    return dataset.map_batches(add, batch_format="pyarrow", batch_size=4096, compute=workers, num_cpus=1)


def predict_spark(frame: Any, predictor: Predictor, *, prefix: str | None = None) -> Any:
    """A Spark data frame with the columns of a prediction, by `mapInArrow`.

    Args:
        frame: A `pyspark.sql.DataFrame` with the model's columns. Spark promises no order: carry a column with the
            number of each row where it matters.
        predictor: The model.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with cpu_threads(1):
            for batch in batches:
                yield from predictor.add_columns(pa.Table.from_batches([batch]), prefix=prefix).to_batches()

    empty = to_arrow_schema(frame.schema).empty_table()
    return frame.mapInArrow(add, from_arrow_schema(predictor.add_columns(empty, prefix=prefix).schema))
