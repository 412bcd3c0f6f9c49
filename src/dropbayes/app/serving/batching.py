"""Requests that arrive together, predicted together in one thread.

A batch takes rows of the requests with the least work left, so that a long request does not keep short ones waiting and
of equal ones the oldest is finished first. Which rows share a batch changes nothing but the time: a row does not depend
on its neighbours.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from starlette.exceptions import HTTPException

from dropbayes.app.models.predictor import Predictor
from dropbayes.runtime.validation import NumpyArray

_BATCH_DRAWS = 2**18  # some tenths of a second on one core, so that the next request need not wait for longer
_MIN_ROWS = 16


@dataclass(eq=False)
class _Job:
    """A request's rows, and the parts of its prediction made so far."""

    predictor: Predictor
    x: NumpyArray
    future: asyncio.Future[dict[str, NumpyArray]]
    blocks: list[dict[str, NumpyArray]] = field(default_factory=list)
    position: int = 0

    @property
    def row_draws(self) -> int:
        """The work for a row, at least 32 draws: its interval costs as much, however few it is made of."""
        return max(32, self.predictor.total_draws)

    @property
    def draws_left(self) -> int:
        return (len(self.x) - self.position) * self.row_draws


class Batches:
    """Predicts queued requests in a thread, calls `observe` with the rows of each batch, and refuses long waits."""

    def __init__(self, max_seconds: float = 60.0, observe: Callable[[int], None] = lambda rows: None) -> None:
        self._max_seconds, self._observe = max_seconds, observe
        self._draws_per_second = float(_BATCH_DRAWS)  # until it was measured
        self._waiting: list[_Job] = []
        self._thread = ThreadPoolExecutor(1, "predictions")
        self._work: asyncio.Task[None] | None = None
        self._closed = False

    async def predict(self, predictor: Predictor, x: NumpyArray) -> dict[str, NumpyArray]:
        """The prediction of some rows, made together with those of others that wait; refused if it would wait long."""
        if self._closed:
            raise RuntimeError("the server is shutting down")
        job = _Job(predictor, x, asyncio.get_running_loop().create_future())
        ahead = sum(other.draws_left for other in self._waiting if other.draws_left <= job.draws_left)
        if ahead > self._max_seconds / 2 * self._draws_per_second:  # the other half is for its own work
            raise HTTPException(429, "too much work is waiting for a request of this size; try again later.")
        self._waiting.append(job)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._predict_waiting())
        return await job.future

    async def close(self) -> None:
        """Takes no more requests, and predicts what is still queued."""
        self._closed = True
        if self._work is not None:
            await self._work
        self._thread.shutdown()

    async def _predict_waiting(self) -> None:
        while True:
            self._waiting = [job for job in self._waiting if not job.future.done()]
            if not self._waiting:
                return
            batch = self._next_batch()
            begun = time.perf_counter()
            await self._predict(batch)
            if (rows := sum(size for _, size in batch)) >= _MIN_ROWS:  # of few rows, the time is that of the call
                rate = rows * batch[0][0].row_draws / (time.perf_counter() - begun)
                self._draws_per_second += 0.2 * (rate - self._draws_per_second)

    def _next_batch(self) -> list[tuple[_Job, int]]:
        """The requests with the least work left and the same settings, with the number of rows to predict of each."""
        jobs = sorted(self._waiting, key=lambda job: job.draws_left)
        key, room = jobs[0].predictor.key, max(_MIN_ROWS, _BATCH_DRAWS // jobs[0].row_draws)
        batch: list[tuple[_Job, int]] = []
        for job in jobs:
            if job.predictor.key == key and (room > 0 or not batch):
                batch.append((job, min(room, len(job.x) - job.position)))
                room -= batch[-1][1]
        return batch

    async def _predict(self, batch: list[tuple[_Job, int]]) -> None:
        first, loop = batch[0][0], asyncio.get_running_loop()
        try:
            joined = np.concatenate([job.x[job.position : job.position + size] for job, size in batch])
            prediction = await loop.run_in_executor(self._thread, first.predictor.predict_inputs, joined)
        except Exception as error:
            if len(batch) > 1:  # one request is at fault: the others must not fail with it
                for entry in batch:
                    await self._predict([entry])
            elif not first.future.cancelled():
                first.future.set_exception(error)
            return
        self._observe(len(joined))
        for (job, size), end in zip(batch, np.cumsum([size for _, size in batch]), strict=True):
            job.blocks.append({name: values[end - size : end] for name, values in prediction.items()})
            job.position += size
            if job.position == len(job.x) and not job.future.cancelled():
                whole = {name: np.concatenate([block[name] for block in job.blocks]) for name in prediction}
                job.future.set_result(whole)
