"""Tests of the authors' protocol."""

import math
from dataclasses import replace

import pytest
import torch

from experiments.uci import data as uci_data
from experiments.uci import faithful as uci_faithful
from experiments.uci import run as uci

TINY_FAITHFUL = uci_faithful.Settings((2.0, 8.0), drop_probs=(0.01, 0.3), n_hidden=8, epochs=120, n_draws=40)


def with_other_test_targets(data):
    """The same data, the outcomes of the first split's test rows replaced."""
    y = data.y.copy()
    y[data.splits[0][1]] = 1e3
    return replace(data, y=y)


def test_weight_decay_gives_the_minimiser_of_the_authors_loss():
    """Their loss: squared error without ½ + l²(1 − p)/(2Nτ)·‖W‖². Its gradient must be twice ours everywhere."""
    settings = uci_faithful.SETTINGS["boston"]
    n_rows, member = 364, uci_faithful.candidates(uci_faithful.SETTINGS["boston"], 364)[5]
    drop_prob, precision = 0.01, 0.2  # the sixth of the grid
    assert member.drop_prob == drop_prob and settings.precisions[2] == precision
    weight, error = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    theirs = (weight - error).square().mean() + 1e-4 * (1 - drop_prob) / (
        2 * n_rows * precision
    ) * weight.square().sum()
    ours = 0.5 * (weight - error).square().mean() + member.weight_decay * weight.square().sum()
    (of_theirs,) = torch.autograd.grad(theirs, weight)
    (of_ours,) = torch.autograd.grad(ours, weight)
    torch.testing.assert_close(of_theirs, 2 * of_ours, rtol=1e-12, atol=0)


def test_settings_are_the_authors():
    assert set(uci_faithful.SETTINGS) == set(uci_data.SETS)
    for name, settings in uci_faithful.SETTINGS.items():
        assert settings.epochs * settings.n_hidden == 200_000
        assert (settings.n_hidden, settings.epochs) == ((100, 2000) if name == "protein" else (50, 4000))
        assert settings.n_draws == 10_000 and settings.batch_size == 128 and settings.length_scale == 0.01


def test_faithful_log_likelihood_respects_the_cap_of_its_precision(small):
    for entry in uci_faithful.results(small, [0, 1], settings=TINY_FAITHFUL, device="cpu"):
        assert entry["log_likelihood"] < 0.5 * math.log(entry["precision"] / (2 * math.pi))
        assert 0.1 < entry["rmse"] < 4.0


def test_no_test_row_chooses_anything_in_the_authors_protocol(small):
    before, after = (
        uci_faithful.results(data, [0], settings=TINY_FAITHFUL, device="cpu")[0]
        for data in (small, with_other_test_targets(small))
    )
    assert (before["drop_prob"], before["precision"]) == (after["drop_prob"], after["precision"])
    assert after["rmse"] > 100 * before["rmse"]


def test_choice_is_that_of_the_held_out_log_likelihood(small):
    """The chosen candidate is the one that scores best when each candidate runs alone."""
    from dropbayes.population import Task, evaluate, train

    rows, _ = small.splits[1]
    cut = int(0.8 * len(rows))
    learned, held = rows[:cut], rows[cut:]
    task = Task(small.x[learned], small.y[learned])
    scores = {}
    for member, (drop_prob, tau) in zip(
        uci_faithful.candidates(TINY_FAITHFUL, cut),
        [(p, t) for p in TINY_FAITHFUL.drop_probs for t in TINY_FAITHFUL.precisions],
        strict=True,
    ):
        alone = train([task], [replace(member, seed=1)], hidden=(8,), device="cpu")
        alone = replace(alone, precision=torch.tensor([[tau]], dtype=torch.float64))
        scored = evaluate(alone, (small.x[held], small.y[held]), n_draws=TINY_FAITHFUL.n_draws)
        scores[drop_prob, tau] = float(scored.log_likelihood[0])
    entry = uci_faithful.results(small, [1], settings=TINY_FAITHFUL, device="cpu")[0]
    assert (entry["drop_prob"], entry["precision"]) == max(scores, key=scores.__getitem__)


def test_results_of_other_settings_are_not_mixed(small, counted, tmp_path):
    uci.run_set(small, "faithful", [0], out=tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        uci.run_set(small, "faithful", [1], out=tmp_path, settings=replace(counted.settings_for(small), size=2))
