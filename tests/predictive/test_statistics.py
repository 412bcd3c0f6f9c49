"""A prediction's statistics, by name, from draws in any chunks."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.predictive.statistics import Request, RowStatistics


def statistics(wishes, draws, variances=None, chunk=7):
    rows = RowStatistics(wishes, wishes.likelihood)
    parts = [None] * len(draws.split(chunk)) if variances is None else variances.split(chunk)
    for part, variance in zip(draws.split(chunk), parts, strict=True):
        rows.add(part, None if variance is None else variance.mean(0))
    return rows.results(torch.float64)


def test_gaussian_total_variance_has_the_inverse_precision():
    draws = torch.randn(50, 4, 2, dtype=torch.float64)
    found = statistics(Request(db.Gaussian(precision=4.0)), draws)
    torch.testing.assert_close(found["mean"], draws.mean(0))
    torch.testing.assert_close(found["epistemic"], draws.var(0, correction=0))
    assert (found["aleatoric"] == 0.25).all()


def test_heteroscedastic_variance_is_the_mean_of_the_predicted_ones():
    draws = torch.randn(50, 4, 2, dtype=torch.float64)
    found = statistics(Request(db.HeteroscedasticGaussian()), draws)
    torch.testing.assert_close(found["epistemic"], draws[..., :1].var(0, correction=0))
    torch.testing.assert_close(found["aleatoric"], draws[..., 1:].exp().mean(0))


def test_class_statistics_follow_their_definitions():
    logits = torch.randn(60, 5, 3, dtype=torch.float64) * 2
    found = statistics(Request(db.Categorical()), logits)
    p = logits.softmax(-1)
    torch.testing.assert_close(found["mean"], p.mean(0))
    torch.testing.assert_close(found["entropy"], torch.distributions.Categorical(p.mean(0)).entropy())
    torch.testing.assert_close(found["expected_entropy"], torch.distributions.Categorical(p).entropy().mean(0))
    # Var[y] of a one-hot label splits into the variance of p and the mean of p(1-p).
    torch.testing.assert_close(found["epistemic"] + found["aleatoric"], p.mean(0) * (1 - p.mean(0)))


def test_integrated_variance_is_added_by_the_law_of_total_variance():
    draws, within = torch.randn(40, 3, 1).double(), torch.rand(40, 3, 1).double()
    found = statistics(Request(), draws, within)
    torch.testing.assert_close(found["epistemic"], draws.var(0, correction=0) + within.mean(0))
    assert (found["aleatoric"] == 0).all()


def test_quantiles_and_draws_are_kept_on_request():
    draws = torch.randn(40, 3).double()
    found = statistics(Request(quantiles=(0.1, 0.9), keep_draws=True), draws)
    torch.testing.assert_close(
        found["quantiles"], draws.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), dim=0).t()
    )
    assert torch.equal(found["draws"], draws.t())


def test_wishes_that_make_no_sense_are_refused():
    with pytest.raises(TypeError, match="`likelihood` must be one of"):
        Request(likelihood="gaussian")
    with pytest.raises(ValueError, match="`quantiles` must lie strictly between 0 and 1"):
        Request(quantiles=(0.5, 1.0))
    for levels in (None, "0.5", ["a"]):
        with pytest.raises(ValueError, match="`quantiles` must lie strictly between 0 and 1"):
            db.predict(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)), torch.ones(1, 2), quantiles=levels)


def test_one_level_or_an_array_of_levels_will_do():
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)), torch.ones(3, 2)
    expected = db.predict(net, x, quantiles=(0.5, 0.9))
    assert torch.equal(db.predict(net, x, quantiles=0.5).quantiles, expected.quantiles[:1])
    assert torch.equal(db.predict(net, x, quantiles=np.array([0.5, 0.9])).quantiles, expected.quantiles)
    with pytest.raises(ValueError, match="need draws"):
        db.predict(net, x, quantiles=np.array([0.5, 0.9]), method="linear")
