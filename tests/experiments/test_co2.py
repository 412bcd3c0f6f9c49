"""The extrapolation of CO2."""

import pytest

from experiments import co2
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_co2_deviation_grows_beyond_the_data_for_relu_and_stays_bounded_for_tanh(tmp_path):
    metrics = tiny("co2", co2, tmp_path)
    growth = {
        k: metrics[k]["epistemic_std_last_third"] / metrics[k]["epistemic_std_observed"] for k in ("relu-5", "tanh-0.1")
    }
    assert growth["relu-5"] > 1.5
    assert growth["tanh-0.1"] < 1.3
    assert metrics["relu-5"]["log_likelihood"] > metrics["averaged weights"]["log_likelihood"]
    assert metrics["process"]["epistemic_std_last_third"] > 5 * metrics["process"]["epistemic_std_observed"]


def test_a_network_that_has_not_learned_the_cycle_is_named_with_what_it_explains():
    metrics = {"relu-5": {"rmse_observed": 0.8}, "tanh-0.1": {"rmse_observed": 0.1}, "process": {"rmse_observed": 0.9}}
    (sentence,) = co2._underfit_sentences(metrics)
    assert "36 % (ReLU, 5 layers)" in sentence and "TanH" not in sentence
    assert not co2._underfit_sentences({"relu-5": {"rmse_observed": 0.3}})
