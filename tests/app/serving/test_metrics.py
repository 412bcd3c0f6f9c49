"""The counters add up, and rows unlike those of training show."""

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from dropbayes.app.serving.metrics import Metrics


def value(metrics, name):
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith(name + " ")]
    return float(lines[0].split()[-1])


def test_rows_and_their_uncertainty_are_added_up():
    metrics = Metrics()
    metrics.take_rows("m", np.array([0.5, 1.5]), None)
    metrics.take_rows("m", np.array([4.0]), np.array([True]))
    assert value(metrics, 'dropbayes_rows_total{model="m"}') == 3
    assert value(metrics, 'dropbayes_uncertainty_total{model="m"}') == 6.0
    assert value(metrics, 'dropbayes_deferred_rows_total{model="m"}') == 1


def test_rows_above_the_percentiles_of_training_are_counted():
    metrics = Metrics()
    metrics.take_model("m", {"50": 1.0, "95": 2.0})
    metrics.take_rows("m", np.array([0.5, 1.5, 2.0, 2.5]), None)
    assert value(metrics, 'dropbayes_rows_above_training_percentile_total{model="m",percentile="50"}') == 3
    assert value(metrics, 'dropbayes_rows_above_training_percentile_total{model="m",percentile="95"}') == 1
    assert value(metrics, 'dropbayes_training_uncertainty{model="m",percentile="95"}') == 2.0
