"""The metrics of a server, in the format of Prometheus.

Drift shows in the rows above the training rows' percentiles: of rows like those of training, one in twenty is above the
95th.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Metrics:
    """Counters of one process; those of several are added up where they share a folder."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)
        self.requests = counter("dropbayes_requests", "Requests, by the status of the answer.", ["status"])
        self.rows = counter("dropbayes_rows", "Rows predicted.")
        self.seconds = histogram("dropbayes_request_seconds", "Time from a request to its answer.", buckets=_SECONDS)
        self.batch_rows = histogram("dropbayes_batch_rows", "Rows predicted at once.", buckets=_ROWS)
        self._uncertainty = counter("dropbayes_uncertainty", "Sum over rows of the deviation (classes: entropy).")
        self._deferred = counter("dropbayes_deferred_rows", "Rows above the `defer_above` of their request.")
        self._above = counter(
            "dropbayes_rows_above_training_percentile", "Rows above this percentile of the training rows.",
            ["percentile"],
        )  # fmt: skip
        self._training = Gauge(
            "dropbayes_training_uncertainty", "Percentiles of the training rows' uncertainty.", ["percentile"],
            registry=registry, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self._percentiles: dict[str, float] = {}

    def take_model(self, percentiles: Mapping[str, float]) -> None:
        """Compares the rows from now on with the percentiles of this model's training rows."""
        self._percentiles = dict(percentiles)
        for level, value in percentiles.items():
            self._training.labels(level).set(value)
            self._above.labels(level)  # exported from the start, at 0

    def take_rows(self, uncertainty: npt.NDArray[Any], deferred: npt.NDArray[np.bool_] | None) -> None:
        """Counts the rows of a prediction."""
        self.rows.inc(len(uncertainty))
        self._uncertainty.inc(float(uncertainty.sum()))
        for level, value in self._percentiles.items():
            self._above.labels(level).inc(int((uncertainty > value).sum()))
        if deferred is not None:
            self._deferred.inc(int(deferred.sum()))

    def text(self) -> bytes:
        """The counters in Prometheus's text format."""
        if MULTIPROCESS_FOLDER not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return generate_latest(registry)
