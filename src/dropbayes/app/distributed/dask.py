"""Parts, and Dask data frames, predicted by Dask (extra `dask`)."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from dropbayes.app.distributed.parts import Part, Prediction, set_up_worker
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
    from dask import config as dask_config

    with contextlib.ExitStack() as stack:
        # A part is retried whenever its worker is killed.
        stack.enter_context(dask_config.set({"distributed.scheduler.allowed-failures": 1000}))
        if address is None:
            cluster = distributed.LocalCluster(
                n_workers=n_workers, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None,
                silence_logs=logging.CRITICAL,
            )  # fmt: skip
            stack.enter_context(cluster)
        client = stack.enter_context(distributed.Client(address or cluster))
        name = f"dropbayes-{uuid.uuid4().hex}"
        client.register_plugin(_plugin(prediction), name=name)
        stack.callback(client.unregister_worker_plugin, name)
        futures = client.map(_make, list(parts), plugin=name, pure=False, retries=1000)
        for future in distributed.as_completed(futures):
            yield int(future.result())


def _plugin(prediction: Prediction) -> Any:
    """A plugin that gives every worker the model once, replacements of killed workers included."""
    import distributed

    class WithPrediction(distributed.WorkerPlugin):
        def __init__(self) -> None:
            self.prediction = prediction

        def setup(self, worker: Any) -> None:
            del worker
            set_up_worker()

    return WithPrediction()


def _make(part: Part, plugin: str) -> int:
    import distributed

    return int(distributed.get_worker().plugins[plugin].prediction(part))
