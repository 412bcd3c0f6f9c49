"""Requests that arrive together, predicted together in one thread.

A batch takes a slice of every request that waits with the same settings, so that a long request does not keep the
short ones behind it waiting. Which rows share a batch changes nothing but the time: a row does not depend on its
neighbours.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dropbayes.app.models.predictor import Predictor
from dropbayes.runtime.arrays import NumpyArray

__all__ = ["Batches"]

# Draws of a batch: about a tenth of a second on one core, so that the next request need not wait for longer.
_BATCH_DRAWS = 2**18
_FEWEST_ROWS = 16


@dataclass(eq=False)
class _Job:
    """A request's rows, and the parts of its prediction made so far."""

    key: tuple[Any, ...]
    predictor: Predictor
    x: NumpyArray
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[dict[str, NumpyArray]]
    position: int = 0
    blocks: list[dict[str, NumpyArray]] = field(default_factory=list)

    def finish(self, result: dict[str, NumpyArray] | Exception) -> None:
        def set_result() -> None:
            if self.future.cancelled():
                return
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        self.loop.call_soon_threadsafe(set_result)


class Batches:
    """A thread that predicts queued requests.

    Args:
        observe: Called with the rows of each batch.
    """

    def __init__(self, observe: Callable[[int], None] = lambda rows: None) -> None:
        self._observe = observe
        self._waiting: collections.deque[_Job] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="predictions", daemon=True)
        self._thread.start()

    async def predict(self, predictor: Predictor, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction of some rows, made together with those of others that wait."""
        loop = asyncio.get_running_loop()
        job = _Job(predictor.key, predictor, x, loop, loop.create_future())
        with self._changed:
            if self._closed:
                raise RuntimeError("the server is shutting down")
            self._waiting.append(job)
            self._changed.notify()
        return await job.future

    def close(self) -> None:
        """Predicts what is still queued, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                batch = self._next_batch()
            if batch:
                self._predict(batch)

    def _next_batch(self) -> list[tuple[_Job, slice]]:
        """A slice of each waiting job with the settings of the first, as many rows as one batch takes."""
        jobs = [job for job in self._waiting if not job.future.cancelled()]
        self._waiting.clear()
        if not jobs:
            return []
        room = max(_FEWEST_ROWS, _BATCH_DRAWS // jobs[0].predictor.total_draws)
        share = max(_FEWEST_ROWS, room // sum(job.key == jobs[0].key for job in jobs))
        batch: list[tuple[_Job, slice]] = []
        for job in jobs:
            if job.key != jobs[0].key or room <= 0:
                self._waiting.append(job)
                continue
            rows = slice(job.position, min(len(job.x), job.position + share))
            batch.append((job, rows))
            room -= rows.stop - rows.start
        return batch

    def _predict(self, batch: list[tuple[_Job, slice]]) -> None:
        try:
            joined = np.concatenate([job.x[rows] for job, rows in batch])
            prediction = batch[0][0].predictor.predict_inputs(joined)
        except Exception as error:
            if len(batch) > 1:  # one request is at fault: the others must not fail with it
                for entry in batch:
                    self._predict([entry])
                return
            batch[0][0].finish(error)
            return
        self._observe(len(joined))
        start = 0
        for job, rows in batch:
            size = rows.stop - rows.start
            self._deliver(job, rows, {name: values[start : start + size] for name, values in prediction.items()})
            start += size

    def _deliver(self, job: _Job, rows: slice, block: dict[str, NumpyArray]) -> None:
        job.blocks.append(block)
        job.position = rows.stop
        if job.position < len(job.x):
            with self._changed:
                self._waiting.append(job)
            return
        job.finish({name: np.concatenate([block[name] for block in job.blocks]) for name in block})
