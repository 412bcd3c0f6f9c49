"""Parts computed in processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from dropbayes.app.distributed.parts import Part, Prediction
from dropbayes.runtime.devices import end_with_parent

__all__ = ["run"]

_MAX_FRUITLESS_POOLS = 10  # in a row, after which the fault must be ours


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
    spawn = multiprocessing.get_context("spawn")
    waiting, fruitless = list(parts), 0
    while waiting:
        before = len(waiting)
        pool = ProcessPoolExecutor(n_workers, mp_context=spawn, initializer=end_with_parent)
        try:
            futures = {pool.submit(prediction, part): part for part in waiting}
            for future in as_completed(futures):
                if not isinstance(future.exception(), BrokenProcessPool):
                    yield future.result()
                    waiting.remove(futures[future])
        except BrokenProcessPool:  # while parts were submitted
            pass
        finally:
            pool.shutdown(cancel_futures=True)
        fruitless = 0 if len(waiting) < before else fruitless + 1
        if fruitless == _MAX_FRUITLESS_POOLS:
            raise RuntimeError(f"workers were killed {fruitless} times without finishing a part; out of memory?")
