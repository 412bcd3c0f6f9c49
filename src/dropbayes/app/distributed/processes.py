"""Parts computed in processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from dropbayes.app.distributed.parts import Part, Prediction, set_up_worker

__all__ = ["run"]

_FRUITLESS_POOLS = 10  # in a row, after which the fault must be ours

_prediction: Any = None  # of this worker process


def run(prediction: Prediction, parts: Sequence[Part], n_workers: int, address: str | None) -> Iterator[int]:
    """Computes the parts; yields the number of rows of each as it finishes. A pool whose worker was killed is replaced.

    Args:
        prediction: The task of a worker.
        parts: The parts to compute.
        n_workers: The number of processes.
        address: Must be None: processes have no cluster.
    """
    if address is not None:
        raise ValueError("`address` must be None for processes of this machine; name an engine that has a cluster.")
    waiting, fruitless = list(parts), 0
    while waiting:
        before = len(waiting)
        with contextlib.closing(_pool_run(prediction, waiting, n_workers)) as finished:
            for part in finished:
                waiting.remove(part)
                yield part.n_rows
        fruitless = 0 if len(waiting) < before else fruitless + 1
        if fruitless == _FRUITLESS_POOLS:
            raise RuntimeError(f"workers were killed {fruitless} times without finishing a part; out of memory?")


def _pool_run(prediction: Prediction, parts: Sequence[Part], n_workers: int) -> Generator[Part, None, None]:
    """The parts that one pool of workers finishes: all of them, unless a worker is killed."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, mp_context=context, initializer=_set_up, initargs=(prediction,))
    try:
        left: dict[Future[int], Part] = {pool.submit(_make, part): part for part in parts}
        while left:
            for future in wait(left, return_when=FIRST_COMPLETED).done:
                part = left.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    continue
                future.result()
                yield part
    except BrokenProcessPool:
        return
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _set_up(prediction: Prediction) -> None:
    global _prediction
    _prediction = prediction
    set_up_worker()


def _make(part: Part) -> int:
    return _prediction(part)
