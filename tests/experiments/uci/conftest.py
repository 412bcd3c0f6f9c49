"""A small set, and a method that notes what it is asked for."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from experiments.uci import data as uci_data
from experiments.uci import run as uci


@pytest.fixture(scope="module")
def small():
    source = np.random.default_rng(0)
    x = source.normal(size=(120, 3))
    y = 5 + 2 * np.sin(x[:, 0]) + x[:, 1] + 0.3 * source.normal(size=120)
    return uci_data.from_arrays(x, y, name="small", n_splits=2)


@dataclass(frozen=True)
class CountedSettings:
    size: int = 1


class Counted:
    """A method that notes what it is asked for."""

    QUICK: dict = {}  # noqa: RUF012

    def __init__(self):
        self.asked = []

    def settings_for(self, dataset):
        return CountedSettings()

    def network_steps(self, dataset, n_splits, settings):
        return 1.0

    def results(self, dataset, splits, *, settings, device, progress):
        time.sleep(0.05)
        if 3 in splits and not self.asked:
            raise KeyboardInterrupt
        self.asked += splits
        return [{"split": s, "rmse": 1.0 + s, "log_likelihood": -1.0} for s in splits]


@pytest.fixture
def counted(monkeypatch):
    method = Counted()
    monkeypatch.setitem(uci.METHODS, "faithful", method)
    return method
