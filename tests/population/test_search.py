"""Tests of the search over candidates."""

import torch

from dropbayes.population import (
    candidates,
    choose,
    evaluate,
)
from dropbayes.population.search import folds

F64 = {"device": "cpu", "dtype": torch.float64}


def toy(n: int = 120, *, noise: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=source, dtype=torch.float64)
    clean = 5 + 2 * x[:, 0].sin() + x[:, 1]
    return x, clean + noise * torch.randn(n, generator=source, dtype=torch.float64)


def test_search_prefers_the_candidate_that_can_learn_and_refits_it_on_all_rows():
    x, y = toy(120)
    grid = candidates(drop_prob=[0.05, 0.9], epochs=[60], learning_rate=[0.01])
    choice = choose(x, y, grid, n_folds=3, n_members=2, hidden=(12,), batch_size=32, **F64)
    assert choice.best.drop_prob == 0.05
    assert choice.log_likelihood[0] > choice.log_likelihood[1]
    assert len(choice.population) == 2
    score = evaluate(choice.population, toy(200, seed=1)).log_likelihood
    assert (score - choice.log_likelihood[0]).abs().max() < 0.35  # held-out folds foretell fresh rows


def test_forward_folds_learn_all_that_came_before_and_nothing_after():
    times = torch.tensor([3, 0, 5, 1, 4, 2, 5, 0, 3, 1])
    splits = folds(times, 5, forward=True)
    assert [times[held].unique().tolist() for _, held in splits] == [[1], [2], [3], [4], [5]]
    for learned, held in splits:
        assert learned.tolist() == [row for row in range(10) if times[row] < times[held].min()]


def test_a_single_forward_split_holds_out_the_last_fifth():
    times = torch.arange(10).flip(0)
    [(learned, held)] = folds(times, 1, forward=True)
    assert sorted(times[held].tolist()) == [8, 9]
    assert sorted(times[learned].tolist()) == list(range(8))


def test_more_forward_folds_than_times_are_as_many_as_there_are():
    assert len(folds(torch.tensor([0, 1, 2, 2]), 5, forward=True)) == 2


def test_a_budget_draws_distinct_candidates():
    grid = candidates(budget=5, drop_prob=[0.1, 0.2, 0.3], learning_rate=[1e-3, 1e-2, 1e-1])
    assert len(set(grid)) == 5
