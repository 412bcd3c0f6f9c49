"""The linear method against draws, on networks where it is known to be right and to be wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.linear import check_linear
from tests.sampling.zoo import build
from tests.sampling.zoo.specimens import Module


def test_it_agrees_where_it_is_exact():
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 2))
    found = check_linear(net, torch.randn(100, 3), n_draws=200)
    assert found.agrees and found.ratio == pytest.approx(1, abs=0.03) and found.rank_correlation > 0.9
    assert found.low > 0.85 and found.high < 1.15 and found.mean_error < 0.1
    assert str(found).endswith('method="linear" will do')


def test_it_does_not_where_the_mean_is_far_off():
    net = Module(lambda m, x: 5 * (F.dropout(x, 0.5, m.training).mean(1, keepdim=True) - 1).square())
    found = check_linear(net, torch.ones(20, 50) + 0.1 * torch.randn(20, 50))
    assert not found.agrees and str(found).endswith('use method="sampling"') and "30 draws" in str(found)


def test_the_figures_are_those_of_the_two_predictions():
    net, x = build("transformer_sequence_first")
    found = check_linear(net, x, sampling=db.Sampling(row_axis=1), n_draws=50)
    linear = db.predict(net, x, method="linear", sampling=db.Sampling(row_axis=1))
    drawn = db.draws(net, x, n_draws=50, masks="row", sampling=db.Sampling(row_axis=1))
    ratio = (linear.std / drawn.std(0)).flatten()
    assert [found.low, found.ratio, found.high] == pytest.approx(
        ratio.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist(), rel=1e-4
    )
    assert found.mean_error == pytest.approx(
        float(((linear.mean - drawn.mean(0)).abs() / drawn.std(0)).median()), rel=1e-3
    )
