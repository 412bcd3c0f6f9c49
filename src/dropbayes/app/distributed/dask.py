"""Parts, and Dask data frames, predicted by Dask (extra `dask`)."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from dropbayes.app.distributed.parts import Part, Prediction
from dropbayes.app.models.predictor import Predictor

__all__ = ["predict", "run"]


def predict(frame: Any, predictor: Predictor, *, prefix: str | None = None) -> Any:
    """A Dask data frame with the columns of a prediction; lazy, its partitions in the same order.

    Args:
        frame: A `dask.dataframe.DataFrame` with the model's columns.
        predictor: The model.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """
    meta = _add_predictions(frame._meta, predictor, prefix)
    return frame.map_partitions(_add_predictions, predictor, prefix, meta=meta)


def _add_predictions(frame: Any, predictor: Predictor, prefix: str | None) -> Any:
    import pyarrow as pa

    table = predictor.add_columns(pa.Table.from_pandas(frame, preserve_index=False), prefix=prefix)
    added = table.select(table.column_names[len(frame.columns) :]).to_pandas()
    return frame.assign(**{name: added[name].to_numpy() for name in added.columns})


def run(prediction: Prediction, parts: Sequence[Part], n_workers: int, address: str | None) -> Iterator[int]:
    """Computes the parts on a Dask cluster; yields the number of rows of each as it finishes.

    Args:
        prediction: The task of a worker.
        parts: The parts to compute.
        n_workers: The number of workers that a cluster on this machine has.
        address: The scheduler's address; None starts a cluster on this machine that nothing else can reach.
    """
    import distributed
    from dask import config

    quiet = {"dashboard_address": None, "silence_logs": logging.CRITICAL}
    with contextlib.ExitStack() as stack:
        # A part is tried again when its worker is killed, as often as that happens, and not after an error.
        stack.enter_context(config.set({"distributed.scheduler.allowed-failures": 1000}))
        cluster = address or stack.enter_context(
            distributed.LocalCluster(n_workers=n_workers, threads_per_worker=1, host="127.0.0.1", **quiet)
        )
        client = stack.enter_context(distributed.Client(cluster))
        # The model is a task like the others, which Dask computes again where a worker that held it is killed.
        model = client.submit(copy.copy, prediction, pure=False)
        futures = client.map(operator.call, [model] * len(parts), list(parts), pure=False)
        for future in distributed.as_completed(futures):
            yield int(future.result())
