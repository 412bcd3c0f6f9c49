"""Parts, and Ray datasets, predicted by Ray (extra `ray`)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from dropbayes.app.distributed.parts import Part, Prediction
from dropbayes.app.models.predictor import Predictor
from dropbayes.runtime.devices import cpu_threads

__all__ = ["predict", "run"]


def predict(dataset: Any, predictor: Predictor, *, n_workers: int, prefix: str | None = None) -> Any:
    """A Ray dataset with the columns of a prediction; lazy, as datasets are.

    Args:
        dataset: A `ray.data.Dataset` with the model's columns. Its blocks keep their order only where the context's
            `execution_options.preserve_order` is set; otherwise carry a column with the number of each row.
        predictor: The model.
        n_workers: The batches predicted at a time.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """
    import ray.data

    add = functools.partial(_add_predictions, predictor=predictor, prefix=prefix)
    workers = ray.data.TaskPoolStrategy(size=n_workers)
    return dataset.map_batches(add, batch_format="pyarrow", batch_size=4096, compute=workers, num_cpus=1)


def _add_predictions(batch: Any, *, predictor: Predictor, prefix: str | None) -> Any:
    with cpu_threads(1):
        return predictor.add_columns(batch, prefix=prefix)


def run(prediction: Prediction, parts: Sequence[Part], n_workers: int, address: str | None) -> Iterator[int]:
    """Computes the parts on a Ray cluster; yields the number of rows of each as it finishes.

    Args:
        prediction: The task of a worker.
        parts: The parts to compute.
        n_workers: The number of parts at a time.
        address: The cluster's address; None starts one on this machine.
    """
    import ray

    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local = {} if address else {"num_cpus": n_workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address=address or "local", log_to_driver=False, logging_level="error", **local)
    try:
        make = ray.remote(num_cpus=1, max_retries=-1)(_make)  # after a worker's death, not after an error
        model, waiting = ray.put(prediction), iter(parts)
        running = [make.remote(model, part) for part in islice(waiting, n_workers)]
        while running:
            (finished,), running = ray.wait(running)
            yield ray.get(finished)
            running += [make.remote(model, part) for part in islice(waiting, 1)]
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        if started:
            ray.shutdown()


def _make(prediction: Prediction, part: Part) -> int:
    return prediction(part)
