"""Tests of the choice of an ensemble."""

import itertools
import math

import torch

from dropbayes.population import Member, choose_ensemble, ensembles
from dropbayes.population.ensembles import greedy_selection

F64 = torch.float64


def rows(n=90):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, dtype=F64, generator=source)
    return x, x[:, 0].sin() + 0.1 * torch.randn(n, dtype=F64, generator=source)


def test_a_greedy_selection_of_two_is_the_best_pair_that_begins_with_the_best_candidate():
    density = torch.randn(6, 40, dtype=F64, generator=torch.Generator().manual_seed(3)) - 1
    weight = torch.rand(40, dtype=F64, generator=torch.Generator().manual_seed(4))
    score = {
        (i, j): float(torch.logaddexp(density[i], density[j]) @ weight)
        for i, j in itertools.product(range(6), repeat=2)
    }
    first, second = greedy_selection(density, weight, 2, torch.zeros(6, 40, 0))
    assert first == int((density @ weight).argmax())
    assert score[first, second] == max(value for (i, _), value in score.items() if i == first)


def test_a_candidate_that_covers_what_others_miss_must_not_ruin_the_mean():
    # The first is exact but for one row in fifty, far off; the second is vague everywhere.
    miss = torch.arange(100) % 50 == 0
    density = torch.stack([torch.where(miss, -60.0, 5.0), torch.full((100,), -1.0)])
    error = torch.stack([torch.where(miss, 1.0, 0.001), torch.full((100,), 0.5)])[..., None]
    weight = torch.ones(100)
    assert greedy_selection(density, weight, 2, error[..., :0]) == [0, 1]
    assert greedy_selection(density, weight, 2, error) == [0, 0]


def test_the_ensemble_learns_and_its_draws_are_of_rows_held_out():
    x, y = rows()
    grid = [Member(drop_prob=p, epochs=40, learning_rate=0.01) for p in (0.02, 0.9)]
    choice = choose_ensemble(x, y, grid, n_members=2, n_folds=3, hidden=(10,), batch_size=30, device="cpu", dtype=F64)
    assert choice.selection == (0, 0)
    inputs, targets, weight = choice.held_out_rows()
    assert sorted(targets.tolist()) == sorted(y.tolist()) and bool((weight == 1).all())
    draws = choice.held_out_draws(5)
    assert draws.shape == (10, 90, 1)
    residual = (draws[..., 0].mean(0) - targets).square().mean().sqrt()
    assert residual < 0.4
    for task in choice.tasks:
        assert not set(map(tuple, task.x.tolist())) & set(map(tuple, task.held_out[0].tolist()))
    assert inputs.shape == x.shape


def test_finalists_are_trained_longer_and_join_the_candidates():
    x, y = rows()
    grid = [Member(drop_prob=p, epochs=2, learning_rate=0.01) for p in (0.02, 0.1, 0.9)]
    settings = {"n_folds": 2, "hidden": (10,), "batch_size": 30, "device": "cpu"}
    choice = choose_ensemble(x, y, grid, finalists=1, finalist_epochs=60, n_members=1, **settings)
    assert len(choice.candidates) == 4 and choice.candidates[3].epochs == 60
    assert choice.candidates[3].relevance is None
    assert choice.selection == (3,) and choice.log_likelihood[3] > choice.log_likelihood[:3].max()


def test_finalists_for_classes_know_which_inputs_matter_and_one_more_is_regularised():
    x, y = rows(200)
    grid = [Member(drop_prob=p, epochs=20, learning_rate=0.01) for p in (0.02, 0.1)]
    settings = {"n_folds": 2, "hidden": (10,), "batch_size": 30, "device": "cpu", "likelihood": "categorical"}
    choice = choose_ensemble(x, (y > 0).long(), grid, finalists=1, finalist_epochs=30, **settings)
    assert all(member.relevance is None for member in choice.candidates[:2])
    plain, strong = choice.candidates[2:]
    assert plain.relevance == strong.relevance and plain.relevance[0] > 2 * plain.relevance[1]
    assert plain.weight_decay == grid[0].weight_decay < strong.weight_decay and strong.drop_prob == 0.1


def test_weights_of_rows_count_in_the_score_and_in_the_precision():
    # Half of the rows are noisy: weighted down, the remaining noise is what is left.
    x, y = rows(200)
    noisy = torch.arange(200) % 2 == 0
    y = torch.where(noisy, y + 3 * torch.randn(200, dtype=F64, generator=torch.Generator().manual_seed(5)), y)
    weight = torch.where(noisy, 1e-3, 1.0).double()
    grid = [Member(drop_prob=0.02, epochs=40, learning_rate=0.01)]
    settings = {"n_members": 1, "n_folds": 2, "hidden": (10,), "batch_size": 30, "device": "cpu"}
    plain, weighted, scaled = (choose_ensemble(x, y, grid, weight=w, **settings) for w in (None, weight, 7.5 * weight))
    assert weighted.precision[0, 0] > 3 * plain.precision[0, 0]
    assert weighted.log_likelihood[0] > plain.log_likelihood[0] + 0.5
    torch.testing.assert_close(scaled.precision, weighted.precision, rtol=1e-3, atol=0)
    assert math.isclose(scaled.log_likelihood[0], weighted.log_likelihood[0], rel_tol=1e-3)


def test_the_best_of_each_number_of_inputs_is_a_finalist():
    candidates = [Member(n_inputs=n) for n in (2, 2, 2, None, None)]
    score = torch.tensor([3.0, 5.0, 4.0, 1.0, 2.0])
    assert ensembles._finalists(candidates, score, 2) == [1, 4]
    assert ensembles._finalists(candidates, score, 3) == [1, 4, 2]
