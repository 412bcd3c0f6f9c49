"""A network and its predictions of digits."""

import pytest
import torch

import dropbayes as db
from tests import small_networks
from tests.decisions.samples import generator


@pytest.fixture(scope="session")
def digits():
    """Rows of digits, 600 for training, and a network's prediction for the others: 600 held out, 597 for testing."""
    x, y = small_networks.standardised("digits")
    order = torch.randperm(len(x), generator=generator())
    x, y = x[order], y[order]
    net = small_networks.trained(small_networks.network(64, 128, 128, 10, drop_prob=0.5), x[:600], y[:600], steps=500)
    return x, y, db.predict(net, x[600:], n_draws=50, likelihood=db.Categorical())
