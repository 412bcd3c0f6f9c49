"""The metrics of a server, in the format of Prometheus.

Drift shows in the rows above the training rows' percentiles: of rows like those of training, one in twenty is above the
95th.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from dropbayes.runtime.validation import NumpyArray

MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Metrics:
    """Counters of one process; those of several are added up where they share a folder."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        counter = functools.partial(Counter, registry=own, labelnames=["model"])
        histogram = functools.partial(Histogram, registry=own)
        by_level: dict[str, Any] = {"labelnames": ["model", "percentile"], "registry": own}
        self.requests = Counter("dropbayes_requests", "Requests, by status of the answer.", ["status"], registry=own)
        seconds = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
        self.seconds = histogram("dropbayes_request_seconds", "Time until the answer.", buckets=seconds)
        self.batch_rows = histogram("dropbayes_batch_rows", "Rows at once.", buckets=[2**n for n in range(13)])
        self._rows = counter("dropbayes_rows", "Rows predicted.")
        self._uncertainty = counter("dropbayes_uncertainty", "Sum over rows of the deviation (classes: entropy).")
        self._deferred = counter("dropbayes_deferred_rows", "Rows above the `defer_above` of their request.")
        self._above = Counter("dropbayes_rows_above_training_percentile", "Rows above it in training.", **by_level)
        by_level["multiprocess_mode"] = "mostrecent"
        self._training = Gauge("dropbayes_training_uncertainty", "Percentiles of training rows.", **by_level)
        self._percentiles: dict[str, dict[str, float]] = {}

    def take_model(self, model: str, percentiles: Mapping[str, float]) -> None:
        """Compares a model's rows from now on with the percentiles of its training rows."""
        self._percentiles[model] = dict(percentiles)
        for level, value in percentiles.items():
            self._training.labels(model, level).set(value)
            self._above.labels(model, level)  # exported from the start, at 0

    def take_rows(self, model: str, uncertainty: NumpyArray, deferred: NumpyArray | None) -> None:
        self._rows.labels(model).inc(len(uncertainty))
        self._uncertainty.labels(model).inc(float(uncertainty.sum()))
        for level, value in self._percentiles.get(model, {}).items():
            self._above.labels(model, level).inc(int((uncertainty > value).sum()))
        if deferred is not None:
            self._deferred.labels(model).inc(int(deferred.sum()))

    def text(self) -> bytes:
        if MULTIPROCESS_FOLDER not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return generate_latest(registry)
