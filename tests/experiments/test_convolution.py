"""Convolutions with little data."""

import pytest

from experiments import convolution
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_dropout_before_every_layer_helps_with_little_data(tmp_path):
    metrics = tiny("convolution", convolution, tmp_path)
    assert metrics["all, mc"]["0.1"]["overconfidence"] < metrics["none, averaged"]["0.1"]["overconfidence"]
