"""Forecasts by recurrent networks."""

import numpy as np
import pytest

from experiments import recurrent
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_one_mask_per_sequence_spreads_more_than_fresh_masks(tmp_path):
    metrics = tiny("recurrent", recurrent, tmp_path)
    assert metrics["variational"]["epistemic_std_test_ppm"] > metrics["naive"]["epistemic_std_test_ppm"]


def test_windows_end_where_their_targets_begin():
    series = np.cumsum(np.r_[np.zeros(12), np.arange(60.0)])
    data = recurrent.windows(series, 24, 3)
    np.testing.assert_allclose(data.y[5] * recurrent.PPM, series[29:32] - series[28], rtol=1e-5)
    np.testing.assert_allclose(data.x[5, :, 0] * recurrent.PPM, series[5:29] - series[28], rtol=1e-5)
    np.testing.assert_allclose(data.last_year[20] * recurrent.PPM, series[32:35] - series[31], rtol=1e-5)
