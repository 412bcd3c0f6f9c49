"""The data of the experiments."""

import pytest

from experiments import datasets


def test_co2_is_detrended_and_standardised_on_the_observed_months():
    data = datasets.atmospheric_co2()
    assert len(data.y) == 272 and len(data.y_hidden) == 156
    assert data.x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.y.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert (data.x * data.y).mean().item() == pytest.approx(0, abs=1e-5)  # no linear trend is left
    assert data.x_hidden.min() > data.x.max()


def test_missing_data_says_what_to_do(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise TimeoutError

    monkeypatch.setenv("DROPBAYES_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(FileNotFoundError, match="DROPBAYES_DATA"):
        datasets.digits("mnist")
    with pytest.raises(ValueError, match="kind"):
        datasets.digits("letters")
