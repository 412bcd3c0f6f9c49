"""Kills of worker processes at random times, each as if the machine had failed."""

import contextlib
import os
import random
import signal
import threading
import time

import psutil


class Killer(threading.Thread):
    """Kills workers among the processes below this one until there were enough kills, or the work is finished."""

    def __init__(self, n_kills, is_worker):
        super().__init__(daemon=True)
        self.n_kills, self.is_worker, self.killed = n_kills, is_worker, 0
        self.chance, self.finished = random.Random(0), threading.Event()

    def run(self):
        while self.killed < self.n_kills and not self.finished.wait(self.chance.uniform(0.2, 1.5)):
            workers = [p for p in psutil.Process().children(recursive=True) if self._can_be_killed(p)]
            if workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.chance.choice(workers).pid, signal.SIGKILL)
                    self.killed += 1

    def _can_be_killed(self, process):
        try:
            return self.is_worker(process) and time.time() - process.create_time() > 2
        except psutil.Error:
            return False


@contextlib.contextmanager
def killed_at_random(n_kills, is_worker):
    """Kills `n_kills` workers while the block runs; yields the killer, which counts them."""
    killer = Killer(n_kills, is_worker)
    killer.start()
    try:
        yield killer
    finally:
        killer.finished.set()
        killer.join()


def spawned(process):
    """Whether multiprocessing started it: a worker of a pool or of Dask."""
    return "spawn_main" in " ".join(process.cmdline())


def ray_worker(process):
    """Whether Ray runs a part in it."""
    return "".join(process.cmdline()[:1]).startswith("ray::part")


def spark_worker(process):
    """Whether Spark runs Python in it."""
    return "pyspark.daemon" in " ".join(process.cmdline())
