"""Early stopping: which rows are watched, and how they are scored."""

import math

import pytest
import torch

import dropbayes as db
from dropbayes.training import EarlyStopping
from tests.training.toys import network, toy


def test_the_score_is_the_log_of_the_mean_density_over_draws():
    x, y = toy()
    net, likelihood = network().eval(), db.Gaussian(4.0)
    stopping = EarlyStopping((x, y), n_draws=7)
    rows = stopping.rows(net, torch.device("cpu"))
    draws = db.draws(net, x, n_draws=7, seed=3, masks="row")
    density = torch.distributions.Normal(draws, 0.5).log_prob(y).sum(-1).double()
    expected = (density.logsumexp(0) - math.log(7)).mean().item()
    assert stopping.score(net, rows, likelihood, 3, 0) == pytest.approx(expected, rel=1e-5)


def test_the_score_is_the_mean_over_the_rows_that_a_loader_gives():
    (x, y), net = toy(), network().eval()
    whole = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x) - 1, drop_last=True)
    held_out = [EarlyStopping(rows).rows(net, torch.device("cpu")) for rows in (whole, (x[:-1], y[:-1]))]
    scores = [EarlyStopping().score(net, rows, db.Gaussian(4.0), 3, 0) for rows in held_out]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_held_out_rows_must_be_a_pair():
    with pytest.raises(ValueError, match=r"`held_out` must be a pair \(x, y\).*got 3 parts"):
        EarlyStopping((1, 2, 3)).rows(network(), torch.device("cpu"))


def test_without_held_out_rows_nothing_is_watched():
    assert EarlyStopping().rows(network(), torch.device("cpu")) is None
    with pytest.raises(ValueError, match="`patience` must be"):
        EarlyStopping(patience=0)
