"""The interpolation of solar irradiance."""

import pytest

from experiments import datasets, solar
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_solar_network_is_over_confident_where_the_process_is_not(tmp_path):
    metrics = tiny("solar", solar, tmp_path)
    process, network = (next(m for k, m in metrics.items() if name in k) for name in ("process", "MC dropout"))
    assert network["coverage_95_without_noise_gaps"] < 0.75
    assert process["coverage_95_without_noise_gaps"] > network["coverage_95_without_noise_gaps"] + 0.1
    assert process["epistemic_std_gaps"] > 2 * process["epistemic_std_observed"]


def test_solar_hides_five_segments_of_twenty():
    data = datasets.solar_irradiance()
    assert len(data.y) + len(data.y_hidden) == 309
    assert len(solar._segments(data)) == len([s for s in datasets.SOLAR_SEGMENTS if s[0] < 309])
