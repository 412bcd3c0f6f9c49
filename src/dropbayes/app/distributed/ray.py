"""Parts, and Ray datasets, predicted by Ray Data (extra `ray`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dropbayes.app.distributed.parts import Part, Prediction, set_up_worker
from dropbayes.app.models.predictor import Predictor

__all__ = ["predict", "run"]

_BATCH_ROWS = 4096


class _Parts:
    """An actor that computes parts; the model is loaded once."""

    def __init__(self, prediction: Prediction) -> None:
        set_up_worker()
        self.prediction = prediction

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = zip(*(batch[name].tolist() for name in ("source", "first", "stop", "output")), strict=True)
        return {"rows": [self.prediction(Part(*row)) for row in rows]}


class _Rows:
    """An actor that predicts batches of rows; the model is loaded once."""

    def __init__(self, predictor: Predictor, prefix: str | None) -> None:
        set_up_worker()
        self.predictor, self.prefix = predictor, prefix

    def __call__(self, batch: Any) -> Any:
        return self.predictor.add_columns(batch, prefix=self.prefix)


def predict(dataset: Any, predictor: Predictor, *, n_workers: int, prefix: str | None = None) -> Any:
    """A Ray dataset with the columns of a prediction; lazy, as datasets are.

    Args:
        dataset: A `ray.data.Dataset` with the model's columns. Its blocks keep their order only where the context's
            `execution_options.preserve_order` is set; otherwise carry a column with the number of each row.
        predictor: The model.
        n_workers: The number of actors.
        prefix: The prefix of the new columns' names; by default the target and `_`.
    """
    import ray.data

    return dataset.map_batches(
        _Rows, fn_constructor_args=(predictor, prefix), batch_format="pyarrow", batch_size=_BATCH_ROWS,
        compute=ray.data.ActorPoolStrategy(size=n_workers), num_cpus=1,
    )  # fmt: skip


def run(prediction: Prediction, parts: Sequence[Part], n_workers: int, address: str | None) -> Iterator[int]:
    """Computes the parts on a Ray cluster; yields the number of rows of each as it finishes.

    Args:
        prediction: The task of a worker.
        parts: The parts to compute.
        n_workers: The number of actors.
        address: The cluster's address; None starts one on this machine that nothing else can reach.
    """
    import ray.data

    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local = {} if address else {"num_cpus": n_workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address=address or "local", log_to_driver=False, logging_level="error", **local)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts rows
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        dataset = ray.data.from_items([asdict(part) for part in parts], override_num_blocks=len(parts))
        done = dataset.map_batches(
            _Parts, fn_constructor_args=(prediction,), batch_size=1, num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=n_workers),
        )  # fmt: skip
        for batch in done.iter_batches(batch_size=1):
            yield int(batch["rows"][0])
    finally:
        if started:
            ray.shutdown()
