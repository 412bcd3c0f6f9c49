"""The small demonstrations."""

import pytest

from experiments import toy
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_small_demonstrations(tmp_path):
    metrics = tiny("toy", toy, tmp_path)
    assert metrics["demo"]["epistemic_std_beyond"] > 1.5 * metrics["demo"]["epistemic_std_among_points"]
    # 1 / (2 N w / (p l^2)) with N = 20, w = 1e-5, p = 0.95, l^2 = 0.005, as the demonstration has it
    assert metrics["demo"]["precision"] == pytest.approx(0.95 * 0.005 / (2 * 20 * 1e-5), rel=1e-5)
    assert metrics["heteroscedastic"]["aleatoric_std_jumps"] > 1.5 * metrics["heteroscedastic"]["aleatoric_std_smooth"]
    first, last = metrics["concrete"]["mean_drop_prob"]
    assert last < first
